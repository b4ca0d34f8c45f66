"""The local training loop, evaluation, and the context in which a method trains.

Imports `attention`, `compute`, `data`, `errors`, `model` and `state`.
"""

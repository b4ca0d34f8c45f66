"""The local training loop, evaluation, and the context in which a method trains.

Imports `attention`, `compute`, `data`, `device_failure`, `errors`, `model` and `state`.
"""

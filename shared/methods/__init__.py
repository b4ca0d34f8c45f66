"""The federated methods, one file each, and what they build on: `base`, `population` and the `registry` that finds
them.

Imports `aggregation`, `model` and `tensors`.
"""

"""The federated methods, one file each, with their interface (`base`), `population` and the `registry`.

Imports `aggregation`, `model` and `tensors`.
"""

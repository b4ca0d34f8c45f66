"""A round without HTTP and without a database: planning it, validating its updates, merging them.

Imports `aggregation`, `api`, `methods`, `metrics`, `model`, `privacy`, `secure_sums`, `tensors` and `updates`.
"""

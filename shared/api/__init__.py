"""The bodies of the API's requests and answers, a module for each audience.

Imports `aggregation`, `methods`, `model`, `secure_sums`, `tensors` and `updates`.
"""

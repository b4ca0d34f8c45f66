"""Differentially private training: per-example gradients, noise and accounting.

Imports `data`, `device_failure`, `errors`, `governance`, `model`, `state` and `training`.
"""

"""Differentially private training: per-example gradients, noise and accounting.

Imports `data`, `errors`, `governance`, `model`, `state` and `training`.
"""

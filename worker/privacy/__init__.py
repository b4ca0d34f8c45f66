"""Differentially private training: per-example gradients, noise and accounting.

Imports `data`, `governance`, `model`, `state` and `training`.
"""

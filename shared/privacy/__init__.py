"""Differential privacy of both sides: noise from a secret key, and the accounting of Gaussian noise.

Imports `tensors`.
"""

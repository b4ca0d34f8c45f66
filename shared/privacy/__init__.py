"""Differential privacy of both sides: noise from a secret key, and the accounting of Gaussian noise.

`noise` draws from a secret key · `gaussian` the accounting of noise that one party adds · `discrete_gaussian` integers
as noise · `noise_shares` noise that several sites add together, and its accounting.

Imports `tensors`.
"""

"""Differential privacy of both sides: noise from a secret key, and the accounting of Gaussian noise.

`noise` draws from a secret key · `gaussian` the accounting of noise of one party · `discrete_gaussian` noise of
integers · `noise_shares` noise that several sites add together, and its accounting.

Imports `tensors`.
"""

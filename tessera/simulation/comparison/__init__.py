"""Simulations beside each other: their folders and figures, and the statistics of differences.

Imports `checkpoint` and `summary`.
"""

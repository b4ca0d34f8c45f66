"""Rules that combine a block's updates: means, robust rules, server optimizers, measures of drift.

Imports `tensors`.
"""

"""A model as the coordinator knows it: its config, its table of blocks, and selectors over blocks.

Imports `tensors`.
"""

"""Tensors that are read chunk by chunk, from memory or from a file, and their dtypes.

Imports no other package of `shared`.
"""

"""The model on this machine: building it, mapping its blocks, adding prompts and adapters.

Imports no other package of `worker`.
"""

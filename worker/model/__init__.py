"""The worker's model: building it, mapping its blocks, adding prompts and adapters.

Imports no other package of `worker`.
"""

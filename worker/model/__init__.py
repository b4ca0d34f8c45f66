"""The worker's model: building it, mapping its blocks, adding prompts and adapters.

Imports `errors`.
"""

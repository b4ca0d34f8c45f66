"""One task from its claim to its upload.

Imports `data`, `governance`, `model`, `privacy`, `state` and `training`.
"""

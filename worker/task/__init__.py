"""The stages of one task, from admission to upload.

Imports `compute`, `data`, `errors`, `governance`, `model`, `privacy`, `state` and `training`.
"""

"""The stages of one task, from admission to upload.

Imports `data`, `governance`, `model`, `privacy`, `state` and `training`.
"""

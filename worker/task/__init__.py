"""The stages of one task, from admission to upload.

Imports `compute`, `data`, `device_failure`, `errors`, `governance`, `model`, `privacy`, `state` and `training`.
"""

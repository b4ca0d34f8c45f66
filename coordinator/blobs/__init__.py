"""Blobs addressed by their SHA-256: the store, resumable uploads, differences between versions.

Imports `auth`, `db`, `domain` and `limits`.
"""

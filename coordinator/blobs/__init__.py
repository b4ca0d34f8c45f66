"""Blobs addressed by their SHA-256: storage, resumable uploads, differences between versions.

Imports `auth`, `db`, `domain` and `limits`.
"""

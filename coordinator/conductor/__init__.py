"""The process that advances rounds: its loop (`conductor`), its actions (`actions`), and merging (`merge`).

Imports `blobs`, `db`, `domain`, `limits` and `notify`.
"""

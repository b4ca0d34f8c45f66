"""The loop that moves rounds: it takes a snapshot, decides, acts and merges.

Imports `blobs`, `db`, `domain`, `limits` and `notify`.
"""

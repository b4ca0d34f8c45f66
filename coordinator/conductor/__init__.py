"""The process that advances rounds: its loop (`conductor`), and the actions that open, close and merge a round
(`round_actions`).

Imports `blobs`, `db`, `domain`, `limits` and `notify`.
"""

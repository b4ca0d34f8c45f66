"""What moves rounds: the loop (`conductor`), what each decision does (`actions`), and merging a round (`merge`).

Imports `blobs`, `db`, `domain`, `limits` and `notify`.
"""

"""The commands `tessera simulate` and `tessera compare`.

Imports `checkpoint`, `comparison`, `config`, `federation` and `summary`.
"""

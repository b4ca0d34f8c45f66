"""Tables, colours, progress lines and the live view of a run, for terminals and notebooks.

Imports `api`, `client`, `metrics` and `rounds`.
"""

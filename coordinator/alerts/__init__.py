"""Conditions that need a person: the list of the dashboard, the status, and notices by a webhook or a command.

Imports `db`, `domain`, `limits` and `settings`.
"""

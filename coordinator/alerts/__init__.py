"""Conditions that need a person: the list of the dashboard, the status, and notices by a webhook or a command.

Imports `audit_sinks`, `db`, `domain`, `limits` and `settings`.
"""

"""Conditions that need a person: the list of the dashboard, the status, and notices of them by webhook and mail.

Imports `db`, `domain`, `limits` and `settings`.
"""

"""What needs a person: the list on the dashboard, and notices of it by webhook and mail.

Imports `db`, `domain`, `limits` and `settings`.
"""

"""The live dashboard for people, rendered on the server.

Imports `alerts`, `api`, `auth`, `db`, `domain`, `limits`, `operations`, `services` and `settings`.
"""

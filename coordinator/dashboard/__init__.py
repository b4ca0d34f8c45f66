"""The live dashboard for people, rendered on the server.

Imports `api`, `auth`, `db`, `domain`, `limits`, `operations`, `services` and `settings`.
"""

"""The live page for administrators, rendered on the server.

Imports `api`, `auth`, `db`, `domain`, `limits`, `operations`, `services` and `settings`.
"""

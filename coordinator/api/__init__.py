"""The routers of the REST API, a module for each audience.

Imports `alerts`, `auth`, `blobs`, `db`, `domain`, `dossier`, `limits`, `notify`, `operations`, `services` and
`telemetry`.
"""

"""The serving process: sockets, limits on connections, shutdown, and the checks before it.

Imports `alerts`, `api`, `app`, `auth`, `conductor`, `db`, `dossier`, `limits`, `services`, `settings` and
`telemetry`.
"""

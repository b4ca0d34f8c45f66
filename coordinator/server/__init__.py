"""The serving process: sockets, limits on connections, a proxy's path, shutdown, and the checks before it.

Imports `alerts`, `api`, `app`, `auth`, `conductor`, `dashboard`, `db`, `dossier`, `limits`, `services`, `settings`
and `telemetry`.
"""

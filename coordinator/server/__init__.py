"""The serving process: sockets, limits on connections, shutdown, and the checks before it.

Imports `alerts`, `api`, `app`, `auth`, `blobs`, `conductor`, `db`, `limits`, `services`, `settings` and `telemetry`.
"""

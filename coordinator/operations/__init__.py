"""The coordinator's use cases, called by the API and the dashboard, without HTTP.

Imports `auth`, `blobs`, `db`, `domain`, `services` and `telemetry`.
"""

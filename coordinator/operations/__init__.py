"""The use cases of the coordinator, which the API and the dashboard both call; none knows of HTTP.

Imports `auth`, `blobs`, `db`, `domain`, `services` and `telemetry`.
"""

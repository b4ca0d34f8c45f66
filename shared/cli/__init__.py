"""The command `tessera`, and the subcommands that need nothing but the API.

Imports `aggregation`, `api`, `client`, `methods`, `metrics`, `telemetry`, `terminal` and `updates`.
"""

"""The command `tessera`, and the subcommands that need nothing but the API.

Imports `aggregation`, `api`, `client`, `methods`, `metrics`, `model`, `telemetry`, `terminal` and `updates`.
"""

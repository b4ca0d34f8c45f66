"""The command `tessera`, and the subcommands that need nothing but the API.

Imports `api`, `client`, `methods`, `metrics`, `model`, `rounds`, `telemetry`, `tensors` and `updates`.
"""

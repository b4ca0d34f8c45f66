"""The Python client of the REST API, and the HTTP transport below it.

Imports `api`, `metrics`, `model`, `telemetry` and `tensors`.
"""

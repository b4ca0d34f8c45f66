"""The Python client of the REST API, the HTTP transport below it, and the library of the commands and the Python API.

Workers use `transport`, `client` and `transfers` too, and both sides use `notice_channels`. `run_file`,
`run_versions`, `lookup` and the others stand above them.

Imports `api`, `methods`, `metrics`, `model`, `rounds`, `telemetry`, `tensors` and `updates`.
"""

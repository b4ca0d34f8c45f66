"""Prometheus metrics, request timing, traces and logs of the coordinator. Imports `db` and `services`."""

"""Prometheus metrics, request timing, traces and logs of the coordinator. Imports `alerts`, `db`, `domain` and
`services`."""

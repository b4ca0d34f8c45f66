"""Failures of a worker: of a task, of its line to the coordinator, of its disk, and state that was put back.

Imports `errors`, `governance`, `model`, `settings`, `state`, `stores` and `task`.
"""

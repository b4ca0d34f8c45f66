"""Failures of a worker: of a task, of its line to the coordinator, of its disk, and state that was put back.

Imports `attention`, `data`, `governance`, `model`, `settings`, `state`, `stores`, `task` and `training`.
"""

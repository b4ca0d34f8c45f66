"""The execution of tasks in other processes: one for each device, kept warm while tasks of one run follow each other.

The agent and its executor meet in a folder for each task (`folder`). Imports `compute`, `data`, `devices`, `errors`,
`faults`, `governance`, `inventory`, `model`, `privacy`, `scores`, `settings`, `state`, `task` and `training`.
"""

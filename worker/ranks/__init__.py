"""Training of one model on several devices: a group of processes (ranks), one for each device, that the agent starts.

Imports `attention`, `compute`, `data`, `governance`, `model`, `privacy`, `state`, `task` and `training`.
"""

"""The rules of runs, rounds and tasks, as pure functions over frozen records: no clock, no random numbers, no I/O.

Imports no other package of `coordinator`.
"""

"""Persistent state of a worker: vault, blob cache, audit log and privacy ledger.

Imports no other package of `worker`.
"""

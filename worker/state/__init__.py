"""Files that a worker keeps: its vault, its cache of blobs, its audit log and its privacy ledger.

Imports no other package of `worker`.
"""

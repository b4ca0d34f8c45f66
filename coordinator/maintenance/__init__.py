"""Backup, restore and garbage collection. Imports `blobs` and `db`."""

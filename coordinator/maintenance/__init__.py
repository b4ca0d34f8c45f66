"""Backup, restore and garbage collection. Imports `blobs`, `db` and `domain`."""

"""Limits on memory, disk, threads and request rates. Imports no other package of `coordinator`."""

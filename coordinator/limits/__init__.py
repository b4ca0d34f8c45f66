"""Limits on memory, caches, disk, threads and request rates. Imports no other package of `coordinator`."""

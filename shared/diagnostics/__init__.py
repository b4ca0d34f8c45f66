"""Checks that `doctor` commands run, and where each setting comes from. Imports no other package of `shared`."""

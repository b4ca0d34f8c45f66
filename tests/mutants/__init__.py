"""Faults of a single line each, put into a copy of the tree: the tests that are named beside each must fail of it."""

"""Rounds over network lines of a given rate and delay: `python -m benchmarks.lines`."""

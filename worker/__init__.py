"""The program that an institution runs: it polls for tasks, trains what they select, and sends only that.

`agent` is its loop.
"""

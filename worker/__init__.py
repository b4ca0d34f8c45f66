"""The program that an institution runs: it polls for tasks, executes them on its data within the site's rules.

`agent` is its loop.
"""

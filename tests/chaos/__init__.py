"""A federation of real processes that are killed, stopped, cut off and starved, and what comes of it all the same.

`python -m tests.chaos` (`make chaos`) runs it at length; `test_chaos.py` is its short form.
"""

"""The demo, with another interpreter for the processes that it starts: `python -m tests.support.demo PYTHON ...`."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.executable = sys.argv.pop(1)
    runpy.run_module("examples.digits", run_name="__main__", alter_sys=True)

"""The demo, with another interpreter for the processes that it starts: `python -m tests.support.demo PYTHON ...`."""

from __future__ import annotations

import sys

from tessera.shared.cli.__main__ import main

if __name__ == "__main__":
    sys.executable = sys.argv.pop(1)
    sys.argv[1:1] = ["demo"]
    main()

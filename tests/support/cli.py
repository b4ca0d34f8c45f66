"""`tessera` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there."""

COMMAND = (sys.executable, "-m", "tessera.shared.cli")


def environment(**settings: str) -> dict[str, str]:
    """This process's environment with none of Tessera's own settings but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return {**kept, "COLUMNS": "200", "NO_COLOR": "1", **settings}


def tessera(
    *arguments: str, command: Sequence[str] = COMMAND, seconds: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, within so many seconds. `settings` are environment variables."""
    return subprocess.run(
        [*command, *arguments],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )

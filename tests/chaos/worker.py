"""A worker that trains by a step which only its task tells, and writes the history of what it did.

`python -m tests.chaos.worker '{"urls": [...], "token": "...", "site": "...", "examples": 10, "history": "...",
"skew": 0}'`
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tessera.shared.problems import Problem
from tests.support.federation import ScriptedWorker
from tests.support.histories import Log, RecordingClient
from tests.support.turns import by_turns


def main() -> None:
    given = json.loads(sys.argv[1])
    here = time.time
    # What a site's clock says is nobody else's business.
    time.time = lambda: here() + given["skew"]
    site = given["site"]
    # A file of its own: another process of this worker may have been killed in the middle of a line.
    log = Log(path=Path(given["history"]) / f"{site}-{os.getpid()}.jsonl")
    client = by_turns(
        RecordingClient(given["urls"][0], given["token"], log, f"{site}/w", patience_seconds=10), given["urls"]
    )
    worker = ScriptedWorker(client, datasets={"data": given["examples"]})
    while True:
        try:
            if task := worker.claim(2):
                worker.train(task, task.seed % 1000 / 1000)
        except (Problem, ValueError, OSError) as fault:
            print(type(fault).__name__, str(fault)[:200], flush=True)
            time.sleep(0.1)


if __name__ == "__main__":
    main()

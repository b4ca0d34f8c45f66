"""A worker that trains by a step which only its task tells, for as long as it is left to.

`python -m tests.soak.worker URL TOKEN`
"""

from __future__ import annotations

import sys
import time

from tessera.shared.client.client import Client
from tessera.shared.problems import Problem
from tests.support.federation import ScriptedWorker


def main(url: str, token: str) -> None:
    worker = ScriptedWorker(Client(url, token, patience_seconds=60), forgets=True)
    while True:
        try:
            if task := worker.claim(5):
                worker.train(task, task.seed % 1000 / 1000)
        except Problem as problem:
            print(problem.code, problem.detail, flush=True)
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])

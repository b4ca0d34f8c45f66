"""Scripted workers as a process, which work until it ends: `python -m tests.support.steady_worker URLS TOKENS`, with
commas. A token is `NUMBER=TOKEN`; that worker has 10 + NUMBER examples. Its step follows from the task's seed alone.
"""

from __future__ import annotations

import sys
import threading

import structlog

from tessera.shared.client.client import Client
from tessera.shared.problems import Conflict
from tessera.shared.telemetry.logging import configure
from tessera.shared.version import VERSION
from tests.support.federation import ScriptedWorker
from tests.support.turns import by_turns


def work(urls: list[str], token: str, number: int) -> None:
    client = by_turns(Client(urls[0], token, patience_seconds=120), urls)
    worker = ScriptedWorker(client, datasets={"data": 10 + number}, version=VERSION).enrol()
    structlog.get_logger().info("enrolled", number=number, version=VERSION)
    while True:
        if task := worker.claim(2):
            try:
                worker.train(task, task.seed % 1000 / 1000)
            except Conflict as conflict:
                # Its lease ran out while this machine was busy; there will be another.
                structlog.get_logger().info("dropped", code=conflict.code, detail=conflict.detail)


def main(urls: str, tokens: str) -> None:
    configure(sys.stderr, console=False)
    for entry in tokens.split(","):
        number, _, token = entry.partition("=")
        threading.Thread(target=work, args=(urls.split(","), token, int(number))).start()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Another system's side, which a program of its own holds: `--beside NAME COMMAND`.

The program reads one line of JSON: `folder`, `model` (a model folder), `workers`, and with TLS `ca`, `server` and
`key` (PEM files). It prints `ready`. For each line with a number of rounds it then prints a `Turn` as JSON. It ends
when its input does.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.network import Certificates
from benchmarks.rounds.sides import Turn

STOP_SECONDS = 120.0


@dataclass
class Beside:
    name: str
    command: str
    folder: Path
    model: Path
    workers: int
    certificates: Certificates | None = None
    may_fail: bool = True

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self._log = self.folder / "log"
        given = {"folder": str(self.folder), "model": str(self.model), "workers": self.workers}
        if self.certificates:
            given |= {name: str(path) for name, path in vars(self.certificates).items()}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                shlex.split(self.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self._ask(json.dumps(given))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _ask(self, line: str) -> str:
        """Return the program's answer to a line. Raises RuntimeError if it ended."""
        answer = ""
        if self._process.stdin and self._process.stdout:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended: {self._log.read_text(encoding='utf-8')[-2000:]}")
        return answer

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            self._process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def turn(self, rounds: int) -> Turn:
        return Turn(**json.loads(self._ask(str(rounds))))

"""Other systems beside ours in the rounds' benchmark: each is a program, whose failure leaves it out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import pytest

from benchmarks import simulations
from benchmarks.network import Certificates
from benchmarks.rounds.beside import Beside
from benchmarks.rounds.cases import compare
from benchmarks.rounds.sides import Turn

TURN = Turn(1.0, (2.0, 3.0), 1.0, 1.0, 1, 1, 10.0, 10.0)
PROGRAM = f"""
import json, sys
given = json.loads(sys.stdin.readline())
print("ready", flush=True)
for rounds in sys.stdin:
    if int(rounds) > given["workers"]:
        sys.exit("too many rounds")
    print({json.dumps(asdict(TURN))!r}, flush=True)
"""


@dataclass
class Timed:
    """A side whose turns are given."""

    name: str
    fault: Exception | None = None
    may_fail: bool = False
    turns: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def turn(self, rounds: int) -> Turn:
        self.turns += 1
        if self.fault:
            raise self.fault
        return TURN


def beside(tmp_path: Path, name: str = "other") -> Beside:
    (tmp_path / "program.py").write_text(PROGRAM)
    certificates = Certificates.made(tmp_path / "certificates")
    command = f"{sys.executable} {tmp_path / 'program.py'}"
    return Beside(name, command, tmp_path / name, tmp_path / "model", 2, certificates)


def test_a_program_s_turns_are_read_and_its_failure_is_reported(tmp_path: Path) -> None:
    with beside(tmp_path) as side:
        assert side.turn(2) == Turn(**{**asdict(TURN), "seconds": [2.0, 3.0]})
        with pytest.raises(RuntimeError, match="other ended: too many rounds"):
            side.turn(3)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_system_that_fails_is_left_out_with_the_reason(tmp_path: Path, turns: int) -> None:
    stuck = Timed("stuck", TimeoutError("timed out after 9 s: the first round ends"), may_fail=True)
    others = [Timed("bare loop"), stuck, beside(tmp_path)]
    comparison = compare(Timed("tessera"), TURN, others, turns, 2)
    assert set(comparison.found) == {"tessera", "bare loop", "other"}
    assert (comparison.failures, stuck.turns) == ({"stuck": "timed out after 9 s: the first round ends"}, 1)


def test_a_failure_of_our_own_side_ends_the_comparison() -> None:
    with pytest.raises(TimeoutError, match="timed out"):
        compare(Timed("tessera"), TURN, [Timed("bare loop", TimeoutError("timed out"))], 1, 2)


def test_certificates_are_those_of_this_host(tmp_path: Path) -> None:
    made = Certificates.made(tmp_path / "certificates")
    assert made.client_context().cert_store_stats()["x509_ca"] == 1
    assert "BEGIN CERTIFICATE" in made.server.read_text()


SIMULATED = """
import json, sys, time
given = json.load(open(sys.argv[1]))
for _ in range(given["rounds"]):
    with open(given["times"], "a") as file:
        print(json.dumps({"at": time.time(), "clients": given["sites"]}), file=file)
time.sleep(30)
"""


def test_another_system_s_simulation_gets_the_same_work(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SIMULATED)
    work, folder = simulations.QUICK[0], tmp_path / "other"
    cost = simulations.side("other", work, folder, 1, f"{sys.executable} {tmp_path / 'program.py'}")
    assert cost.peak_bytes > 0
    given = json.loads((folder / "work.json").read_text())
    assert (given["sites"], given["steps"], given["batch"]) == (work.sites, work.steps, simulations.BATCH)
    assert Path(given["weights"]).is_file()

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.walk import Walk, walk

CALLS = {
    "runner": """
from tessera.worker.policy import Policy
from tessera.worker.fetch import fetched

class Runner:
    policy: Policy

    def run(self, task: Task):
        self.policy.check(task)
        found = fetched(task.round)
        self.note(task)
        fetched(found)

    def note(self, task): ...
""",
    "policy": """
class Policy:
    def check(self, task):
        refuse(task)

def refuse(task): ...
""",
    "fetch": "def fetched(number): ...",
}

RECORDS = {
    "runner": """
from dataclasses import dataclass
from tessera.worker.stages import Egress, Run, Task, made
from tessera.worker import audit, policy

def run(task: Task, report):
    run = Run(task, report)
    policy.check(run.report)
    policy.check(run.task)
    audit.note(run)
    there, other = made(run, report)
    policy.check(other)
    there.send()
    threads.start(audit.note, run)

def parts(task: Task):
    policy.check(task.plan)
    policy.check(task.round)
    audit.note(Run(task.plan, None))

def reads(task: Task):
    Run(task, None).name
""",
    "stages": """
from dataclasses import dataclass
from tessera.worker import audit, policy

class Plan: ...

class Task:
    plan: Plan
    round: int

@dataclass(frozen=True)
class Run:
    task: Task
    report: Report

    @property
    def name(self):
        return policy.check(self.task)

class Egress:
    def __init__(self, run: Run) -> None:
        self._run = run

    def send(self):
        audit.note(self._run.task)
        policy.check(self._run.report)

def made(run: Run, report) -> tuple[Egress, Report]:
    return Egress(run), report
""",
    "audit": "def note(about): ...",
    "policy": "def check(it): ...",
}


def walked(folder: Path, files: dict[str, str], start: str, *, parts: bool = False) -> Walk:
    (folder / "worker").mkdir()
    for name, text in files.items():
        (folder / "worker" / f"{name}.py").write_text(text)
    return walk(folder, f"worker/runner.py:{start}", parts=parts)


def stays(made: Walk) -> list[str]:
    return [Path(file).stem for file in made.stays]


def test_a_parameter_is_followed_in_the_order_of_the_calls_and_its_plain_values_are_not(tmp_path: Path) -> None:
    made = walked(tmp_path, CALLS, "Runner.run:task")
    # Within a file a stay is one; what `fetched` returned is no part of the task.
    assert stays(made) == ["runner", "policy", "runner"]
    assert made.returns == 1


def test_records_that_carry_the_parameter_are_followed_and_their_other_fields_are_not(tmp_path: Path) -> None:
    made = walked(tmp_path, RECORDS, "run:task")
    assert stays(made) == ["runner", "policy", "audit", "stages", "audit"]
    assert [name for _, names in made.visits for name in names] == [
        "run", "check", "note", "made", "Egress.__init__", "Egress.send", "note", "note",
    ]  # fmt: skip
    assert made.returns == 1


@pytest.mark.parametrize(("parts", "expected"), [(False, ["runner"]), (True, ["runner", "policy", "audit"])])
def test_records_of_the_parameter_are_followed_if_asked(tmp_path: Path, parts: bool, expected: list[str]) -> None:
    assert stays(walked(tmp_path, RECORDS, "parts:task", parts=parts)) == expected


def test_a_property_of_a_record_is_entered(tmp_path: Path) -> None:
    assert stays(walked(tmp_path, RECORDS, "reads:task")) == ["runner", "stages", "policy"]

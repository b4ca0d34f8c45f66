"""Which tasks of a run's rounds came to nothing, why, and what to do about it: as on the page under Failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from tessera.shared.api.runs import Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.problems import Fault, Withheld, WorkerFailed

MAX_SHOWN = 10
MAX_FAULTS = 3
MAX_CHARACTERS = 600

# What a worker or a site says has its own code in its text, or none.
SAID_BY_SITES = (WorkerFailed.code, Withheld.code)


@dataclass(frozen=True)
class TaskFailureRow:
    worker: str
    round: Round
    end: str
    """How the task ended, in a word."""
    said: str
    remedy: str
    faults: tuple[Fault, ...] = ()


def troubles(rounds: Sequence[Round]) -> Iterator[TaskFailureRow]:
    """Yield the newest first. `rounds` are from the oldest on."""
    for round_ in reversed(rounds):
        for task in round_.tasks:
            if found := _trouble(round_, task):
                yield found


def _trouble(round_: Round, task: TaskView) -> TaskFailureRow | None:
    if problem := task.problem:
        end = {"cancelled": "withheld", "rejected": "refused"}.get(task.state, task.state)
        said = problem.detail if problem.code in SAID_BY_SITES else f"{problem.code}: {problem.detail}"
        return TaskFailureRow(task.worker, round_, end, said, problem.remedy, problem.errors)
    if task.state == "expired":
        remedy = "Ask its site whether the worker still runs."
        return TaskFailureRow(
            task.worker, round_, "expired", "its lease ran out, and nothing was heard of it", remedy
        )
    if task.state == "cancelled" and round_.state == "abandoned":
        said = "its update had not come" if task.attempts else "it had not taken its task"
        late = round_.closed_at is not None and round_.closed_at >= round_.deadline_at
        remedy = "Ask its site whether the worker runs; a longer cohort.deadline_seconds waits for slow ones."
        return TaskFailureRow(
            task.worker, round_, "no update", f"{said} when the round ended", remedy if late else ""
        )
    return None


def print_troubles(console: Console, rounds: Sequence[Round]) -> None:
    """The newest ones, and how many more there are."""
    found = list(troubles(rounds))
    if not found:
        return
    console.print("\n[bold]without an update, the newest first[/]")
    for one in found[:MAX_SHOWN]:
        attempt = f" (try {one.round.attempt})" if one.round.attempt > 1 else ""
        lines = [f"round {one.round.number}{attempt}  {one.worker}  {one.end}: {one.said}"]
        lines += [f"  {fault.pointer}: {fault.detail}" for fault in one.faults[:MAX_FAULTS]]
        lines += [f"  {one.remedy}"] if one.remedy else []
        for line in lines:
            console.print(escape(_plain(line)), soft_wrap=True)
    if len(found) > MAX_SHOWN:
        console.print(f"and {len(found) - MAX_SHOWN} more, which --json has")


def _plain(line: str) -> str:
    """Without what moves a terminal's cursor or begins another line: workers say what they like."""
    return "".join(letter if letter.isprintable() else " " for letter in line[:MAX_CHARACTERS])

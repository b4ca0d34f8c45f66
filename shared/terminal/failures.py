"""The failed tasks of a run, with reason and remedy, as on the dashboard under Failures."""

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

# Problems that a site words: their text has its own code, or none.
SITE_CODES = (WorkerFailed.code, Withheld.code)


@dataclass(frozen=True)
class TaskFailureRow:
    worker: str
    round: Round
    end: str
    """The task's end, in a word or two."""
    reason: str
    remedy: str
    faults: tuple[Fault, ...] = ()


def task_failures(rounds: Sequence[Round]) -> Iterator[TaskFailureRow]:
    """Yield the failed tasks, newest round first. `rounds` are in order, oldest first."""
    for round_ in reversed(rounds):
        yield from filter(None, (_failure(round_, task) for task in round_.tasks))


def _failure(round_: Round, task: TaskView) -> TaskFailureRow | None:
    if problem := task.problem:
        ended = "withheld" if problem.code == Withheld.code else "no update"
        end = {"cancelled": ended, "rejected": "refused", "offered": "given back"}.get(task.state, task.state)
        reason = problem.detail if problem.code in SITE_CODES else f"{problem.code}: {problem.detail}"
        return TaskFailureRow(task.worker, round_, end, reason, problem.remedy, problem.errors)
    if task.state == "expired":
        remedy = "Ask its site whether the worker still runs."
        return TaskFailureRow(
            task.worker, round_, "expired", "its lease ran out, and nothing was heard of it", remedy
        )
    if task.state == "cancelled" and round_.state == "abandoned":
        missing = "its update had not come" if task.attempts else "it had not taken its task"
        late = round_.closed_at is not None and round_.closed_at >= round_.deadline_at
        remedy = "Ask its site whether the worker runs; a longer cohort.deadline_seconds waits for slow ones."
        reason = f"{missing} when the round ended"
        return TaskFailureRow(task.worker, round_, "no update", reason, remedy if late else "")
    return None


def print_failures(console: Console, rounds: Sequence[Round]) -> None:
    """Print the newest failures, and the number of the others."""
    found = list(task_failures(rounds))
    if not found:
        return
    console.print("\n[bold]without an update, the newest first[/]")
    for one in found[:MAX_SHOWN]:
        attempt = f" (try {one.round.attempt})" if one.round.attempt > 1 else ""
        lines = [f"round {one.round.number}{attempt}  {one.worker}  {one.end}: {one.reason}"]
        lines += [f"  {fault.pointer}: {fault.detail}" for fault in one.faults[:MAX_FAULTS]]
        lines += [f"  {one.remedy}"] if one.remedy else []
        for line in lines:
            console.print(escape(_plain(line)), soft_wrap=True)
    if len(found) > MAX_SHOWN:
        console.print(f"and {len(found) - MAX_SHOWN} more, which --json has")


def _plain(line: str) -> str:
    """Remove control characters and line breaks: the text comes from workers, which are not trusted."""
    return "".join(letter if letter.isprintable() else " " for letter in line[:MAX_CHARACTERS])

"""Live view of a run: a line for each round that ended, and the workers of the open round."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from tessera.shared import units
from tessera.shared.api.runs import Coverage, Round, Run
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.round_outcomes import RoundOutcome, RunProgress
from tessera.shared.metrics.eta import TaskPace, expected_end
from tessera.shared.metrics.site_spread import LISTED, PERSONAL, headlines, name_over_sites
from tessera.shared.schema import TaskState
from tessera.shared.terminal import output

# Metrics that fit on a line; `tessera run metrics` has all.
LINE = (*dict.fromkeys(title for name in LISTED for title in (name, name_over_sites(name))),)

PLAIN_SECONDS = timedelta(seconds=10)
"""Time between two looks at the open round where there is no terminal."""

PAST_ROUNDS = 5
"""Rounds of a stage from which the next ones are estimated."""

MAX_WORKERS = 12
"""Workers that are shown one by one."""

BAR_COLUMNS = 30

MAX_REASON = 120
"""Characters of the reason why a task was given back."""

STATES: Mapping[TaskState, str] = {
    "offered": "waiting",
    "accepted": "done",
    "merged": "done",
    "left_out": "done",
    "rejected": "update refused",
    "failed": "failed",
    "expired": "not heard of in time",
    "cancelled": "not needed",
}


def _now() -> datetime:
    return datetime.now(UTC)


def watch_as_text(glimpses: Iterable[RunProgress], clock: Callable[[], datetime] = _now) -> Run:
    """Print each round that ends, and each worker's work in the open round; return the run as it ended.

    A terminal shows the open round in place, under a progress bar; so does a notebook with ipywidgets. Elsewhere the
    round is printed in lines, every `PLAIN_SECONDS` if it has changed.
    """
    console = output.out()
    estimates, said_at, said = Estimates(), None, ""
    with _live(console) as live:
        for glimpse in glimpses:
            for outcome in glimpse.ended:
                print_ended(console, outcome)
            now = clock()
            estimates.add(glimpse.ended)
            if live:
                live.update(open_view(glimpse, estimates, now), refresh=True)
            elif said_at is None or now - said_at >= PLAIN_SECONDS:
                lines = "\n".join(open_lines(glimpse, estimates, now))
                # Estimates change with the time alone.
                if (facts := "\n".join(open_lines(glimpse, Estimates(), now))) not in ("", said):
                    console.print(escape(lines), soft_wrap=True)
                said_at, said = now, facts
    run = glimpse.run
    console.print(
        escape(f"{run.spec.name} is {run.state}" + (f": {run.reason}" if run.reason else "")), soft_wrap=True
    )
    if run.coverage and run.coverage.low:
        console.print(f"[yellow]warning:[/] low coverage: {run.coverage.words}", soft_wrap=True)
    return run


def watch_as_json(glimpses: Iterable[RunProgress]) -> Run:
    """Print an object per line: `open` when an open round's tasks change, `round` when one ends, `run` at the end."""
    before: dict[str, Any] | None = None
    for glimpse in glimpses:
        for outcome in glimpse.ended:
            print_ended_as_json(outcome)
        now = glimpse.open.model_dump(mode="json") if glimpse.open else None
        if now and now != before:
            output.print_json({"event": "open", **now}, line=True)
        before = now
    output.print_json({"event": "run", **glimpse.run.model_dump(mode="json")}, line=True)
    return glimpse.run


def print_ended(console: Console, outcome: RoundOutcome) -> None:
    """Print a line for a round that ended, and its method's warnings."""
    console.print(escape(_line(outcome)), soft_wrap=True)
    for warning in outcome.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def print_ended_as_json(outcome: RoundOutcome) -> None:
    output.print_json({"event": "round", **outcome.as_json()}, line=True)


@contextmanager
def _live(console: Console) -> Iterator[Live | None]:
    """Yield a view that is updated in place, or None where there is no place for one."""
    if console.is_terminal or (console.is_jupyter and find_spec("ipywidgets")):
        with Live(console=console, transient=True) as live:
            yield live
    else:
        yield None


def _line(outcome: RoundOutcome) -> str:
    ended = outcome.round
    attempt = f" (try {ended.attempt})" if ended.attempt > 1 else ""
    begin = f"round {ended.number}{attempt} {ended.stage}: {outcome.accepted}"
    begin += " updates" if outcome.buffers else f" of {outcome.asked} updates"
    if ended.state != "committed":
        return f"{begin}; {ended.state}: {ended.reason}"
    # The last is that of the sites' own models, if they have any.
    shown = [*headlines(outcome.spreads)]
    own = [name for name in shown if name.startswith(PERSONAL)]
    scores = "".join(f", {_score(outcome, name)}" for name in (*LINE, *own) if name in outcome.scores)
    for name in own:
        if name not in outcome.scores:
            # A central evaluator measures no site's own model.
            spread = outcome.spreads[name]
            scores += f", {name} {spread.weighted_mean:.3f} over {spread.sites} site{'s' if spread.sites > 1 else ''}"
    if shown:
        spread = outcome.spreads[shown[-1]]
        scores += f", worst site {spread.worst_site}: {shown[-1]} {spread.worst:.3f}"
    covered = Coverage.of(outcome.scalars)
    scores += f", {covered.words}" if covered and covered.sites < 1 else ""
    moved = f"{units.size(outcome.download_bytes)} down, {units.size(outcome.upload_bytes)} up"
    return f"{begin}{scores}, {moved}, {output.seconds(outcome.seconds())} s"


def _score(outcome: RoundOutcome, name: str) -> str:
    """Return a score, and over how many sites: another round or metric may have others."""
    spread = None if outcome.central or name not in headlines(outcome.spreads) else outcome.spreads[name]
    over = f" over {spread.sites} site{'s' if spread.sites > 1 else ''}" if spread else ""
    return f"{name} {outcome.scores[name]:.3f}{over}"


# ---------------------------------------------------------------- the open round


class Estimates:
    """Durations of the latest rounds of each stage. There is no estimate before a round of a stage has ended."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}

    def add(self, ended: Iterable[RoundOutcome]) -> None:
        for outcome in ended:
            if outcome.round.state == "committed" and (seconds := outcome.seconds()) is not None:
                self._seconds.setdefault(outcome.round.stage, deque(maxlen=PAST_ROUNDS)).append(seconds)

    def worker_left(self, round_: Round, task: TaskView, now: datetime) -> str:
        """Return the estimated time until a worker has done its task, or nothing.

        Before a round of the stage has ended, only the time of the steps that are left is known.
        """
        pace = TaskPace.of(task)
        if pace.over:
            return ""
        if left := self._left(round_, [pace], now, 0):
            return left
        seconds = task.progress.seconds_left if task.progress else None
        return f"{output.about(seconds)} of {pace.phase} left" if seconds else ""

    def run_left(self, glimpse: RunProgress, now: datetime) -> str:
        """Return the estimated time until the run's last round has ended, or nothing."""
        if (round_ := glimpse.open) is None:
            return ""
        later = glimpse.run.spec.rounds - round_.number
        return self._left(round_, [TaskPace.of(task) for task in round_.tasks], now, later)

    def _left(self, round_: Round, paces: Sequence[TaskPace], now: datetime, later: int) -> str:
        before, at = self._seconds.get(round_.stage, ()), now.timestamp()
        end = expected_end(round_.opened_at.timestamp(), at, round_.deadline_at.timestamp(), list(before), paces)
        return "" if end is None else f"{output.about(end - at + later * median(before))} left"


def open_lines(glimpse: RunProgress, estimates: Estimates, now: datetime) -> Iterator[str]:
    """Yield lines about the run, its open round and each worker in it; of many workers, how many do what."""
    if glimpse.over:
        return
    yield _joined(_headline(glimpse), estimates.run_left(glimpse, now))
    if round_ := glimpse.open:
        for task in _shown(round_):
            yield f"  {task.worker}: {_joined(*_doing(task), estimates.worker_left(round_, task, now))}"
        if rest := _rest(round_):
            yield f"  {rest}"


def open_view(glimpse: RunProgress, estimates: Estimates, now: datetime) -> RenderableType:
    """Return the same as a progress bar and a table."""
    if glimpse.over:
        return ""
    bar = Table.grid(padding=(0, 1))
    made = ProgressBar(total=glimpse.run.spec.rounds or 1, completed=glimpse.run.version.number, width=BAR_COLUMNS)
    bar.add_row(escape(_headline(glimpse)), made, estimates.run_left(glimpse, now))
    if (round_ := glimpse.open) is None:
        return bar
    rows = [(task.worker, *_doing(task), estimates.worker_left(round_, task, now)) for task in _shown(round_)]
    return Group(bar, output.table(("worker", "phase", "done", "loss", ""), rows), escape(_rest(round_)))


def _headline(glimpse: RunProgress) -> str:
    if (now := glimpse.open) is None:
        return f"{glimpse.run.spec.name}: waiting for {'the next round' if glimpse.run.spec.rounds else 'answers'}"
    state = "merging" if now.state == "merging" else now.stage
    cohort, buffered = glimpse.run.spec.cohort, ""
    if cohort.buffers and now.state == "open":
        buffered = f", {now.accepted} of {cohort.target_updates or cohort.quorum} updates"
        buffered += f", no idle site is asked: {now.reason[:MAX_REASON]}" if now.reason else ""
    return f"round {now.number} of {glimpse.run.spec.rounds}, {state}{buffered}"


def _shown(round_: Round) -> list[TaskView]:
    """Return the tasks to show, those at work first."""
    return sorted(round_.tasks, key=lambda task: (task.state != "leased", TaskPace.of(task).over))[:MAX_WORKERS]


def _rest(round_: Round) -> str:
    rest = len(round_.tasks) - MAX_WORKERS
    if rest <= 0:
        return ""
    counts = Counter(_doing(task)[0] for task in round_.tasks)
    return f"and {rest} more workers; of all: {', '.join(f'{phase} {count}' for phase, count in counts.items())}"


def _doing(task: TaskView) -> tuple[str, str, str]:
    """Return a worker's phase, its progress in the phase, and its loss."""
    if task.state == "offered" and task.problem:
        return STATES[task.state], task.problem.detail[:MAX_REASON], ""
    if task.state != "leased":
        return STATES[task.state], "", ""
    if (at := task.progress) is None:
        return "started", "", ""
    done = ""
    if at.steps:
        done = f"step {at.step or 0} of {at.steps}"
    elif at.held_since:
        done = units.ago(at.held_since)
    elif at.total_bytes:
        done = f"{units.size(at.bytes or 0)} of {units.size(at.total_bytes)}"
    return at.doing, done, "" if at.loss is None else f"loss {at.loss:.3g}"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)

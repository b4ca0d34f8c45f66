"""Live view of a run: a line for each round that ended, and a line for the open round that is updated in place."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from tessera.shared.api.runs import Run
from tessera.shared.cli.render import output
from tessera.shared.client.round_outcomes import Outcome, RunProgress, at_work
from tessera.shared.metrics.site_spread import PERSONAL

# Metrics that fit on a line; `tessera run metrics` has all.
HEADLINES = ("accuracy", "macro_f1", "loss", f"{PERSONAL}accuracy")


def watch_as_text(glimpses: Iterable[RunProgress]) -> Run:
    """Print each round that ends, and the state of the open one; return the run as it ended."""
    console = output.out()
    with _live_line() as live:
        for glimpse in glimpses:
            for outcome in glimpse.ended:
                print_ended(console, outcome)
            live.update(escape(_open_line(glimpse)))
    run = glimpse.run
    console.print(
        escape(f"{run.spec.name} is {run.state}" + (f": {run.reason}" if run.reason else "")), soft_wrap=True
    )
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


def print_ended(console: Console, outcome: Outcome) -> None:
    """Print a line for a round that ended, and its method's warnings."""
    console.print(escape(_line(outcome)), soft_wrap=True)
    for warning in outcome.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def print_ended_as_json(outcome: Outcome) -> None:
    output.print_json({"event": "round", **outcome.as_json()}, line=True)


@contextmanager
def _live_line() -> Iterator[Status]:
    """Yield a line that is updated in place; it is shown on terminals only."""
    with output.out().status("") as status:
        yield status


def _line(outcome: Outcome) -> str:
    ended = outcome.round
    attempt = f" (try {ended.attempt})" if ended.attempt > 1 else ""
    begin = f"round {ended.number}{attempt} {ended.stage}: {outcome.accepted} of {outcome.asked} updates"
    if ended.state != "committed":
        return f"{begin}; {ended.state}: {ended.reason}"
    scores = "".join(f", {name} {outcome.scores[name]:.3f}" for name in HEADLINES if name in outcome.scores)
    if spread := outcome.spreads.get("accuracy"):
        scores += f", worst site {spread.worst_site} {spread.worst:.3f}"
    moved = f"{output.size(outcome.download_bytes)} down, {output.size(outcome.upload_bytes)} up"
    return f"{begin}{scores}, {moved}, {output.seconds(outcome.seconds())} s"


def _open_line(glimpse: RunProgress) -> str:
    now = glimpse.open
    if glimpse.over:
        return ""
    if now is None:
        return f"{glimpse.run.spec.name} {glimpse.run.state}: waiting for the next round"
    return f"round {now.number} of {glimpse.run.spec.rounds}, {now.stage}, {now.state}; {at_work(now)}"

"""Shows a run as it goes: a line for each round that ended, and one that changes for the round that is open."""

from __future__ import annotations

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

# Of what was measured, as much as a line holds; `tessera run metrics` has it all.
TELLING = ("accuracy", "macro_f1", "loss", f"{PERSONAL}accuracy")


def watch_as_text(glimpses: Iterable[RunProgress]) -> Run:
    """Print until the glimpses end; returns the run as it then is."""
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
    """Print an object a line: an `open` round when its tasks move, a `round` that ended, the `run` at its end."""
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
    """A round that is over, in a line, and what its method warns of."""
    console.print(escape(_line(outcome)), soft_wrap=True)
    for warning in outcome.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def print_ended_as_json(outcome: Outcome) -> None:
    output.print_json({"event": "round", **outcome.as_json()}, line=True)


@contextmanager
def _live_line() -> Iterator[Status]:
    """Yield a line that changes, on a terminal; nothing elsewhere."""
    with output.out().status("") as status:
        yield status


def _line(outcome: Outcome) -> str:
    made = outcome.round
    attempt = f" (try {made.attempt})" if made.attempt > 1 else ""
    begin = f"round {made.number}{attempt} {made.stage}: {outcome.accepted} of {outcome.asked} updates"
    if made.state != "committed":
        return f"{begin}; {made.state}: {made.reason}"
    told = {name: outcome.scores[name] for name in TELLING if name in outcome.scores}
    scores = "".join(f", {name} {value:.3f}" for name, value in told.items())
    if spread := outcome.spreads.get("accuracy"):
        scores += f", worst site {spread.worst_site} {spread.worst:.3f}"
    moved = f"{output.size(outcome.download_bytes)} down, {output.size(outcome.upload_bytes)} up"
    return f"{begin}{scores}, {moved}, {output.seconds(outcome.seconds())} s"


def _open_line(glimpse: RunProgress) -> str:
    made = glimpse.open
    if glimpse.over:
        return ""
    if made is None:
        return f"{glimpse.run.spec.name} {glimpse.run.state}: waiting for the next round"
    return f"round {made.number} of {glimpse.run.spec.rounds}, {made.stage}, {made.state}; {at_work(made)}"

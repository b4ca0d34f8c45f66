"""`tessera admin status`: the coordinator at a glance, once or as it changes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Group
from rich.live import Live
from rich.markup import escape

from tessera.shared.api.admin import Status
from tessera.shared.cli.render import output
from tessera.shared.client.client import Client
from tessera.shared.client.round_outcomes import at_work

LOOK_SECONDS = 1.0


def status_picture(found: Status) -> Group:
    """Return two tables: the coordinator's facts, and the rounds that are open if there are any."""
    facts = output.table(("", ""), list(_facts(found).items()))
    if not found.open_rounds:
        return Group(facts)
    rows = [(r.number, r.stage, r.state, at_work(r)) for r in found.open_rounds]
    return Group(facts, "", output.table(("round", "stage", "state", "tasks"), rows, right=("round",)))


def watch_status(client: Client, *, as_json: bool) -> None:
    """Show each status that differs from the one before, until it is interrupted."""
    if as_json:
        for found in _changes(client):
            output.print_json(found, line=True)
        return
    console = output.out()
    if not console.is_terminal:
        before = ""
        for found in _changes(client):
            if (line := _line(found)) != before:
                console.print(escape(line), soft_wrap=True)
            before = line
        return
    with Live(console=console) as live:
        for found in _changes(client):
            live.update(status_picture(found))


def _changes(client: Client) -> Iterator[Status]:
    before: Status | None = None
    while True:
        found = client.status()
        if found != before:
            yield found
        before = found
        time.sleep(LOOK_SECONDS)


def _facts(found: Status) -> dict[str, str]:
    runs = ", ".join(f"{count} {state}" for state, count in sorted(found.runs.items()))
    live = sum(worker.live for worker in found.workers)
    return {
        "version": f"{found.version}, protocol {found.protocol}",
        "runs": runs or "none",
        "workers": f"{live} live of {len(found.workers)}",
        "blobs": f"{found.blobs}, {output.size(found.blob_bytes)}",
    }


def _line(found: Status) -> str:
    facts = [f"{name} {value}" for name, value in _facts(found).items() if name != "version"]
    return "; ".join((*facts, *(f"round {r.number} {r.stage} {r.state} ({at_work(r)})" for r in found.open_rounds)))

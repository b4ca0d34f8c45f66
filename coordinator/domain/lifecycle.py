"""State machines of runs, rounds and tasks, one table each.

Every write of a state names its event here, and changes a row only if it is in one of the event's sources; otherwise
it is a conflict, never an overwrite. `python -m tessera.coordinator.domain.lifecycle` draws the tables.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Move(NamedTuple):
    sources: tuple[str, ...]
    target: str


Lifecycle = Mapping[str, Move]

RUN: Lifecycle = {
    "pause": Move(("running",), "paused"),
    "resume": Move(("paused",), "running"),
    "cancel": Move(("running", "paused"), "cancelled"),
    "complete": Move(("running",), "completed"),
}

ROUND: Lifecycle = {
    "close": Move(("open",), "merging"),
    "commit": Move(("merging",), "committed"),
    "abandon": Move(("open", "merging"), "abandoned"),
}

TASK: Lifecycle = {
    "lease": Move(("offered",), "leased"),
    "release": Move(("leased",), "offered"),
    "expire": Move(("leased",), "expired"),
    "offer": Move(("expired",), "offered"),
    "accept": Move(("leased",), "accepted"),
    "merge": Move(("accepted",), "merged"),
    "leave_out": Move(("accepted",), "left_out"),
    "reject": Move(("leased",), "rejected"),
    "fail": Move(("leased",), "failed"),
    "withhold": Move(("offered", "leased"), "cancelled"),
    "cancel": Move(("offered", "leased", "expired"), "cancelled"),
}

LIVE_ROUND = ("open", "merging")
LIVE_RUN = ("running", "paused")


def diagram(title: str, lifecycle: Lifecycle) -> str:
    """Return the table as a Mermaid state diagram."""
    arrows = [
        f"    {source} --> {move.target}: {event}" for event, move in lifecycle.items() for source in move.sources
    ]
    return "\n".join([f"---\ntitle: {title}\n---", "stateDiagram-v2", *arrows])


if __name__ == "__main__":
    for name, table in {"Run": RUN, "Round": ROUND, "Task": TASK}.items():
        print(f"```mermaid\n{diagram(name, table)}\n```\n")

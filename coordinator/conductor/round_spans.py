"""The trace of a round: the spans of the actions that move it, and the one span around them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from structlog.contextvars import bound_contextvars

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import RoundRow
from tessera.coordinator.domain.decide import Action
from tessera.coordinator.domain.round_moves import Abandon, Merge, RoundAction
from tessera.coordinator.domain.snapshot import RunSnapshot
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import trace_of, traceparent_of


@contextmanager
def in_trace(run: RunSnapshot, action: Action) -> Iterator[AbstractContextManager[None]]:
    """Name in logs the trace of the round that an action moves, and yield the action's span; for others, none."""
    if not isinstance(action, RoundAction):
        yield nullcontext()
        return
    number = run.version + 1
    with bound_contextvars(trace=trace_of(run.id, number)):
        yield spans.span(type(action).__name__.lower(), parent=traceparent_of(run.id, number))


def record_round(database: Database, action: Action) -> None:
    """Record the span of a round that an action has ended, which is the parent of all spans of its actions."""
    if not (spans.on() and isinstance(action, Merge | Abandon)):
        return
    with database.snapshot() as session:
        row = session.get_one(RoundRow, action.round)
    itself = traceparent_of(row.run_id, row.number)
    place: dict[str, str | int] = {"tessera.run": row.run_id, "tessera.round": row.number}
    about = place | {"tessera.attempt": row.attempt}
    # After an abandoned attempt, another may yet be the round.
    over = row.state == "committed"
    name, ended_at = "round" if over else "abandoned", row.closed_at or row.opened_at
    spans.past(name, itself, row.opened_at, ended_at, about, is_parent=not over)

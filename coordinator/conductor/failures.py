"""Failed actions of the conductor: what to log, when to try again, and whether the run pauses."""

from dataclasses import dataclass, field
from math import inf

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import IntegrityError

from tessera.coordinator.conductor.liveness import TooFewWilling
from tessera.coordinator.db.engine import DATABASE_AWAY, Database
from tessera.coordinator.domain.decide import Action
from tessera.coordinator.domain.snapshot import RunSnapshot
from tessera.coordinator.limits.disk import is_full, is_unusable
from tessera.shared.problems import Conflict, StoreAway, StoreFull

log = structlog.get_logger()

REFUSED_SECONDS = 5.0
"""Delay before a round is planned again, or its helpers asked again, after too few would take part."""

FULL_SECONDS = 10.0
"""Delay of an action after the disk was full."""


@dataclass(frozen=True)
class ActionFailures:
    """The last failure of each action. Forgetting it costs one more try."""

    database: Database
    _failed: dict[tuple[str, Action], tuple[float, float, float]] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)

    def put_off(self, run: RunSnapshot, action: Action) -> bool:
        """Return True if the action failed before and is not due again yet."""
        since, failed_at, delay = self._failed.get((run.id, action), (0.0, 0.0, 0.0))
        if delay == inf and run.state == "running":
            # It was to pause, and the database was away.
            return False
        # A run that was resumed, and a clock that stepped back, end the delay.
        return since == run.idle_since and 0 <= self.database.now() - failed_at < delay

    def leave(self, run_id: str, fault: ValueError) -> bool:
        """Return True if a newer version of the coordinator beside this one conducts a run that this one cannot read;
        log the first time of each run."""
        if self.database.schema() != "ahead":
            return False
        if run_id not in self._left:
            self._left.add(run_id)
            log.warning("conductor.left_to_newer_version", run=run_id, detail=str(fault))
        return True

    def note(self, run: RunSnapshot, action: Action, fault: Exception) -> bool:
        """Note and log a failure; return True if it is the run's own fault, and stays until a person resumes the run.

        Raises the fault if the database is away.
        """
        about = {"run": run.id, "action": str(action), "detail": str(fault)}
        delay = inf
        if isinstance(fault, TooFewWilling):
            log.info("conductor.too_few_willing", **about)
            delay = REFUSED_SECONDS
        elif isinstance(fault, Conflict | IntegrityError):
            log.info("conductor.overtaken", **about)
            delay = 0.0
        elif isinstance(fault, StoreFull) or is_full(fault) or is_unusable(fault):
            # It waits until there is room, or the files can be used.
            event = "files_unusable" if is_unusable(fault) else "disk_full"
            log.warning(f"conductor.{event}", **about)
            delay = FULL_SECONDS
        elif isinstance(fault, ValidationError) and self.leave(run.id, fault):
            delay = REFUSED_SECONDS
        elif isinstance(fault, StoreAway):
            # The store has said so in the log already; the next tick tries again.
            delay = 0.0
        elif isinstance(fault, DATABASE_AWAY):
            raise fault
        else:
            log.error("conductor.action_failed", **about, exc_info=fault)
        if delay:
            self._failed[run.id, action] = run.idle_since, self.database.now(), delay
        return delay == inf

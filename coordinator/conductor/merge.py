"""Merging a closed round: from its accepted updates to the next version, and to the next round."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.conductor.actions import Liveness, open_planned, plan_for_willing, read_base, require
from tessera.coordinator.db import rounds
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import RoundRow, RunRow
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.workers import sites_of
from tessera.coordinator.limits.disk import DiskSpace
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.rounds.aggregate import Aggregation, norm_scores, observed, outlying
from tessera.shared.rounds.planning import run_facts, warnings_of
from tessera.shared.rounds.versions import States
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import traceparent_of

log = structlog.get_logger()


@dataclass(frozen=True)
class RoundMerger:
    """Merges a round, by what the tables and the blobs hold of it alone."""

    database: Database
    blobs: Blobs
    states: States
    aggregation: Aggregation
    room: DiskSpace
    liveness: Liveness

    def is_due(self, round_id: str) -> bool:
        """Return whether a round is closed and not merged yet."""
        with self.database.snapshot() as session:
            return session.get_one(RoundRow, round_id).state == "merging"

    def merge(self, run_id: str, round_id: str, notify: Callable[[Sequence[str]], None]) -> None:
        """Merge a closed round and open the next; wake its workers; then score the merged updates."""
        invited, base = read_base(self.database, run_id)
        notify(self._merge(run_id, round_id, invited, base))
        # Beside the next round, which need not wait for it.
        self._score(run_id, invited.spec, base)

    def _merge(self, run_id: str, round_id: str, invited: RunTerms, base: VersionRef) -> list[str]:
        """Merge and plan outside of any transaction, then commit version, round and next round in one (I3)."""
        spec = invited.spec
        model = self.states.model(spec.model)
        self.room.require(model.stored_bytes)
        # Asked again: only now is `base` known to be the version before this round.
        require(self.is_due(round_id), "the round was merged already")
        with self.database.snapshot() as session:
            accepted = rounds.assigned_updates(session, run_id, base.number + 1)
            bounds = rounds.bounds_in_force(session.get_one(RunRow, run_id))

        manifest, new, merged = self.aggregation.merge(spec, bounds, base, accepted)
        made = VersionRef(number=base.number + 1, digest=new[-1].digest)
        state = self.states.load(model, manifest, made.number)
        half = coordinator_half(spec.method, run_facts(spec, model))
        warnings = warnings_of(spec, model, state, bounds, outlying(half, bounds, accepted))

        live, willing = self.liveness.willing(run_id, invited)
        # If its cohort is not all here, a later look opens the next round.
        plans = None
        if made.number < spec.rounds and len(sites_of(willing)) >= (spec.cohort.size or spec.cohort.quorum):
            # A method that cannot plan fails at the next look too, which pauses the run with the reason. What was
            # merged is committed all the same.
            with suppress(Exception):
                plans = plan_for_willing(spec, model, state, willing)

        with self.database.transaction() as session:
            now = self.database.now()
            self.blobs.record(session, now, new)
            run = session.get_one(RunRow, run_id)
            require(run.version_number == base.number, "the round was merged already")
            require(run.state in LIVE_RUN, f"the run was {run.state} meanwhile")
            round_ = session.get_one(RoundRow, round_id)
            for warning in rounds.commit_round(session, now, run, round_, made, manifest, warnings, merged):
                log.warning("version.warning", run=run_id, number=made.number, warning=warning)
            rounds.note_scores(session, run_id, made.number, norm_scores(half, bounds, accepted))
            if run.bounds is not None:
                run.bounds = observed(half, bounds, accepted).model_dump()
            # Before the next round is offered: a site measures its own model as this round left it.
            woken = rounds.offer_at_sites(session, now, run, live)
            if run.state != "running" or plans is None or not self.liveness.includes(session, plans):
                return woken
            with spans.span("open", parent=traceparent_of(run.id, made.number + 1)):
                return [*woken, *open_planned(session, self.database.now(), run, willing, plans)]

    def _score(self, run_id: str, spec: RunSpec, base: VersionRef) -> None:
        """Store each update's distance from the merged ones; a process that ends before it leaves them out."""
        with self.database.snapshot() as session:
            accepted = rounds.assigned_updates(session, run_id, base.number + 1)
            bounds = rounds.bounds_in_force(session.get_one(RunRow, run_id))
        if found := self.aggregation.scores(spec, bounds, base, accepted):
            with self.database.transaction() as session:
                rounds.note_scores(session, run_id, base.number + 1, found)

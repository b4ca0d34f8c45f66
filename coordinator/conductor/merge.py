"""Merging a closed round: from its accepted updates to the next version, and to the next round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.conductor.actions import latest, open_planned, plan_for_willing
from tessera.coordinator.conductor.liveness import Liveness, require
from tessera.coordinator.conductor.secure_sums import SecureRounds
from tessera.coordinator.db import rounds
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.rounds import MergedRound
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.tables import RoundRow, RunRow
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.workers import sites_of
from tessera.coordinator.limits.disk import DiskSpace
from tessera.shared.api.runs import Bounds
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.registry import chooses_blocks, coordinator_half
from tessera.shared.metrics.selections import Choices
from tessera.shared.rounds.aggregate import (
    Accepted,
    Aggregation,
    examples_by_site,
    norm_scores,
    observed,
    outlying,
    with_selection,
)
from tessera.shared.rounds.planning import run_facts, warnings_of
from tessera.shared.rounds.secure_sums import Sums
from tessera.shared.rounds.versions import States
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import traceparent_of

log = structlog.get_logger()


@dataclass(frozen=True)
class _Due:
    """A round whose updates are to be merged."""

    run_id: str
    invited: RunTerms
    base: VersionRef
    """The version before the round."""
    bounds: Bounds
    accepted: Sequence[Accepted]
    earlier: Sequence[Choices]
    """The sites' selections for the versions before, of a method that chooses blocks."""
    noise_key: bytes = field(repr=False)
    """Of client-level privacy; empty without it."""
    sums: Sums | None
    """The opened sums, if the run has secure sums."""


@dataclass(frozen=True)
class RoundMerger:
    """Merges a round, by what the tables and the blobs hold of it alone."""

    database: Database
    blobs: Blobs
    states: States
    aggregation: Aggregation
    room: DiskSpace
    liveness: Liveness
    secure: SecureRounds

    def is_due(self, round_id: str, *, closing: bool) -> bool:
        """Return whether a round is closed and not merged yet, or is still open if the merge is to close it."""
        with self.database.snapshot() as session:
            return session.get_one(RoundRow, round_id).state == ("open" if closing else "merging")

    def merge(
        self, run_id: str, round_id: str, notify: Callable[[Sequence[str]], None], closing: str | None = None
    ) -> None:
        """Merge a closed round, or close it for the reason `closing` and merge it in one transaction. Open the next
        and wake its workers; then score the merged updates.

        Raises Conflict if the round is in another state, or if another update is accepted while one is closing.
        """
        due = self._read(run_id, round_id, "merging" if closing is None else "open")
        notify(self._merge(due, round_id, closing))
        # Beside the next round, which need not wait for it.
        self._score(due)

    def _read(self, run_id: str, round_id: str, state: str) -> _Due:
        with self.database.snapshot() as session:
            round_ = session.get_one(RoundRow, round_id)
            require(round_.state == state, "the round was moved on already")
            run, base = session.get_one(RunRow, run_id), latest(session, run_id)
            invited = terms_of(session, run_id, run.changes)
            open_round = round_id if state == "open" else None
            accepted = rounds.assigned_updates(session, run_id, base.number + 1, open_round)
            chooses, number = chooses_blocks(invited.spec.method), base.number + 1
            earlier = rounds.earlier_choices(session, run_id, number) if chooses else []
            bounds, key = rounds.bounds_in_force(run), round_.noise_key or b""
        return _Due(run_id, invited, base, bounds, accepted, earlier, key, self.secure.sums(run_id, round_id))

    def _merge(self, due: _Due, round_id: str, closing: str | None) -> list[str]:
        """Merge and plan outside of any transaction, then commit version, round and next round in one (I3)."""
        spec, base, accepted, bounds = due.invited.spec, due.base, due.accepted, due.bounds
        model = self.states.model(spec.model)
        self.room.require(model.stored_bytes)
        manifest, new, merged = self.aggregation.merge(spec, bounds, base, accepted, due.sums, due.noise_key)
        made = VersionRef(number=base.number + 1, digest=new[-1].digest)
        state = self.states.load(model, manifest, made.number)
        half = coordinator_half(spec.method, run_facts(spec, model))
        aside = outlying(half, bounds, accepted)
        shown = with_selection(spec, state, due.earlier, accepted, merged)
        warnings = warnings_of(spec, model, shown, bounds, aside, examples_by_site(accepted, aside))
        scores, kept = norm_scores(half, bounds, accepted), self.states.manifest(base.digest).digests
        result = MergedRound(made, manifest, kept, shown.scalars, warnings, merged, scores)

        live, willing = self.liveness.willing(due.run_id, due.invited)
        # If its cohort is not all here, a later look opens the next round.
        plans, terms = None, None
        if made.number < spec.rounds and len(sites_of(willing)) >= (spec.cohort.size or spec.cohort.quorum):
            # A method that cannot plan fails at the next look too, which pauses the run with the reason. What was
            # merged is committed all the same.
            with suppress(Exception):
                planned = plan_for_willing(spec, model, state, willing, self.states.vocabulary)
                terms = self.secure.terms(due.run_id, spec, model, state, made, manifest.values, willing, planned)
                plans = planned

        with self.database.transaction() as session:
            now = self.database.now()
            self.blobs.record(session, now, new)
            run = session.get_one(RunRow, due.run_id)
            require(run.version_number == base.number, "the round was merged already")
            require(run.state in LIVE_RUN, f"the run was {run.state} meanwhile")
            round_ = session.get_one(RoundRow, round_id)
            if closing is not None:
                assigned = rounds.close_round(session, now, round_, closing)
                merging = sorted(entry.digest for entry in accepted)
                require(assigned == merging, "another update was accepted meanwhile")
            for warning in rounds.commit_round(session, now, run, round_, result):
                log.warning("version.warning", run=run.id, number=made.number, warning=warning)
            if run.bounds is not None:
                run.bounds = observed(half, bounds, accepted).model_dump()
            # Before the next round is offered: a site measures its own model as this round left it.
            woken = rounds.offer_at_sites(session, now, run, live)
            if run.state != "running" or plans is None or not self.liveness.includes(session, plans):
                return woken
            if terms_of(session, run.id, run.changes).spec != spec:
                return woken
            with spans.span("open", parent=traceparent_of(run.id, made.number + 1)):
                sums = self.secure.record(session, terms)
                return [*woken, *open_planned(session, self.database.now(), run, willing, plans, sums)]

    def _score(self, due: _Due) -> None:
        """Store each update's distance from the merged ones; a process that ends before it leaves them out, and what
        was committed stands without them."""
        try:
            if found := due.sums is None and self.aggregation.scores(
                due.invited.spec, due.bounds, due.base, due.accepted
            ):
                with self.database.transaction() as session:
                    rounds.note_scores(session, due.run_id, due.base.number + 1, found)
        except Exception:  # a method is anybody's code
            log.exception("conductor.not_scored", run=due.run_id, number=due.base.number + 1)

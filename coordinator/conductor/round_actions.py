"""Opening, closing and merging a round. Each computes outside of any transaction and commits in one, guarded by the
state that was decided upon. None of them does another's part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from sqlalchemy.orm import Session

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.conductor.liveness import Liveness, TooFewWilling, require
from tessera.coordinator.conductor.secure_sums import SecureRounds
from tessera.coordinator.conductor.willing_plans import plans_beside
from tessera.coordinator.db import round_tasks, rounds, versions
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.snapshots import sites_at_work, sites_due, spec_in, terms_of
from tessera.coordinator.db.tables import RoundRow, RunRow
from tessera.coordinator.db.transitions import ACTOR, move_run
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.workers import LiveWorker, ids, in_study, sites_of
from tessera.coordinator.limits.disk import DiskSpace
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.registry import chooses_blocks
from tessera.shared.rounds.aggregate import Aggregation
from tessera.shared.rounds.versions import States

log = structlog.get_logger()


@dataclass(frozen=True)
class RoundActions:
    """The actions that move a round. Each raises Conflict if the state decided upon has changed."""

    database: Database
    blobs: Blobs
    states: States
    aggregation: Aggregation
    room: DiskSpace
    liveness: Liveness
    secure: SecureRounds

    def open(self, run_id: str, number: int, *, again: bool = False) -> list[str]:
        """Open the run's next round, or end the run if the method plans nothing more. Return the workers with a new
        task. With `again`, offer tasks of the round that is open to further workers.

        Raises SelectorError, before any worker gets such a plan, and TooFewWilling.
        """
        with self.database.snapshot() as session:
            invited, base = terms_of(session, run_id), versions.latest_version(session, run_id)
            round_ = round_tasks.live_round(session, run_id) if again else None
            at_work = self._at_work(session, run_id, invited.spec, round_, self.liveness.workers(session))
        require(base.number + 1 == number and (round_ is not None) == again, "the run has moved on")
        require(again or number <= invited.spec.rounds, "the run has fewer rounds now")
        spec, model, manifest = invited.spec, self.states.model(invited.spec.model), self.states.manifest(base.digest)
        state, willing = self.states.load(model, manifest, base.number), self.liveness.willing(run_id, invited)
        willing = [worker for worker in willing if worker.site not in at_work]
        require(not spec.cohort.lack(sites_of(willing) | at_work.keys()), "too few sites are live")
        try:
            plans = plans_beside(at_work, spec, model, state, self.states.vocabulary, willing, again=again)
        except TooFewWilling as refusal:
            if round_:
                with self.database.transaction() as session:
                    round_tasks.note_refusal(session, round_.id, str(refusal))
            raise
        terms = self.secure.terms(run_id, spec, model, state, base, manifest.values, willing, plans)
        with self.database.transaction() as session:
            now, run = self.database.now(), session.get_one(RunRow, run_id)
            require(run.state == "running" and run.version_number == base.number, "the run has moved on")
            require(terms_of(session, run_id, run.changes).spec == spec, "the run's settings have changed")
            present = in_study(spec.study, self.liveness.workers(session))
            planned = [worker for worker in present if worker.name in plans]
            require(len(planned) == len(plans), "a worker that was planned for is no longer live")
            # Another conductor may have asked it, or a worker that was absent has gone on with its task.
            now_at_work = self._at_work(session, run_id, invited.spec, round_, present).keys()
            require(not sites_of(planned) & now_at_work, "a site that was planned for is at work")
            # A site that joined after the decision measures its own model before the round changes it (decision 9).
            require(not sites_due(session, run, invited, planned), "a worker that was planned for evaluates first")
            if round_:
                open_ = session.get_one(RoundRow, round_.id)
                require(open_.state == "open", "the round closed")
                return round_tasks.ask_again(session, now, run, open_, willing, plans)
            if not plans and not at_work:
                move_run(session, now, ACTOR, run_id, "complete", "the method planned nothing more")
                return []
            return rounds.open_round(session, now, run, willing, plans, self.secure.record(session, terms))

    def _at_work(
        self, session: Session, run_id: str, spec: RunSpec, round_: RoundRow | None, live: Sequence[LiveWorker]
    ) -> dict[str, bool]:
        here = ids(live) if self.liveness.is_settled() else None
        return sites_at_work(session, run_id, spec.cohort, round_.id if round_ else None, here)

    def close(self, round_id: str, reason: str) -> None:
        """Close a round to updates, and assign the accepted ones to the next version."""
        with self.database.transaction() as session:
            round_ = session.get_one(RoundRow, round_id)
            spec = spec_in(terms_of(session, round_.run_id).spec, round_)
            rounds.close_round(session, self.database.now(), round_, reason, spec.cohort)

    def merge(self, run_id: str, round_id: str, committed: Callable[[], object]) -> None:
        """Compute the next version from a closed round's updates, and commit it with the round's end (I3). Call
        `committed`; then score the updates, which no round waits for."""
        with self.database.snapshot() as session:
            run, round_ = session.get_one(RunRow, run_id), session.get_one(RoundRow, round_id)
            require(round_.state == "merging", "the round was moved on already")
            spec, base = terms_of(session, run_id, run.changes).spec, versions.latest_version(session, run_id)
            accepted = versions.assigned_updates(session, run_id, round_.number)
            # The sites' selections for the versions before.
            earlier = versions.earlier_choices(session, run_id, round_.number) if chooses_blocks(spec.method) else []
            latest = versions.latest_updates(session, run_id, round_.number) if spec.cohort.memory else []
            bounds, noise_key = versions.bounds_in_force(run), round_.noise_key or b""
        sums = self.secure.sums(run_id, round_id)
        self.room.require(self.states.model(spec.model).stored_bytes)
        try:
            made = self.aggregation.merge(spec, bounds, base, accepted, sums, noise_key, earlier, latest)
        except Exception:
            # A site that withdraws takes its updates along; the merge may not have read all of them.
            with self.database.snapshot() as session:
                require(not (gone := versions.withdrawn(session, round_id, latest)), gone)
            raise
        with self.database.transaction() as session:
            now, run = self.database.now(), session.get_one(RunRow, run_id)
            require(run.version_number == base.number, "the round was merged already")
            require(run.state in LIVE_RUN, f"the run was {run.state} meanwhile")
            require(not (gone := versions.withdrawn(session, round_id, latest)), gone)
            if absent := spec.cohort.absent(worker.partition("/")[0] for worker in made.merged):
                reason = f"cohort.require names {', '.join(absent)}, whose update was left out: its norm is too large"
                rounds.abandon_round(session, now, session.get_one(RoundRow, round_id), reason, spec.cohort)
                return
            self.blobs.record(session, now, made.blobs)
            news = rounds.commit_round(session, now, run, session.get_one(RoundRow, round_id), made)
        for warning in news:
            log.warning("version.warning", run=run_id, number=made.ref.number, warning=warning)
        committed()
        if sums is None:
            self._score(run_id, made.ref.number, partial(self.aggregation.scores, spec, bounds, base, accepted))

    def _score(self, run_id: str, number: int, scores: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Store each update's distance from the merged ones. A version whose process ended before has none."""
        try:
            if found := scores():
                with self.database.transaction() as session:
                    versions.note_scores(session, run_id, number, found)
        except Exception:  # a method is anybody's code
            log.exception("conductor.not_scored", run=run_id, number=number)

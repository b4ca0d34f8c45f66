"""The conductor's actions, except for those that open, close and merge a round, which are in `round_actions`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.conductor.evaluations import cancel_evaluations, offer_evaluations, plans_to_rehearse
from tessera.coordinator.conductor.liveness import Liveness, require
from tessera.coordinator.conductor.secure_sums import SecureRounds
from tessera.coordinator.db import round_tasks, rounds, versions
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.helper_tasks import withdraw_helpers
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.tables import RoundRow, RunRow, TaskRow
from tessera.coordinator.db.tasks import renew
from tessera.coordinator.db.transitions import ACTOR, move_back, move_run, move_task
from tessera.coordinator.domain.decide import Action, CancelEvaluations, Evaluate
from tessera.coordinator.domain.leases import Expire, LeaseAction, MoveBack, Offer, Shorten
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.round_moves import Abandon
from tessera.coordinator.domain.sum_helpers import AskHelpers, Pause
from tessera.coordinator.domain.without_rounds import Complete
from tessera.shared.methods.base import Plan
from tessera.shared.rounds import regions
from tessera.shared.rounds.versions import States


@dataclass(frozen=True)
class Actions:
    """The actions, each in a transaction of its own. Raises Conflict if the state decided upon has changed."""

    database: Database
    blobs: Blobs
    states: States
    liveness: Liveness
    secure: SecureRounds

    def do(self, run_id: str, action: Action) -> Sequence[str]:
        """Do an action; return the workers who now have something to do."""
        if isinstance(action, AskHelpers):
            return self.secure.ask(run_id, action.round, action.kind)
        plans: Mapping[str, Plan] = {}
        if isinstance(action, Evaluate):
            plans = plans_to_rehearse(self.database, self.states, self.liveness, run_id)
        with self.database.transaction() as session:
            now = self.database.now()
            match action:
                case Offer() | Expire() | Shorten():
                    return change_lease(session, now, action)
                case Evaluate(due):
                    return offer_evaluations(session, now, run_id, due, self.liveness, plans)
                case Abandon(round_id, reason):
                    run = session.get_one(RunRow, run_id)
                    cohort = terms_of(session, run_id, run.changes).spec.cohort if run.state in LIVE_RUN else None
                    rounds.abandon_round(session, now, session.get_one(RoundRow, round_id), reason, cohort)
                case MoveBack():
                    move_back(session, now, session.get_one(RunRow, run_id))
                case Pause(reason):
                    move_run(session, now, ACTOR, run_id, "pause", reason)
                case Complete(reason):
                    run = session.get_one(RunRow, run_id)
                    rounds_now = terms_of(session, run_id, run.changes).spec.rounds
                    require(run.version_number >= rounds_now, "the run has more rounds now")
                    move_run(session, now, ACTOR, run_id, "complete", reason)
                    round_tasks.end_training(session, now, run_id)
                    cancel_evaluations(session, now, run_id)
                case CancelEvaluations():
                    cancel_evaluations(session, now, run_id)
                    withdraw_helpers(session, now, run_id)
        return ()

    def adopt(self, run_id: str) -> Sequence[str]:
        """Take the parent's version as the latest of a region's run: in place of the region's own if no site was
        asked for an update of that, else as the next one."""
        with self.database.snapshot() as session:
            spec, latest = terms_of(session, run_id).spec, versions.latest_version(session, run_id)
        assert spec.parent  # noqa: S101 (as decided)
        base = spec.parent.base
        given = self.states.load(self.states.model(spec.model), self.states.manifest(base.version), latest.number)
        manifest, blobs = self.states.store(regions.begun(spec, given), base.version)
        own = self.states.manifest(latest.digest).digests
        with self.database.snapshot() as session:
            # Blocks that do not train are in other versions too.
            for other in versions.digests_of(session, run_id, latest.number):
                own = own - self.states.manifest(other).digests - {other}
        with self.database.transaction() as session:
            now, run = self.database.now(), session.get_one(RunRow, run_id)
            require(terms_of(session, run_id, run.changes).spec.parent == spec.parent, "the parent has gone on")
            require(versions.latest_version(session, run_id) == latest, "the run has moved on")
            require(round_tasks.live_round(session, run_id) is None, "a round is under way")
            self.blobs.record(session, now, blobs)
            versions.adopt_version(session, now, run, own, blobs[-1].digest, manifest)
        return ()


def change_lease(session: Session, now: float, action: LeaseAction) -> Sequence[str]:
    """Do an action on a lease; return the worker of an offered task. Raise Conflict if the lease was renewed."""
    task = session.get_one(TaskRow, action.task)
    match action:
        case Offer():
            move_task(session, now, ACTOR, task, "offer")
            return [task.worker_id]
        case Expire():
            expire(session, now, action.task, action.token)
        case Shorten():
            require(task.token == action.token, "the task was leased again")
            renew(session, task, action.expires_at)
    return ()


def expire(session: Session, now: float, task_id: str, token: int) -> None:
    """Expire a lease. Raise Conflict if it was renewed."""
    task = session.get_one(TaskRow, task_id)
    require(task.token == token and (task.lease_expires_at or 0) <= now, "the lease was renewed")
    move_task(session, now, ACTOR, task, "expire")

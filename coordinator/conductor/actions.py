"""The conductor's actions, except for a merge, which is in `merge`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session

from tessera.coordinator.conductor.liveness import Liveness, TooFewWilling, require
from tessera.coordinator.conductor.secure_sums import SecureRounds
from tessera.coordinator.db import rounds
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.rounds import ACTOR, RoundSums
from tessera.coordinator.db.snapshots import (
    central_due,
    evaluators,
    sites_due,
    terms_of,
)
from tessera.coordinator.db.tables import RUNS, RoundRow, RunRow, TaskRow, VersionRow
from tessera.coordinator.db.tasks import renew
from tessera.coordinator.db.transitions import move_run, move_task
from tessera.coordinator.domain import decide as todo
from tessera.coordinator.domain.decide import Action
from tessera.coordinator.domain.eligibility import Vocabulary, refused_plans, unsuited
from tessera.coordinator.domain.snapshot import PendingEvaluation
from tessera.coordinator.domain.workers import LiveWorker, ids, sites_of
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import Plan, State
from tessera.shared.model.spec import Model
from tessera.shared.rounds.planning import plan_round
from tessera.shared.rounds.versions import States


@dataclass(frozen=True)
class Actions:
    """The actions, each in a transaction of its own. Raises Conflict if the state decided upon has changed."""

    database: Database
    states: States
    liveness: Liveness
    secure: SecureRounds

    def do(self, run_id: str, action: Action) -> Sequence[str]:
        """Do an action; return the workers who now have something to do."""
        match action:
            case todo.Open(number):
                return self.open_round(run_id, number)
            case todo.AskHelpers(round_id, kind):
                return self.secure.ask(run_id, round_id, kind)
            case _:
                return self._write(run_id, action)

    def _write(self, run_id: str, action: Action) -> Sequence[str]:
        """Do an action that reads no blobs."""
        with self.database.transaction() as session:
            now = self.database.now()
            match action:
                case todo.Offer(task_id):
                    task = session.get_one(TaskRow, task_id)
                    move_task(session, now, ACTOR, task, "offer")
                    return [task.worker_id]
                case todo.Evaluate(due):
                    return self._offer_evaluation(session, now, run_id, due)
                case todo.Expire(task_id, token):
                    expire(session, now, task_id, token)
                case todo.Shorten(task_id, token, expires_at):
                    task = session.get_one(TaskRow, task_id)
                    require(task.token == token, "the task was leased again")
                    renew(session, task, expires_at)
                case todo.Close(round_id, reason):
                    rounds.close_round(session, now, session.get_one(RoundRow, round_id), reason)
                case todo.Abandon(round_id, reason):
                    rounds.abandon_round(session, now, session.get_one(RoundRow, round_id), reason)
                case todo.Pause(reason):
                    move_run(session, now, ACTOR, run_id, "pause", reason)
                case todo.Complete():
                    run = session.get_one(RunRow, run_id)
                    rounds_now = terms_of(session, run_id, run.changes).spec.rounds
                    require(run.version_number >= rounds_now, "the run has more rounds now")
                    move_run(session, now, ACTOR, run_id, "complete")
                    rounds.cancel_evaluations(session, now, run_id)
                case todo.CancelEvaluations():
                    rounds.cancel_evaluations(session, now, run_id)
                    rounds.withdraw_helpers(session, now, run_id)
        return ()

    def open_round(self, run_id: str, number: int) -> list[str]:
        """Open the run's first round, or one that could not open when the last was committed."""
        with self.database.snapshot() as session:
            invited, base = terms_of(session, run_id), latest(session, run_id)
        spec = invited.spec
        require(base.number + 1 == number, "the run has moved on")
        model = self.states.model(spec.model)
        manifest = self.states.manifest(base.digest)
        state = self.states.load(model, manifest, base.number)
        _, willing = self.liveness.willing(run_id, invited)
        require(len(sites_of(willing)) >= spec.cohort.quorum, "too few sites are live")
        plans = plan_for_willing(spec, model, state, willing, self.states.vocabulary)
        terms = self.secure.terms(run_id, spec, model, state, base, manifest.values, willing, plans)
        with self.database.transaction() as session:
            run = session.get_one(RunRow, run_id)
            require(run.state == "running" and run.version_number == base.number, "the run has moved on")
            require(terms_of(session, run_id, run.changes).spec == spec, "the run's settings have changed")
            require(self.liveness.includes(session, plans), "a worker that was planned for is no longer live")
            return open_planned(session, self.database.now(), run, willing, plans, self.secure.record(session, terms))

    def _offer_evaluation(self, session: Session, now: float, run_id: str, due: PendingEvaluation) -> list[str]:
        """Offer a version to the named worker, or to the central worker with the fewest tries."""
        run = session.get_one(RunRow, run_id)
        invited = terms_of(session, run.id, run.changes)
        live = self.liveness.workers(session)
        if due.worker is None:
            still = central_due(session, run, invited.spec, ids(live) if self.liveness.is_settled() else None)
            able = evaluators(invited, live)
        else:
            still = sites_due(session, run, invited, live)
            able = [worker for worker in live if worker.id == due.worker]
        require(due in still, "the version is no longer to be evaluated, or not by this worker")
        require(bool(able), "no worker that could evaluate is live")
        tries = rounds.tries_by_worker(session, run_id, due.version)
        worker = min(able, key=lambda member: tries[member.id])
        rounds.offer_evaluation(session, now, run, due, worker)
        return [worker.id]


def expire(session: Session, now: float, task_id: str, token: int) -> None:
    """Expire a lease. Raise Conflict if it was renewed."""
    task = session.get_one(TaskRow, task_id)
    require(task.token == token and (task.lease_expires_at or 0) <= now, "the lease was renewed")
    move_task(session, now, ACTOR, task, "expire")


# ---------------------------------------------------------------- what a merge needs too


_LATEST = RUNS.where(RunRow.id == given("run")).with_only_columns(VersionRow.number, VersionRow.digest)


def latest(session: Session, run_id: str) -> VersionRef:
    """Return the latest version of a run."""
    number, digest = session.execute(_LATEST, {"run": run_id}).one()
    return VersionRef(number=number, digest=digest)


def plan_for_willing(
    spec: RunSpec, model: Model, state: State, willing: Sequence[LiveWorker], vocabulary: Vocabulary
) -> Mapping[str, Plan]:
    """Plan for the workers whose sites would send what is planned, as far as they advertise their policies.

    Raises SelectorError, before any worker gets such a plan, and TooFewWilling.
    """
    refused = {w.name: found for w in willing if (found := unsuited(spec, w.declared, model, vocabulary))}
    while True:
        willing = [worker for worker in willing if worker.name not in refused]
        if (sites := len(sites_of(willing))) < spec.cohort.quorum:
            said = "; ".join(f"{name}: {found.rule}: {found.detail}" for name, found in sorted(refused.items())[:4])
            raise TooFewWilling(f"{sites} sites would do what the round asks: {said}")
        plans = plan_round(spec, model, state, [worker.participant(spec.dataset) for worker in willing])
        planned = [worker for worker in willing if worker.name in plans]
        more = refused_plans(spec, model, plans, {w.name: w.advertised_policy for w in planned})
        if not more:
            return plans
        refused |= more


def open_planned(
    session: Session,
    now: float,
    run: RunRow,
    willing: Sequence[LiveWorker],
    plans: Mapping[str, Plan],
    sums: RoundSums | None = None,
) -> list[str]:
    """Open the next round, or end the run if nothing more is planned. Return the workers with a new task."""
    if not plans:
        move_run(session, now, ACTOR, run.id, "complete", "the method planned nothing more")
        return []
    return rounds.open_round(session, now, run, willing, plans, sums)

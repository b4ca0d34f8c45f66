"""Rounds with secure sums: their terms, the tasks of their helpers, and the sums that the helpers opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.conductor.liveness import Liveness, TooFewWilling, require
from tessera.coordinator.db import helper_tasks, rounds
from tessera.coordinator.db.engine import Database, insert_missing
from tessera.coordinator.db.helper_tasks import RoundSums
from tessera.coordinator.db.snapshots import DECLARATIONS
from tessera.coordinator.db.studies import sites_of_studies
from tessera.coordinator.db.tables import RoundRow, RunBlobRow, RunRow, SiteRow, TaskRow, VersionRow, WorkerRow
from tessera.coordinator.domain.workers import LiveWorker, ids, in_study
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.secure_sums import HelperKind, SumTask
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import Plan, State
from tessera.shared.model.spec import Model
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.rounds.secure_sums import Sums, terms_of_round
from tessera.shared.rounds.versions import States
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.messages import (
    Agreement,
    SiteKeys,
    SumDocument,
    Terms,
    fingerprint,
    share_out,
    signatures_of,
)
from tessera.shared.secure_sums.roster import check_keys

REPEATED = (
    "A site sends updates from one model into one sum: the difference of two could be its update. Start a run from "
    "another version, or one with secure_sums.repeat_model, which a person at each site has to allow"
)


@dataclass(frozen=True)
class SecureRounds:
    """The conductor's part in rounds with secure sums."""

    database: Database
    blobs: Blobs
    states: States
    liveness: Liveness

    def terms(
        self,
        run_id: str,
        spec: RunSpec,
        model: Model,
        state: State,
        version: VersionRef,
        values: str,
        willing: Sequence[LiveWorker],
        plans: Mapping[str, Plan],
    ) -> tuple[StoredBlob, Terms] | None:
        """Return the stored terms of the next round; None for a run without secure sums.

        Raises TooFewWilling if too few helpers are live, or have signed yet that they sign no set of an abandoned
        attempt; ValueError if the sites would refuse to train from the model a second time.
        """
        if spec.secure_sums is None or not plans:
            return None
        planned = [worker for worker in willing if worker.name in plans]
        with self.database.snapshot() as session:
            attempt = rounds.next_attempt(session, run_id, version.number + 1)
            holders = _key_holders(session, spec.study, spec.secure_sums.helpers)
            before = session.get(VersionRow, (run_id, version.number - 1))
            live = ids(in_study(spec.study, self.liveness.workers(session)))
        keys = {site: found for site, (_, found) in holders.items()}
        here = {site for site, (worker, _) in holders.items() if worker in live}
        needed = signatures_of(len(spec.secure_sums.helpers))
        if len(keys) < len(spec.secure_sums.helpers) or len(here) < needed:
            missing = sorted(set(spec.secure_sums.helpers) - here)
            raise TooFewWilling(f"{len(here)} helpers are live and {needed} are needed: there is no {missing}")
        weights = [SiteKeys.model_validate(worker.declared["site_keys"]).weight for worker in planned]
        former = None
        if before:
            former = self.states.load(model, self.states.manifest(before.digest), before.number)
        terms = terms_of_round(
            spec,
            model,
            plans,
            keys,
            max(weights),
            state,
            former,
            run=run_id,
            attempt=attempt,
            version=version,
            values=values,
        )
        if terms.is_exact and not terms.repeat_model:
            abandoned = self._abandoned(terms, {worker.site for worker in planned})
            terms = Terms(**{**dict(terms), "abandoned": abandoned})
        return self.blobs.put([canonical(terms)]), terms

    def record(self, session: Session, found: tuple[StoredBlob, Terms] | None) -> RoundSums | None:
        """Record the terms of a round that is about to open, so that workers may fetch them."""
        if found is None:
            return None
        stored, terms = found
        self.blobs.record(session, self.database.now(), [stored])
        return RoundSums(stored.digest, terms.values if terms.is_exact else None)

    def _abandoned(self, terms: Terms, sites: set[str]) -> dict[str, tuple[Agreement, ...]]:
        """Return the earlier terms of sums from the same model, with the helpers' signatures that they are never
        opened. Ask for missing signatures. `sites` are those of the next round.

        Raises TooFewWilling while too few have signed, ValueError if too few are left or if a sum was opened.
        """
        helpers, asked = {helper.site for helper in terms.helpers}, list[str]()
        found: dict[str, tuple[Agreement, ...]] = {}
        with self.database.transaction() as session:
            run, workers = session.get_one(RunRow, terms.run), _helper_workers(session, terms)
            tasks, now = helper_tasks.helper_tasks(session, run), self.database.now()
            for round_, of_run in helper_tasks.rounds_from(session, terms.values):
                about, former = f"round {round_.number} of run {of_run.spec['name']}", round_.sum_terms or ""
                if of_run.study != run.study:
                    about = "a round of another study"
                if round_.state != "abandoned":
                    if of_run.id == run.id or sites & helper_tasks.senders_in(session, round_.id):
                        raise ValueError(f"{about} had sums from a model with the same values. {REPEATED}")
                    continue
                if set(of_run.spec["secure_sums"]["helpers"]) != helpers:
                    continue
                require(run.version_number == terms.round - 1, "the run has moved on")
                by_site = helper_tasks.abandonments(tasks, former)
                for site in sorted(helpers - set(by_site)):
                    helper_tasks.offer_helper(
                        session, now, run, "abandon", workers[site], site, SumTask(terms=former)
                    )
                    asked.append(workers[site])
                failed = sorted(site for site, task in by_site.items() if task.state == "failed")
                if len(helpers) - len(failed) < terms.signatures:
                    said = f"{failed} do not sign that the sums of {about} are never opened: see their tasks"
                    raise ValueError(
                        f"{said}. If they signed its senders before, these sums may be known. {REPEATED}"
                    )
                found[former] = helper_tasks.valid_abandonments(by_site.values(), former, terms)
        if waiting := sum(len(signed) < terms.signatures for signed in found.values()):
            detail = f"too few helpers have signed yet that {waiting} abandoned sums are never opened"
            raise TooFewWilling(detail, asked)
        return found

    def ask(self, run_id: str, round_id: str, kind: HelperKind) -> list[str]:
        """Offer tasks to helpers: all of them sign, and as many as needed open. Return the workers.

        Raises TooFewWilling if too few are live, ValueError if too few are left that have not failed, and Conflict.
        """
        with self.database.snapshot() as session:
            run = session.get_one(RunRow, run_id)
            round_ = session.get_one(RoundRow, round_id)
            require(round_.state == "merging", "the round was moved on already")
            tasks = helper_tasks.helper_tasks(session, run)
            envelopes = tuple(helper_tasks.envelopes(session, run_id, round_.number).values())
            terms_digest = round_.sum_terms or ""
            terms = Terms.model_validate_json(self.blobs.read(terms_digest))
            known = _helper_workers(session, terms)
            here = ids(in_study(run.study, self.liveness.workers(session)))
            live = {site: worker for site, worker in known.items() if worker in here}
        asked = {site for task, site in tasks if task.kind == "agree"}
        unasked: dict[str, tuple[int, ...]] = {one.site: () for one in terms.helpers if one.site not in asked}
        shares = unasked if kind == "agree" else self._shares(terms, tasks, live)
        signed = () if kind == "agree" else helper_tasks.agreements(tasks)
        document = self.blobs.put([canonical(SumDocument(envelopes=envelopes, agreements=signed))])
        about = {"terms": terms_digest, "document": document.digest}
        requests = {site: SumTask(**about, seeds=seeds) for site, seeds in shares.items()}
        with self.database.transaction() as session:
            now = self.database.now()
            require(session.get_one(RoundRow, round_id).state == "merging", "the round was moved on already")
            # Another conductor may have asked, or a helper answered: its masks would be subtracted twice.
            present = helper_tasks.helper_tasks(session, session.get_one(RunRow, run_id))
            require(_states(present) == _states(tasks), "the helpers' tasks have changed meanwhile")
            self.blobs.record(session, now, [document])
            insert_missing(session, RunBlobRow, [{"run_id": run_id, "digest": document.digest}])
            run = session.get_one(RunRow, run_id)
            if kind == "open":
                helper_tasks.withdraw_helpers(session, now, run_id, ["open"])
            for site, request in requests.items():
                helper_tasks.offer_helper(session, now, run, kind, known[site], site, request)
        return [known[site] for site in requests]

    def _shares(
        self, terms: Terms, tasks: Sequence[Row[TaskRow, str]], live: Mapping[str, str]
    ) -> dict[str, tuple[int, ...]]:
        """Return the seeds whose masks are still missing, by the site of a live helper that has not failed."""
        openings = [(task, site) for task, site in tasks if task.kind == "open"]
        done = {
            n for task, _ in openings if task.state == "accepted" for n in SumTask.model_validate(task.sums).seeds
        }
        failed = {site for task, site in openings if task.state == "failed"}
        sites = [helper.site for helper in terms.helpers]
        able = [number for number, site in enumerate(sites) if site not in failed]
        if not _suffices(terms, able):
            raise ValueError(f"too few helpers can open the round's sums; these failed: {sorted(failed)}")
        here = [number for number in able if sites[number] in live]
        if not _suffices(terms, here):
            raise TooFewWilling("too few helpers are live to open the round's sums")
        # Sites that signed were there a moment ago; others may be gone and not yet missed.
        signed = {site for task, site in tasks if task.kind == "agree" and task.state == "accepted"}
        if _suffices(terms, signers := [number for number in here if sites[number] in signed]):
            here = signers
        return {sites[number]: seeds for number, seeds in share_out(len(sites), here, done).items()}

    def sums(self, run_id: str, round_id: str) -> Sums | None:
        """Return the opened sums of a closed round; None for a run without secure sums."""
        with self.database.snapshot() as session:
            run, round_ = session.get_one(RunRow, run_id), session.get_one(RoundRow, round_id)
            if round_.sum_terms is None:
                return None
            tasks = helper_tasks.helper_tasks(session, run)
            envelopes = helper_tasks.envelopes(session, run_id, round_.number)
        terms = Terms.model_validate_json(self.blobs.read(round_.sum_terms))
        opened = [task for task, _ in tasks if task.kind == "open" and task.state == "accepted"]
        seeds = sorted(n for task in opened for n in SumTask.model_validate(task.sums).seeds)
        if seeds != list(range(len(terms.seeds))):
            raise ValueError(f"the masks of each of {len(terms.seeds)} seeds are needed once; these came: {seeds}")
        return Sums(terms, envelopes, [task.update_digest or "" for task in opened])


def _suffices(terms: Terms, helpers: list[int]) -> bool:
    try:
        share_out(len(terms.helpers), helpers)
    except SumRefused:
        return False
    return True


def _states(tasks: Sequence[Row[TaskRow, str]]) -> dict[str, str]:
    return {task.id: task.state for task, _ in tasks}


def _declared_keys(session: Session, sites: Sequence[str]) -> list[tuple[str, str, SiteKeys | None]]:
    """Return each worker of these sites, with its site and the keys that it declares as a helper. The workers
    that were seen last are last."""
    query = (
        select(SiteRow.name, WorkerRow.id, WorkerRow.declared_digest)
        .join_from(WorkerRow, SiteRow)
        .where(SiteRow.name.in_(sites))
        .order_by(WorkerRow.last_seen_at)
    )
    rows = session.execute(query).all()
    declared = DECLARATIONS.of(session, {worker: digest for _, worker, digest in rows})
    return [(site, worker, _keys_in(declared[worker], site)) for site, worker, _ in rows]


def _keys_in(declared: Mapping[str, Any], site: str) -> SiteKeys | None:
    if "open" not in declared["kinds"] or not declared.get("site_keys"):
        return None
    keys = SiteKeys.model_validate(declared["site_keys"])
    try:
        check_keys(keys, {site: fingerprint(keys.identity)})
    except SumRefused:
        return None
    return keys


def _key_holders(session: Session, study: str, sites: Sequence[str]) -> dict[str, tuple[str, SiteKeys]]:
    """Return the worker of each of these sites that last declared keys, and the keys. Suspended sites, and sites that
    are not in the study, have none."""
    query = select(SiteRow.name).where(SiteRow.name.in_(sites), SiteRow.suspended_at.is_(None))
    admitted = set(session.scalars(query.where(SiteRow.id.in_(sites_of_studies([study], present=True)))))
    return {
        site: (worker, keys) for site, worker, keys in _declared_keys(session, sites) if keys and site in admitted
    }


def _helper_workers(session: Session, terms: Terms) -> dict[str, str]:
    """Return the worker that has each helper's key, by site: another of the site could not do its tasks. If none has,
    it is the worker that was seen last."""
    identities = {helper.site: helper.identity for helper in terms.helpers}
    found = _declared_keys(session, list(identities))
    found.sort(key=lambda row: row[2] is not None and row[2].identity == identities[row[0]])
    return {site: worker for site, worker, _ in found}

"""Per-run history of a site, used to refuse runs whose terms change midway.

A run's terms are fixed (but see `_fixed`), a version number names one version, and rounds only advance. A coordinator
that breaks one of these rules could train on the same examples twice and learn from the difference; an honest retry
repeats the same round of the same version. A task is recorded just before its result leaves, so refused tasks leave
no trace.

Over all runs, updates from one model go into one exact secure sum: the difference of two could be the site's update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, NonNegativeInt, PositiveInt

from tessera.shared.api.tasks import Task
from tessera.shared.api.terms import TERMS, terms_digest, terms_of
from tessera.shared.rounds.count_table import CountTable
from tessera.shared.schema import Digest, Label, TaskKind, Value
from tessera.shared.secure_sums.committee import is_abandoned
from tessera.shared.secure_sums.messages import Hex32, Terms
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.state.database import StateDatabase

SITE_PRIVACY = "site-privacy"
"""The note of the zCDP of all noisy sums to which the site sent an update, a bound on their information about it."""

VERSIONS_KEPT = 64

MAX_RESTORES = 3
"""Times that a worker follows a run back to an earlier round by itself, as after a restore of its coordinator. So a
run gets at most four times the updates that its rounds and attempts allow."""

LIVE_TERMS = ("quorum", "deadline_seconds")
"""Rules of cohorts that may change while a run lives, as the number of rounds may."""


class LastSubmission(Value):
    """The last round for which a worker submitted updates, and their number."""

    round: int
    version: int
    seed: int
    times: PositiveInt
    restores: NonNegativeInt = 0
    """Times that the run went back to an earlier round."""
    rounds: NonNegativeInt = 1
    """The number of rounds for which it has submitted updates."""
    kept: str = ""
    """The id of the task, if tensors that its run keeps at the site are of it."""


class Record(Value):
    """The history of one run, over the workers that share the database."""

    terms: dict[str, JsonValue] = {}
    versions: dict[int, Digest] = {}
    """Digests of the newest versions by number."""
    handed: dict[Label, LastSubmission] = {}
    """By worker."""
    upload_bytes: NonNegativeInt = 0
    """Total size of all updates, accepted or not."""
    evaluations: NonNegativeInt = 0
    """Evaluations that began, over all data sets."""


class Contribution(Value):
    """An update that left into an exact secure sum."""

    run: str
    round: int
    helpers: tuple[Hex32, ...]
    """Their long-term keys."""


@dataclass(frozen=True)
class TaskStatement:
    """A run's terms and progress as one task states them."""

    run: str
    kind: TaskKind
    dataset: str
    held_out: bool
    terms: Mapping[str, JsonValue]
    round: int
    version: int
    digest: Digest
    """The version's."""
    seed: int

    @classmethod
    def of(cls, task: Task) -> TaskStatement:
        terms = terms_of(task)
        number, digest = task.version.number, task.version.digest
        return cls(task.run, task.kind, task.dataset, task.held_out, terms, task.round, number, digest, task.seed)

    def terms_digest(self, kind: TaskKind | None = None) -> str:
        """Return the digest that an approval of tasks of this kind covers; by default, of the task's own kind."""
        return terms_digest(self.terms, self.dataset, kind or self.kind)

    @property
    def repeats_model(self) -> bool:
        """True if the task sends an update into a sum although one from the same model may be in another sum."""
        sums = self.terms.get("secure_sums")
        return self.kind == "train" and isinstance(sums, dict) and sums.get("repeat_model") is True


class RunHistory:
    """Records of all runs in the database of a `folder`, which a site's workers may share."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._database = StateDatabase.of(folder)
        self._worker = worker

    def check(self, snapshot: TaskStatement, policy: Policy) -> None:
        """Check a task against the run's history. Raises PolicyViolation."""
        # Require room for at least one more byte of upload.
        self._next(self._read(snapshot.run), snapshot, policy, 1 if snapshot.kind == "train" else 0)
        if snapshot.kind == "evaluate":
            times, of_run = self.measured(snapshot.dataset), self._read(snapshot.run).evaluations
            policy.check_measurements(snapshot.dataset, times + 1, of_run + 1)

    def add(
        self, snapshot: TaskStatement, policy: Policy, upload_bytes: int = 0, rho: float = 0.0, kept: str = ""
    ) -> None:
        """Check the task again with the size of its update, and the zCDP by which it is noisy, and record it durably,
        with its id if it has `kept` tensors. Raises PolicyViolation."""
        with self._database.writing():
            record = self._next(self._read(snapshot.run), snapshot, policy, upload_bytes)
            if kept:
                last = record.handed[self._worker].model_copy(update={"kept": kept})
                record = record.model_copy(update={"handed": {**record.handed, self._worker: last}})
            if rho:
                # Also where there is no limit yet: a later one counts what was spent before.
                self._database.set_note(SITE_PRIVACY, self.check_site(policy, rho))
            self._write(snapshot.run, record)

    def kept_by(self, run: str, task: str) -> bool:
        """Return True if this task was the worker's last submission in the run, and kept tensors."""
        handed = self._read(run).handed.get(self._worker)
        return handed is not None and handed.kept == task

    def adopt(self, named: str) -> str:
        """Let a run go on from any round, once: its coordinator was restored. Return its id.

        Its terms stay, and so do the size of its uploads and the number of its evaluations. Raises ValueError unless
        one run has this name or id.
        """
        with self._database.writing():
            runs = [str(run) for (run,) in self._database.rows("SELECT run FROM runs ORDER BY run")]
            found = [run for run in runs if named in (run, self._read(run).terms.get("run_name"))]
            if len(found) != 1:
                raise ValueError(f"{len(found)} runs here are called {named!r}: give the id of one that took part")
            self._write(found[0], self._read(found[0]).model_copy(update={"handed": {}, "versions": {}}))
        return found[0]

    def spent_of_site(self) -> float:
        """Return the zCDP of all sums to which this site has sent noisy updates."""
        return float(self._database.note(SITE_PRIVACY) or 0.0)

    def check_site(self, policy: Policy, rho: float) -> float:
        """Return the site's zCDP after a further round of `rho`. Raises PolicyViolation if it is above the limit."""
        spent = self.spent_of_site() + rho
        if policy.require_client_privacy:
            policy.require_client_privacy.check_total(spent)
        return spent

    def check_sum(self, terms: Terms) -> None:
        """Check the terms of an exact sum against earlier sums. Raises PolicyViolation."""
        self._abandoned(terms)

    def add_sum(self, terms: Terms) -> None:
        """Check again, and record durably that an update under these terms leaves. Raises PolicyViolation."""
        helpers = tuple(helper.identity for helper in terms.helpers)
        made = Contribution(run=terms.run, round=terms.round, helpers=helpers)
        with self._database.writing() as connection:
            abandoned = [(terms.values, digest) for digest in self._abandoned(terms)]
            connection.executemany("DELETE FROM sums WHERE model = ? AND terms = ?", abandoned)
            connection.execute(
                "INSERT OR REPLACE INTO sums VALUES (?, ?, ?)", (terms.values, terms.digest, made.model_dump_json())
            )

    def _abandoned(self, terms: Terms) -> list[str]:
        """Return the terms of the model's other sums, which are never opened. Raises PolicyViolation for another."""
        abandoned = []
        query = "SELECT terms, contribution FROM sums WHERE model = ? AND terms != ? ORDER BY terms"
        for digest, document in self._database.rows(query, terms.values, terms.digest):
            one = Contribution.model_validate_json(document)
            if is_abandoned(digest, one.helpers, terms):
                abandoned.append(digest)
            # With repeat_model the operator has allowed it: the task would not have been admitted otherwise.
            elif not terms.repeat_model:
                # The orchestrator reads this, who may not know of the other run.
                where = f"in round {one.round} of this run" if one.run == terms.run else "in another run"
                raise PolicyViolation(
                    "sums_repeated",
                    f"an update from a model with the same values left {where}, and too few of the helpers there "
                    "have signed that its sum is never opened",
                )
        return abandoned

    def has_trained(self, dataset: str, version: Digest) -> bool | None:
        """Return True if a run that updates of a data set left into has the version, at or after the last of them;
        False if only other versions are known; None if no update of the data set ever left."""
        records, table = self._database.documents(Record, "SELECT record FROM runs"), CountTable(dataset).model_digest
        sent = [one for one in records if one.upload_bytes and one.terms.get("dataset") == dataset]
        trained = [one for one in sent if one.terms.get("model") != table]
        if not trained:
            return None
        return any(
            digest == version and number >= max(1, min(last.round for last in one.handed.values()))
            for one in trained
            if one.handed
            for number, digest in one.versions.items()
        )

    def measured(self, dataset: str) -> int:
        """Return the number of evaluations on a data set over all runs."""
        row = self._database.row("SELECT times FROM evaluations WHERE dataset = ?", dataset)
        return int(row[0]) if row else 0

    def measure(self, run: str, dataset: str, policy: Policy) -> None:
        """Durably count one more evaluation of a run on a data set. Raises PolicyViolation if that exceeds a limit.

        Call it before the data are read: even a failed evaluation reveals something of them.
        """
        with self._database.writing() as connection:
            times, record = self.measured(dataset) + 1, self._read(run)
            record = record.model_copy(update={"evaluations": record.evaluations + 1})
            policy.check_measurements(dataset, times, record.evaluations)
            connection.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", (dataset, times))
            self._write(run, record)

    def _read(self, run: str) -> Record:
        return self._database.document(Record, "SELECT record FROM runs WHERE run = ?", run) or Record()

    def _write(self, run: str, record: Record) -> None:
        self._database.write("INSERT OR REPLACE INTO runs VALUES (?, ?)", run, record.model_dump_json())

    def _next(self, record: Record, snapshot: TaskStatement, policy: Policy, upload_bytes: int) -> Record:
        """Return the record extended by the task. Raises PolicyViolation if they conflict."""
        terms, before = snapshot.terms, record.terms
        stated = [name for name in TERMS if name in before and name in terms]
        run = {**terms, **before}
        if changed := [name for name in stated if _fixed(name, before, run) != _fixed(name, terms, run)]:
            raise PolicyViolation("run", f"run {snapshot.run} has changed its {', '.join(changed)}")
        handed, known_versions = dict(record.handed), record.versions
        last = handed.get(self._worker)
        if _is_restored(last, record, snapshot):
            # Also of a task that only measures: else the next one would count again.
            restores, rounds = (last.restores, last.rounds) if last else (0, 0)
            last = LastSubmission(round=0, version=-1, seed=0, times=1, restores=restores + 1, rounds=rounds)
            handed[self._worker] = last
            known_versions = {number: known for number, known in known_versions.items() if number < snapshot.version}
        versions = _with_version(known_versions, snapshot)
        if snapshot.kind == "train":
            handed[self._worker] = _next_round(last, snapshot, policy.max_attempts)
            _check_updates(snapshot, sum(each.rounds for each in handed.values()))
        total_bytes = record.upload_bytes + upload_bytes
        policy.check_run_upload(total_bytes)
        known = {**before, **terms}
        update = {"terms": known, "versions": versions, "handed": handed, "upload_bytes": total_bytes}
        return record.model_copy(update=update)


def _fixed(name: str, terms: Mapping[str, JsonValue], run: Mapping[str, JsonValue]) -> JsonValue:
    """Return the part of a term that stays through a run. Without secure sums an orchestrator may change quorum and
    deadline and, if no noise follows from it, the number of rounds: a site that approves runs is asked again."""
    value = terms.get(name)
    if run.get("secure_sums"):
        return value
    if name == "rounds":
        return value if run.get("privacy") or run.get("client_privacy") else None
    return {**value, **dict.fromkeys(LIVE_TERMS)} if name == "cohort" and isinstance(value, dict) else value


def _is_restored(last: LastSubmission | None, record: Record, snapshot: TaskStatement) -> bool:
    """Return True if a task may belong to a run that went back with its restored coordinator.

    Such a run keeps nothing at the site, and the coordinator sees its single updates in any case, because it has
    neither privacy nor secure sums.
    """
    covered = any(snapshot.terms.get(name) for name in ("privacy", "client_privacy", "secure_sums"))
    keeps = any(one.kept for one in record.handed.values())
    remade = record.versions.get(snapshot.version, snapshot.digest) != snapshot.digest
    goes_back = snapshot.kind == "train" and not (_comes_after(last, snapshot) or _repeats(last, snapshot))
    return (remade or goes_back) and not covered and not keeps and (last is None or last.restores < MAX_RESTORES)


def _comes_after(last: LastSubmission | None, snapshot: TaskStatement) -> bool:
    return last is None or (snapshot.round > last.round and snapshot.version > last.version)


def _repeats(last: LastSubmission | None, snapshot: TaskStatement) -> bool:
    """Return True if a task is a retry of the last round: on the same version and seed."""
    asked = (snapshot.round, snapshot.version, snapshot.seed)
    return last is not None and asked == (last.round, last.version, last.seed)


def after_restore(run: str) -> str:
    """Return the remedy for a refusal of a run that went back."""
    return f"If the coordinator was restored from a backup: `tessera worker adopt --run {run}` at the site goes on"


def _with_version(versions: Mapping[int, Digest], snapshot: TaskStatement) -> dict[int, Digest]:
    number, digest = snapshot.version, snapshot.digest
    about = f"version {number} of run {snapshot.run}"
    if versions.get(number, digest) != digest:
        raise PolicyViolation("version", f"{about} has changed its digest. {after_restore(snapshot.run)}")
    if len(versions) >= VERSIONS_KEPT and number < min(versions):
        raise PolicyViolation("version", f"{about} is older than the versions kept. {after_restore(snapshot.run)}")
    known = {**versions, number: digest}
    return {number: known[number] for number in sorted(known)[-VERSIONS_KEPT:]}


def _next_round(last: LastSubmission | None, snapshot: TaskStatement, max_attempts: int) -> LastSubmission:
    """Return the record of a training task; repeating the last round on the same version and seed is a retry."""
    restores, rounds = (last.restores, last.rounds) if last else (0, 0)
    asked = {"round": snapshot.round, "version": snapshot.version, "seed": snapshot.seed}
    current = LastSubmission(**asked, times=1, restores=restores, rounds=rounds + 1)
    if last is None or _comes_after(last, snapshot):
        return current
    if not _repeats(last, snapshot):
        raise PolicyViolation(
            "round",
            f"round {current.round} on version {current.version} does not come after round {last.round} on version "
            f"{last.version}, which was already submitted. {after_restore(snapshot.run)}",
        )
    if last.times >= max_attempts:
        raise PolicyViolation(
            "max_attempts", f"round {last.round} was already submitted {last.times} times (policy.max_attempts)"
        )
    return current.model_copy(update={"times": last.times + 1, "rounds": rounds})


def _check_updates(snapshot: TaskStatement, rounds: int) -> None:
    """Raise PolicyViolation if the site's workers submit updates for more rounds than the run allows a site."""
    cohort = snapshot.terms.get("cohort")
    most = cohort.get("max_updates_per_site") if isinstance(cohort, dict) else None
    if isinstance(most, int) and rounds > most:
        detail = f"the site has sent updates of {most} versions, as many as the run allows"
        raise PolicyViolation("max_updates_per_site", detail)

"""What workers and orchestrators did and were told, and whether it agrees with what the coordinator kept.

A history is JSON lines, one when something is asked and one when it is answered, joined by `id`:

    {"id": 7, "at": 12.5, "who": "a/w", "did": "submit", "task": "...", "token": 1, "run": "...", "round": 3,
     "version": "sha256:...", "update": "sha256:..."}
    {"id": 7, "at": 12.9, "told": {"id": "...", "state": "accepted", "token": 1}}      or {"problem": "lease-lost"}

A question without an answer is one that was lost, or whose asker died. Times are the asker's own and order only what
one asker did. `RecordingClient` writes a history of real HTTP; `check` judges histories and database together.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db import audit, versions
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import RoundRow, RunRow, TaskRow, VersionRow
from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.api.tasks import Claim, EvaluationResult, Failure, Submission, Task, TaskView
from tessera.shared.api.versions import VersionRef
from tessera.shared.client.client import Client
from tessera.shared.problems import Problem
from tessera.shared.rounds.aggregate import Aggregation
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.schema import RunState
from tessera.shared.tensors.lazy import as_bytes, digest_of, to_array

# What is to be found wrong must not judge itself: simulations plant faults in the code that merges.
NEXT_STATE = Aggregation.next_state
ASSIGNED = versions.assigned_updates
STATES = ("accepted", "merged", "left_out")
"""Of a task whose report was accepted."""

TOLD = ("id", "state", "token", "version", "run", "round")
"""What is kept of an answer, as far as it has it."""


@dataclass
class Entry:
    told: Callable[[object], None]
    """To be called with the answer. A problem that is raised is noted by itself."""


@dataclass
class Log:
    """A history that is being written; to a file, if there is one, each line before anything else happens."""

    clock: Callable[[], float] = time.monotonic
    path: Path | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def entry(self, who: str, did: str, **facts: object) -> Iterator[Entry]:
        """One question and its answer. What ends it without a problem or an answer leaves it unanswered."""
        # Askers that share a file are told apart by their process.
        number = f"{os.getpid()}-{len(self.lines)}" if self.path else len(self.lines)
        self._write({"id": number, "at": self.clock(), "who": who, "did": did, **facts})

        def told(answer: object) -> None:
            self._write({"id": number, "at": self.clock(), "told": said(answer)})

        try:
            yield Entry(told)
        except Problem as problem:
            # Without a document nobody knows what became of it.
            if problem.from_document or self.path is None:
                self._write({"id": number, "at": self.clock(), "told": {"problem": problem.code}})
            raise

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def said(answer: object) -> dict[str, Any]:
    if not isinstance(answer, BaseModel):
        return {}
    facts = answer.model_dump(mode="json", include=set(TOLD))
    return {name: facts[name]["digest"] if name == "version" else facts[name] for name in TOLD if name in facts}


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Histories from files. A line that was cut off by its writer's death is no line."""
    lines = []
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines()):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            lines.append({**line, "id": f"{path.name}:{line['id']}", "line": number})
    return lines


class RecordingClient(Client):
    """A client that writes the history of its tasks and runs."""

    def __init__(self, url: str, token: str | None, log: Log, who: str, **transport: Any) -> None:
        super().__init__(url, token, **transport)
        self._log = log
        self._who = who

    def claim(self, claim: Claim, wait_seconds: int = 25) -> Task | None:
        return self._noted("claim", lambda: super(RecordingClient, self).claim(claim, wait_seconds))

    def submit(self, task_id: str, submission: Submission) -> TaskView:
        about = {"task": task_id, "token": submission.token, "version": submission.version}
        return self._noted(
            "submit",
            lambda: super(RecordingClient, self).submit(task_id, submission),
            update=submission.update,
            **about,
        )

    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView:
        about = {"task": task_id, "token": evaluated.token, "version": evaluated.version}
        return self._noted(
            "evaluate", lambda: super(RecordingClient, self).submit_evaluation(task_id, evaluated), **about
        )

    def fail(self, task_id: str, failure: Failure) -> TaskView:
        about = {"task": task_id, "token": failure.token}
        return self._noted("fail", lambda: super(RecordingClient, self).fail(task_id, failure), **about)

    def release(self, task_id: str, token: int) -> TaskView:
        again = super().release
        return self._noted("release", lambda: again(task_id, token), task=task_id, token=token)

    def create_run(self, spec: RunSpec, *, key: str | None = None) -> Run:
        again = super().create_run
        return self._noted("create", lambda: again(spec, key=key), key=key)

    def set_run_state(self, run_id: str, state: RunState) -> Run:
        again = super().set_run_state
        return self._noted("patch", lambda: again(run_id, state), run=run_id, state=state)

    def _noted(self, did: str, ask: Callable[[], Any], **facts: object) -> Any:
        with self._log.entry(self._who, did, **facts) as entry:
            answer = ask()
            entry.told(answer)
        return answer


# ---------------------------------------------------------------- judging


@dataclass(frozen=True)
class Finding:
    """What must not be. `kind` is one of the words that `check` names."""

    kind: str
    detail: str


def check(
    lines: Iterable[Mapping[str, Any]], database: Database, blobs: Blobs, *, merges_again: bool = True
) -> list[Finding]:
    """Everything in which histories and database disagree, or the database with itself.

    lost           an update, evaluation, run or cancellation that was acknowledged is not there
    twice          more than one update of a worker in a round, or more than one token or update told 'accepted'
    wrong-round    what was accepted was made for another round or from another version
    never-sent     an update is accepted that nobody in these histories sent; only if they hold any submission
    contradiction  what was told 'accepted' was refused afterwards to the same asker
    wrong-version  a version is not the merge of exactly the updates that its round accepted; only with
                   `merges_again`, which reads all versions
    broken-chain   the audit chain does not hold
    """
    asked, told = _joined(lines)
    with database.snapshot() as session:
        return [
            *_acknowledged(session, asked, told),
            *_counted(session, asked, told),
            *(_merged(session, blobs) if merges_again else ()),
            *_chain(session),
        ]


def _joined(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[Any, Mapping[str, Any]], dict[Any, Mapping[str, Any]]]:
    asked, told = {}, {}
    for line in lines:
        (told if "told" in line else asked)[line["id"]] = line
    return asked, told


def _acknowledged(
    session: Session, asked: Mapping[Any, Mapping[str, Any]], told: Mapping[Any, Mapping[str, Any]]
) -> Iterator[Finding]:
    answers = [(asked[number], line["told"], line["at"]) for number, line in told.items()]
    reports = [one for one in answers if one[0]["did"] in ("submit", "evaluate")]
    yield from _reports(session, reports)
    made: defaultdict[str, set[str]] = defaultdict(set)
    for question, answer, _ in answers:
        if question["did"] == "create" and "id" in answer:
            made[question.get("key") or answer["id"]].add(answer["id"])
            if session.get(RunRow, answer["id"]) is None:
                yield Finding("lost", f"run {answer['id']} was created and is not there")
        if question["did"] == "patch" and answer.get("state") == "cancelled":
            run = session.get(RunRow, question["run"])
            if run is None or run.state != "cancelled":
                yield Finding("lost", f"run {question['run']} was cancelled and is not")
    for key, runs in made.items():
        if len(runs) > 1:
            yield Finding("twice", f"the key {key} made {len(runs)} runs")


def _reports(
    session: Session, answers: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], float]]
) -> Iterator[Finding]:
    accepted: defaultdict[str, set[tuple[int, str | None]]] = defaultdict(set)
    since: dict[tuple[str, str, int, str | None], float] = {}
    for question, answer, at in answers:
        task, report = question["task"], (question["token"], question.get("update"))
        who = (question["who"], task, *report)
        if answer.get("state") == "accepted":
            accepted[task].add(report)
            since.setdefault(who, at)
            yield from _kept(session, question)
        elif "problem" in answer and question["at"] >= since.get(who, math.inf):
            yield Finding("contradiction", f"{who[0]}'s report on task {task} was accepted, then {answer['problem']}")
    for task, several in accepted.items():
        if len(several) > 1:
            yield Finding("twice", f"task {task} was told 'accepted' for {sorted(map(str, several))}")


def _kept(session: Session, question: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether an acknowledged report is there, and where it belongs."""
    row = session.get(TaskRow, question["task"])
    shown = f"{question['did']} of task {question['task']} under token {question['token']}"
    report = (question["token"], question.get("update"))
    if row is None or row.state not in STATES or (row.token, row.update_digest) != report:
        found = f"{row.state} under token {row.token} with {row.update_digest}" if row else "not there"
        yield Finding("lost", f"{shown} was accepted; the task is {found}")
        return
    base = session.get(VersionRow, (row.run_id, row.version_number))
    if base is None or base.digest != question["version"]:
        yield Finding("wrong-round", f"{shown} was made from {question['version']}, not from the task's version")
    round_ = session.get(RoundRow, row.round_id) if row.round_id else None
    if round_ and "round" in question and round_.number != question["round"]:
        yield Finding("wrong-round", f"{shown} was made for round {question['round']}, and is in {round_.number}")
    if round_ and round_.number != row.version_number + 1:
        yield Finding("wrong-round", f"{shown} starts from version {row.version_number}, in round {round_.number}")


def _counted(
    session: Session, asked: Mapping[Any, Mapping[str, Any]], told: Mapping[Any, Mapping[str, Any]]
) -> Iterator[Finding]:
    sent = {(q["task"], q["token"], q["update"]) for q in asked.values() if q["did"] == "submit"}
    seen: dict[tuple[str, str], str] = {}
    rows = session.scalars(select(TaskRow).where(TaskRow.state.in_(STATES), TaskRow.kind == "train"))
    for task in rows:
        place = (task.round_id or "", task.worker_id)
        if place in seen:
            yield Finding("twice", f"tasks {seen[place]} and {task.id} of one worker count in one round")
        seen[place] = task.id
        if sent and (task.id, task.token, task.update_digest) not in sent:
            yield Finding("never-sent", f"task {task.id} has the update {task.update_digest}, which nobody sent")


def _merged(session: Session, blobs: Blobs) -> Iterator[Finding]:
    for round_ in session.scalars(select(RoundRow).where(RoundRow.state == "committed")):
        if detail := misfit(session, blobs, round_.id):
            yield Finding("wrong-version", detail)


def misfit(session: Session, blobs: Blobs, round_id: str) -> str | None:
    """In what the version of a committed round is not the merge of the updates that the round accepted."""
    round_ = session.get_one(RoundRow, round_id)
    run = session.get_one(RunRow, round_.run_id)
    spec = RunSpec.model_validate(run.spec)
    base = session.get(VersionRow, (run.id, round_.number - 1))
    made = session.get(VersionRow, (run.id, round_.number))
    if base is None or made is None:
        return f"round {round_.number} of run {run.id} is committed without its version"
    states = States(blobs)
    aggregation = Aggregation(states, Inspector(blobs, states))
    ref = VersionRef(number=base.number, digest=base.digest)
    accepted = sorted(ASSIGNED(session, run.id, made.number), key=lambda entry: entry.worker)
    if not spec.cohort.buffers:
        accepted = [replace(entry, base=ref) for entry in accepted]
    latest = versions.latest_updates(session, run.id, made.number) if spec.cohort.memory else []
    wanted, _ = NEXT_STATE(aggregation, spec, versions.bounds_in_force(run), ref, accepted, latest=latest)
    manifest = states.manifest(made.digest)
    found = {**manifest.blocks, **{name: entry.digest for name, entry in manifest.server_state.items()}}
    wrong = [
        name
        for name, tensor in {**wanted.model, **wanted.server_state}.items()
        if digest_of(bytes(as_bytes(to_array(tensor)))) != found.get(name)
    ]
    if wrong:
        who = [entry.worker for entry in accepted]
        return f"version {made.number} is not the merge of {who}: {len(wrong)} of {len(found)} blocks differ"
    return None


def _chain(session: Session) -> Iterator[Finding]:
    if (entry := audit.broken_at(session)) is not None:
        yield Finding("broken-chain", f"audit entry {entry} is not what was chained there")

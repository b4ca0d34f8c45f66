"""Who takes part: workers that train by a formula, an orchestrator that changes its mind, and an intruder.

They call the coordinator's own operations, over a network that loses and repeats, and write down what they did and
were told, as `tests.support.histories` has it.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.coordinator.db import views
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations import runs, tasks
from tessera.coordinator.services import Services
from tessera.shared.api.runs import Run, RunPatch, RunSpec
from tessera.shared.api.tasks import Claim, EvaluationResult, Failure, Heartbeat, Release, Submission, Task, TaskView
from tessera.shared.api.versions import Manifest
from tessera.shared.client.transport import Unreachable
from tessera.shared.problems import Conflict, DigestMismatch, NotFound, OffsetMismatch, Problem
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import ArrayTensor, as_bytes, digest_of, to_array
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.worker.state.vault import Vault
from tests.model_checking.replicas import World, driven
from tests.model_checking.schedule import Process
from tests.support.federation import small_model, values
from tests.support.histories import Log

MODEL = small_model(2)
START = values(MODEL)
PATIENCE_SECONDS = 40.0
POLL_SECONDS = 4.0


class Broken(Exception):
    """A connection broke in the middle of a body."""


def site(name: str) -> Principal:
    return Principal(token_id=name, name=name, role="site", site_id=name)


ORCHESTRATOR = Principal(token_id="orchestrator", name="orchestrator", role="orchestrator", site_id=None)


def step_of(seed: int, shape: tuple[int, ...], *, rests: bool = False) -> np.ndarray:
    """How far a worker moves a block: it follows from the task's seed alone, so that it is the same at every try.

    With `rests`, every fourth seed leaves a block as it is, so that some versions do not change it."""
    if rests and seed % 4 == 0:
        return np.zeros(shape, np.float32)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def kept_of(task: str, token: int) -> dict[str, np.ndarray]:
    """What a worker keeps of a task: which it was."""
    return {"task": np.frombuffer(task.encode(), dtype=np.uint8), "token": np.array([token])}


@dataclass
class Manners:
    """What a worker does that it should not, and how often: chances."""

    fails: float = 0.03
    releases: float = 0.04
    spoils: float = 0.04
    """Sends what is not finite."""
    exaggerates: float = 0.03
    """Counts more examples than it declared."""
    outdated: float = 0.03
    """Names another version than the task's."""
    garbles: float = 0.04
    """A byte changes on its way."""
    goes_on: float = 0.5
    """Though its lease is gone."""
    dies: float = 0.02
    twin: float = 0.15
    """A second process starts under the same name, while the first lives."""
    longest_silence: float = 40.0
    """Seconds between two heartbeats: by default at times more than a lease lasts."""


POLITE = Manners(0, 0, 0, 0, 0, 0, 0, 0, 0, longest_silence=10.0)
"""As a real worker: it misbehaves in nothing, and renews its lease several times before it ends."""


@dataclass
class Worker:
    """One worker's machine: its processes come and go, its vault stays."""

    world: World
    site: str
    examples: int
    log: Log
    codec_inline: bool
    manners: Manners
    evaluates: bool = False
    vaults: list[Vault] = field(default_factory=list)
    has_left: bool = False
    queue_seconds: float = 0.0
    """How long each task waits on its machine before it begins."""
    rests: bool = False
    """Whether it leaves some blocks as they are."""
    _processes: list[Process] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.site}/w"

    def start(self, after: float = 0.0) -> None:
        """A process on a machine of its own, with a vault of its own, which its successors inherit."""
        vault = Vault(self.world.folder / "vaults" / f"{self.site}-{len(self.vaults)}", durable=False)
        self.vaults.append(vault)
        self._begin(vault, after)

    def _begin(self, vault: Vault, after: float = 0.0) -> None:
        if self.has_left:
            return
        process = Process(self.name, revive=lambda: self._begin(vault))
        self._processes.append(process)
        instance = uuid.uuid4().hex
        self.world.schedule.spawn(process, "worker", lambda: self._live(process, vault, instance), after)

    def leave(self) -> None:
        """Its processes end, and none follows."""
        self.has_left = True
        for process in self._processes:
            if process.alive:
                self.world.schedule.kill(process)

    def _live(self, process: Process, vault: Vault, instance: str) -> None:
        schedule = self.world.schedule
        dice = schedule.dice
        while True:
            try:
                vault.settle(self._fate)
                break
            except Problem:
                schedule.sleep(POLL_SECONDS)
        while True:
            try:
                vault.settle_unanswered(self._fate)
                task = self._claim(instance)
            except Problem:
                task = None
            if task is None:
                schedule.sleep(dice.uniform(0.5, 1.5) * POLL_SECONDS)
                continue
            if dice.random() < self.manners.twin:
                self.start(after=dice.uniform(0, 20))
            if dice.random() < self.manners.dies:
                schedule.kill(process)
                return
            try:
                self._do(task, vault)
            except (Problem, Broken):
                schedule.sleep(1)

    # ------------------------------------------------------------ requests

    @property
    def _me(self) -> Principal:
        return site(self.site)

    def _call(self, label: str, request: Callable[[Services], Any]) -> Any:
        return self.world.call(self.name, label, request)

    def _patiently(self, label: str, request: Callable[[Services], Any]) -> Any:
        schedule = self.world.schedule
        give_up_at = schedule.at + PATIENCE_SECONDS
        while True:
            try:
                return self._call(label, request)
            except Problem as problem:
                if not problem.retryable or schedule.at > give_up_at:
                    raise
                schedule.sleep(schedule.dice.uniform(0.1, 5))

    def _fate(self, task: str) -> TaskView:
        view: TaskView = self._patiently("task", lambda serving: tasks.get_task(serving, self._me, task))
        return view

    def _claim(self, instance: str) -> Task | None:
        body = Claim(
            worker="w",
            instance=instance,
            kinds=("train", "evaluate") if self.evaluates else ("train",),
            datasets={"data": self.examples},
            held_out={"data": 5} if self.evaluates else {},
            methods=("fedavg", "fedfrozen"),
        )

        def request(serving: Services) -> Task | None:
            worker_id = tasks.declare(serving, self._me, body)
            return tasks.lease(serving, self._me, worker_id, instance, woken=False)

        with self.log.entry(self.name, "claim", instance=instance) as entry:
            task: Task | None = self._call("claim", request)
            entry.told(task)
        return task

    # ------------------------------------------------------------ one task

    def _do(self, task: Task, vault: Vault) -> None:
        schedule, dice, manners = self.world.schedule, self.world.schedule.dice, self.manners
        begins_at = schedule.at + self.queue_seconds
        while schedule.at < begins_at:
            schedule.sleep(dice.uniform(0, manners.longest_silence))
            self._call("heartbeat", self._heartbeat(task))
        for _ in range(dice.randrange(4)):
            schedule.sleep(dice.uniform(0, manners.longest_silence))
            try:
                self._call("heartbeat", self._heartbeat(task))
            except Conflict:
                if dice.random() >= manners.goes_on:
                    raise
            except Unreachable:
                pass
        fate = dice.random()
        if fate < manners.fails:
            failure = Failure(token=task.token, code="failed", detail="no")
            self._report(task, "fail", lambda s: tasks.fail(s, self._me, task.id, failure))
        elif fate < manners.fails + manners.releases:
            beat = Release(token=task.token)
            self._report(task, "release", lambda s: tasks.release(s, self._me, task.id, beat))
        elif task.kind == "evaluate":
            found = EvaluationResult(
                token=task.token, version=task.version.digest, examples=5, metrics={"accuracy": 0.5}
            )
            self._report(
                task,
                "evaluate",
                lambda s: tasks.submit_evaluation(s, self._me, task.id, found),
                version=found.version,
            )
        else:
            self._train(task, vault)

    def _heartbeat(self, task: Task) -> Callable[[Services], Any]:
        def beat(serving: Services) -> Any:
            over = self.world.is_over(task.id)
            answer = tasks.heartbeat(serving, self._me, task.id, Heartbeat(token=task.token))
            self.world.after_heartbeat(task.id, over)
            return answer

        return beat

    def _train(self, task: Task, vault: Vault) -> None:
        dice, manners = self.world.schedule.dice, self.manners
        base = self._patiently("fetch", lambda serving: fetched(serving, task.version.digest))
        spoilt = dice.random() < manners.spoils
        data = written(task, base, spoilt=spoilt, rests=self.rests)
        digest = digest_of(data)
        vault.settle_run(task.run, task.receipt, self._fate)
        staged = vault.stage(task.run, task.id, task.token, kept_of(task.id, task.token))
        sent = bytearray(data)
        if dice.random() < manners.garbles:
            sent[len(sent) // 2] ^= 1
        if not self.codec_inline:
            self._upload(digest, bytes(sent))
        submission = Submission(
            token=task.token,
            version=f"sha256:{'0' * 64}" if dice.random() < manners.outdated else task.version.digest,
            update=digest,
            data=bytes(sent) if self.codec_inline else None,
            examples=self.examples * (100 if dice.random() < manners.exaggerates else 1),
        )

        def submit(serving: Services) -> Any:
            return tasks.submit_update(serving, self._me, task.id, submission)

        # Of a submission that raises, the vault asks before the next claim what became of it.
        garbled = bytes(sent) != data
        self._report(task, "submit", submit, garbled=garbled, update=digest, version=submission.version)
        self.world.schedule.point("vault")
        staged.accept()

    def _report(
        self, task: Task, did: str, request: Callable[[Services], Any], *, garbled: bool = False, **about: object
    ) -> None:
        facts = {"task": task.id, "token": task.token, "run": task.run, "round": task.round, **about}
        schedule = self.world.schedule
        report = (task.id, task.token, about.get("update"))

        def watched(serving: Services) -> Any:
            held = self.world.holds(task.id, task.token)
            try:
                answer = request(serving)
            except Problem as problem:
                self.world.after_report(*report, problem, garbled=garbled, held=held)
                raise
            self.world.after_report(*report, None, garbled=garbled)
            return answer

        give_up_at = schedule.at + PATIENCE_SECONDS
        while True:
            try:
                with self.log.entry(self.name, did, **facts) as entry:
                    entry.told(self._call(did, watched if did in ("submit", "evaluate") else request))
                return
            except Problem as problem:
                if not problem.retryable or schedule.at > give_up_at:
                    raise
            schedule.sleep(schedule.dice.uniform(0.1, 5))

    def _upload(self, digest: str, data: bytes) -> None:
        """In two pieces, each of which may break off, going on from where the coordinator says that it stands."""
        dice = self.world.schedule.dice

        def announce(serving: Services) -> str:
            upload = serving.uploads.announce(self._me.owner, digest, len(data))
            return upload.id

        upload_id = self._patiently("announce", announce)

        def attempt(serving: Services) -> bool:
            taking = serving.uploads
            upload = taking.find(upload_id, self._me.owner)
            offset = taking.offset(upload)
            breaks = dice.random() < 0.2

            async def body() -> Any:
                half = offset + (len(data) - offset) // 2
                yield data[offset:half]
                self.world.schedule.point("piece")
                if breaks:
                    raise Unreachable("the connection broke")
                yield data[half:]

            try:
                driven(taking.append(upload, offset, body()))
            except OffsetMismatch as problem:
                problem.retryable = True
                raise
            return taking.find(upload_id, self._me.owner).complete

        # What was garbled on its way is thrown away, and the submission is refused for want of it.
        with suppress(DigestMismatch):
            self._patiently("append", attempt)


def fetched(serving: Services, version: str) -> dict[str, np.ndarray]:
    manifest = serving.states.manifest(version)
    state = serving.states.load(MODEL, manifest, 0)
    return {name: to_array(tensor) for name, tensor in state.model.items()}


def written(task: Task, base: dict[str, np.ndarray], *, spoilt: bool = False, rests: bool = False) -> bytes:
    """The update file of a worker that moves every block that is asked for by `step_of`."""
    changes = []
    for number, block in enumerate(task.plan.upload.resolve(MODEL.blocks)):
        moved = base[block.name] + step_of(task.seed + number, block.shape, rests=rests)
        if spoilt:
            moved.flat[0] = np.nan
        changes.append(TrainedBlock(block, ArrayTensor(moved, block.dtype), ArrayTensor(base[block.name])))
    file = io.BytesIO()
    write_update(file, task.codec, changes)
    return file.getvalue()


@dataclass
class Orchestrator:
    """Starts one run, repeating itself, and pauses, resumes, changes and cancels it at its whim."""

    world: World
    spec: dict[str, Any]
    log: Log
    whims: int
    cancels: float
    run: Run | None = None
    settled: bool = False
    """Whether it will interfere no more."""

    def start(self) -> None:
        self.world.schedule.spawn(Process("orchestrator"), "orchestrator", self._live)

    def _live(self) -> None:
        dice, schedule = self.world.schedule.dice, self.world.schedule
        spec = self._until(lambda: self.world.call("orchestrator", "upload", self._uploaded))
        key = uuid.uuid4().hex

        def create(serving: Services) -> Run:
            return runs.create_run(serving, ORCHESTRATOR, spec, key)

        self.run = self._until(lambda: self._logged("create", create, key=key))
        for _ in range(self.whims):
            schedule.sleep(dice.uniform(5, 120))
            state = "cancelled" if dice.random() < self.cancels else dice.choice(("paused", "running", ""))
            self._wish(state=state) if state else self._wish(**self._change())
        self.settled = True

    def _change(self) -> dict[str, Any]:
        """A change of the live run that leaves it able to end."""
        dice, quorum = self.world.schedule.dice, self.spec["cohort"]["quorum"]
        rounds, deadline = dice.randint(1, self.spec["rounds"] + 1), dice.choice((100.0, 200.0))
        return {"rounds": rounds, "cohort": {"quorum": dice.randint(1, quorum), "deadline_seconds": deadline}}

    def resume(self) -> None:
        """What a person does with a run that has paused, until it is over."""
        if self.run:
            self.world.schedule.spawn(Process("orchestrator"), "orchestrator", lambda: self._wish(state="running"))

    def _wish(self, **wish: Any) -> None:
        run = self.run
        assert run

        def patch(serving: Services) -> Run:
            with serving.database.snapshot() as session:
                seen = runs.etag(views.find_run(session, run.id).revision)
            self.world.schedule.point("seen")
            return runs.patch_run(serving, ORCHESTRATOR, run.id, RunPatch.model_validate(wish), seen)

        try:
            self._logged("patch", patch, run=run.id, **wish)
        except Problem:
            # It is over, or somebody was faster, or nobody answers: this whim passes.
            return

    def _logged(self, did: str, request: Callable[[Services], Any], **facts: object) -> Any:
        with self.log.entry("orchestrator", did, **facts) as entry:
            answer = self.world.call("orchestrator", did, request)
            entry.told(answer)
        return answer

    def _until(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except Problem as problem:
                if not problem.retryable:
                    raise
            self.world.schedule.sleep(2)

    def _uploaded(self, serving: Services) -> RunSpec:
        taking = serving.uploads

        def put(data: bytes) -> str:
            digest = digest_of(data)
            taking.keep(taking.announce(ORCHESTRATOR.owner, digest, len(data)), data)
            return digest

        blocks = {name: put(bytes(as_bytes(array))) for name, array in START.items()}
        version = put(canonical(Manifest(blocks=blocks)))
        return RunSpec(model=put(canonical(MODEL)), version=version, **self.spec)


@dataclass
class Intruder:
    """A site that meddles with the tasks of others."""

    world: World
    tasks: Callable[[], list[tuple[str, int]]]
    """The tasks that there are, with tokens that they may have."""
    admitted: list[str] = field(default_factory=list)
    """What it should have been refused."""

    def start(self) -> None:
        self.world.schedule.spawn(Process("intruder"), "intruder", self._live)

    def _live(self) -> None:
        schedule = self.world.schedule
        while True:
            schedule.sleep(schedule.dice.uniform(10, 60))
            if known := self.tasks():
                task, token = schedule.dice.choice(known)
                try:
                    self.world.call("intruder", "meddle", lambda s, t=task, n=token: self._meddle(s, t, n))
                except Problem:
                    continue

    def _meddle(self, serving: Services, task: str, token: int) -> None:
        try:
            tasks.release(serving, site("x"), task, Release(token=token))
        except NotFound:
            return
        except Problem as problem:
            self.admitted.append(f"the intruder was told of task {task}: {problem.code}")
        else:
            self.admitted.append(f"the intruder released task {task}")

"""The executor of a region's process (`tessera regional`): its training is rounds of the region's own coordinator.

Outward, the process is a worker of a parent coordinator, with the gates, the audit and the airlock of any other.
Inward it is an orchestrator of the region's coordinator. One inner run belongs to each run of the parent, so that
sites approve once, keep their vaults, and plan their privacy over all rounds. The inner run stores all values
that are needed after a crash: the parent's version that it trains on, and the steps from that.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import ParentVersion, RegionalRun, Run, RunPatch, RunSpec
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.client.transport import may_pass
from tessera.shared.methods.base import REFERENCE, LocalResult, UnsupportedRun
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.spec import Model
from tessera.shared.problems import Problem
from tessera.shared.rounds.regions import COUNTS, PARENT, ROUNDS, STEP, RegionCounts, counts_of
from tessera.shared.schema import canonical
from tessera.shared.tensors.hashing import derive_seed
from tessera.shared.tensors.lazy import Array, digest_of, from_bytes
from tessera.shared.urls import without_password
from tessera.worker.data.dataset_info import DatasetInfo, Inventory
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.settings import DataSources, SettingsError
from tessera.worker.task.environment import TaskRun, facts_of
from tessera.worker.task.handover import CheckedModel, FetchedVersion, TaskOutcome

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount
    from tessera.worker.settings import RegionSettings
    from tessera.worker.state.checkpoints import TaskCheckpoint

ENDED = ("completed", "cancelled")
LOOK_SECONDS = 0.5
"""Time between two looks at an inner run."""
COUNT_SECONDS = 10.0
"""Time between two counts of the region's examples."""
ENDED_SECONDS = 60.0
"""Time between two searches for inner runs whose parent's run has ended."""
DEADLINE_SHARE = 0.8
"""Share of the parent's deadline that the inner rounds get together."""

log = structlog.get_logger("worker")


class RegionalExecutor(ProcessExecutor):
    """A `ProcessExecutor` without processes, whose training tasks are done by the sites of a region."""

    def __init__(self, region: RegionSettings, name: str, parent: Client, parent_url: str, *given: Any) -> None:
        super().__init__(*given)
        # Sites see the URL, and not its password.
        self._region, self._name, self._parent, self._parent_url = region, name, parent, without_password(parent_url)
        self._inner = Client.from_options(
            region.url, token_file=region.token_file, ca_bundle=region.ca_bundle, patience_seconds=0
        )
        self._runs: dict[str, str] = {}
        """The inner runs by the parent's."""
        self._examples: Mapping[str, int] = {}
        self._counted_at = self._searched_at = 0.0

    def start(self) -> None:
        """Start nothing: the sites have their own processes."""

    def inventory(self) -> Inventory:
        """Return the region's data sets, as its sites declare them. Raises SettingsError."""
        assert self._ranks.sources  # noqa: S101  (of a worker)
        try:
            self._examples = self._count()
        except Problem as problem:
            if not may_pass(problem):
                raise SettingsError(f"region: {self._region.url}: {problem}") from problem
            log.warning("region-away", detail=problem.detail, remedy="Start the region's coordinator.")
        names = self._ranks.sources.datasets
        found = {name: DatasetInfo(self._examples.get(name, 0)) for name in names}
        return Inventory(found, device="region")

    def reload(self, sources: DataSources) -> Inventory:
        self._ranks = self._ranks.model_copy(update={"sources": sources})
        return self.inventory()

    def is_outdated(self) -> bool:
        if time.monotonic() < self._counted_at + COUNT_SECONDS:
            return False
        with suppress(Problem):
            return self._count() != self._examples
        return False

    def idle(self) -> None:
        """Cancel inner runs whose parent's run has ended."""
        if time.monotonic() < self._searched_at + ENDED_SECONDS:
            return
        self._searched_at = time.monotonic()
        live: list[Run] = []
        with suppress(Problem):
            live = [run for run in self._inner.runs() if run.state not in ENDED]
        for run in live:
            parent = run.spec.parent
            with suppress(Problem):
                ours = parent and parent.coordinator == self._parent_url
                if parent and ours and (state := self._parent.run(parent.run).state) in ENDED:
                    self._inner.set_run_state(run.id, "cancelled")
                    log.info("inner-run-cancelled", run=run.spec.name, parent=state)

    def check(self, run: TaskRun, document: Model, dataset: DatasetInfo) -> CheckedModel:
        """Return the blocks by the model's own table, which the sites check. An external base is theirs alone."""
        return CheckedModel(tuple(block for block in document.blocks if block.name not in document.external))

    def execute(
        self,
        run: TaskRun,
        fetched: FetchedVersion,
        account: PrivacyAccount | None,
        checkpoint: TaskCheckpoint | None,
    ) -> TaskOutcome:
        """Train by rounds of the inner run on the task's version. Raises UnsupportedRun, TaskFailure, and the
        exceptions of `run.check`."""
        require_nestable(run, fetched.document)
        run.report.begin("training", steps=self._region.rounds)
        said = ""
        while True:
            try:
                inner = self._on_version(run, fetched)
                run.report.step, done = self._progress(inner, run.task.version.number)
                if done:
                    return self._outcome(run, fetched, inner)
            except Problem as problem:
                # It may be the reason why the task is no longer wanted.
                run.check()
                if not may_pass(problem):
                    # The parent learns the code alone: the text can name sites. The log has it as the cause.
                    why = f"the region's coordinator refuses ({problem.code}); the region's own log has more"
                    raise TaskFailure("region-refuses", why) from problem
                if problem.code != said:
                    said = problem.code
                    log.warning("region-away", reason=said, detail=problem.detail)
            else:
                if inner.state != "running":
                    log.warning(
                        "region-stopped", run=inner.id, state=inner.state, reason=inner.reason or "by a person"
                    )
                    raise TaskFailure("region-stopped", f"the region's run is {inner.state}; its own log has more")
            run.check()
            time.sleep(LOOK_SECONDS)

    # ------------------------------------------------------------ the inner run

    def _count(self) -> dict[str, int]:
        """Return the examples of each data set over the region's sites; of a site's workers the largest number."""
        self._counted_at = time.monotonic()
        of_sites: dict[tuple[str, str], int] = {}
        for worker in self._inner.workers():
            if not (worker.suspended or worker.revoked):
                for name, examples in worker.datasets.items():
                    key = (name, worker.site)
                    of_sites[key] = max(examples, of_sites.get(key, 0))
        found: dict[str, int] = {}
        for (name, _), examples in of_sites.items():
            found[name] = found.get(name, 0) + examples
        return found

    def _on_version(self, run: TaskRun, fetched: FetchedVersion) -> Run:
        """Return the inner run, created if need be, with the task's version as its base."""
        task, version = run.task, _manifest(fetched)
        base = ParentVersion(number=task.version.number, version=digest_of(canonical(version)), plan=task.plan)
        inner = self._find(self._spec(run, base))
        if inner is None or inner.spec.parent is None or inner.spec.parent.base != base:
            self._copy(run, fetched.document, version)
            if inner is None:
                inner = self._create(run, base)
            elif inner.state not in ENDED:
                inner = self._inner.set_base(inner.id, base)
        wanted = task.rounds * _rounds_each(inner)
        if inner.spec.rounds != wanted and inner.state not in ENDED:
            inner = self._inner.patch_run(inner.id, RunPatch(rounds=wanted))
        return inner

    def _find(self, wanted: RunSpec) -> Run | None:
        """Return the inner run of the parent's run, with the settings that the parent's task asks for: another
        orchestrator of the region can create a run that names the same parent."""
        assert wanted.parent  # noqa: S101 (of a region)
        parent = wanted.parent.run
        if parent not in self._runs:
            for run in self._inner.runs():
                if run.spec.parent and run.spec.parent.run == parent:
                    if _is_same(run.spec, wanted):
                        self._runs[parent] = run.id
                    else:
                        log.warning("inner-run-differs", run=run.id, remedy="See who created it, and cancel it.")
        return self._inner.run(self._runs[parent]) if parent in self._runs else None

    def _spec(self, run: TaskRun, base: ParentVersion) -> RunSpec:
        task, region = run.task, self._region
        deadline = region.deadline_seconds or DEADLINE_SHARE * task.cohort.deadline_seconds / region.rounds
        same = ("method", "model", "dataset", "training", "privacy", "codec", "upload_budget", "upload_seconds")
        bounds = ("max_examples", "max_update_norm", "max_norm_of_median")
        return RunSpec(
            name=task.run_name,
            **{name: getattr(task, name) for name in (*same, *bounds)},
            version=base.version,
            rounds=task.rounds * region.rounds,
            seed=derive_seed(0, "region", task.run, self._name),
            cohort=Cohort(quorum=region.min_sites, deadline_seconds=deadline),
            parent=RegionalRun(
                coordinator=self._parent_url,
                run=task.run,
                orchestrator=task.orchestrator,
                terms=run.snapshot.terms_digest("train"),
                rounds_each=region.rounds,
                base=base,
            ),
        )

    def _create(self, run: TaskRun, base: ParentVersion) -> Run:
        # A process that is killed before it reads the answer finds the run in the list.
        inner = self._inner.create_run(self._spec(run, base), key=f"region-{run.task.run}-{base.number}")
        log.info("inner-run-created", run=run.task.run_name, id=inner.id)
        return inner

    def _copy(self, run: TaskRun, document: Model, manifest: Manifest) -> None:
        """Upload what the region's coordinator lacks of the model and the version."""
        sizes = {ref.digest: ref.nbytes for ref in document.preprocessing.values()}
        sizes |= {manifest.blocks[block.name]: block.nbytes for block in document.stored}
        sizes |= {entry.digest: entry.nbytes for entry in manifest.server_state.values()}
        for digest, nbytes in sizes.items():
            run.check()
            if self._inner.has_blob(digest):
                continue
            path, data = run.fetch(digest, nbytes), run.env.shelf.in_memory(digest)
            with io.BytesIO(data) if data is not None else path.open("rb") as file:
                self._inner.put_stream(digest, file, nbytes)
        self._inner.put_bytes(run.document(run.task.model))
        self._inner.put_bytes(canonical(manifest))

    def _progress(self, inner: Run, number: int) -> tuple[int, bool]:
        """Return the number of inner rounds that are done on the parent's version, and whether these are all."""
        scalars = self._scalars(inner)
        rounds = int(scalars[ROUNDS]) if scalars[PARENT] == number else 0
        return rounds, rounds >= _rounds_each(inner)

    def _scalars(self, inner: Run) -> Mapping[str, float]:
        return next(iter(self._inner.versions(inner.id, inner.version.number))).scalars

    def _outcome(self, run: TaskRun, fetched: FetchedVersion, inner: Run) -> TaskOutcome:
        """Return the region's steps with the examples behind each block. Raises TaskFailure for too few sites."""
        manifest = self._inner.manifest(inner.version.digest)
        entry, names = manifest.server_state[COUNTS], [block.name for block in fetched.document.blocks]
        table = from_bytes(self._inner.read_blob(entry.digest, entry.nbytes), entry.dtype).reshape(entry.shape)
        counts = counts_of(names, manifest.scalars, table)
        least = self._region.min_sites
        if counts.sites < least:
            raise TaskFailure("region-too-small", f"updates of {counts.sites} sites were merged; {least} are needed")
        steps = dict[str, Array]()
        for name, (_, sites) in counts.of_blocks.items():
            if (step := manifest.server_state.get(STEP + name)) and sites >= least:
                raw = self._inner.read_blob(step.digest, step.nbytes)
                steps[name] = from_bytes(raw, step.dtype).reshape(step.shape)
        if not steps:
            raise TaskFailure("region-too-small", f"no block was sent by {least} sites or more")
        withheld = len(counts.of_blocks) - len(steps)
        if withheld:
            log.warning("region-blocks-withheld", blocks=withheld, least=least)
        run.report.examples = examples = min(counts.examples, run.env.datasets[run.task.dataset].examples)
        run.report.metrics = {"region_sites": float(counts.sites), "region_withheld_blocks": float(withheld)}
        return TaskOutcome(examples, LocalResult(steps), weights=_weights(counts, examples, steps))


def _rounds_each(inner: Run) -> int:
    """Return the inner rounds for each round of the parent: fixed when the run was created, since its sites plan
    schedules and privacy by them."""
    assert inner.spec.parent  # noqa: S101 (of a region)
    return inner.spec.parent.rounds_each


def _is_same(found: RunSpec, wanted: RunSpec) -> bool:
    """Return True if a run is as `wanted`, but for settings that change while it is live or follow from the region's
    own settings."""
    parent, asked = found.parent, wanted.parent
    assert parent  # noqa: S101 (of a region)
    assert asked  # noqa: S101 (the same)
    cohort = wanted.cohort.model_copy(
        update={"quorum": found.cohort.quorum, "deadline_seconds": found.cohort.deadline_seconds}
    )
    changing = {"terms": parent.terms, "rounds_each": parent.rounds_each, "base": parent.base}
    own = {name: getattr(found, name) for name in ("version", "rounds", "seed")}
    return found == wanted.model_copy(update={**own, "cohort": cohort, "parent": asked.model_copy(update=changing)})


def _manifest(fetched: FetchedVersion) -> Manifest:
    """Return the version for the region: the parent's method and server optimizer keep the rest of their memory."""
    memory = fetched.manifest.server_state.items()
    reference = {name: one for name, one in memory if name.startswith(REFERENCE)}
    return Manifest(blocks=fetched.manifest.blocks, server_state=reference)


def _weights(counts: RegionCounts, examples: int, steps: Mapping[str, Array]) -> dict[str, int]:
    """Return the examples behind each block that fewer than all sites sent, in proportion if fewer examples than
    counted were declared at the parent."""
    behind = {name: counts.of_blocks[name][0] for name in steps}
    return {
        name: max(1, count * examples // counts.examples) for name, count in behind.items() if count < counts.examples
    }


def require_nestable(run: TaskRun, document: Model) -> None:
    """Raise UnsupportedRun for a task that a region's mean cannot do for its sites."""
    task, plan = run.task, run.task.plan
    half = coordinator_half(task.method, facts_of(task, document))
    reasons = {
        f"the method {task.method.name} with these settings merges more than means of blocks: choose another, such "
        "as fedavg": not half.declared("regional").allows(half.settings),
        "cohort.work and cohort.memory: a region has neither local steps nor a latest update of each site": (
            task.cohort.work == "fitted" or task.cohort.memory
        ),
        "the method sends nothing, so that a region has nothing to do: name sites at the region's coordinator": (
            not plan.upload
        ),
        "the plan sends or fetches more than blocks": bool(plan.extra or plan.server_state),
        "secure_sums: the region's coordinator has to see updates": task.secure_sums is not None,
        "client_privacy: its noise is for single sites": task.client_privacy is not None,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UnsupportedRun(
            f"this worker is a region: {'; '.join(found)}. Leave it out, or name the run's sites without regions "
            "(cohort.sites)"
        )

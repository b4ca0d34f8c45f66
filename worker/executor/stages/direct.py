"""The execution of tasks in this process: on one device, in simulations and in tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.updates.base_folder import BaseFolder
from tessera.worker.compute import Compute
from tessera.worker.data.content import digests_of
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.data.overlap import ExampleDigests
from tessera.worker.executor.stages.check import check
from tessera.worker.executor.stages.describe import subject_tables
from tessera.worker.executor.stages.execution import execute
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.executor.stages.run_cache import RunCache
from tessera.worker.model.sandbox import Sandbox
from tessera.worker.model.snapshot import convert_blocks
from tessera.worker.state.base_sources import Take
from tessera.worker.task.environment import SiteRecords, TaskRun
from tessera.worker.task.handover import CheckedModel, FetchedVersion, TaskOutcome
from tessera.worker.training.checkpoints import CheckpointFile, TrainingCheckpoints
from tessera.worker.training.setup import TrainingSetup

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount
    from tessera.worker.privacy.disclosed_counts import SubjectTables
    from tessera.worker.state.checkpoints import TaskCheckpoint


@dataclass(frozen=True, eq=False, repr=False)
class Direct:
    """The execution of tasks in this process, as `task.environment.Executor` describes it."""

    datasets: Mapping[str, Dataset]
    setup: TrainingSetup
    cache: RunCache = field(default_factory=RunCache)
    sandbox: Sandbox | None = None

    @property
    def kind(self) -> str:
        return self.setup.device.type

    @property
    def compute(self) -> Compute:
        return self.setup.compute

    def digests(self, run: TaskRun, dataset: str) -> ExampleDigests:
        return digests_of(self.datasets[dataset], run.check)

    def subjects(self, run: TaskRun, dataset: str) -> SubjectTables:
        return subject_tables(self.datasets[dataset], run.check)

    def check(self, run: TaskRun, document: Model, dataset: DatasetInfo) -> CheckedModel:
        return check(self.local(run), document, run.mapping(document), dataset)

    def convert(self, run: TaskRun, document: Model, folder: BaseFolder, blocks: Iterable[Block], take: Take) -> None:
        convert_blocks(document.config, document.head, folder, blocks, take)

    def execute(
        self, run: TaskRun, fetched: FetchedVersion, account: PrivacyAccount | None, checkpoint: TaskCheckpoint | None
    ) -> TaskOutcome:
        checkpoints = None
        if checkpoint:
            checkpoints = TrainingCheckpoints(CheckpointFile.of(checkpoint), run.env.checkpoint_seconds)
        return execute(self.local(run), fetched, self.datasets[run.task.dataset], account, checkpoints)

    def local(self, run: TaskRun) -> LocalTask:
        """Return a task's context in this process."""
        records = SiteRecords(run)
        return LocalTask(
            run.task.model_copy(update={"seed": run.training_seed}),
            run.env,
            records,
            self.setup,
            self.cache,
            run.env.scratch,
            run.check,
            run.report,
            records.loss_scale(),
            self.sandbox,
            run.env.noise_key(run.task),
        )

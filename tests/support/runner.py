"""A worker's runner that executes tasks in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.worker.data.dataset import Dataset
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.state.vault import Vault
from tessera.worker.task.environment import Coordinator, Shelf
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.setup import TrainingSetup


def task_runner(
    client: Coordinator, datasets: Mapping[str, Dataset], setup: TrainingSetup, vault: Vault, shelf: Shelf,
    scratch: Path, **given: Any,
) -> TaskRunner:  # fmt: skip
    infos = {name: dataset.info for name, dataset in datasets.items()}
    return TaskRunner(client, infos, Direct(datasets, setup), vault, shelf, scratch, **given)

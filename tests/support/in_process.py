"""An executor for an agent in the process of a test, for tests of what executes tasks, or that change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.worker.data.dataset_info import Inventory
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.inventory import datasets_of, inventory_of
from tessera.worker.model.sandbox import Sandbox, shared_folder
from tessera.worker.settings import WorkerSettings
from tessera.worker.training.setup import TrainingSetup
from tests.support.tasks import CPU


@dataclass(frozen=True, eq=False, repr=False)
class InProcess(Direct):
    facts: Inventory = field(default_factory=lambda: Inventory({}))

    def inventory(self) -> Inventory:
        return self.facts

    def is_outdated(self) -> bool:
        return False

    def memory_bytes(self) -> int:
        return 0

    def settle(self, ask: Any) -> None:
        pass

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass


def in_process(settings: WorkerSettings) -> Any:
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    datasets = datasets_of(settings.sources, make=True)
    setup = TrainingSetup(CPU, settings.micro_batch, settings.compute)
    facts = inventory_of(settings.datasets, datasets)
    return InProcess(datasets, setup, sandbox=Sandbox(shared_folder()), facts=facts)

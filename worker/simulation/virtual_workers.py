"""The virtual workers, which run their tasks one after the other and share one cache of models."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tessera.shared.api.runs import Measurement
from tessera.shared.api.tasks import Task, TaskView
from tessera.shared.problems import InvalidUpdate, Problem, WorkerFailed
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.executor.stages.run_cache import ModelCache, RunCache
from tessera.worker.faults.failures import REPORTABLE, failure_of
from tessera.worker.governance.policy import Policy
from tessera.worker.model.layouts import MappingFile
from tessera.worker.simulation.in_process_coordinator import InProcessCoordinator, Order
from tessera.worker.simulation.secure_sums import party_of
from tessera.worker.simulation.virtual_sites import VirtualSites
from tessera.worker.state.atomic_files import sweep
from tessera.worker.state.site_keys import SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup

EVALUATOR = "evaluator"
"""The site that holds the central data set, and does not train."""

OF_THE_RUN: tuple[type[Exception], ...] = (TaskFailure, Problem, *REPORTABLE)
"""Failures that a run tolerates. Any other is a bug, and ends the simulation."""


@dataclass(frozen=True)
class Workers:
    population: VirtualSites
    test: Dataset | None
    coordinator: InProcessCoordinator
    folder: Path
    device: torch.device
    policy: Policy
    mappings: Mapping[str, MappingFile]
    models: ModelCache = field(default_factory=ModelCache)
    _vaults: dict[Path, Vault] = field(default_factory=dict)

    def settle(self) -> None:
        """Commit or discard the vaults' pending files of finished rounds."""
        for site in self.population.holdings:
            if (home := self._home(site)).exists():
                sweep(home)
                Vault(home / "vault", durable=False).settle(self.coordinator.task)

    def train(self, order: Order) -> TaskView:
        """Run the task. Return its outcome."""
        try:
            self._do(order, self._data(order))
        except InvalidUpdate as problem:
            return self.coordinator.view(order, "rejected", problem)
        except OF_THE_RUN as fault:
            return self.coordinator.view(order, "failed", WorkerFailed.of(*failure_of(fault)))
        return self.coordinator.task(order.id)

    def evaluate(self, order: Order) -> Measurement | TaskView:
        """Measure a version. Return the measurement, or the failed task if it cannot be measured there."""
        try:
            if order.held_out:
                self._do(order, self._data(order))
            elif self.test:
                self._do(order, self.test)
        except OF_THE_RUN as fault:
            return self.coordinator.view(order, "failed", WorkerFailed.of(*failure_of(fault)))
        return self.coordinator.measurement(order)

    def _do(self, order: Order, dataset: Dataset) -> None:
        central = order.kind == "evaluate" and not order.held_out
        site = None if central else self.population.site_of(order.worker)
        home = self._home(site) if site else self.folder / "evaluator"
        shelf = self.coordinator.shelf(order)
        task = self.coordinator.give(order, shelf)
        runner = TaskRunner(
            coordinator=self.coordinator,
            datasets={task.dataset: dataset.info},
            executor=Direct({task.dataset: dataset}, TrainingSetup(self.device), RunCache(self.models)),
            for_evaluation=frozenset({task.dataset} if central else ()),
            vault=self._vault(home),
            shelf=shelf,
            scratch=home,
            # The sites' examples are all here.
            policy=self.policy.model_copy(update={"send_class_counts": True}),
            mappings=self.mappings,
            resources=self.population.participant(site, order.number).resources if site else {},
            seed_key=self.population.seed_key(site, in_sum=task.sums is not None) if site else None,
            full_precision=True,
            noise_key=noise_key_of,
            sums=self._party(site) if site and task.sums else None,
        )
        runner.run(task, lambda: None, Report())

    def _data(self, order: Order) -> Dataset:
        return self.population.dataset(self.population.site_of(order.worker), order.number)

    def _party(self, site: str) -> SumParty:
        return party_of(site, self.coordinator.helpers, self.population.weight(site))

    def _vault(self, home: Path) -> Vault:
        if home not in self._vaults:
            self._vaults[home] = Vault(home / "vault", durable=False)
        return self._vaults[home]

    def _home(self, site: str) -> Path:
        return self.folder / "sites" / site


def noise_key_of(task: Task) -> bytes:
    """Derive a private task's noise key from the run's seed, so that a simulation is reproducible.

    The seed is in the run's settings, so this noise protects no data.
    """
    return hashlib.sha256(f"{task.seed}/{task.id}".encode()).digest()

"""The memory of a coordinator's processes, read from outside: no unmasked update is in it during a secure sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load

from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.rounds.planning import training_seed
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.updates.codecs.delta import difference
from tessera.shared.updates.model_folder import ModelFolder
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, memory_of, worker_process
from tests.support.secure_sums import integers_of
from tests.system.test_secure_sums import PARTS, SITES, Keep, begun, settings, started
from safetensors.torch import save_file
from tessera.worker.simulation.virtual_sites import WORKER

Arrays = Mapping[str, np.ndarray]
TRACE = 16
"""Values in a row that tell an update from all else."""


@pytest.fixture
def coordinators(tmp_path: Path) -> Iterator[tuple[CoordinatorProcess, CoordinatorProcess]]:
    with CoordinatorProcess(tmp_path / "plain") as plain, CoordinatorProcess(tmp_path / "secret") as secret:
        yield plain, secret


def updates_of(client: Client, run: Run) -> dict[str, Arrays]:
    """The plain updates of the first round, by site: without a codec, the new values."""
    (first,) = client.rounds(run.id)
    return {task.worker.split("/")[0]: load(client.read_blob(task.update or "")) for task in first.tasks}

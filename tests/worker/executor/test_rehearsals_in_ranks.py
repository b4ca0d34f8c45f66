"""Several processes rehearse together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera.shared.run_settings import Privacy
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import LiveCoordinator
from tests.support.tasks import CPU, images
from tests.worker.executor.conftest import InMemory
from tests.worker.task.test_rehearsals import COUNT, PRIVATE, Site


@pytest.mark.parametrize("privacy", [None, PRIVATE], ids=["open", "private"])
def test_ranks_rehearse_without_a_word_to_the_ledger(
    coordinator: LiveCoordinator, tmp_path: Path, executor: ProcessExecutor, privacy: Privacy | None
) -> None:
    site = Site(coordinator, tmp_path)
    here = Direct({"data": images(COUNT)}, TrainingSetup(CPU))
    site.runner = replace(site.runner, executor=InMemory(executor, here))
    _, report = site.rehearse(privacy=privacy)
    assert (report.examples, report.steps, report.synthetic) == (COUNT, 10, privacy is not None)
    assert min(report.train_seconds, report.update_bytes) > 0
    assert site.ledger.read("data") == ()

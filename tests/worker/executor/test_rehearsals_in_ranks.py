"""Several processes rehearse, and attack a version, together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera.shared.metrics.membership import membership_figures
from tessera.shared.run_settings import Privacy
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import LiveCoordinator
from tests.support.tasks import CPU, images
from tests.worker.executor.conftest import InMemory
from tests.worker.task import test_membership
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


def test_ranks_find_the_losses_that_one_process_finds(
    coordinator: LiveCoordinator, tmp_path: Path, executor: ProcessExecutor
) -> None:
    site = test_membership.Site(coordinator, tmp_path, test_membership.pictures())
    run = site.train()
    # Without memory of the first answer.
    alone = site.attack(run, described=None)
    site.ask(run)
    task, here = site.worker.take(), Direct({"data": site.data}, TrainingSetup(CPU))
    runner = replace(site.runner(described=None), executor=InMemory(executor, here))
    runner.run(task, lambda: None, Report())
    (together,) = site.admin.reports(task.run)
    figures = [membership_figures([each])[0].figures["auroc"].value for each in (alone, together)]
    # A loss may be rounded into the next bin.
    assert figures[0] == pytest.approx(figures[1], abs=0.01)
    assert figures[0] > 0.65

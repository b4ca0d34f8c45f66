"""What a worker tells Prometheus: a file, whole at any moment, that the documents describe."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tessera.worker.metrics_file import WorkerCounts
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "worker.md"


def told(file: Path) -> dict[tuple[str, ...], float]:
    """Each sample's value, by its name and the values of its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }


def test_a_file_tells_of_claims_and_tasks(tmp_path: Path) -> None:
    file = tmp_path / "tessera.prom"
    figures = WorkerCounts(file)
    figures.asking(1_800_000_000.0)
    assert told(file)["tessera_worker_last_claim_timestamp_seconds",] == 1_800_000_000.0
    figures.ended("train", "done", 7.0, received_bytes=100, sent_bytes=10)
    figures.ended("train", "failed", 70.0, received_bytes=1, sent_bytes=0)
    found = told(file)
    assert found["tessera_worker_tasks_total", "train", "done"] == 1
    assert found["tessera_worker_tasks_total", "train", "failed"] == 1
    assert found["tessera_worker_task_duration_seconds_sum", "train"] == 77.0
    assert found["tessera_worker_received_bytes_total",] == 101
    assert found["tessera_worker_sent_bytes_total",] == 10
    # What it was written under first is gone.
    assert list(tmp_path.iterdir()) == [file]


def test_a_task_whose_update_waits_for_a_release_is_not_counted_twice(tmp_path: Path) -> None:
    file = tmp_path / "tessera.prom"
    figures = WorkerCounts(file)
    for outcome in ("held", "done"):
        figures.ended("train", outcome, 7.0, received_bytes=100, sent_bytes=0)
    found = told(file)
    assert {key[1:] for key in found if key[0] == "tessera_worker_tasks_total"} == {("train", "done")}
    assert found["tessera_worker_received_bytes_total",] == 100


def test_a_worker_that_cannot_write_its_figures_works_on(tmp_path: Path) -> None:
    with capture_logs() as lines:
        WorkerCounts(tmp_path / "not-there" / "tessera.prom").asking(0.0)
    assert [line["event"] for line in lines] == ["figures-not-written"]


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    WorkerCounts(None).ended("evaluate", "done", 1.0, received_bytes=0, sent_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_every_figure_is_described() -> None:
    document = DOCUMENT.read_text()
    assert [family.name for family in WorkerCounts(None).registry.collect() if family.name not in document] == []

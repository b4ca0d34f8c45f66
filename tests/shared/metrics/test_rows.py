"""A run's measurements in long form, from literals."""

from __future__ import annotations

import csv
import io
from datetime import timedelta

from tessera.shared.api.runs import Measurement, Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.rows import MetricRow, rows_of, write_csv
from tests.support.literals import AT, round_of, run_of, view_of

RUN, task = run_of(), view_of


def a_round(*tasks: TaskView, state: str = "committed", version: int | None = 1) -> Round:
    ended = AT + timedelta(seconds=12.5)
    return round_of(*tasks, attempt=2, state=state, stage="warm-up", closed_at=ended, version=version)


def measured(worker: str, *, held_out: bool, **metrics: float) -> Measurement:
    dataset = "data" if held_out else "test"
    return Measurement(version=1, dataset=dataset, worker=worker, held_out=held_out, examples=5, metrics=metrics)


def test_a_round_has_a_row_for_each_number_of_each_accepted_update_and_for_its_totals() -> None:
    done = task("a/w", examples=10, metrics={"loss": 0.5}, upload_bytes=7, download_bytes=9)
    rows = list(rows_of(RUN, [a_round(done, task("b/w", "failed"))], [], []))
    where = ("r", 1, 1, 2, "warm-up", "data")
    assert rows == [
        MetricRow(*where, "a", "w", "loss", 0.5),
        MetricRow(*where, "a", "w", "examples", 10.0),
        MetricRow(*where, "a", "w", "upload_bytes", 7.0),
        MetricRow(*where, "a", "w", "download_bytes", 9.0),
        MetricRow(*where, None, None, "asked", 2.0),
        MetricRow(*where, None, None, "accepted", 1.0),
        MetricRow(*where, None, None, "upload_bytes", 7.0),
        MetricRow(*where, None, None, "download_bytes", 9.0),
        MetricRow(*where, None, None, "seconds", 12.5),
    ]


def test_an_abandoned_attempt_has_rows_and_no_version() -> None:
    spent = a_round(task("a/w", upload_bytes=7), state="abandoned", version=None)
    rows = list(rows_of(RUN, [spent], [], []))
    assert {row.version for row in rows} == {None}
    assert MetricRow("r", None, 1, 2, "warm-up", "data", None, None, "upload_bytes", 7.0) in rows


def test_evaluations_and_figures_over_sites_have_rows_of_their_own() -> None:
    found = [
        measured("j/w", held_out=False, accuracy=0.5),
        measured("a/w", held_out=True, accuracy=0.25),
        measured("b/w", held_out=True, accuracy=0.75),
    ]
    rows = list(rows_of(RUN, [], [], found))
    assert rows[:9] == [
        MetricRow("r", 1, None, None, "central", "test", "j", "w", "accuracy", 0.5),
        MetricRow("r", 1, None, None, "central", "test", "j", "w", "examples", 5.0),
        MetricRow("r", 1, None, None, "central", "test", "j", "w", "download_bytes", 0.0),
        MetricRow("r", 1, None, None, "sites", "data", "a", "w", "accuracy", 0.25),
        MetricRow("r", 1, None, None, "sites", "data", "a", "w", "examples", 5.0),
        MetricRow("r", 1, None, None, "sites", "data", "a", "w", "download_bytes", 0.0),
        MetricRow("r", 1, None, None, "sites", "data", "b", "w", "accuracy", 0.75),
        MetricRow("r", 1, None, None, "sites", "data", "b", "w", "examples", 5.0),
        MetricRow("r", 1, None, None, "sites", "data", "b", "w", "download_bytes", 0.0),
    ]
    # Two sites are too few for a worst tenth.
    assert {(row.metric, row.site, row.value) for row in rows[9:]} == {
        ("accuracy.sites", None, 2.0),
        ("accuracy.mean", None, 0.5),
        ("accuracy.weighted_mean", None, 0.5),
        ("accuracy.worst", "a", 0.25),
        ("accuracy.deviation", None, 0.25),
    }
    assert {(row.stage, row.dataset, row.version) for row in rows[9:]} == {("fairness", "data", 1)}


def test_the_first_attempt_at_a_round_counts_what_evaluations_before_it_fetched() -> None:
    fetched = [measured("a/w", held_out=True).model_copy(update={"version": n, "download_bytes": 5}) for n in (0, 1)]
    first = a_round(task("a/w", download_bytes=1), state="abandoned", version=None).model_copy(update={"attempt": 1})
    rows = rows_of(RUN, [first, a_round(task("a/w", download_bytes=2))], [], fetched)
    totals = [row.value for row in rows if row.metric == "download_bytes" and row.round and not row.site]
    # The run has one round: its last, which counts both versions.
    assert totals == [11.0, 2.0]


def test_comma_separated_values_read_back_as_they_were() -> None:
    rows = [MetricRow("r", 1, None, None, "sites", "data", "a", "w", "=loss", -1 / 3)]
    file = io.StringIO()
    write_csv(rows, file)
    (read,) = csv.DictReader(io.StringIO(file.getvalue()))
    assert list(read) == list(MetricRow._fields)
    assert (float(read["value"]), read["round"], read["site"]) == (-1 / 3, "", "a")
    # A worker chose the name, and a spreadsheet would compute it.
    assert read["metric"] == "'=loss"

"""What the dashboard reads of a run that has more versions than a chart shows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tessera.coordinator.dashboard.queries import evaluations, latest_scores, measured, round_costs, score_curves
from tessera.coordinator.db import views
from tessera.coordinator.db.tables import SiteRow, WorkerRow
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import MethodSpec
from tessera.shared.metrics.comparison import best_version, totals
from tessera.shared.metrics.site_spread import Measured
from tests.support.storage import NOW, add_round, add_run, add_task, add_worker, migrated

SPEC = RunSpec(
    name="run", method=MethodSpec(name="fedavg"), model=f"sha256:{'1' * 64}", version=f"sha256:{'2' * 64}",
    dataset="data", rounds=40,
)  # fmt: skip


def figures(one: Measured) -> tuple[object, ...]:
    return one.version, one.worker, one.site, one.held_out, one.labels, one.metrics, one.class_counts


@pytest.mark.both_databases
@pytest.mark.parametrize(("central", "metric"), [(True, None), (False, None), (False, "f1"), (False, 'odd"')])
def test_the_best_of_all_evaluated_versions_is_among_those_shown(
    tmp_path: Path, central: bool, metric: str | None
) -> None:
    database, dice = migrated(tmp_path), random.Random(5)
    with database.transaction() as session:
        add_run(session).spec = SPEC.model_dump(mode="json")
        for name in "a" if central else "abc":
            session.add(SiteRow(id=name, name=name, created_at=NOW))
            session.flush()
            session.add(WorkerRow(id=name, site_id=name, name="w", declared={}, created_at=NOW, last_seen_at=NOW))
            session.flush()
            for number in range(0, 40, 2):
                # Some sites are absent, and a site that measured nothing has no weight.
                if dice.random() < 0.8:
                    add_task(
                        session, f"{name}-{number}", name, "accepted", round_id=None, kind="evaluate",
                        held_out=not central, version_number=number, examples=dice.choice([0, 5, 20]),
                        metrics={"accuracy": dice.random(), "f1": dice.random(), 'odd"': dice.random()},
                    )  # fmt: skip
    with database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, "run"))
        everything = views.measurements(session, run.id, run.spec)
        every = evaluations(session, run, metric)
        best = best_version(every, metric=metric)
        shown = measured(session, run, every, 5, [best.number] if best else [])
        assert list(map(figures, measured(session, run, every, 100))) == list(map(figures, everything))
    database.close()
    assert len({one.version for one in shown}) <= 7
    assert figures(shown[-1]) == figures(everything[-1])
    if metric != 'odd"':
        assert best is not None
        assert best == best_version(everything, metric=metric)
        assert best.number in {one.version for one in shown}


def test_the_latest_score_is_over_all_workers_that_measured_and_of_own_models(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    with database.transaction() as session:
        add_run(session).spec = SPEC.model_dump(mode="json")
        session.add(SiteRow(id="a", name="a", created_at=NOW))
        session.flush()
        for number in range(201):
            name = f"w{number:03}"
            session.add(WorkerRow(id=name, site_id="a", name=name, declared={}, created_at=NOW, last_seen_at=NOW))
            session.flush()
            add_task(
                session, name, name, "accepted", round_id=None, kind="evaluate", held_out=True, version_number=1,
                examples=10, metrics={"accuracy": float(number == 200)},
            )  # fmt: skip
    with database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, "run"))
        assert latest_scores(session, ["run"])["run"] == {"accuracy": pytest.approx(1 / 201)}
        at = run.model_copy(update={"version": run.version.model_copy(update={"number": 1})})
        assert score_curves(session, [(at, "accuracy")]) == {"run": [pytest.approx(1 / 201)]}
    # A version of own models is shown by these, and best by these.
    with database.transaction() as session:
        for name, own in (("w000", 0.5), ("w001", 0.7)):
            add_task(
                session, f"own-{name}", name, "accepted", round_id=None, kind="evaluate", held_out=True,
                version_number=2, examples=10, metrics={"accuracy": 0.1, "personal_accuracy": own},
            )  # fmt: skip
    with database.snapshot() as session:
        assert latest_scores(session, ["run"])["run"] == {"personal_accuracy": pytest.approx(0.6)}
        best = best_version(evaluations(session, run))
    database.close()
    assert best is not None
    assert (best.number, best.metric) == (2, "personal_accuracy")


@pytest.mark.both_databases
def test_a_curve_that_reads_all_versions_or_mixes_central_figures_with_those_of_sites(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    with database.transaction() as session:
        add_run(session).spec = SPEC.model_dump(mode="json")
        for name, labels, best in (("a", 10, 40), ("b", 30, 80)):
            session.add(SiteRow(id=name, name=name, created_at=NOW))
            session.flush()
            session.add(WorkerRow(id=name, site_id=name, name="w", declared={}, created_at=NOW, last_seen_at=NOW))
            session.flush()
            for number in range(40):
                add_task(
                    session, f"{name}-{number}", name, "accepted", round_id=None, kind="evaluate", held_out=True,
                    version_number=number, examples=labels, metrics={"accuracy": number / best},
                )  # fmt: skip
    with database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, "run"))
        run = run.model_copy(update={"version": run.version.model_copy(update={"number": 39})})
        # Each label counts alike: (10 * n / 40 + 30 * n / 80) / 40 = n / 64.
        expected = [number / 64 for number in [*range(0, 39, 5), 39]]
        assert score_curves(session, [(run, "accuracy"), (run, "")]) == {"run": pytest.approx(expected)}
    with database.transaction() as session:
        # A sum of what a site may report fits no float of a database.
        add_task(
            session, "boast", "a", "accepted", round_id=None, kind="evaluate", held_out=False, version_number=5,
            examples=5, metrics={"accuracy": 1.7e308},
        )  # fmt: skip
        for number in (0, 39):
            add_task(
                session, f"central-{number}", "a", "accepted", round_id=None, kind="evaluate", held_out=False,
                version_number=number, examples=5, metrics={"accuracy": 0.5},
            )  # fmt: skip
    with database.snapshot() as session:
        assert score_curves(session, [(run, "accuracy")]) == {"run": [0.5, 0.5]}
    database.close()


@pytest.mark.both_databases
def test_a_version_costs_the_bytes_of_abandoned_attempts_and_of_evaluations_too(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    with database.transaction() as session:
        add_run(session).spec = SPEC.model_dump(mode="json")
        add_worker(session)
        for number, attempt, state in ((1, 1, "abandoned"), (1, 2, "committed"), (2, 1, "committed")):
            add_round(session, number=number, attempt=attempt, state=state).closed_at = NOW + 10 * number
        trained = {"failed": (1, 1), "accepted": (1, 2), "expired": (2, 1)}
        for state, (number, attempt) in trained.items():
            add_task(session, state, state=state, round_id=f"run-{number}-{attempt}", version_number=number - 1,
                     upload_bytes=number, download_bytes=10 * number)  # fmt: skip
        for state, number in (("accepted", 0), ("accepted", 1), ("failed", 1)):
            add_task(session, f"evaluated-{state}-{number}", state=state, kind="evaluate", held_out=True,
                     round_id=None, version_number=number, download_bytes=100)  # fmt: skip
    with database.snapshot() as session:
        costs = round_costs(session, views.run_view(session, views.find_run(session, "run")))
    database.close()
    assert [cost.version for cost in costs] == [None, 1, 2]
    # Round 1: two downloads of 10, two uploads of 1 and an evaluation; round 2: 20, 2 and its accepted evaluation.
    assert totals(costs) == ({0: 0, 1: 122, 2: 122 + 122}, {0: 0.0, 1: 20.0, 2: 40.0})

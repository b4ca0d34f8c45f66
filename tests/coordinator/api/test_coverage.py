"""The part of a federation that a version rests on: said everywhere, and green nowhere if large sites are missing."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.coordinator.alerts.attention import LATELY_SECONDS
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Coverage, Run, SiteCoverage
from tessera.shared.api.tasks import AdvertisedPolicy
from tests.coordinator.dashboard.conftest import signed_in
from tests.shared.cli.test_metrics import MLFLOW_SECONDS
from tests.support.cli import process, tessera
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()
START = values(MODEL)


@dataclass
class Federation:
    """Sites by what they declare, with a worker each."""

    live: LiveCoordinator
    examples: dict[str, int]
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for site, count in self.examples.items():
            self.workers[site] = ScriptedWorker(self.live.client("site", site), datasets={"data": count}).enrol()

    def start(self, cohort: Cohort, rounds: int = 1, **spec: Any) -> Run:
        return start_run(self.live.client(), MODEL, START, cohort=cohort, rounds=rounds, **spec)

    def train(self, *sites: str, **steps: float) -> None:
        """Have these sites take their task and send an update."""
        for site in sites:
            worker = self.workers[site]
            worker.train(worker.take(), step=steps.get(site, 1.0))

    def reached(self, run: Run, number: int) -> Run:
        until(lambda: self.live.client().run(run.id).version.number == number)
        return self.live.client().run(run.id)

    def missed(self, run: Run) -> dict[str, SiteCoverage]:
        return {one.site: one for one in self.live.client("viewer").coverage(run.id)}

    def codes(self) -> set[str]:
        services = self.live.services
        with services.database.snapshot() as session:
            return {alert.code for alert in services.alerts(session, services.database.now())}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(tmp_path: Path, clock: Clock) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path, clock=clock) as live:
        yield live


def command(live: LiveCoordinator, *arguments: str) -> Any:
    return tessera(*arguments, TESSERA_URL=live.url, TESSERA_TOKEN=live.token("orchestrator"))


def test_a_run_whose_largest_site_is_cut_off_looks_green_nowhere(
    live: LiveCoordinator, clock: Clock, tmp_path: Path
) -> None:
    # MediSwarm's finding: the slowest site is the largest, and each round ends without it.
    federation = Federation(live, {"large": 600, "a": 200, "b": 200})
    run = federation.start(Cohort(target_updates=2), rounds=2)
    for number in (1, 2):
        federation.workers["large"].take()
        federation.train("a", "b")
        federation.reached(run, number)
    until(lambda: live.client().run(run.id).state == "completed")
    ended = live.client().run(run.id)
    assert ended.coverage == Coverage(sites=2 / 3, examples=0.4, low=True)
    assert federation.missed(run) == {
        "large": SiteCoverage(
            site="large", examples=600, missed=2,
            reason="its update had not come when the round closed: 2 updates are enough",
        ),
        "a": SiteCoverage(site="a", examples=200, missed=0),
        "b": SiteCoverage(site="b", examples=200, missed=0),
    }  # fmt: skip
    # The API and exports of metrics.
    assert [version.scalars.get("coverage.examples") for version in live.client().versions(run.id)] == [
        None,
        0.4,
        0.4,
    ]
    exported = command(live, "run", "metrics", run.id).stdout
    assert re.search(r"^\w+,2,,,version,,,,coverage\.low,1\.0$", exported, re.MULTILINE)
    # Commands.
    assert "completed, low coverage" in command(live, "run", "list").stdout
    shown = command(live, "run", "show", run.id).stdout
    assert "completed, low coverage" in shown
    assert "40% of the examples, 67% of the sites" in shown
    assert re.search(r"^large +600 +2 +its update had not come", shown, re.MULTILINE)
    assert json.loads(command(live, "run", "show", run.id, "--json").stdout)["coverage"][0]["missed"] == 2
    watched = command(live, "run", "watch", run.id)
    assert watched.returncode == 3
    assert "low coverage: 40% of the examples" in watched.stdout
    written = command(live, "run", "export", run.id, str(tmp_path / "model.safetensors"))
    assert "rests on 40% of the examples" in written.stderr
    # The dashboard, and a notice for a day.
    person = signed_in(live)
    for path in ("/page/", "/page/runs", f"/page/runs/{run.id}", "/page/storage", f"/page/runs/compare?run={run.id}"):
        assert 'class="state completed"' not in person.http.get(path).text, path
    page = person.http.get(f"/page/runs/{run.id}").text
    assert "its update had not come when the round closed" in page
    assert "run-coverage" in federation.codes()
    clock.advance(LATELY_SECONDS + 1)
    assert "run-coverage" not in federation.codes()


@pytest.mark.long
def test_mlflow_does_not_show_a_run_of_low_coverage_as_a_success(live: LiveCoordinator, tmp_path: Path) -> None:
    federation = Federation(live, {"large": 600, "a": 200})
    run = federation.start(Cohort(target_updates=1))
    federation.train("a")
    until(lambda: live.client().run(run.id).state == "completed")
    store, token = f"sqlite:///{tmp_path}/mlflow.db", live.token("viewer")
    given = {"TESSERA_URL": live.url, "TESSERA_TOKEN": token}
    written = process("run", "metrics", run.id, "--mlflow", store, seconds=MLFLOW_SECONDS, **given)
    assert written.returncode == 0, written.stderr
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as made:
        assert made.execute("SELECT status FROM runs").fetchall() == [("FAILED",)]
        (told,) = made.execute("SELECT value FROM tags WHERE key = 'tessera.coverage'").fetchone()
        assert told == "low: 25% of the examples, 50% of the sites"
        assert made.execute("SELECT value FROM metrics WHERE key = 'version/coverage.low'").fetchall() == [(1.0,)]


def test_a_version_that_rests_on_all_sites_has_full_coverage(live: LiveCoordinator) -> None:
    federation = Federation(live, {"large": 600, "a": 200})
    run = federation.start(Cohort(quorum=2))
    federation.train("large", "a")
    assert federation.reached(run, 1).coverage == Coverage(sites=1, examples=1, low=False)
    until(lambda: live.client().run(run.id).state == "completed")
    assert "run-coverage" not in federation.codes()
    assert command(live, "run", "watch", run.id).returncode == 0


def test_coverage_recovers_once_a_large_site_takes_part_in_half_of_the_rounds(live: LiveCoordinator) -> None:
    federation = Federation(live, {"large": 600, "a": 200})
    run = federation.start(Cohort(target_updates=1), rounds=3)
    federation.train("a")
    assert federation.reached(run, 1).has_low_coverage
    federation.train("large")
    # One of two rounds: not most of them.
    assert federation.reached(run, 2).coverage == Coverage(sites=0.5, examples=0.75, low=False)
    assert (federation.missed(run)["large"].missed, federation.missed(run)["a"].missed) == (0, 1)


@pytest.mark.parametrize(("least", "low"), [(0.8, False), (0.81, True)])
def test_less_than_the_run_s_own_minimum_is_low(live: LiveCoordinator, least: float, low: bool) -> None:
    federation = Federation(live, {"large": 800, "small": 200})
    run = federation.start(Cohort(target_updates=1, min_coverage=least), rounds=2)
    federation.train("large")
    assert federation.reached(run, 1).coverage == Coverage(sites=0.5, examples=0.8, low=low)
    assert ("run-coverage" in federation.codes()) == low


def test_sites_that_were_not_drawn_do_not_make_a_run_look_bad(live: LiveCoordinator) -> None:
    federation = Federation(live, dict.fromkeys("abcd", 100))
    run = federation.start(Cohort(size=1))
    (task,) = until(lambda: [one.tasks for one in live.client().rounds(run.id)])[0]
    federation.train(task.worker[0])
    assert federation.reached(run, 1).coverage == Coverage(sites=0.25, examples=0.25, low=False)
    others = [one for site, one in federation.missed(run).items() if site != task.worker[0]]
    assert {(one.missed, one.reason) for one in others} == {(1, "it was not drawn, or joined later")}


def test_each_site_that_was_not_asked_is_named_with_the_reason(live: LiveCoordinator, clock: Clock) -> None:
    federation = Federation(live, {"silent": 300, "strict": 200, "a": 100})
    clock.advance(live.settings.liveness_seconds + 1)
    strict = federation.workers["strict"]
    strict.advertised_policy = AdvertisedPolicy(max_batch=1)
    strict.enrol()
    failing = ScriptedWorker(live.client("site", "failing"), datasets={"data": 50}).enrol()
    federation.workers["a"].enrol()
    # Another data set, and a site that is suspended: neither is one of the run's.
    ScriptedWorker(live.client("site", "other"), datasets={"x": 900}).enrol()
    ScriptedWorker(live.client("site", "left"), datasets={"data": 900}).enrol()
    left = next(site for site in live.client().sites() if site.name == "left")
    live.client().suspend_site(left.id)
    run = federation.start(Cohort(quorum=1))
    failing.fail(failing.take())
    federation.train("a")
    federation.reached(run, 1)
    # A site that comes later misses no round of before.
    clock.advance(1)
    ScriptedWorker(live.client("site", "late"), datasets={"data": 5}).enrol()
    reasons = {site: (one.missed, one.reason) for site, one in federation.missed(run).items()}
    assert reasons == {
        "silent": (1, "none of its workers calls"),
        "strict": (1, "max_batch: a batch of 32 is more than its 1"),
        "a": (0, ""),
        "failing": (1, "worker-failed: failed: no"),
        "late": (0, ""),
    }


def test_sites_learn_neither_coverage_nor_which_others_are_required(live: LiveCoordinator) -> None:
    federation = Federation(live, {"north": 600, "south": 200})
    run = federation.start(Cohort(quorum=2, require=("north", "south")), rounds=2)
    federation.train("north", "south")
    assert federation.reached(run, 1).coverage
    seen = live.client("site", "south").run(run.id)
    assert (seen.coverage, seen.spec.cohort.require) == (None, ("south",))
    assert "north" not in live.http("site", "south").get(f"/v1/runs/{run.id}").text
    assert live.http("site", "south").get(f"/v1/runs/{run.id}/coverage").status_code == 403


# ---------------------------------------------------------------- required sites


def test_a_round_without_a_required_site_is_tried_again_and_not_merged(live: LiveCoordinator, clock: Clock) -> None:
    federation = Federation(live, {"north": 600, "a": 200, "b": 200})
    run = federation.start(Cohort(require=("north",), deadline_seconds=100, max_attempts=3))
    federation.train("a", "b")
    federation.workers["north"].fail(federation.workers["north"].take())
    (tried, _) = until(lambda: len(found := list(live.client().rounds(run.id))) == 2 and found)
    assert (tried.state, tried.version) == ("abandoned", None)
    assert tried.reason is not None
    assert tried.reason.startswith(
        "2 of 3 updates came and no more can come; cohort.require names north (north/w: failed"
    )
    assert live.client().run(run.id).version.number == 0
    federation.train("a", "b", "north")
    assert federation.reached(run, 1).coverage == Coverage(sites=1, examples=1, low=False)


def test_a_run_waits_for_a_required_site_and_says_for_which(live: LiveCoordinator, clock: Clock) -> None:
    federation = Federation(live, {"a": 200})
    run = federation.start(Cohort(require=("north",)))
    found = live.client().preview_run(run.spec)
    assert (found.eligible, found.lacking, found.missing_sites) == (1, ("north",), ("north",))
    assert "north would not take part, and cohort.require names it: no round would be merged" in found.warnings
    clock.advance(1)
    live.services.conductor.step()
    assert list(live.client().rounds(run.id)) == []
    assert "north must take part" in signed_in(live).http.get(f"/page/runs/{run.id}").text
    federation.workers["north"] = ScriptedWorker(live.client("site", "north")).enrol()
    federation.train("a", "north")
    federation.reached(run, 1)


def test_a_round_is_not_merged_without_a_required_update_that_is_far_too_large(live: LiveCoordinator) -> None:
    federation = Federation(live, dict.fromkeys(("north", "a", "b", "c"), 100))
    run = federation.start(Cohort(quorum=4, require=("north",), max_attempts=1), max_norm_of_median=3.0)
    federation.train("a", "b", "c", "north", north=100.0)
    until(lambda: live.client().run(run.id).state == "paused")
    (tried,) = live.client().rounds(run.id)
    assert (tried.state, tried.reason) == (
        "abandoned", "cohort.require names north, whose update was left out: its norm is too large",
    )  # fmt: skip
    assert live.client().run(run.id).version.number == 0


@pytest.mark.parametrize(
    ("cohort", "said"),
    [
        ({"require": ["a", "b"], "size": 1}, "require names 2 sites, and a cohort has 1"),
        ({"require": ["a", "b"], "sites": ["b"]}, "require names a: add it to sites too"),
        ({"min_coverage": 0}, "greater than 0"),
        ({"min_coverage": 1.1}, "less than or equal to 1"),
    ],
)
def test_a_cohort_that_cannot_be_had_is_refused(cohort: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Cohort.model_validate(cohort)

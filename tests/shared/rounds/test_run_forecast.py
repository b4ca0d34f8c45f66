"""The forecast of a whole run: the arithmetic of hours, bytes and epsilon."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.rehearsals import Rehearsal
from tessera.shared.api.runs import Privacy, RunSpec, SiteReport
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import OF_WORKERS, WorkerFailed
from tessera.shared.rounds.run_forecast import RunForecast
from tests.support.task_document import NO_DIGEST

PACE = {
    "examples": 100, "steps": 10, "check_seconds": 5.0, "load_seconds": 2.0, "train_seconds": 30.0,
    "fetch_seconds": 4.0, "download_bytes": 4_000, "version_bytes": 8_000, "sent_bytes": 2_000, "update_bytes": 1_000,
}  # fmt: skip


def spec(**given: Any) -> RunSpec:
    about = {"name": "r", "dataset": "data", "rounds": 0, "rehearsal": 10, "cohort": Cohort(quorum=2)}
    return RunSpec(method=MethodSpec(name="fedavg"), model=NO_DIGEST, version=NO_DIGEST, **{**about, **given})


def answer(worker: str, **found: Any) -> SiteReport:
    rehearsal = Rehearsal(**{**PACE, **found})
    return SiteReport(site=worker.partition("/")[0], worker=worker, state="accepted", rehearsal=rehearsal)


def test_a_run_takes_as_long_as_its_slowest_site() -> None:
    found = RunForecast.of(spec(), [answer("a/w"), answer("b/w", train_seconds=130.0)])
    # 1000 bytes a second: 2 to load, 130 to train, 2 to fetch what a round sends, 1 to send the update.
    assert (found.slowest, found.workers[1].round_seconds) == ("b/w", 135.0)
    # Once, 5 to check the model and 8 to fetch the whole version.
    assert found.seconds == 10 * 135.0 + 5 + 8
    # Of each site the whole version, and then 9 times what a round sends; and 10 updates.
    assert (found.download_bytes, found.upload_bytes) == (2 * (8_000 + 9 * 2_000), 2 * 10 * 1_000)
    assert (found.epsilon, list(found.faults)) == (None, [])


def test_a_round_that_waits_for_fewer_updates_is_as_slow_as_the_last_of_these() -> None:
    workers = [answer("a/w"), answer("b/w", train_seconds=60.0), answer("c/w", train_seconds=600.0)]
    found = RunForecast.of(spec(cohort=Cohort(quorum=1, target_updates=2)), workers)
    assert found.slowest == "b/w"


def test_of_the_workers_of_a_site_the_slowest_counts_once() -> None:
    found = RunForecast.of(spec(cohort=Cohort()), [answer("a/fast"), answer("a/slow", train_seconds=60.0)])
    assert (found.slowest, found.upload_bytes) == ("a/slow", 10_000)


def test_a_drawn_cohort_moves_its_share_of_the_bytes() -> None:
    workers = [answer(f"{site}/w") for site in "abcd"]
    found = RunForecast.of(spec(cohort=Cohort(size=2)), workers)
    assert found.upload_bytes == 2 * 10 * 1_000


def test_a_run_of_too_few_sites_has_no_time_and_names_the_remedy() -> None:
    problem = WorkerFailed.of("out-of-memory", "the model does not fit").document()
    failed = SiteReport(site="b", worker="b/w", state="failed", problem=problem)
    found = RunForecast.of(spec(), [answer("a/w"), failed])
    assert (found.slowest, found.seconds) == (None, None)
    assert next(iter(found.facts)) == ("time", "unknown: fewer sites than the quorum of 2 trained")
    (fault,) = found.faults
    assert fault == f"b/w: out-of-memory: the model does not fit. {OF_WORKERS['out-of-memory']}"


def test_a_site_that_would_miss_each_deadline_is_named() -> None:
    found = RunForecast.of(
        spec(cohort=Cohort(deadline_seconds=100)), [answer("a/w"), answer("b/w", train_seconds=200)]
    )
    # Rounds end without it.
    assert found.seconds == 10 * 100 + 13
    assert list(found.faults) == [
        "b/w: its first round takes 4 min, and rounds end after 100 s. Set cohort.deadline_seconds to 436 or more."
    ]


def test_the_largest_epsilon_of_a_site_is_that_of_the_run() -> None:
    privacy = Privacy(epsilon=8.0, delta=1e-5, clip_norm=1.0)
    found = RunForecast.of(spec(privacy=privacy), [answer("a/w", epsilon=7.9), answer("b/w", epsilon=7.99)])
    assert found.epsilon == 7.99
    assert ("epsilon", "7.99 at delta 1e-05 for each example") in list(found.facts)


def test_a_declared_upload_rate_is_that_of_the_line() -> None:
    (one,) = RunForecast.of(spec(cohort=Cohort()), [answer("a/w", upload_bytes_per_second=10.0)]).workers
    assert one.round_seconds == pytest.approx(2 + 30 + 2 + 100)

"""Two levels as real processes: any of them may be killed at any moment, and nothing is counted twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tessera.shared.api.admin import Approval, Enrolment
from tessera.shared.api.tasks import Task
from tessera.shared.client.client import Client
from tests.support.cli import environment
from tests.support.coordinator import until
from tests.support.federation import exported, small_model, start_run, values
from tests.support.paths import ROOT
from tests.support.processes import CoordinatorProcess, Process
from tests.support.regions import drawn, regional_process, start_region, working
from tests.support.shell_blocks import blocks

PAGE = ROOT / "docs" / "regions.md"
SITES = [("north-1", 5), ("north-2", 20), ("north-3", 40)]
ALONE = [("alone", 35)]
MODEL = small_model(16)
UNBOUNDED = {"max_examples": "unlimited", "max_norm_of_median": "unlimited"}


def steps(site: str, task: Task) -> dict[str, np.ndarray]:
    return drawn(site, task, MODEL)


@pytest.fixture
def levels(tmp_path: Path) -> Iterator[tuple[CoordinatorProcess, CoordinatorProcess]]:
    quick = {"lease_seconds": 4, "liveness_seconds": 10}
    with (
        CoordinatorProcess(tmp_path / "parent", **quick) as parent,
        CoordinatorProcess(tmp_path / "inner", cohort_wait_seconds=0, **quick) as inner,
    ):
        yield parent, inner


def expected(rounds: int) -> np.ndarray:
    """The head after rounds of all four sites, in float64."""
    head = values(MODEL)["head.weight"].astype(np.float64)
    weights = dict([*SITES, *ALONE])
    for number in range(1, rounds + 1):
        for site, examples in weights.items():
            rng = np.random.default_rng([*site.encode(), number])
            moved = {b.name: rng.normal(0, 0.1, b.shape).astype(np.float32) for b in MODEL.blocks}
            head += moved["head.weight"].astype(np.float64) * examples / sum(weights.values())
    return head


def check(client: Client, region: Client, run: str, rounds: int) -> None:
    """Each site's update of each round is in the last version, once."""
    np.testing.assert_allclose(exported(client, client.run(run))["head.weight"], expected(rounds), atol=1e-5)
    (own,) = region.runs()
    until(lambda: region.run(own.id).state == "completed")
    merged = Counter(
        (task.worker, round_.version)
        for round_ in region.rounds(own.id)
        for task in round_.tasks
        if task.state == "merged"
    )
    assert merged == {(f"{site}/w", number): 1 for site, _ in SITES for number in range(1, rounds + 1)}


def play(
    levels: tuple[CoordinatorProcess, CoordinatorProcess], folder: Path, rounds: int, kills: list[tuple[int, str]]
) -> None:
    """Run some rounds, and kill a process each time that a version is there."""
    parent, inner = levels
    with ExitStack() as stack:
        stack.enter_context(working(inner, SITES, steps))
        stack.enter_context(working(parent, ALONE, steps))
        process = regional_process(folder, parent, inner, "north")
        stack.callback(lambda: process.kill())  # noqa: PLW0108 (another by then)
        client = parent.admin()
        cohort = {"quorum": 2, "size": 2, "max_attempts": 50}
        run = start_run(client, MODEL, values(MODEL), rounds=rounds, cohort=cohort, **UNBOUNDED)
        for number, victim in kills:
            until(lambda number=number: client.run(run.id).version.number >= number, 120)
            process = killed(victim, parent, inner, process, folder)
        until(lambda: client.run(run.id).state == "completed", 240)
        check(client, inner.admin(), run.id, rounds)


def killed(
    victim: str, parent: CoordinatorProcess, inner: CoordinatorProcess, process: Process, folder: Path
) -> Process:
    """kill -9 one of the three and start it again; the region's process now."""
    match victim:
        case "parent" | "inner":
            coordinator = parent if victim == "parent" else inner
            coordinator.kill()
            coordinator.start()
        case "region":
            process.kill()
            return start_region(folder)
    return process


@pytest.mark.long
def test_a_run_in_two_levels_survives_each_of_its_processes(
    levels: tuple[CoordinatorProcess, CoordinatorProcess], tmp_path: Path
) -> None:
    play(levels, tmp_path / "north", 4, [(0, "region"), (1, "inner"), (2, "parent")])


@pytest.mark.long
def test_the_page_joins_a_region_to_a_parent(
    levels: tuple[CoordinatorProcess, CoordinatorProcess], tmp_path: Path
) -> None:
    parent, inner = levels
    serve, join, settings, regional = (block.text for block in blocks(PAGE))
    assert "tessera coordinator serve" in serve
    folder, log = tmp_path / "region", tmp_path / "page.log"
    folder.mkdir()
    (folder / "admin.token").write_text((inner.folder / "admin.token").read_text())
    with ExitStack() as stack:
        told = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", OMP_NUM_THREADS="1")

        def begin(text: str) -> subprocess.Popen[bytes]:
            for page, here in ((8470, parent.port), (8471, inner.port)):
                text = text.replace(f"127.0.0.1:{page}", f"127.0.0.1:{here}")
            with log.open("ab") as out:
                options = {"cwd": folder, "env": told, "stdout": out, "stderr": out, "start_new_session": True}
                begun = subprocess.Popen(["bash", "-ec", text], **options)
            stack.callback(end, begun)
            return begun

        client, joining = parent.admin(), begin(join)
        enrolment = until(lambda: next(iter(client.enrolments()), None) or joining.poll())
        assert isinstance(enrolment, Enrolment), log.read_text()
        client.approve(enrolment.id, Approval(code=enrolment.code, site="north", create_site=True))
        assert joining.wait(60) == 0, log.read_text()
        assert begin(settings).wait(60) == 0, log.read_text()
        begin(regional)
        stack.enter_context(working(inner, SITES, steps))
        until(lambda: [one for one in client.workers() if one.datasets == {"data": 65}])
        run = start_run(client, MODEL, values(MODEL), rounds=1, cohort={"size": 1, "quorum": 1})
        until(lambda: client.run(run.id).state == "completed")
        (task,) = client.round(run.id, 1).tasks
        assert (task.worker.partition("/")[0], task.metrics["region_sites"]) == ("north", 3.0)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the shell and to what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


@pytest.mark.long
def test_a_run_in_two_levels_survives_kills_at_many_moments(
    levels: tuple[CoordinatorProcess, CoordinatorProcess], tmp_path: Path
) -> None:
    draw = Random(7)
    kills = [(number, draw.choice(["region", "inner", "parent"])) for number in range(12) for _ in range(2)]
    play(levels, tmp_path / "north", 13, kills)

"""A federation is upgraded while it trains, as docs/operating.md says; one site was early.

It begins with the release before this commit; before the first one, with the commit itself.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tessera.shared.updates.model_folder import ModelFolder
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, start_worker, worker_process
from tests.system.test_crashes import digits_run, shard

ROUNDS = 6


@pytest.fixture
def old(tmp_path: Path) -> Path:
    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=Path(__file__).parents[2], capture_output=True, check=False).stdout

    release = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^").decode().strip()
    archive = git("archive", release or "HEAD")
    if not archive:
        pytest.skip("this checkout has no history")
    (tmp_path / "old").mkdir()
    subprocess.run(["tar", "--extract", "--directory", tmp_path / "old"], input=archive, check=True)
    return tmp_path / "old"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_goes_on_while_all_of_its_federation_is_upgraded(old: Path, tmp_path: Path, vit: ModelFolder) -> None:
    # Each version makes and migrates its own schema here.
    database = f"sqlite:///{tmp_path}/upgraded.db"
    coordinator = CoordinatorProcess(tmp_path / "coordinator", database_url=database)
    coordinator.tree = old
    with coordinator:
        client = coordinator.admin()
        workers = {
            "a": worker_process(coordinator, "a", shard(0), old),
            "b": worker_process(coordinator, "b", shard(1)),
        }

        def at(version: int) -> bool:
            for worker in workers.values():
                assert worker.popen.poll() is None, worker.log.read_text()
            return client.run(run.id).version.number >= version

        try:
            until(lambda: len(list(client.workers())) == 2, 60)
            run = digits_run(client, vit, ROUNDS)
            until(lambda: at(2), 120)

            # In the middle of a round.
            coordinator.process.terminate()
            coordinator.tree = None
            coordinator.start()
            until(lambda: at(4), 120)

            workers["a"].terminate()
            workers["a"] = start_worker(coordinator.folder / "a")
            until(lambda: client.run(run.id).state == "completed", 120)
        finally:
            for worker in workers.values():
                worker.kill()
        assert [sum(task.is_accepted for task in found.tasks) for found in client.rounds(run.id)] == [2] * ROUNDS

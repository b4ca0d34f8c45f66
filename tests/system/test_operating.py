"""What an administrator does to a coordinator at work, by the commands."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tests.support import databases
from tests.support.coordinator import until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.processes import CoordinatorProcess


def ended(coordinator: CoordinatorProcess, *arguments: str) -> tuple[int, str]:
    """The exit code of a command with the coordinator's settings, and what it said."""
    process = coordinator.beside("command", "tessera.coordinator", *arguments)
    code = process.popen.wait(60)
    return code, process.log.read_text()


def exported(client: Client, run: Run) -> bytes:
    file = io.BytesIO()
    client.export(run.id, file)
    return file.getvalue()


def test_a_lost_admin_token_is_replaced_on_the_coordinators_machine(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator:
        code, said = ended(coordinator, "token", "--name", "anew")
        assert code == 0, said
        with Client(coordinator.url, said.rpartition(": ")[2].strip()) as client:
            assert "anew" in {token.name for token in client.tokens()}


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_coordinator_at_work_is_backed_up_verified_and_restored_elsewhere(tmp_path: Path) -> None:
    model = small_model()
    folder = str(tmp_path / "backup")
    with CoordinatorProcess(tmp_path / "one", inline_bytes=1) as one:
        client = one.admin()
        worker = ScriptedWorker(one.site("a")).enrol()
        run = start_run(client, model, values(model), rounds=3, cohort=Cohort(size=1))
        worker.train(worker.take())
        until(lambda: client.run(run.id).version.number == 1)
        whole = exported(client, run)
        assert ended(one, "backup", folder)[0] == 0
        code, said = ended(one, "backup", folder)
        assert (code, "0 new blobs" in said) == (0, True), said
        assert ended(one, "verify")[0] == 0
        code, said = ended(one, "gc")
        assert (code, "removed 0 blobs" in said) == (0, True), said
        secret = (one.folder / "admin.token").read_text()
        # All this beside a run that goes on.
        worker.train(worker.take())
        until(lambda: client.run(run.id).version.number == 2)
    with CoordinatorProcess(tmp_path / "two", inline_bytes=1) as two:
        two.kill()
        code, said = ended(two, "restore", folder)
        assert (code, "the database is in use" in said) == (1, True), said
        two.environment["TESSERA_DATABASE_URL"] = databases.empty_in(two.folder, "anew")
        assert ended(two, "migrate")[0] == 0
        code, said = ended(two, "restore", folder)
        assert code == 0, said
        (two.folder / "admin.token").write_text(secret)
        two.start()
        assert exported(two.admin(), run) == whole
        path = next((two.folder / "blobs").glob("*/*"))
        path.write_bytes(b"rot")
        code, said = ended(two, "verify")
        assert (code, path.name in said) == (1, True), said

"""One run that cannot go on does not hold up the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import update

from coordinator.services import assemble
from coordinator.settings import Settings
from coordinator.storage.blobs import StagingElsewhere
from coordinator.storage.tables import RunRow
from shared.methods import Chosen
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values


def test_a_run_that_cannot_be_read_pauses_and_the_others_go_on(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    spoilt = start_run(client, model, values(model), name="spoilt")
    with coordinator.services.database.transaction() as session:
        unreadable = {**spoilt.spec.model_dump(mode="json"), "codec": "from-the-future"}
        session.execute(update(RunRow).where(RunRow.id == spoilt.id).values(spec=unreadable))
    sound = start_run(client, model, values(model), name="sound")

    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.train(worker.take())

    until(lambda: client.run(sound.id).state == "completed")
    with coordinator.services.database.snapshot() as session:
        row = session.get_one(RunRow, spoilt.id)
        assert row.state == "paused"
        assert "from-the-future" in (row.reason or "")


def test_a_plan_that_selects_what_the_model_lacks_pauses_the_run_with_the_reason(
    coordinator: LiveCoordinator,
) -> None:
    client = coordinator.client()
    blocks = tuple(block for block in small_model().blocks if block.role not in ("query", "key", "value"))
    model = small_model().model_copy(update={"blocks": blocks})
    frozen = Chosen(name="fedfrozen", settings={"warmup_rounds": 0, "scope": "v_only"})
    run = start_run(client, model, values(model), method=frozen)
    ScriptedWorker(coordinator.client("site", "a")).enrol()

    until(lambda: client.run(run.id).state == "paused")
    assert "no block matches {'roles': ['value']}" in (client.run(run.id).reason or "")


def test_a_staging_folder_on_another_file_system_is_refused(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one file system only")
    settings = Settings(
        database_url=f"sqlite:///{tmp_path}/tessera.db", blob_url=str(tmp_path / "blobs"), staging_dir=elsewhere
    )
    with pytest.raises(StagingElsewhere, match="two file systems"):
        assemble(settings)

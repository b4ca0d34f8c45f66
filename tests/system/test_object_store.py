"""A federation whose coordinator has its blobs in an S3-compatible store, and is killed (invariant I5)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from tessera.shared.api.cohort import Cohort
from tests.support.coordinator import until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.processes import CoordinatorProcess
from tests.support.stores import SECRET, serving


@pytest.mark.parametrize("kind", ["moto", pytest.param("rclone", marks=pytest.mark.long)])
def test_a_round_on_an_object_store_survives_kill_9(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(width=32)
    start = values(model)
    with serving(kind, tmp_path / "store") as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "coordinator"
        with CoordinatorProcess(folder, blob_url=bucket.url, inline_bytes=1, submission_bytes=0) as coordinator:
            client = coordinator.admin()
            run = start_run(client, model, start, cohort=Cohort(size=2, quorum=2))
            first, second = (ScriptedWorker(coordinator.site(site)).enrol() for site in "ab")
            first.train(first.take(), step=1.0)
            task = second.take()

            coordinator.kill()
            coordinator.start()

            second.train(task, step=3.0)
            until(lambda: client.run(run.id).state == "completed")
            file = io.BytesIO()
            client.export(run.id, file)
            check = coordinator.beside("verify", "tessera.coordinator", "verify")
            assert check.popen.wait() == 0, check.log.read_text()
        # Both count: the mean of 1 and 3.
        np.testing.assert_allclose(load(file.getvalue())["head.weight"], start["head.weight"] + 2.0, rtol=1e-5)
        assert len(bucket.names()) > 10
        assert not (folder / "blobs").exists()
        assert SECRET not in (folder / "coordinator.log").read_text()

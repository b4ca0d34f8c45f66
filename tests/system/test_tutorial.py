"""The methods of the tutorial, each one file in a folder and nothing else, run over HTTP as they stand there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec, Training
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import FOLDERS
from tessera.shared.updates.model_folder import ModelFolder
from tests.support.coordinator import until
from tests.support.paths import ROOT
from tests.support.processes import CoordinatorProcess, Process, worker_process

TUTORIAL = ROOT / "docs" / "writing-a-method.md"
DATA = '[datasets.digits]\nkind = "digits"\npart = { scheme = "iid", count = 8, index = 0 }\n'
STAGES = {
    "headonly": ["head"] * 2,
    "cycle": ["warm-up", "layer 0", "layer 1", "layer 0"],
    # Each layer is tried once; which one moved more is for the training to say.
    "restless": ["layer 0", "layer 1"],
}


def written(folder: Path) -> set[str]:
    """Writes the tutorial's files into the folder, and returns their methods' names."""
    folder.mkdir()
    files = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    for name, code in files:
        (folder / f"{name}.py").write_text(code)
    return {name for name, _ in files}


def test_the_methods_of_the_tutorial_run_from_one_file_each(
    tmp_path: Path, vit: ModelFolder, running: Callable[[Process], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written(tmp_path / "methods") == set(STAGES)
    monkeypatch.setenv(FOLDERS, str(tmp_path / "methods"))
    with CoordinatorProcess(tmp_path / "coordinator") as live:
        client = live.admin()
        for site in ("alder", "birch"):
            running(worker_process(live, site, DATA, threads=1))
        uploaded = upload_model(client, vit, lambda _: None)
        for name, stages in STAGES.items():
            run = client.create_run(
                RunSpec(
                    name=name,
                    method=MethodSpec(name=name),
                    model=uploaded.model,
                    version=uploaded.version,
                    dataset="digits",
                    rounds=len(stages),
                    cohort=Cohort(size=2, quorum=2),
                    training=Training(learning_rate=1e-3, batch_size=256),
                )
            )
            until(lambda run=run: client.run(run.id).state != "running", seconds=60)
            assert client.run(run.id).state == "completed", client.run(run.id).reason
            rounds = sorted(client.rounds(run.id), key=lambda round_: round_.number)
            assert [round_.stage for round_ in rounds] == stages
            metrics = client.manifest(client.run(run.id).version.digest).scalars
            assert set(metrics) == ({"moved.0", "moved.1"} if name == "restless" else set())

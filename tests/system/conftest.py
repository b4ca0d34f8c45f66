from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera.shared.updates.model_folder import ModelFolder
from tests.support.cli import forked
from tests.support.paths import ROOT
from tests.support.processes import CoordinatorProcess, Process

VIT = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "id2label": {str(digit): str(digit) for digit in range(10)},
}


DEMO_VIT = ROOT / "examples" / "digits" / "vit.json"


def made(folder: Path, config: Path) -> ModelFolder:
    """A model, made by the command that users have."""
    model = ("model", "init", str(folder / "model"), "--config", str(config))
    done = forked(*model, "--head", "image-classification", "--random", "--seed", "1")
    assert done.returncode == 0, done.stderr
    return ModelFolder.open(folder / "model")


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A ViT for the digits that trains in no time."""
    folder = tmp_path_factory.mktemp("vit")
    (folder / "vit.json").write_text(json.dumps(VIT))
    return made(folder, folder / "vit.json")


@pytest.fixture(scope="session")
def demo_vit(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The demo's ViT."""
    return made(tmp_path_factory.mktemp("demo-vit"), DEMO_VIT)


@pytest.fixture
def running() -> Iterator[Callable[[Process], Process]]:
    """Takes processes that must not outlive the test."""
    started: list[Process] = []

    def keep(process: Process) -> Process:
        started.append(process)
        return process

    yield keep
    for process in started:
        if process.popen.poll() is None:
            process.kill()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator process whose leases outlast its own restart, however busy the machine is."""
    with CoordinatorProcess(tmp_path / "coordinator", lease_seconds=600) as coordinator:
        yield coordinator

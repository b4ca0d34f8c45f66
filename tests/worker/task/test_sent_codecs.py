"""The codecs of the updates that real workers send."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tessera.shared.api.runs import Training
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW
from tessera.shared.updates.safetensors_file import read_header
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.vault import Vault
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.simulation.test_simulation import images
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, start_run
from tests.support.runner import task_runner
from tests.support.tasks import CPU, VIT, untrained

WIDE = {**VIT, "hidden_size": 128, "intermediate_size": 768}
"""A model of more than 1 MiB, which is uploaded from a file."""


# A block for which the lossless stages save too little is sent raw.
@pytest.mark.parametrize(
    ("codec", "sent"), [(LOSSLESS, {LOSSLESS, RAW}), (RAW, {RAW}), ("delta+int8", {"delta+int8"})]
)
def test_an_update_is_sent_in_the_codec_of_its_run(
    coordinator: LiveCoordinator, tmp_path: Path, codec: str, sent: set[str]
) -> None:
    torch.set_num_threads(1)
    worker = ScriptedWorker(coordinator.client("site", "a"), datasets={"data": 16})
    cache, vault = Cache(tmp_path / "cache", 1 << 24), Vault(tmp_path / "vault")
    runner = task_runner(worker.client, {"data": images(0)}, TrainingSetup(CPU), vault, cache, tmp_path)
    worker.enrol()
    document, start = untrained(WIDE, "image-classification")
    training = Training(optimizer="sgd", momentum=0, learning_rate=0.01, batch_size=8)
    start_run(coordinator.client(), document, start, training=training, codec=codec)
    runner.run(worker.take(), lambda: None, Report())
    (digest,) = (view.update for view in worker.client.tasks() if view.update)
    data = coordinator.services.blobs.read(digest)
    metadata = read_header(io.BytesIO(data), len(data)).metadata
    assert {value for name, value in metadata.items() if name != "format"} == sent

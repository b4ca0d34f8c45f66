"""What the system computes, end to end: real coordinator, real worker processes, real training."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import save_file

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec, Training
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import laid_out, write_block
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, Process, worker_process

Keep = Callable[[Process], Process]
RATE = 0.1


def images(count: int, seed: int) -> dict[str, torch.Tensor]:
    """`pixel_values` float32 [count, 1, 8, 8] and `labels` int64 [count]."""
    dice = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 8, 8, generator=dice)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (count,), generator=dice)}


def central_descent(
    vit: ModelFolder, data: dict[str, torch.Tensor], steps: int, start: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Plain gradient descent on all data in one place, from the model itself or from other values of its tensors."""
    model = laid_out(vit.model)
    tensors = named_tensors(model)
    for block, raw in vit.blocks():
        write_block(tensors, block, np.frombuffer(raw, dtype="<f4").reshape(block.shape))
    for name, values in (start or {}).items():
        tensors[name].data.copy_(torch.from_numpy(values))
    model.train()
    for _ in range(steps):
        model.zero_grad()
        model(**data).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(RATE * parameter.grad)
    return {name: tensor.detach().numpy() for name, tensor in named_tensors(model).items()}


def test_fedavg_with_one_full_batch_step_is_centralised_gradient_descent(
    live: CoordinatorProcess, vit: ModelFolder, running: Keep, tmp_path: Path
) -> None:
    parts = [images(count, seed) for seed, count in enumerate((8, 24, 40))]
    for index, part in enumerate(parts):
        file = tmp_path / f"{index}.safetensors"
        save_file(part, file)
        running(worker_process(live, f"s{index}", f'[datasets.images]\nkind = "arrays"\nfile = "{file}"\n'))
    client = live.admin()
    uploaded = upload_model(client, vit)
    spec = RunSpec(
        name="descent",
        method=MethodSpec(name="fedavg"),
        model=uploaded.model,
        version=uploaded.version,
        dataset="images",
        rounds=2,
        cohort=Cohort(size=3, quorum=3),
        training=Training(epochs=1, batch_size=None, optimizer="sgd", learning_rate=RATE, weight_decay=0),
    )
    run = client.create_run(spec)
    until(lambda: client.run(run.id).state == "completed", seconds=60)

    file = io.BytesIO()
    client.export(run.id, file)
    together = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    expected = central_descent(vit, together, steps=2)
    for name, merged in load(file.getvalue()).items():
        np.testing.assert_allclose(merged, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_the_frozen_stage_moves_under_15_percent_of_a_full_exchange(
    live: CoordinatorProcess, demo_vit: ModelFolder, running: Keep
) -> None:
    running(worker_process(live, "a", '[datasets.digits]\nkind = "digits"\n'))
    client = live.admin()
    uploaded = upload_model(client, demo_vit)
    spec = RunSpec(
        name="frozen",
        method=MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1, "scope": "v_head"}),
        model=uploaded.model,
        version=uploaded.version,
        dataset="digits",
        rounds=13,
        cohort=Cohort(size=1),
        training=Training(learning_rate=1e-3, batch_size=256),
        # Uncompressed, so that what is counted is what is left out and not what zstd saves.
        codec="raw",
    )
    run = client.create_run(spec)
    until(lambda: client.run(run.id).state == "completed", seconds=60)

    warm, *frozen = (round_.tasks[0] for round_ in client.rounds(run.id))
    full = demo_vit.model.nbytes
    assert warm.upload_bytes > full
    # Down and up, over all of stage two: its first round still fetches what the warm-up changed, as a difference.
    assert frozen[0].download_bytes > 0.5 * full
    assert sum(task.download_bytes + task.upload_bytes for task in frozen) < 0.15 * 2 * full * len(frozen)
    # From then on nothing frozen travels, either way.
    assert all(max(task.download_bytes, task.upload_bytes) < 0.1 * full for task in frozen[1:])
    frozen_blocks = {block.name for block in demo_vit.model.blocks if block.role not in ("value", "head")}
    manifests = [client.manifest(version.digest).blocks for version in client.versions(run.id)][1:]
    assert all(later[name] == manifests[0][name] for later in manifests for name in frozen_blocks)

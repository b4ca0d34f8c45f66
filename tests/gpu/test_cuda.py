"""Training, privacy and evaluation on a GPU, compared with the CPU: `make test-gpu`, where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.methods.base import LocalResult, MethodSpec, Phase, Plan, RunInfo
from tessera.shared.methods.registry import methods, worker_half
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import Array
from tessera.simulation import Conditions, Weights, simulate
from tessera.worker.compute import Compute
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.registry import load
from tessera.worker.errors import ExampleTooLarge
from tessera.worker.inventory import gpu_name
from tessera.worker.live_values import LiveMonitor
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.device_memory import free_bytes, use_of_gpus
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.scans import write_scans
from tests.support.tasks import ADAPTED, CPU, PLAIN, VIT, images, one_task, subject_of
from tests.worker.task.test_checkpoint_key import task
from tests.worker.training.test_checkpoints import Killed, Process

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

GPU = torch.device("cuda")
SGD: dict[str, Any] = {"optimizer": "sgd", "epochs": 2}
"""Unlike AdamW's, a step of SGD grows with its gradient, so that rounding stays small."""


def arrays_of(result: LocalResult) -> dict[str, Array]:
    return {**{f"up/{name}": values for name, values in result.upload.items()}, **result.keep}


def distance(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Return the distance of two results over the norm of the first."""
    assert one.keys() == other.keys()
    pairs = [(np.asarray(one[name], np.float64), np.asarray(other[name], np.float64)) for name in one]
    norm = math.sqrt(sum(float((a * a).sum()) for a, _ in pairs))
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs)) / norm


def moves(method: str, device: torch.device, **more: Any) -> tuple[dict[str, Array], dict[str, float]]:
    """Return how far a task moved each block that it sent, what it kept, and its metrics."""
    subject = more.pop("subject", None) or subject_of(method)
    start = {f"up/{block.name}": values for block, values in _start(subject)}
    _, result = one_task(method, subject=subject, device=device, **{**SGD, **more})
    return {name: values - start.get(name, 0) for name, values in arrays_of(result).items()}, dict(result.metrics)


def _start(subject: Any) -> Iterator[tuple[Any, Array]]:
    context = LocalTaskContext(subject.model(), subject.head, Plan(), subject.facts().blocks)
    return ((block, context.read(block).copy()) for block in context.blocks)


@pytest.mark.parametrize("method", sorted(methods()))
def test_each_method_trains_on_a_gpu_as_on_the_cpu(method: str) -> None:
    here, measured_here = moves(method, CPU)
    there, measured_there = moves(method, GPU)
    assert here
    assert distance(here, there) < 1e-3
    assert measured_there == pytest.approx(measured_here, rel=1e-3, abs=1e-5)


def test_a_task_that_keeps_state_keeps_it_on_the_cpu() -> None:
    momentum = {**SGD, "momentum": 0.9, "keep_moments": True}
    prompts = ("pfeddc", "fedpgp", "fedotp")
    for method, training in (("ditto", momentum), ("scaffold", SGD), *((name, SGD) for name in prompts)):
        subject = subject_of(method)
        _, result = one_task(method, subject=subject, device=GPU, **training)
        assert result.keep
        _, after = one_task(method, subject=subject, device=GPU, vault=result.keep, **training)
        assert all(isinstance(values, np.ndarray) for values in arrays_of(after).values())


@pytest.mark.parametrize(("precision", "limit"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision_moves_the_weights_nearly_as_far(precision: str, limit: float) -> None:
    whole, _ = moves("fedavg", GPU)
    half, measured = moves("fedavg", GPU, precision=precision)
    assert distance(whole, half) < limit
    assert all(map(math.isfinite, measured.values()))


def test_a_first_step_that_overflows_float16_is_repeated_at_a_smaller_scale() -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    found, _ = moves("fedavg", GPU, precision="float16", scaler=scaler)
    whole, _ = moves("fedavg", GPU)
    assert scaler.get_scale() < 2.0**30
    assert distance(whole, found) < 0.02


def test_a_killed_task_resumes_on_the_gpu(tmp_path: Path) -> None:
    training: dict[str, Any] = {"epochs": 3, "optimizer": "adamw", "device": GPU}
    subject = replace(PLAIN, config={**PLAIN.config, "hidden_dropout_prob": 0.1})
    _, undisturbed = one_task("fedavg", subject=subject, **training)
    killed = Process(tmp_path, 2, 5)
    with pytest.raises(Killed):
        one_task("fedavg", subject=subject, check=killed.check, checkpoints=killed.checkpoints, **training)
    last = Process(tmp_path, 2)
    _, result = one_task("fedavg", subject=subject, check=last.check, checkpoints=last.checkpoints, **training)
    assert last.steps < 9
    # Dropout's generator resumes too, or the masks would be others.
    assert distance(arrays_of(undisturbed), arrays_of(result)) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_compiled_training_ends_near_the_weights_of_plain_training() -> None:
    plain, _ = moves("fedavg", GPU)
    fast, _ = moves("fedavg", GPU, compute=Compute(compile=True))
    assert distance(plain, fast) < 1e-2


def test_adapters_alone_train_on_a_gpu() -> None:
    here, _ = moves("fedavg", CPU, subject=ADAPTED)
    there, _ = moves("fedavg", GPU, subject=ADAPTED)
    assert distance(here, there) < 1e-3


SITES = ("north", "south")


def private_spec(method: str, settings: dict[str, Any], **privacy: Any) -> dict[str, Any]:
    return {
        "method": {"name": method, "settings": settings}, "rounds": 2, "codec": "raw",
        "training": {"batch_size": 8, "learning_rate": 0.05, "optimizer": "sgd"},
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0, **privacy},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "settings", "privacy"), [("fedavg", {}, {}), ("safl", {"layers": 1}, {"selection": "noisy"})]
)
def test_private_training_draws_the_same_noise_and_samples_on_a_gpu(
    method: str, settings: dict[str, Any], privacy: dict[str, Any]
) -> None:
    pytest.importorskip("opacus")
    weights = Weights.of(instantiate(VIT, "image-classification", seed=1), VIT, "image-classification")
    sites = {name: images() for name in SITES}
    found = [
        simulate(
            private_spec(method, settings, **privacy), weights, sites, conditions=Conditions(device=device)
        ).arrays()
        for device in ("cpu", "cuda")
    ]
    here, there = ({name: values - weights.values[name] for name, values in each.items()} for each in found)
    assert distance(here, there) < 1e-2


BERT = {
    "model_type": "bert", "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16, "num_labels": 2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def test_a_word_and_a_class_that_the_model_lacks_end_no_private_task_on_a_gpu() -> None:
    pytest.importorskip("opacus")
    ids = torch.randint(1, 100, (24, 16), generator=torch.Generator().manual_seed(3))
    labels = torch.arange(24) % 2
    ids[3, 0], ids[5, 1], labels[7], labels[8] = 100, -1, 2, -1
    weights = Weights.of(instantiate(BERT, "text-classification", seed=1), BERT, "text-classification")
    spec = private_spec("safl", {"layers": 1}, selection="noisy")
    sites = {name: Dataset({"input_ids": ids, "labels": labels}) for name in SITES}
    found = [
        simulate(spec, weights, sites, conditions=Conditions(device=device)).arrays() for device in ("cpu", "cuda")
    ]
    here, there = ({name: values - weights.values[name] for name, values in each.items()} for each in found)
    assert distance(here, there) < 1e-2


def test_versions_are_measured_on_a_gpu_as_on_the_cpu_and_memory_does_not_grow() -> None:
    weights = Weights.of(instantiate(VIT, "image-classification", seed=1), VIT, "image-classification")
    spec = {
        "method": {"name": "fedavg"}, "rounds": 6, "evaluation": {"sites": True},
        "training": {"batch_size": 8, "learning_rate": 0.05, "optimizer": "sgd"},
    }  # fmt: skip
    sites = {name: replace(images(40), held_out=images(24)) for name in SITES}
    held: list[int] = []
    test = images(50)
    there = simulate(
        spec, weights, sites, test=test, conditions=Conditions(device="cuda"),
        watch=lambda _: held.append(torch.cuda.memory_allocated()),
    )  # fmt: skip
    here = simulate(spec, weights, sites, test=test)
    for version, scores in here.scores().items():
        assert there.scores()[version] == pytest.approx(scores, rel=1e-2, abs=0.05)
    assert held[2] >= held[-1] > 0


LARGER = {
    "model_type": "vit", "image_size": 64, "patch_size": 4, "num_channels": 1, "hidden_size": 192, "num_labels": 3,
    "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 768, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def leave(nbytes: int) -> None:
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.mem_get_info()[1])


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Leave this process 1 GiB of the GPU."""
    torch.cuda.empty_cache()
    leave(1 << 30)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def in_pieces(size: PieceSize | None, examples: int = 128, left: int | None = None) -> dict[str, Array]:
    """Return the weights after two steps on that many images at once, with `left` bytes beside the model."""
    training = Training(batch_size=examples, steps=2, optimizer="sgd", learning_rate=0.05)
    model = instantiate(LARGER, "image-classification", seed=1).to(GPU)  # type: ignore[arg-type]
    table = block_table(model)
    context = LocalTaskContext(model, "image-classification", Plan(), table)
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(table, rounds=1, training=training))
    dice = torch.Generator().manual_seed(0)
    plain = images(examples)
    pixels = torch.randn(examples, 1, 64, 64, generator=dice)
    data = replace(plain, tensors={**plain.tensors, "pixel_values": pixels})
    if left is not None:
        leave(torch.cuda.memory_reserved() + left)
    setup = TrainingSetup(GPU, "auto" if size else None)
    Trainer(half, context, training, setup, lambda: None, piece_size=size).train([Phase(EVERYTHING)], data, 0)
    return {block.name: context.read(block).copy() for block in context.blocks}


def test_a_batch_that_does_not_fit_is_trained_in_pieces_with_the_same_result(
    request: pytest.FixtureRequest,
) -> None:
    whole = in_pieces(None)
    request.getfixturevalue("little_memory")
    size = PieceSize(None, automatic=True)
    assert distance(whole, in_pieces(size)) < 1e-4
    assert size.examples
    assert size.examples < 128
    with pytest.raises(torch.OutOfMemoryError):
        in_pieces(None)


def test_an_example_that_does_not_fit_is_refused_with_the_remedy(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("little_memory")
    with pytest.raises(ExampleTooLarge, match="one example does not fit"):
        in_pieces(PieceSize(None, automatic=True), examples=8, left=6 << 20)


def test_free_memory_counts_what_torch_has_freed() -> None:
    torch.cuda.empty_cache()
    before = free_bytes(GPU)
    held = torch.zeros(256 << 20, dtype=torch.uint8, device=GPU)
    assert before - free_bytes(GPU) >= held.numel() * 0.9
    del held
    assert abs(before - free_bytes(GPU)) < 128 << 20


def test_loaders_fill_pinned_batches(tmp_path: Path) -> None:
    folder = write_scans(tmp_path / "scans", 11)
    loaders = LoaderProcesses(2, pinned=True)
    options = {"folder": str(folder), "in_memory": False, "size": 4}
    try:
        read = list(Batches(load("images", options, loaders=loaders), 4, GPU, torch.Generator().manual_seed(3)))
    finally:
        loaders.close()
    plain = list(Batches(load("images", options), 4, CPU, torch.Generator().manual_seed(3)))
    assert [batch["pixel_values"].device.type for batch in read] == ["cuda"] * 3
    for one, other in zip(read, plain, strict=True):
        assert all(torch.equal(one[name].cpu(), other[name]) for name in other)


def test_heartbeats_show_the_gpu(tmp_path: Path) -> None:
    live = LiveMonitor(gpu_name([GPU]), tmp_path, lambda: 0, shares_log=False)
    values = live.sample(task(), Report(gpu_use=use_of_gpus([GPU])))
    assert values.gpu_name
    assert values.gpu_memory_bytes
    assert 0 < (values.gpu_memory_used_bytes or 0) < values.gpu_memory_bytes

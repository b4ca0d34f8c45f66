"""Training where a device runs out of memory: the step begins anew in smaller pieces, with the bits of such a run.
And what stays in memory after a task."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.selectors import EVERYTHING, roles
from tessera.shared.run_settings import Training
from tessera.simulation import Weights, simulate
from tessera.worker.compute import MicroBatch
from tessera.worker.errors import ExampleTooLarge
from tessera.worker.faults.failures import failure_of
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.model.four_bits import four_bit_layers, four_bit_tensors, put_four_bits
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tasks import ADAPTED, CPU, FEW_METHODS, VIT, images, subject_of

Memory = Callable[[nn.Module, int], None]


def forward_memory(model: nn.Module, most: int) -> None:
    """Let memory run out in the forward pass of more than `most` examples."""

    def run_out(_: nn.Module, args: Any, kwargs: Any) -> Any:
        # Of every source of randomness something has been drawn by then.
        noise = 1 + 0.1 * (random.random() + np.random.rand())  # noqa: NPY002
        if len(kwargs["pixel_values"]) > most:
            raise torch.OutOfMemoryError("out of memory in a test")
        return args, {**kwargs, "pixel_values": kwargs["pixel_values"] * noise}

    model.register_forward_pre_hook(run_out, with_kwargs=True)


def backward_memory(model: nn.Module, most: int) -> None:
    """Let memory run out in the backward pass, when half of the gradients are there."""

    def run_out(gradient: Tensor) -> None:
        if len(gradient) > most:
            raise torch.OutOfMemoryError("out of memory in a test")

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(run_out)

    first = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))
    first.register_forward_hook(watch)


def trained(
    micro_batch: MicroBatch, memory: Memory, most: int, size: PieceSize | None = None, **settings: Any
) -> dict[str, Tensor]:
    """The weights after three steps with dropout, the last on a smaller batch."""
    model = instantiate({**VIT, "hidden_dropout_prob": 0.3}, "image-classification", seed=1)
    memory(model, most)
    context = LocalTaskContext(model, "image-classification", Plan(), block_table(model))
    training = Training.model_validate({"batch_size": 8, "learning_rate": 0.05, **settings})
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), rounds=1, training=training))
    seed_everything(3)
    setup = TrainingSetup(CPU, micro_batch)
    Trainer(half, context, training, setup, lambda: None, piece_size=size).train([Phase(EVERYTHING)], images(20), 0)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("memory", [forward_memory, backward_memory])
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"optimizer": "sgd", "momentum": 0.9}, marks=pytest.mark.long)]
)
def test_a_step_that_runs_out_of_memory_begins_anew_in_half_the_size(
    memory: Memory, settings: dict[str, Any]
) -> None:
    size = PieceSize.of("auto")
    found = trained("auto", memory, 3, size, **settings)
    assert size.examples == 2
    for name, expected in trained(2, memory, 3, **settings).items():
        assert torch.equal(found[name], expected), name


def test_the_size_that_went_well_is_where_the_next_task_begins() -> None:
    sizes: list[int] = []

    def watch(model: nn.Module, most: int) -> None:
        model.register_forward_pre_hook(
            lambda _, __, kwargs: sizes.append(len(kwargs["pixel_values"])), with_kwargs=True
        )
        forward_memory(model, most)

    size = PieceSize.of("auto")
    for _ in range(2):
        trained("auto", watch, 2, size)
        sizes.append(0)
    first, second = sizes[: sizes.index(0)], sizes[sizes.index(0) + 1 : -1]
    assert first == [8, 4, *second]
    assert max(second) == 2


def test_enough_memory_takes_whole_batches_and_changes_no_bit() -> None:
    size = PieceSize.of("auto")
    found, expected = trained("auto", forward_memory, 8, size), trained(None, forward_memory, 8)
    assert size.examples is None
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_one_example_that_does_not_fit_fails_the_task_and_says_so() -> None:
    with pytest.raises(ExampleTooLarge, match=r"one example does not fit.* smaller model") as fault:
        trained("auto", forward_memory, 0)
    assert failure_of(fault.value)[0] == "out-of-memory"


def test_a_size_that_the_site_set_is_not_changed() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="in a test"):
        trained(4, forward_memory, 3)


class Clones(TorchDispatchMode):
    """The addresses of the tensors that are copied within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.seen.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def test_a_base_in_4_bits_is_not_copied_at_each_step() -> None:
    model = ADAPTED.model()
    put_four_bits(model, four_bit_tensors(ADAPTED.document()), fill=True)
    forward_memory(model, 3)
    model.register_buffer("counts", torch.zeros(3))
    context = LocalTaskContext(model, ADAPTED.head, Plan(), ADAPTED.blocks)
    half = worker_half(MethodSpec(name="lora"), ADAPTED.facts())
    size = PieceSize.of("auto")
    setup = TrainingSetup(CPU, "auto")
    trainer = Trainer(half, context, Training(batch_size=8), setup, lambda: None, piece_size=size)
    with Clones() as clones:
        trainer.train([Phase(roles("adapter"))], images(20), 0)
    base = {each.data_ptr() for layer in four_bit_layers(model).values() for each in (layer.packed, layer.scales)}
    assert size.examples == 2
    assert model.counts.data_ptr() in clones.seen
    assert not base & clones.seen


@pytest.mark.parametrize(
    ("settings", "names"), [({}, {"step", "exp_avg", "exp_avg_sq"}), ({"optimizer": "sgd"}, set())]
)
def test_moments_are_allocated_before_the_first_step(settings: dict[str, Any], names: set[str]) -> None:
    seen: list[set[str]] = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append({key for state in optimizer.state.values() for key in state})
    )
    trained("auto", forward_memory, 8, **settings)
    hook.remove()
    assert seen[0] == names


PRIVATE = {"privacy": {"epsilon": 50.0, "delta": 1e-3, "clip_norm": 1.0}}


@FEW_METHODS
def test_what_a_task_trained_with_is_gone_with_it(method: str) -> None:
    require_released(method)


@pytest.mark.parametrize(
    "spec",
    [PRIVATE, pytest.param({"training": {"precision": "float16"}}, marks=pytest.mark.long)],
    ids=["private", "float16"],
)
def test_so_it_is_with_privacy_and_with_scaled_losses(spec: dict[str, Any]) -> None:
    require_released("fedavg", **spec)


def require_released(method: str, training: dict[str, Any] | None = None, **spec: Any) -> None:
    """Require that no optimizer, whose moments are twice the weights, waits for Python's garbage collector, and that
    the model that is kept has no gradients."""
    subject = subject_of(method)
    model, document = subject.model(), subject.document()
    tensors = named_tensors(model)
    start = Weights(document, {block.name: read_block(tensors, block) for block in document.blocks})
    # Some methods take no other optimizer.
    steps = {"steps": 2, "batch_size": 8, "optimizer": "sgd", **(training or {})}
    wanted = {"method": {"name": method}, "rounds": 2, "training": steps, **spec}
    left: list[int] = []
    gc.collect()
    gc.disable()
    try:
        before = len(held())
        simulate(wanted, start, {"a": subject.data()}, watch=lambda _: left.append(len(held()) - before))
    finally:
        gc.enable()
    assert left == [0, 0]


def held() -> list[Any]:
    """The optimizers, and the parameters with gradients, of this process."""
    # Of a type, since Parameter answers `isinstance` in Python, and there are a million objects.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer | nn.Parameter)]
    return [each for each in found if isinstance(each, torch.optim.Optimizer) or each.grad is not None]

"""One task as a task runner does it, without coordinator, cache or files: for tests of what a method computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tessera.shared.api.runs import Training
from tessera.shared.methods.base import (
    LocalResult,
    MethodSpec,
    Participant,
    Plan,
    RunInfo,
    State,
    UnsupportedRun,
)
from tessera.shared.methods.registry import coordinator_half, methods, worker_half
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Fusion, Head, Lora, Model, Prompts
from tessera.shared.rounds.planning import initial_state
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array
from tessera.worker.compute import Compute
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.model.forward import objective_of
from tessera.worker.model.held_values import HeldValues
from tessera.worker.training.batches import Batches
from tessera.worker.training.checkpoints import TrainingCheckpoints
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.moments import Moments, without_moments
from tessera.worker.training.optimization.precision import gradient_scaler
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.duals import dual, pairs
from tests.support.variants import variants

CPU = torch.device("cpu")
VIT: dict[str, Any] = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_labels": 3,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MOBILEVIT: dict[str, Any] = {
    "model_type": "mobilevit", "image_size": 32, "num_channels": 1, "patch_size": 1, "hidden_sizes": [8, 8, 8],
    "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8], "num_attention_heads": 2, "num_labels": 3, "mlp_ratio": 2.0,
    "expand_ratio": 1.0, "hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
}  # fmt: skip
DIGITS_VIT: dict[str, Any] = {**VIT, "num_labels": 10, "num_hidden_layers": 1, "intermediate_size": 16}


def images(count: int = 24, size: int = 8) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(count, 1, size, size, generator=generator)
    return Dataset({"pixel_values": pixels, "labels": torch.randint(0, 3, (count,), generator=generator)})


def untrained(
    config: Mapping[str, Any], head: Head, *, seed: int = 0, **parts: Any
) -> tuple[Model, dict[str, Array]]:
    """Return a random model's document, with further `parts`, and its blocks' values: what a run starts from."""
    inserted = {name: parts[name] for name in ("lora", "prompts") if name in parts}
    model = instantiate(config, head, seed=seed, **inserted)
    document = Model(config=dict(config), head=head, blocks=block_table(model), **parts)
    tensors = named_tensors(model)
    return document, {block.name: read_block(tensors, block) for block in document.blocks}


@dataclass(frozen=True)
class Subject:
    """A small model, and data for it."""

    config: dict[str, Any]
    head: Head
    data: Callable[[], Dataset]
    prompts: Prompts | None = None
    lora: Lora | None = None

    def model(self) -> PreTrainedModel:
        return instantiate(self.config, self.head, seed=1, prompts=self.prompts, lora=self.lora)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return block_table(self.model())

    def document(self) -> Model:
        return Model(config=self.config, head=self.head, blocks=self.blocks, prompts=self.prompts, lora=self.lora)

    def facts(self, **training: Any) -> RunInfo:
        facts = RunInfo(self.blocks, rounds=10, training=Training.model_validate(training))
        return replace(facts, head=self.head, lora=self.lora)


PLAIN = Subject(VIT, "image-classification", images)
NORMALISED = Subject(
    {**MOBILEVIT, "initializer_range": 0.3}, "image-classification", lambda: images(size=32)
)  # whose classes differ from the start
"""With 32 batch normalisations, in its layers and outside of them."""
ADAPTED = Subject(VIT, "image-classification", images, lora=Lora(rank=2, alpha=4))
PROMPTED = Subject(
    dual("clip"), "contrastive", lambda: pairs("clip"), prompts=Prompts(vision=2, text=2, fusion=Fusion(heads=2))
)

DEEP = replace(PROMPTED, prompts=Prompts(vision=2, text=2, depth=2))


KINDS = {"ditto", "fedrep", "lora", "pfeddc", "safl", "scaffold"}
"""Methods with each kind of plan, of phases, and of state that a server or a site keeps."""
EACH_METHOD = pytest.mark.parametrize("method", variants(sorted(methods()), KINDS))
"""Each of `KINDS`, and in the long tests every method."""
FEW_METHODS = pytest.mark.parametrize("method", variants(sorted(methods()), {"ditto", "pfeddc", "safl"}))
"""Methods with a private phase, with prompts and with a choice, and in the long tests every method."""

QUICK: Mapping[str, Mapping[str, Any]] = {"fedotp": {"transport": {"iterations": 5}}}
"""Settings with which a method does the same more quickly than by its defaults."""


def quick(method: str) -> MethodSpec:
    return MethodSpec(name=method, settings=dict(QUICK.get(method, {})))


@cache
def subject_of(method: str) -> Subject:
    """The first that a run of the method can start from: one that is plain, if that will do."""
    for subject in (PLAIN, ADAPTED, PROMPTED, DEEP):
        facts = subject.facts(optimizer="sgd")  # some methods take no other
        zeros = {block.name: ArrayTensor(np.zeros(block.shape, np.float32)) for block in facts.blocks}
        try:
            initial_state(coordinator_half(MethodSpec(name=method), facts), State(0, zeros))
        except UnsupportedRun:
            continue
        return subject
    raise AssertionError(f"{method} is suited to none of the models that it could be tested on")


def fetched(state: State, plan: Plan) -> dict[str, Array]:
    """The server state that a worker gets with a plan."""
    patterns = plan.server_state
    wanted = {name for name in state.server_state if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return {name: to_array(state.server_state[name]) for name in wanted}


def one_task(
    method: str,
    settings: Mapping[str, Any] | None = None,
    *,
    round_number: int = 0,
    start: Mapping[str, Array] | None = None,
    vault: Mapping[str, Array] | None = None,
    server_state: Mapping[str, Array] | None = None,
    plan: Plan | None = None,
    dataset: Dataset | None = None,
    subject: Subject = PLAIN,
    compute: Compute | None = None,
    check: Callable[[], None] = lambda: None,
    checkpoints: TrainingCheckpoints | None = None,
    device: torch.device = CPU,
    scaler: torch.amp.GradScaler | None = None,
    written: Callable[[PreTrainedModel], HeldValues] = lambda _: HeldValues(),
    **training: Any,
) -> tuple[LocalTaskContext, LocalResult]:
    """Trains a small model, on its own data and as the method asks in this round unless told otherwise; what is left
    of it, and its harvest."""
    model = subject.model().to(device)  # type: ignore[arg-type]
    wanted = Training.model_validate({"batch_size": 8, "learning_rate": 0.05, **training})
    facts = RunInfo(block_table(model), rounds=10, training=wanted, head=subject.head, lora=subject.lora)
    chosen = MethodSpec(name=method, settings=dict(settings or {}))
    worker = Participant("a/w", 24)
    plan = plan or coordinator_half(chosen, facts).plan_for(State(round_number, {}), worker)
    moments = Moments.of(vault or {})
    context = LocalTaskContext(
        model, subject.head, plan, facts.blocks, without_moments(vault or {}), dict(server_state or {}),
        objective=objective_of(wanted, subject.document(), device),
    )  # fmt: skip
    half = worker_half(chosen, facts)
    for block in facts.blocks:
        if start:
            context.write(block, start[block.name])
    context.held = written(model)
    seed_everything(0)
    context.restore(half.private())
    half.setup(context)
    data = dataset or subject.data()
    context.batches = Batches(data, wanted.batch_size, device)
    selected = half.select(context, context.batches)
    place: dict[str, Any] = {"round_number": round_number + 1, "rounds": facts.rounds}
    place["moments"] = moments if wanted.keep_moments else None
    place["scaler"] = scaler or gradient_scaler(wanted, device)
    setup = TrainingSetup(device, compute=compute or Compute())
    trainer = Trainer(half, context, wanted, setup, check, checkpoints=checkpoints, **place)
    stats = trainer.train(half.phases(context, selected), data, 0)
    result = half.collect(context, selected, stats)
    return context, replace(result, keep={**result.keep, **moments.values})

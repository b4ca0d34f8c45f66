"""Whole rounds of a method in one process, without server, files or codecs: for tests of what its halves compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from tessera.shared.aggregation.local_work import EFFECTIVE_STEPS
from tessera.shared.methods.base import LocalResult, MethodSpec, Participant, RunInfo, State, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.selectors import Selector
from tessera.shared.rounds.planning import initial_state
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import Array, ArrayTensor, Tensor, to_array
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.training.context import LocalTaskContext
from tests.support.tasks import PLAIN, Subject, one_task

SGD = {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}


def site_data(seed: int, count: int) -> Dataset:
    """Random images with mostly one label, a different one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.where(torch.rand(count, generator=generator) < 0.8, seed % 3, (seed + 1) % 3)
    return Dataset({"pixel_values": torch.randn(count, 1, 8, 8, generator=generator), "labels": labels})


@dataclass
class Rounds:
    """A run on the small ViT or another `subject`. `sites` gives each worker's data, `vaults` what each keeps."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=lambda: SGD)
    sites: Mapping[str, Dataset] = field(
        default_factory=lambda: {"a/w": site_data(1, 8), "b/w": site_data(2, 16), "c/w": site_data(3, 24)}
    )

    only: Selector | None = None
    """What trains and is sent, whatever the method plans."""
    subject: Subject = PLAIN

    def __post_init__(self) -> None:
        model = self.subject.model()
        trained = {"batch_size": 8, **self.training}  # as `one_task` does
        self.facts = RunInfo(block_table(model), rounds=10, training=Training.model_validate(trained))
        context = LocalTaskContext(model, "image-classification", None, self.facts.blocks)  # type: ignore[arg-type]
        first = State(0, {block.name: ArrayTensor(context.read(block)) for block in self.facts.blocks})
        self.half = coordinator_half(MethodSpec(name=self.method, settings=dict(self.settings)), self.facts)
        self.state = initial_state(self.half, first)
        self.vaults: dict[str, dict[str, Array]] = {name: {} for name in self.sites}
        self.harvests: dict[str, LocalResult] = {}

    def play(self, *cohort: str) -> State:
        """One round of these workers, or of all."""
        names = cohort or tuple(self.sites)
        asked = [Participant(name, self.sites[name].examples) for name in names]
        updates = []
        for name, planned in self.half.plan(self.state, asked, Random(0)).items():
            plan = planned.model_copy(update={"train": self.only, "upload": self.only}) if self.only else planned
            model, server_state = _arrays(self.state.model), _arrays(self.state.server_state)
            _, result = one_task(
                self.method,
                self.settings,
                round_number=self.state.round,
                start=model,
                vault=self.vaults[name],
                server_state=server_state if plan.server_state else {},
                plan=plan,
                dataset=self.sites[name],
                subject=self.subject,
                **self.training,
            )
            examples = self.sites[name].examples
            worked = {EFFECTIVE_STEPS: self.half.expected_steps(plan, examples)} if self.half.normalizes else {}
            metrics = {**result.metrics, **worked}
            self.half.check(plan, examples, metrics)
            sent: dict[str, Tensor] = {block: ArrayTensor(values) for block, values in result.upload.items()}
            extra: dict[str, Tensor] = {array: ArrayTensor(each.values) for array, each in result.extra.items()}
            updates.append(Update(name, examples, sent, metrics, plan=plan, extra=extra))
            self.vaults[name], self.harvests[name] = dict(result.keep), result
        merged = self.half.merge(self.state, updates)
        self.state = replace(merged, model=_held(merged.model), server_state=_held(merged.server_state))
        return self.state

    def value(self, block: str) -> Array:
        return to_array(self.state.model[block])


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: to_array(tensor) for name, tensor in tensors.items()}


def _held(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: ArrayTensor(to_array(tensor), tensor.dtype) for name, tensor in tensors.items()}


def same_bits(one: Rounds, other: Rounds) -> bool:
    """Whether two runs have come to the same model, and remember nothing on top of it."""
    bits = [{n: to_array(t).tobytes() for n, t in rounds.state.model.items()} for rounds in (one, other)]
    return bits[0] == bits[1] and not one.state.server_state and not other.state.server_state

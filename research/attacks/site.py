"""A site under attack: the product's own worker, the version and plan that a coordinator sends it, and its upload.

Training, privacy and codecs are the product's, in its simulation of one round with one site. An attack sees the
version, the settings of the run and the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from transformers import PreTrainedModel

from common.arrays import Array
from tessera.shared.methods.base import Method, MethodSpec, Participant, Plan, State
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import Selector, named, roles
from tessera.shared.model.spec import Head, Model, Prompts
from tessera.shared.run_settings import Privacy
from tessera.simulation import Stalled, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, laid_out, read_block, write_block

SITE = "site"
RECORDED = "recorded"
"""The name of the method under attack, beside its own."""
ONE_STEP = {"batch_size": None, "epochs": 1, "optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0}
"""One step of plain SGD over all examples, which a coordinator may ask for."""


@dataclass(frozen=True)
class Version:
    """A model as a coordinator sends it, honest or crafted."""

    model: Model
    values: Mapping[str, Array]

    @classmethod
    def of(cls, config: Mapping[str, Any], head: Head, seed: int, prompts: Prompts | None = None) -> Self:
        """Return a new model with random weights."""
        built = instantiate(config, head, seed=seed, prompts=prompts)
        blocks, tensors = block_table(built), named_tensors(built)
        values = {block.name: read_block(tensors, block).copy() for block in blocks}
        return cls(Model(config=dict(config), head=head, blocks=blocks, prompts=prompts), values)

    def changed(self, values: Mapping[str, Array]) -> Self:
        """Return the version with other values of some blocks."""
        same = {name: np.asarray(new, self.values[name].dtype) for name, new in values.items()}
        return replace(self, values={**self.values, **same})

    def build(self) -> PreTrainedModel:
        """Return the model that the version describes, in evaluation mode."""
        built = laid_out(self.model)
        tensors = named_tensors(built)
        for block in self.model.blocks:
            write_block(tensors, block, self.values[block.name])
        built.train(mode=False)
        return built

    def block(self, ending: str) -> str:
        """Return the name of the only block whose name ends so."""
        (name,) = [block.name for block in self.model.blocks if block.name.endswith(ending)]
        return name


@dataclass(frozen=True)
class Scope:
    """A kind of partial update: the method whose plan trains and sends just these blocks."""

    name: str
    method: MethodSpec
    blocks: Selector | None = None
    """The plan's blocks, where no method plans just these; a coordinator may plan any."""


def _safl(score: str) -> MethodSpec:
    return MethodSpec(name="safl", settings={"score": score, "layers": 1})


FEDAVG = MethodSpec(name="fedavg")
FULL = Scope("full", FEDAVG)
HEAD = Scope("head", FEDAVG, roles("head"))
VALUE = Scope("value", MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, "scope": "v_only"}))
QUERY_KEY = Scope(
    "query, key",
    MethodSpec(name="fedfrozen", settings={"freeze": "value", "warmup_rounds": 0, "scope": "qk_only"}),
)
NORMS = Scope("norms", FEDAVG, roles("norm"))
FIRST_LAYER = Scope("SAFL first", _safl("first"))
LAST_LAYER = Scope("SAFL last", _safl("last"))
PROMPTS = Scope("prompts", MethodSpec(name="promptfl"))
WORDS = Scope("words", FEDAVG, named(["*word_embeddings.weight"]))

OF_TEXT = (FULL, HEAD, VALUE, QUERY_KEY, NORMS, FIRST_LAYER, LAST_LAYER)
SCOPES = (*OF_TEXT, PROMPTS)
"""What a round may train and send. SAFL's layer goes with the head and the norms, as it does by default."""


@dataclass(frozen=True)
class Release:
    """The update of one site in one round, as it was uploaded."""

    version: Version
    steps: Mapping[str, Array]
    """The difference from the version of each block that was sent, float64."""
    examples: int
    rate: float
    """The learning rate."""

    @property
    def gradients(self) -> dict[str, Array]:
        """The mean gradient of each block, if the site made `ONE_STEP`."""
        return {name: -step / self.rate for name, step in self.steps.items()}

    def sent(self, ending: str) -> str | None:
        """Return the name of the block with this ending, or None if it was not sent."""
        return next((name for name in self.steps if name.endswith(ending)), None)

    def updated(self) -> Version:
        """Return the version with the update applied."""
        return self.version.changed({name: self.version.values[name] + step for name, step in self.steps.items()})


def release(
    version: Version,
    data: Dataset,
    scope: Scope,
    *,
    privacy: Privacy | None = None,
    training: Mapping[str, Any] = ONE_STEP,
    seed: int = 0,
) -> Release:
    """Let a site train on its data for one round, and return what it uploads.

    `seed` determines all randomness, the noise of privacy included. Raises RuntimeError with the problem if the site
    uploads nothing.
    """
    plans: list[Plan] = []
    spec = {
        "name": "attacked", "dataset": "data", "rounds": 1, "seed": seed, "training": training, "privacy": privacy,
        "method": {"name": RECORDED, "settings": scope.method.settings},
    }  # fmt: skip
    methods()[RECORDED] = _recorded(methods()[scope.method.name], scope.blocks, plans)
    try:
        result = simulate(spec, Weights(version.model, version.values), {SITE: data})
        values = result.arrays(1)
    except Stalled as fault:
        raise RuntimeError(f"the site uploaded nothing: {fault}") from fault
    finally:
        del methods()[RECORDED]
    # Of one update the mean is the update.
    steps = {
        block.name: values[block.name].astype(np.float64) - version.values[block.name].astype(np.float64)
        for block in plans[-1].upload.resolve(version.model.blocks)
    }
    return Release(version, steps, data.examples, float(result.spec.training.learning_rate))


def _recorded(whole: Method[Any], blocks: Selector | None, plans: list[Plan]) -> Method[Any]:
    """Return a method that notes its plans, of these blocks if there are any."""

    class Recorded(whole.coordinator):  # type: ignore[misc, name-defined]
        def plan(self, state: State, cohort: Sequence[Participant], rng: Any) -> Mapping[str, Plan]:
            found: Mapping[str, Plan] = super().plan(state, cohort, rng)
            if blocks:
                found = dict.fromkeys(found, Plan(train=blocks, upload=blocks))
            plans.extend(found.values())
            return found

    return replace(whole, name=RECORDED, coordinator=Recorded)

"""A site under attack: the product's own worker, the version and plan that a coordinator sends it, and its upload.

Training, privacy, codecs and files are the product's. An attack sees the version, the settings of the run and the
bytes of the update file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import Selector, named, roles
from tessera.shared.model.spec import Head, Model, Prompts
from tessera.shared.rounds.planning import begun, plan_round
from tessera.shared.rounds.validation import HeldUpdates, Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.run_settings import Privacy
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array
from tessera.shared.updates.update_file import read_update
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.policy import Policy
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, laid_out, read_block, write_block
from tessera.worker.simulation import Weights
from tessera.worker.simulation.blob_folder import Folder
from tessera.worker.simulation.checkpoint import Records
from tessera.worker.simulation.in_process_coordinator import InProcessCoordinator, Order
from tessera.worker.simulation.virtual_sites import VirtualSites
from tessera.worker.simulation.virtual_workers import Workers

SITE = "site"
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
    with tempfile.TemporaryDirectory(prefix="attacked-site-") as name:
        folder = Path(name)
        blobs, records = Folder(folder / "blobs"), Records(folder)
        uploaded = upload_model(blobs, Weights(version.model, version.values))
        spec = RunSpec.model_validate({
            "name": "attacked", "method": scope.method, "model": uploaded.model, "version": uploaded.version,
            "dataset": "data", "rounds": 1, "seed": seed, "training": training, "privacy": privacy,
        })  # fmt: skip
        states, population = States(blobs), VirtualSites({SITE: data}, 1)
        model = states.model(uploaded.model)
        given = states.load(model, states.manifest(uploaded.version), 0)
        state = begun(spec, model, given)
        first = uploaded.version if state == given else states.store(state, uploaded.version)[1][-1].digest
        ((worker, plan),) = plan_round(spec, model, state, [population.participant(SITE, 1)]).items()
        if scope.blocks:
            plan = Plan(train=scope.blocks, upload=scope.blocks)
        inspector = Inspector(blobs, states, HeldUpdates(1 << 26))
        coordinator = InProcessCoordinator(spec, model, blobs, states, inspector, records.open)
        workers = Workers(population, None, coordinator, folder, torch.device("cpu"), Policy(), {})
        order = Order(
            id="task", worker=worker, kind="train", number=1, plan=plan, version=VersionRef(number=0, digest=first)
        )
        view, held = workers.train(order), records.open.get(order.id)
        if held is None:
            raise RuntimeError(f"the site uploaded nothing: {view.problem}")
        steps = _steps(blobs.read(held.reported.update), plan.upload.resolve(model.blocks), version)
    rate = float(spec.training.learning_rate)
    return Release(version, steps, data.examples, rate)


def _steps(update: bytes, asked: tuple[Block, ...], version: Version) -> dict[str, Array]:
    """Return the differences from the version in the bytes of an update, by block."""
    bases = {block.name: ArrayTensor(version.values[block.name], block.dtype) for block in asked}
    sent = read_update(partial(BytesIO, update), len(update), {block.name: block for block in asked}, bases)
    return {
        name: to_array(tensor).astype(np.float64) - version.values[name].astype(np.float64)
        for name, tensor in sent.items()
    }

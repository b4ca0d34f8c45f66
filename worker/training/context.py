"""The task context of a method's worker half: a model, the plan, and access to the model's internals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import proxy

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tessera.shared.methods.base import Output, Phase, Plan, TaskContext
from tessera.shared.model.attention_stats import LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import Selector
from tessera.shared.model.spec import Head, Modality
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import Array
from tessera.worker.attention.layer_scores import common_to_all, fisher, gradient_norms
from tessera.worker.attention.profile import attention_profile, attention_rows, batches_of_one, isolated_profile
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import ConfigError
from tessera.worker.model.block_map import DTYPES, named_tensors
from tessera.worker.model.build import read_block, write_block
from tessera.worker.model.forward import IGNORED, CrossEntropy, Preference, forward, uncompiled, without_dropout
from tessera.worker.model.held_values import HeldValues
from tessera.worker.model.prompts import PromptFunction, patch_features, prompts_of, require_prompts, text_features
from tessera.worker.training.optimization.image_features import ImageFeatures, images_once
from tessera.worker.training.optimization.precision import autocast


def largest(scores: Array, count: int, picks: int | None = None) -> list[int]:  # noqa: ARG001 (it is for noise)
    """Return the places of the `count` largest sums of scores [examples, candidates]; ties go to the first."""
    return [int(place) for place in np.argsort(-scores.sum(axis=0), kind="stable")[:count]]


MAX_PLAIN = 8
"""Number of tokens that a model has at least, if its configuration does not name their number."""


def synthetic_examples(model: PreTrainedModel, dataset: Dataset, examples: int) -> dict[str, Tensor]:
    """Return synthetic examples of a data set, whose texts end with the model's end-of-text token.

    They have no padding: some models number the other tokens, and then no text needs more positions than these.
    """
    end, words = (getattr(model.config, name, None) for name in ("eos_token_id", "vocab_size"))
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    padding = {getattr(model.config, "pad_token_id", None), *(table.padding_idx for table in tables)}
    known = isinstance(end, int) and isinstance(words, int) and 0 <= end < words and end not in padding
    plain = [word for word in range(words if isinstance(words, int) else MAX_PLAIN) if word not in {end, *padding}]
    return dataset.placeholder(examples, end if known else None, plain[:2] or (0, 1))


def synthetic_batch(model: PreTrainedModel, dataset: Dataset) -> dict[str, Tensor]:
    """Return a batch of one synthetic example, on the model's device."""
    batch = {**synthetic_examples(model, dataset, 1), **dataset.common}
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


@dataclass
class LocalTaskContext:
    """`shared.methods.base.TaskContext` on a transformers model. Call `close` at the end of the task."""

    model: PreTrainedModel
    head: Head
    plan: Plan
    blocks: Sequence[Block]
    vault: Mapping[str, Array] = field(default_factory=dict)
    server_state: Mapping[str, Array] = field(default_factory=dict)
    private: list[Block] = field(default_factory=list)
    choose_top: Callable[[Array, int, int | None], list[int]] = largest
    """The function behind `top_k`: without noise, unless the task is private."""
    batches: Iterable[Mapping[str, Tensor]] = ()
    placeholder: Mapping[str, Tensor] | None = None
    """A synthetic example for a private task, in which no measurement may fail because of the examples."""
    objective: CrossEntropy | None = None
    """The training loss that the run's settings put in place of the model's own."""
    training: Training = field(default_factory=Training)
    """The run's. Attention is measured in their precision, and gradients as scores in that of the weights."""
    held: HeldValues = field(default_factory=HeldValues)
    """The digests of the model's values, which the next task need not write again."""
    images: ImageFeatures = field(default_factory=ImageFeatures)
    """The features of images that are the same in all passes."""
    _added: list[str] = field(default_factory=list)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def read(self, block: Block) -> Array:
        return read_block(self._tensor(block), block)

    def read_all(self, blocks: Iterable[Block]) -> dict[str, Array]:
        tensors = named_tensors(self.model)
        return {block.name: read_block(tensors, block) for block in blocks}

    def write(self, block: Block, values: Array) -> None:
        self.held.forget([block.tensor])
        write_block(self._tensor(block), block, values)

    def synthetic_examples(self, dataset: Dataset, examples: int) -> dict[str, Tensor]:
        return synthetic_examples(self.model, dataset, examples)

    def _tensor(self, block: Block) -> dict[str, Tensor]:
        """Return the tensor of a block by its name. It is looked up alone, because listing all tensors is slow."""
        *path, name = block.tensor.split(".")
        module: nn.Module = self.model
        try:
            for step in path:
                module = getattr(module, step)
            return {block.tensor: getattr(module, name)}
        except AttributeError:
            return {}

    def restore(self, private: Selector) -> None:
        """Set the run's private blocks to their values in the vault. Raises SelectorError as `resolve` does."""
        for block in private.resolve(self.blocks):
            self._restore(block)

    def tensors(self, values: Mapping[str, Array]) -> dict[str, Tensor]:
        blocks = [block for block in self.blocks if block.name in values]
        wanted = {block.tensor for block in blocks}
        whole = {name: torch.zeros_like(t) for name, t in named_tensors(self.model).items() if name in wanted}
        for block in blocks:
            write_block(whole, block, values[block.name])
        return whole

    def forward(self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None) -> Output:
        with nullcontext() if values is None else uncompiled(self.model):
            return forward(self.model, self.head, batch, values, self.objective)

    def forward_with_features(self, batch: Mapping[str, Tensor]) -> tuple[Output, Tensor]:
        return self._output_and_features(batch, None)

    def features(self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad(), without_dropout(self.model):
            return self._output_and_features(batch, values)[1]

    def _output_and_features(
        self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor] | None
    ) -> tuple[Output, Tensor]:
        inputs: list[Tensor] = []
        handle = self._head_module().register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            with uncompiled(self.model):
                output = self.forward(batch, values)
        finally:
            handle.remove()
        features = inputs[0]  # [examples, width] or [examples, positions, width]
        if features.ndim == 2:
            return output, features
        real = self._real_tokens(batch)  # [examples, positions]
        if real is None or features.shape[:-1] != real.shape:
            return output, features.flatten(1, -2).mean(dim=1)
        weights = real.to(features.dtype).unsqueeze(-1)
        return output, (features * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)

    def _real_tokens(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return the mask of the head's tokens that are not padding, or None if the batch has no such mask."""
        name = "decoder_attention_mask" if self.head == "seq2seq-lm" else "attention_mask"
        return self._with_padding(batch).get(name)

    def _head_module(self) -> nn.Module:
        # A dual encoder's scale of the logits is the model's own parameter, and its first projection that of images.
        paths = [block.tensor.rpartition(".")[0] for block in self.blocks if block.role == "head"]
        path = next(filter(None, paths), None)
        if path is None:
            raise ValueError("the model has no head module, so it has no features: choose a head or another method")
        return self.model.get_submodule(path)

    def attention(self, batches: Iterable[Mapping[str, Tensor]], tokens: TaskTokens) -> dict[str, LayerAttention]:
        common = partial(common_to_all, head=self.head)
        padded = map(self._with_padding, batches)

        def read(batch: Mapping[str, Tensor]) -> Output:
            with autocast(self.training, self.model.device):
                return self.forward(batch)

        def profile(batches: Iterable[Mapping[str, Tensor]]) -> dict[str, LayerAttention]:
            return attention_profile(self.model, self.blocks, batches, read, tokens, common)

        if self.placeholder is None:
            return profile(padded)
        return isolated_profile(profile, self._with_padding(self.placeholder), padded, common)

    def attention_rows(self, batch: Mapping[str, Tensor], queries: int) -> dict[str, Array]:
        padded = self._with_padding(batch)
        # One by one: the batch may be larger than those of training, which fit into memory.
        pieces = [padded] if common_to_all(padded, self.head) else batches_of_one(padded, ())
        with autocast(self.training, self.model.device):
            found = [attention_rows(self.model, self.blocks, each, self.forward, queries) for each in pieces]
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}

    def _with_padding(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch with a decoder's padding mask, which only the labels contain."""
        if self.head != "seq2seq-lm" or "decoder_attention_mask" in batch or not batch:
            return batch
        return {**batch, "decoder_attention_mask": (batch["labels"] != IGNORED).long()}

    def gradient_norms(self, batches: Iterable[Mapping[str, Tensor]], blocks: Sequence[Block]) -> dict[str, float]:
        return gradient_norms(self.model, blocks, batches, self._loss)

    def fisher(self, batches: Iterable[Mapping[str, Tensor]], blocks: Sequence[Block]) -> dict[str, float]:
        return fisher(self.model, blocks, batches, self._loss, self.head)

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        # The model's own loss, as in evaluations, so that settings of the training loss change no score.
        return forward(self.model, self.head, batch, objective=self.preference).loss

    @property
    def preference(self) -> Preference | None:
        """The loss of pairs of texts, which evaluations have too: of pairs a model has no loss of its own."""
        return self.objective if isinstance(self.objective, Preference) else None

    def top_k(self, scores: Array, count: int, picks: int | None = None) -> list[int]:
        return self.choose_top(scores, count, picks)

    def add_private(self, name: str, module: nn.Module) -> None:
        if hasattr(self.model, name):
            raise ConfigError(f"the model already has a module {name!r}, the name of the method's private module")
        self.model.add_module(name, module.to(self.model.device))
        self._added.append(name)
        for path, tensor in named_tensors(module).items():
            block = Block(
                tensor=f"{name}.{path}", role="other", shape=tuple(tensor.shape), dtype=DTYPES[tensor.dtype]
            )
            self.private.append(block)
            self._restore(block)

    def _restore(self, block: Block) -> None:
        if block.name in self.vault:
            self.write(block, self.vault[block.name])

    def insert_prompts(self, prompts: Mapping[Modality, PromptFunction]) -> None:
        require_prompts(self.model).insert(prompts)

    def text_features(self, batch: Mapping[str, Tensor], prompts: PromptFunction | None = None) -> Tensor:
        return text_features(self.model, batch, prompts)

    def replace_output(self, function: Callable[[TaskContext, Mapping[str, Tensor], Any], Any]) -> None:
        # A reference to this context, and by it to the model, would keep the model of a failed task in memory until
        # Python's garbage collector happens to run.
        context = proxy(self)
        self._hooks.append(
            self.model.register_forward_hook(
                lambda _model, _args, inputs, output: function(context, inputs, output), with_kwargs=True
            )
        )

    def patch_features(self, output: Any) -> Tensor:
        return patch_features(self.model, output)

    def images_once(self, data: Dataset, phases: Sequence[Phase] | None = None) -> AbstractContextManager[Dataset]:
        """Return `image_features.images_once` for a task with these phases, or for an evaluation.

        A task that trains the vision tower in any phase computes images again in all of them, however often the
        training resumes. So does one whose plan lets it, as the next round may.
        """
        if self._hooks:
            # They may read more of the vision tower than its features.
            return nullcontext(data)
        plans = [] if phases is None else [self.plan.train, *(phase.train for phase in phases)]
        trained = {block.tensor for plan in plans for block in plan.resolve(self.blocks)}
        changed = self.held.written | trained
        return images_once(self.model, self.head, self.images, data, changed, in_order=phases is None)

    def close(self) -> None:
        """Remove everything that was added to the model."""
        if tokens := prompts_of(self.model):
            tokens.transforms = {}
        for name in self._added:
            delattr(self.model, name)
        self._added.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

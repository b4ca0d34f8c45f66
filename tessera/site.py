"""A site's own training script as a part of federated runs.

    import tessera.site

    task = tessera.site.task()
    model = task.model()
    task.freeze(model)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[task.callback()])
    trainer.train()
    task.submit(model, {"loss": trainer.state.log_history[-1]["train_loss"]})

A worker whose settings name the script (`executor.command`) runs it for each training task. It needs the packages of
a worker, and accelerate for transformers' `Trainer`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainerCallback

from tessera.shared.model.blocks import Block
from tessera.shared.model.dataset_schema import token_limit
from tessera.shared.tensors.lazy import as_bytes
from tessera.shared.updates.model_folder import ModelFolder
from tessera.shared.updates.safetensors_file import write
from tessera.worker.data.dataset import Dataset as Examples
from tessera.worker.data.packing import packed
from tessera.worker.data.readers.tokenizer import MAX_TOKENS, tokenized, tokenizer_of
from tessera.worker.errors import ModelMismatch
from tessera.worker.executor import script_folder
from tessera.worker.executor.folder import read_document, write_document
from tessera.worker.executor.script_folder import ScriptFigures, ScriptProgress, ScriptTask
from tessera.worker.inventory import datasets_of
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import activate_adapters, load, read_block, tensor_of
from tessera.worker.training.freeze import Freeze

__all__ = ["SiteTask", "task"]


def task() -> SiteTask:
    """Return the training task that the worker hands this script. Raises RuntimeError if no worker runs it."""
    folder = os.environ.get(script_folder.TASK_VARIABLE)
    if not folder:
        raise RuntimeError(
            "no worker runs this script: name it in the worker's settings, [executor] command = "
            f'["{sys.executable}", "{sys.argv[0]}"], and start a run'
        )
    return SiteTask(Path(folder))


class SiteTask:
    """One training task of a run, in the folder that the worker made for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._document = given = read_document(ScriptTask, folder / script_folder.TASK)
        self.run, self.round, self.rounds = given.run, given.round, given.rounds
        """The run's name; the round's number, from 1; and the number of the run's rounds."""
        self.examples, self.steps = given.examples, given.steps
        """The number of training examples, by which the update is weighed, and of optimizer steps at most."""
        self.training = given.training
        """The run's settings of local training, such as `learning_rate`. The script may use others."""
        self.seed = given.seed % (1 << 32)
        """A seed, the same when the task is repeated."""
        self.model_folder = folder / script_folder.MODEL
        """The folder of the model and its tokenizer, for `AutoTokenizer.from_pretrained`."""

    @property
    def data(self) -> dict[str, Any]:
        """The kind and the options of the data set in the worker's settings, such as its file.

        Raises RuntimeError if some rows of the files are not for training.
        """
        if self._document.data is None:
            raise RuntimeError(
                f"the data set {self._document.dataset!r} has rows that are not for training (held_out, opt_out or "
                "part): use task.dataset(), which leaves them out"
            )
        return self._document.data

    def dataset(self) -> Dataset[dict[str, Tensor]]:
        """Return the training examples as the worker reads them: the model's inputs and `labels`, by name.

        Texts for the run's own tokenizer are converted with it. Raises DataError, and RuntimeError if the number of
        examples has changed since the worker started.
        """
        (found,) = datasets_of(self._document.sources).values()
        if found.texts:
            tokenizer = tokenizer_of("tokenizer", str(self.model_folder), by_word=found.texts.by_word)
            limit = token_limit(self._opened.model) or MAX_TOKENS
            tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
            found = tokenized(found, tokenizer)
        if found.common:
            raise RuntimeError("a data set with texts of classes is for the worker's own training")
        if found.examples != self.examples:
            since = f"there are {found.examples} examples, and {self.examples} at the worker's start"
            raise RuntimeError(f"{since}: restart the worker")
        return _Rows(packed(found) if found.pack else found)

    def model(self) -> PreTrainedModel:
        """Return the model of the run's version, with its prompts and the adapters of this site's rank."""
        model = load(self._opened, self._document.mapping)
        if (lora := self._opened.model.lora) and lora.ranks:
            activate_adapters(model, lora.parts_within(self._document.lora_rank or lora.rank))
        model.name_or_path = model.config.name_or_path = str(self.model_folder)
        return model

    def freeze(self, model: nn.Module) -> None:
        """Let the tensors of the plan's blocks train (`requires_grad`), and no others. Call it before the trainer is
        made. Raises ModelMismatch if the model lacks a block."""
        self.frozen(model)

    def frozen(self, model: nn.Module) -> Freeze:
        """Do as `freeze`, and return the object that restores frozen rows of tensors, for a script's own loop."""
        return Freeze(_bare(model), self._blocks(self._document.train))

    def callback(self) -> TrainerCallback:
        """Return a callback for transformers' `Trainer` and TRL's trainers: it reports the progress to the worker,
        keeps frozen rows of tensors as they are, and ends training after `steps`, or when the worker asks for it."""
        return _Callback(self)

    def submit(self, model: nn.Module, metrics: Mapping[str, float] | None = None) -> None:
        """Hand the trained blocks, and finite figures such as `loss`, to the worker.

        Of several processes (torchrun), only the first submits. Raises ValueError for a model without the run's
        blocks, and SystemExit if the worker no longer wants the result.
        """
        if os.environ.get("RANK", "0") != "0":
            return
        if self.is_unwanted:
            raise SystemExit("the worker no longer wants the result of this task")
        tensors, blocks = named_tensors(_bare(model)), self._blocks(self._document.send)
        try:
            for block in blocks:
                tensor_of(tensors, block)
        except ModelMismatch as fault:
            raise ValueError(f"{fault}. Train and submit the model of task.model(), in its own dtypes") from fault
        figures = ScriptFigures(metrics=_figures(metrics or {}))
        partial_result = self.folder / f"{script_folder.RESULT}-{uuid4().hex}"
        partial_result.mkdir(mode=0o700)
        try:
            with (partial_result / script_folder.BLOCKS).open("wb") as file:
                layout = [(block.name, block.dtype, block.shape) for block in blocks]
                write(file, layout, (as_bytes(read_block(tensors, block)) for block in blocks))
            write_document(partial_result / script_folder.FIGURES, figures)
            partial_result.rename(self.folder / script_folder.RESULT)
        finally:
            shutil.rmtree(partial_result, ignore_errors=True)

    @property
    def is_unwanted(self) -> bool:
        """True once the worker no longer wants the task's result."""
        return (self.folder / script_folder.STOP).exists()

    def report(self, step: int, loss: float | None = None) -> None:
        """Report the number of steps made, and the mean loss, to the worker."""
        known = loss if loss is not None and isfinite(loss) else None
        write_document(self.folder / script_folder.PROGRESS, ScriptProgress(step=step, loss=known))

    @cached_property
    def _opened(self) -> ModelFolder:
        return ModelFolder.open(self.model_folder)

    def _blocks(self, names: tuple[str, ...]) -> list[Block]:
        return [self._opened.model.by_name[name] for name in names]


class _Rows(Dataset[dict[str, Tensor]]):
    """The rows of a worker's data set."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return self._examples.examples

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {name: rows[0] for name, rows in self._examples.read(torch.tensor([place])).items()}


class _Callback(TrainerCallback):
    def __init__(self, task: SiteTask) -> None:
        self._task = task
        self._loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        assert model  # noqa: S101  (as every trainer passes it)
        # On the device of training, and with the version's values.
        self._freeze = freeze = self._task.frozen(model)
        self._hooks = [
            parameter.register_hook(partial(_masked, freeze, parameter))  # type: ignore[no-untyped-call]
            for parameter in freeze.parameters
            if freeze.in_part(parameter)
        ]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._freeze.restore()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._task.report(state.global_step, self._loss)
        if state.global_step >= self._task.steps or self._task.is_unwanted:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for hook in self._hooks:
            hook.remove()


def _masked(freeze: Freeze, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    masked = gradient.clone()
    freeze.mask(parameter, masked)
    return masked


def _bare(model: nn.Module) -> nn.Module:
    """Return a model without the wrappers of accelerate."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite figures under names that may leave a site: `eval/loss` as `eval_loss`."""
    found = {re.sub(r"\W+", "_", name.lower(), flags=re.ASCII): value for name, value in metrics.items()}
    usable = [
        (name, float(value))
        for name, value in found.items()
        if script_folder.FIGURE.match(name) and isinstance(value, int | float) and isfinite(value)
    ]
    return dict(usable[: script_folder.MAX_FIGURES])

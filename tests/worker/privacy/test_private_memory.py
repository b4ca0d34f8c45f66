"""Private training where memory is short: the size of pieces is found before any privacy is spent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tessera.shared.methods.base import Phase
from tessera.shared.model.selectors import EVERYTHING
from tessera.worker.training.optimization.micro_batch import PieceSize
from tests.worker.privacy.test_private_task import images, private_task, spent, trainer_of, work_on


def run_out_above(model: nn.Module, most: int, sizes: list[int]) -> None:
    """Let memory run out in a forward pass of more than `most` examples, and note the sizes of the others."""

    def check(_: nn.Module, __: Any, kwargs: Any) -> None:
        if len(kwargs["pixel_values"]) > most:
            raise torch.OutOfMemoryError("out of memory in a test")
        sizes.append(len(kwargs["pixel_values"]))

    model.register_forward_pre_hook(check, with_kwargs=True)


def test_pieces_fit_into_memory_before_privacy_is_spent(tmp_path: Path) -> None:
    context, size, sizes, before = work_on(), PieceSize.of("auto"), [], []
    run_out_above(context.model, 3, sizes)
    private = private_task(tmp_path)
    begin = private.begin

    def watched(steps: int) -> None:
        before.append((size.examples, spent(tmp_path)))
        begin(steps)

    private.begin = watched  # type: ignore[method-assign]
    trainer = replace(trainer_of(context), private=private, piece_size=size)
    trainer.train([Phase(EVERYTHING)], images(), seed=0)
    # Of 16, twice the expected 8, which is halved until it fits.
    assert before == [(2, [])]
    assert max(sizes) == 2
    assert len(spent(tmp_path)) == 1


def test_an_example_that_does_not_fit_costs_no_privacy(tmp_path: Path) -> None:
    context, fitting = work_on(), PieceSize.of("auto")
    run_out_above(context.model, 0, [])
    private = private_task(tmp_path)
    # The rehearsal of a loss takes one example, which runs out of memory too.
    trainer = replace(trainer_of(context), private=private, piece_size=fitting)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train([Phase(EVERYTHING)], images(), seed=0)
    assert spent(tmp_path) == []

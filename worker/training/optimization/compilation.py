"""Compilation of a model's forward and backward passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_trained: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""The tensors that trained when a model was compiled last. Torch keeps compiled code for the whole process."""


@contextmanager
def compiled(model: nn.Module, compiler: Callable[..., Any] = torch.compile) -> Iterator[None]:
    """Compile a model's forward pass within the block. No name of a module or tensor changes.

    Compiled code may keep to the gradients that an earlier phase needed (pytorch #139476), so it is dropped whenever
    other tensors train than before.
    """
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if _trained.get(model) != trained:
        torch.compiler.reset()
        _trained[model] = trained
    model.forward = compiler(model.forward)
    try:
        yield
    finally:
        del model.forward

"""The values that a kept model still has from its last task, so that they need not be written again."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SAMPLES = 64
"""Number of values of a parameter that are compared with those that were written."""


@dataclass(frozen=True)
class _Held:
    """A parameter as it was when its values had been written."""

    tensor: Tensor
    content: tuple[str, ...]
    writes: int
    """Torch's count of the writes to it."""
    address: int
    sample: Tensor


class HeldValues:
    """The digests of the blocks in a model's parameters.

    A parameter is trusted only if no phase trained it and nothing was written to it: neither by torch's own count of
    in-place writes, nor by assigning other memory to its `data`. Writes that torch does not count, through `data` or
    numpy, are noticed by a sample of the values. Buffers are never trusted, because forward passes change them
    without a count.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self.written = set[str]()
        """The names of the tensors that were written or trained since a version was loaded."""

    def note(self, name: str, tensor: Tensor, content: tuple[str, ...]) -> None:
        """Note the digests of the blocks that were just written to a tensor."""
        if isinstance(tensor, nn.Parameter) and tensor.is_contiguous():
            self._held[name] = _Held(tensor, content, tensor._version, tensor.data_ptr(), _sample(tensor))  # noqa: SLF001 (no other way)

    def has(self, name: str, tensor: Tensor, content: tuple[str, ...]) -> bool:
        """Return True if a tensor still has the values of blocks with these digests."""
        held = self._held.get(name)
        return (
            held is not None
            and held.tensor is tensor
            and (held.content, held.writes, held.address) == (content, tensor._version, tensor.data_ptr())  # noqa: SLF001
            and (tensor.is_meta or torch.equal(held.sample, _sample(tensor)))
        )

    def forget(self, names: Iterable[str]) -> None:
        """Trust the values of these tensors no longer, because they are about to be written."""
        for name in names:
            self._held.pop(name, None)
            self.written.add(name)


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy of up to twice SAMPLES values, spread over a contiguous tensor from its first value on."""
    flat = tensor.detach().view(-1)
    return flat[:: max(1, len(flat) // SAMPLES)].clone()

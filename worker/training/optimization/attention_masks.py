"""Attention masks whose values are not read on the way."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

SDPA = "sdpa"

_LOCK = threading.Lock()
_inside = 0
"""The number of threads whose models leave their masks unread."""


@contextmanager
def unread_masks(device: torch.device) -> Iterator[None]:
    """Let no model on a GPU read its padding mask.

    transformers drops a mask without padding, for which each forward pass waits until the device has summed it. On
    the CPU nothing changes. Holds for all threads of the process: a backward pass recomputes layers in another one.
    """
    global _inside  # noqa: PLW0603 (so is transformers' table)
    if device.type == "cpu":
        yield
        return
    with _LOCK:
        if not _inside:
            _install()
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                del ALL_MASK_ATTENTION_FUNCTIONS[SDPA]  # type: ignore[no-untyped-call]


def _install() -> None:
    mask = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]

    def unread(*args: object, attention_mask: torch.Tensor | None = None, **options: object) -> torch.Tensor | None:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made: torch.Tensor | None = mask(*args, attention_mask=attention_mask, **options)
        return made

    ALL_MASK_ATTENTION_FUNCTIONS[SDPA] = unread

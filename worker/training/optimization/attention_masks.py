"""Attention masks whose values are not read on the way."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

SDPA = "sdpa"


@contextmanager
def unread_masks(device: torch.device) -> Iterator[None]:
    """Let no model on a GPU read its padding mask.

    transformers drops a mask without padding, for which each forward pass waits until the device has summed it. On
    the CPU nothing changes.
    """
    if device.type == "cpu":
        yield
        return
    mask = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]

    def unread(*args: object, attention_mask: torch.Tensor | None = None, **options: object) -> torch.Tensor | None:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made: torch.Tensor | None = mask(*args, attention_mask=attention_mask, **options)
        return made

    ALL_MASK_ATTENTION_FUNCTIONS[SDPA] = unread
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[SDPA]  # type: ignore[no-untyped-call]

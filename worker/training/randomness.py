"""The global sources of randomness, which models and other libraries draw from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed every global source of randomness: Python's, numpy's, and torch's on each device."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002  (other libraries draw from the global state)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # Otherwise torch notes the stack for each kind of device that could be found later.
        torch.default_generator.manual_seed(seed)


def generator_states() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the states of these sources: a JSON document, and tensors by name."""
    # numpy's words are an array, which JSON lacks.
    name, words, *rest = np.random.get_state()  # noqa: NPY002
    document = {"python": random.getstate(), "numpy": [name, np.asarray(words).tolist(), *rest]}
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors |= {f"cuda:{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return document, tensors


def set_generator_states(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Set the states that `generator_states` returned, except those of GPUs that this process does not see."""
    version, words, gauss = document["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(document["numpy"]))  # noqa: NPY002
    for device, state in tensors.items():
        if device == "cpu":
            torch.set_rng_state(state.clone())
        elif torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.clone(), device)

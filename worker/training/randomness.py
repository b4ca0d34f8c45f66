"""The global sources of randomness, which models and other libraries draw from."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed every global source of randomness: Python's, numpy's, and torch's on each device."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002  (the global state is what other libraries draw from)
    torch.manual_seed(seed)

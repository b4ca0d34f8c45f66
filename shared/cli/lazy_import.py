"""Modules that are imported only where they are needed."""

from __future__ import annotations

import gc
import importlib
from typing import Any


def load(module: str) -> Any:
    """Return the module of this name.

    The garbage collector rests meanwhile: what is imported stays, and to look through it again and again takes a
    tenth of the time or more.
    """
    resting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if resting:
            gc.enable()

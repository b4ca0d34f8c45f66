"""Variants of a test, of which the long tests alone run some."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variants(names: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Return parameters: those in `short` run always, the others in the long tests only."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]

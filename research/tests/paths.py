"""The project's folder, and variants of a test."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def variants(names: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Return parameters: those in `short` run always, the others in the long tests only."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]

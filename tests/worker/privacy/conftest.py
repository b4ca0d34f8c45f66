from __future__ import annotations

from collections.abc import Iterator

import pytest

from tessera.worker.privacy import accountant

LOSS_GRID = accountant.LOSS_GRID
"""The product's own: tests are collected before a coarser one is set (`tests/conftest.py`)."""


@pytest.fixture
def fine_grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Account on the product's own grid."""
    monkeypatch.setattr(accountant, "LOSS_GRID", LOSS_GRID)
    _forget()
    yield
    _forget()


def _forget() -> None:
    """Clear the caches whose keys do not name the grid."""
    for cached in (accountant._noise_multiplier, accountant._admits, accountant._least_budget, accountant._epsilon):
        cached.cache_clear()

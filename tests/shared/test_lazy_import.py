"""Imports on first use."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from tessera.shared import lazy_import


class Itself:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("frozen", [False, True])
def test_only_a_program_keeps_objects_for_the_sake_of_its_imports(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_import, "frozen", frozen)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    made = Itself()
    there = weakref.ref(made)
    lazy_import.load("colorsys")
    del made
    gc.collect()
    assert (there() is not None) == frozen
    gc.unfreeze()

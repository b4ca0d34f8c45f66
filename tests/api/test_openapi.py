"""The committed description of the API is the API."""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.api.openapi import document

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_the_committed_description_is_the_present_one() -> None:
    made = "python -m coordinator.api.openapi > docs/openapi.json"
    assert COMMITTED.read_text() == document(), f"the API has changed; run: {made}"


def test_every_operation_has_a_stable_name_of_its_own() -> None:
    paths = json.loads(document())["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() and name[0].islower() and "_" not in name for name in names)


def test_every_operation_says_what_it_is_for() -> None:
    paths = json.loads(document())["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["tags"], (method, path)
            assert operation["summary"], (method, path)

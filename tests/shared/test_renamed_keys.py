"""Keys of versions before: hashed documents are read, and what people write is refused with the new name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared import renamed_keys
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import Manifest
from tessera.shared.schema import canonical

DIGEST = "sha256:" + "0" * 64
SPEC = {"name": "x", "method": {"name": "fedavg"}, "model": DIGEST, "version": DIGEST, "dataset": "d", "rounds": 1}


def test_a_manifest_of_format_1_is_read_and_new_ones_say_their_format() -> None:
    tensor = {"digest": DIGEST, "shape": [2], "dtype": "F32"}
    old = {"blocks": {"a": DIGEST}, "memory": {"c/a": tensor}, "numbers": {"x": 1.0}, "root": None}
    manifest = Manifest.read(json.dumps(old).encode(), lambda _: b"")
    assert manifest.server_state["c/a"].shape == (2,)
    assert manifest.scalars == {"x": 1.0}
    assert json.loads(canonical(manifest))["format"] == 2
    assert Manifest.model_validate_json(canonical(manifest)) == manifest


def test_names_of_format_1_are_refused_in_format_2() -> None:
    with pytest.raises(ValidationError, match="numbers"):
        Manifest.model_validate({"format": 2, "blocks": {}, "numbers": {}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cohort": {"tries": 2}}, "`cohort.tries` is now `cohort.max_attempts`"),
        ({"cohort": {"enough": 2}}, "`cohort.enough` is now `cohort.target_updates`"),
        ({"divide": "cohort"}, "`divide` is now `normalization`"),
    ],
)
def test_an_old_key_of_a_run_is_refused_with_the_new_one(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RunSpec.model_validate(SPEC | given)


@pytest.mark.parametrize(("old", "new"), renamed_keys.COORDINATOR.items())
def test_an_old_setting_in_the_environment_is_refused_with_the_new_one(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    monkeypatch.setenv(f"TESSERA_{old.upper()}", "1")
    with pytest.raises(ValidationError, match=f"`TESSERA_{old.upper()}` is now `TESSERA_{new.upper()}`"):
        CoordinatorSettings()
    assert new in CoordinatorSettings.model_fields

"""The reference of a run's file, and the file that `tessera run init` writes: both are made of the models."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.runs import RunSpec
from tessera.shared.cli.reference.run_settings import document
from tessera.shared.cli.run_keys import kind_of
from tessera.shared.cli.run_template import template
from tessera.shared.client.run_file import read_spec
from tessera.shared.methods.registry import coordinator_half, methods
from tessera.shared.rounds.planning import run_facts
from tests.support.cli import tessera
from tests.support.federation import small_model
from tests.support.variants import variants

START = dict.fromkeys(("model", "version"), "sha256:" + "0" * 64)


def written(tmp_path: Path, method: str, change: Any = str) -> dict[str, Any]:
    file = tmp_path / f"{method}.toml"
    file.write_text(change(template(methods()[method])))
    return read_spec(file)


def test_a_bound_is_shown_as_it_is() -> None:
    for high, shown in ((0.5, "0.5"), (30, "30"), (2_592_000, "2592000")):
        assert kind_of({"type": "number", "minimum": 0, "maximum": high}, {}) == f"number from 0 to {shown}"


def test_every_key_has_a_meaning() -> None:
    rows = re.findall(r"^\|.*\|$", document(), re.MULTILINE)
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []


@pytest.mark.parametrize("method", sorted(methods()))
def test_the_file_of_each_method_is_valid_as_it_is(tmp_path: Path, method: str) -> None:
    given = written(tmp_path, method)
    assert given["evaluation"] == {"sites": True}
    spec = RunSpec.model_validate(given | START)
    assert spec.method.settings == {}
    coordinator_half(spec.method, run_facts(spec, small_model()))
    required = {
        "name": method,
        "dataset": "data",
        "rounds": 10,
        "method": {"name": method},
        "evaluation": {"sites": True},
    }
    training = methods()[method].training
    assert spec == RunSpec.model_validate(required | START | {"training": training})


@pytest.mark.parametrize("method", variants(sorted(methods()), {"fedavg", "fedfrozen", "pfeddc", "safl"}))
def test_the_defaults_that_the_file_shows_are_the_defaults(tmp_path: Path, method: str) -> None:
    def uncommented(text: str) -> str:
        return re.sub(r"^# (\[\w+\]|[\w.]+ = \S.*)$", r"\1", text, flags=re.MULTILINE)

    shown = RunSpec.model_validate(written(tmp_path, method, uncommented) | START)
    plain = RunSpec.model_validate(written(tmp_path, method) | START)
    settings = methods()[method].settings
    assert settings.model_validate(shown.method.settings) == settings()
    assert shown.privacy
    assert shown.model_copy(update={"method": plain.method, "privacy": None}) == plain


@pytest.mark.parametrize("method", sorted(name for name, method in methods().items() if method.paper))
def test_the_file_of_a_paper_has_its_values_each_with_its_source(tmp_path: Path, method: str) -> None:
    text = template(methods()[method], paper=True)
    (tmp_path / "run.toml").write_text(text)
    spec = RunSpec.model_validate(read_spec(tmp_path / "run.toml") | START)
    methods()[method].settings.model_validate(spec.method.settings)
    lines = text.splitlines()
    for key, (value, source) in methods()[method].paper.items():
        found: Any = spec.model_dump()
        for part in key.split("."):
            found = found[part]
        assert found == value, key
        assert source.split()[0] in text
    assert sum(line.startswith("# Source: ") for line in lines) == len(methods()[method].paper)


def test_a_paper_is_asked_of_a_method_that_declares_none() -> None:
    refused = tessera("run", "init", "fedavg", "--paper")
    assert refused.returncode == 2
    assert "fedavg declares no settings of its paper\nThese do: fedfrozen" in refused.stderr


def test_the_command_writes_a_new_file_or_prints_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert tessera("run", "init", "fedprox", "--dataset", "scans", "--out", str(file)).returncode == 0
    assert read_spec(file)["dataset"] == "scans"
    again = tessera("run", "init", "fedprox", "--out", str(file))
    assert (again.returncode, again.stdout) == (2, "")
    assert "run.toml cannot be created: File exists" in again.stderr
    assert tomllib.loads(tessera("run", "init", "safl").stdout)["method"] == {"name": "safl", "settings": {}}
    assert json.loads(tessera("run", "init", "safl", "--json").stdout)["path"] is None
    unknown = tessera("run", "init", "fedprx")
    assert unknown.returncode == 2
    assert "there is no method 'fedprx'; did you mean `fedprox`? (TESSERA_METHODS is not set)" in unknown.stderr


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (["method.name=fedavg"], {}),
        (["method.name=fedprox", "method.settings.mu=0.5"], {"mu": 0.5}),
        (["method.settings.scope=v_head", "method.name=other"], {"scope": "v_head"}),
        (["method.name=moon"], {}),
        (["method.name=fedfrozen"], {"warmup_rounds": 2, "scope": "v_head"}),
        (["method.settings.scope=v_only"], {"warmup_rounds": 2, "scope": "v_only"}),
    ],
)
def test_another_method_starts_from_its_own_settings(
    tmp_path: Path, changes: list[str], settings: dict[str, Any]
) -> None:
    file = tmp_path / "run.toml"
    given = 'name = "x"\ndataset = "d"\nrounds = 1\n[method]\nname = "fedfrozen"\n'
    file.write_text(given + 'settings = { warmup_rounds = 2, scope = "v_head" }\n')
    notes: list[str] = []
    assert read_spec(file, changes, notes.append)["method"].get("settings", {}) == settings
    dropped = any("dropped settings of fedfrozen: scope, warmup_rounds" in note for note in notes)
    assert dropped == ("warmup_rounds" not in settings)

"""Settings as they took effect, from where, and with no secret among them wherever one stands."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera.coordinator.cli import app as coordinator_app
from tessera.shared.diagnostics import HIDDEN, effective, shown, toml_file
from tessera.worker.cli.worker import app as worker_app

SECRET = "hunter2hunter2"

SETTINGS = """
url = "http://north:{secret}@127.0.0.1:9"
token = "{secret}"
name = "north-1"
state_dir = "{folder}/state"

[datasets.digits]
kind = "digits"
api_key = "{secret}"
mirror = "https://ward:{secret}@data.example/x"

[policy]
max_epochs = 7
may_send = {{ include = [{{ roles = ["value"] }}] }}
"""


def test_each_setting_tells_where_it_comes_from() -> None:
    values = {"a": 1, "b": {"c": 2, "d": 3}, "e": (1, 2), "f": None}
    environment = {"X_B__C": "2", "x_e": "[1, 2]", "OTHER": "1"}
    found = {one.name: one.origin for one in effective(values, {"b": {"d": 3}, "e": [9]}, environment, "X_")}
    assert found == {"a": "default", "b.c": "X_B__C", "b.d": "file", "e": "x_e", "f": "default"}


def test_a_table_in_one_variable_is_told_apart_by_its_keys() -> None:
    values = {"policy": {"max_epochs": 5, "max_attempts": 10}}
    found = effective(values, {}, {"X_POLICY": '{"max_epochs": 5}'}, "X_")
    assert [(one.name, one.origin) for one in found] == [
        ("policy.max_epochs", "X_POLICY"), ("policy.max_attempts", "default"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("token", SECRET, HIDDEN),
        ("datasets.d.password", SECRET, HIDDEN),
        ("store_access_key", SECRET, HIDDEN),
        ("token_file", "/run/secrets/t", "/run/secrets/t"),
        ("admin_token_file", None, None),
        ("token", None, None),
        ("url", f"https://a:{SECRET}@h:8/x?y=1", "https://a:***@h:8/x?y=1"),
        ("database_url", f"postgresql:///x?password={SECRET}", "postgresql:///x?password=***"),
        ("files", [f"s3://k:{SECRET}@b/c", "plain"], ["s3://k:***@b/c", "plain"]),
        ("more", {"password": SECRET, "n": 1}, {"password": HIDDEN, "n": 1}),
    ],
)
def test_what_is_secret_by_its_name_or_place_is_hidden(name: str, value: object, seen: object) -> None:
    assert shown(name, value) == seen


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "worker.toml"
    file.write_text(SETTINGS.format(folder=tmp_path, secret=SECRET))
    return file


def test_a_worker_shows_its_settings_without_secrets(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_WORKER_POLICY__MAX_ATTEMPTS", "3")
    monkeypatch.setenv("TESSERA_WORKER_TOKEN", SECRET)
    said = CliRunner().invoke(worker_app, ["config", "show", "--config", str(config), "--json"])
    assert said.exit_code == 0, said.output
    found = {one["name"]: (one["value"], one["origin"]) for one in json.loads(said.stdout)["settings"]}
    assert found["token"] == (HIDDEN, "TESSERA_WORKER_TOKEN")
    assert found["url"] == ("http://north:***@127.0.0.1:9", "file")
    assert found["policy.max_epochs"] == (7, "file")
    assert found["policy.max_attempts"] == (3, "TESSERA_WORKER_POLICY__MAX_ATTEMPTS")
    assert found["policy.max_batch"] == (65_536, "default")
    assert SECRET not in said.output
    assert SECRET not in CliRunner().invoke(worker_app, ["config", "show", "--config", str(config)]).output


def test_a_coordinator_shows_its_settings_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATABASE_URL", f"postgresql://tessera:{SECRET}@db.example/tessera")
    monkeypatch.setenv("TESSERA_BLOB_URL", f"s3://key:{SECRET}@bucket/prefix")
    said = CliRunner().invoke(coordinator_app, ["config", "show", "--json"])
    assert said.exit_code == 0, said.output
    found = {one["name"]: (one["value"], one["origin"]) for one in json.loads(said.stdout)["settings"]}
    assert found["database_url"] == ("postgresql://tessera:***@db.example/tessera", "TESSERA_DATABASE_URL")
    assert found["port"] == (8470, "default")
    assert SECRET not in said.output


def test_what_a_worker_says_when_nothing_works_has_no_secret(config: Path) -> None:
    options = ("api_key", "mirror")
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith(options)))
    for command in ("check", "doctor"):
        said = CliRunner().invoke(worker_app, [command, "--config", str(config)])
        assert said.exit_code == 1, said.output
        assert "cannot" in said.output or "no " in said.output
        assert SECRET not in said.output


def test_a_document_with_any_names_is_read_back_as_it_was() -> None:
    odd = {"a b": 1, "c\x7f\n\"'#": {"k.\u00e9": [1, {"z y": "]\n[evil]", "q": True}]}, "": 0.5}
    document = {"name": "a", "absent": None, "method": {"settings": odd, "none": {}}, "small": 1e-5, "last": []}
    written = toml_file(document)
    assert tomllib.loads(written) == {name: value for name, value in document.items() if value is not None}

"""`tessera admin study`, and `--study` of the other commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.shared.client.client import Client
from tests.shared.cli.test_runs import Commands
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import model_folder, small_model

RUN = """
name = "trial"
dataset = "data"
rounds = 1
study = "default"
[method]
name = "fedavg"
"""


@pytest.fixture
def commands(coordinator: LiveCoordinator) -> Commands:
    return Commands(coordinator)


def members(commands: Commands, study: str) -> set[tuple[str, str]]:
    return {(one["kind"], one["name"]) for one in commands.json("admin", "study", "show", study)["members"]}


def test_members_come_and_go(commands: Commands) -> None:
    commands.say("admin", "study", "create", "stroke", "--purpose", "outcome")
    commands.say("admin", "study", "create", "stroke", code=1)
    commands.say("admin", "site", "add", "north", "--study", "stroke")
    commands.say("admin", "site", "add", "south")
    commands.say("admin", "token", "create", "alice", "--role", "orchestrator")
    commands.say("admin", "token", "create", "bob", "--role", "viewer", "--study", "stroke", "--study", "default")
    assert members(commands, "stroke") == {("site", "north"), ("token", "bob")}
    commands.say("admin", "study", "add", "stroke", "--site", "south", "--token", "alice")
    commands.say("admin", "study", "remove", "stroke", "--token", "bob", "--site", "north")
    assert members(commands, "stroke") == {("site", "south"), ("token", "alice")}
    assert members(commands, "default") == {("site", "south"), ("token", "alice"), ("token", "bob")}
    assert [one["name"] for one in commands.json("admin", "study", "list")] == ["default", "stroke"]


@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        ("admin study add nothing --site north", "there is no study nothing", 1),
        ("admin study add default", "no member is named", 2),
        ("admin study remove default --token first", "there is no token 'first'", 1),
        ("admin study add default --person ann", "no OpenID provider is set", 1),
        ("admin study add default --token test-admin", "an administrator reads all studies", 1),
        ("admin site add west --study nothing", "there is no study 'nothing'", 1),
        ("admin token create x --role viewer --study nothing", "there is no study 'nothing'", 1),
        ("admin token create x --role admin --study default", "has no studies", 2),
        ("admin join token --site north --study default", "its studies stay as they are", 2),
    ],
)
def test_what_cannot_be_a_member_is_refused_with_the_reason(
    commands: Commands, line: str, said: str, code: int
) -> None:
    commands.say("admin", "site", "add", "north")
    assert said in commands.say(*line.split(), code=code).stderr


def test_a_run_starts_in_the_study_that_is_named(
    coordinator: LiveCoordinator, commands: Commands, tmp_path: Path
) -> None:
    commands.say("admin", "study", "create", "stroke")
    (tmp_path / "run.toml").write_text(RUN)
    folder = model_folder(tmp_path / "model", small_model())
    start = ("run", "create", str(tmp_path / "run.toml"), "--model", str(folder))
    assert commands.json(*start)["spec"].get("study", "default") == "default"
    assert commands.json(*start, "--study", "stroke")["spec"]["study"] == "stroke"
    assert "no study 'strok'; did you mean `stroke`" in commands.say(*start, "--set", "study=strok", code=1).stderr
    assert {"study", "stroke"} <= set(commands.say("run", "list").stdout.split())
    client: Client = coordinator.client("orchestrator")
    assert [run.spec.study for run in client.runs()] == ["default"]

"""`tessera run` and `tessera admin` against a real coordinator, with workers that follow a script."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import to_thread
from safetensors.numpy import load_file
from sqlalchemy import update

from tessera.coordinator.db.tables import TokenRow
from tessera.shared.api.admin import EnrolmentSpec
from tessera.shared.api.runs import Round, RunPatch
from tessera.shared.api.tasks import Failure, Submission, TaskView
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.client.client import MAX_CHANGES, Client
from tessera.shared.client.round_outcomes import follow
from tessera.shared.model.spec import BLOCKS_FILE, WEIGHTS_FILE, Lora
from tessera.shared.problems import Fault, InvalidUpdate
from tessera.shared.terminal.failures import task_failures
from tests.support import zygote
from tests.support.cli import COMMAND, environment, process, tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, model_folder, small_model, start_run, values, whole_tensors
from tests.support.variants import variants

SPEC = """
name = "trial"
dataset = "data"
rounds = 1
method = {name = "fedavg"}
"""

MODEL = small_model()

FULL_DISK = """
import os, resource
from tessera.shared.cli.main import main

os.dup2(1, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
main()
"""
"""A command as on a full disk, where no file grows beyond ten bytes. It says everything to its standard output."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, and run.toml beside it."""
    (tmp_path / "run.toml").write_text(SPEC)
    return model_folder(tmp_path / "model", MODEL)


class Commands:
    """`tessera` commands as an administrator of one coordinator."""

    def __init__(self, coordinator: LiveCoordinator) -> None:
        self.settings = {"TESSERA_URL": coordinator.url, "TESSERA_TOKEN": coordinator.token("admin")}

    def say(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = tessera(*arguments, **self.settings)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.say(*arguments, "--json", code=code).stdout)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command as a process of its own, with a pipe for what it prints: see `zygote`."""
        started = zygote.piped([*COMMAND, *arguments], env=environment(**self.settings))
        assert started.stdin
        started.stdin.close()
        started.stdin = None
        return started

    def create(self, folder: Path, *arguments: str) -> str:
        return self.say(
            "run", "create", str(folder.parent / "run.toml"), "--model", str(folder), *arguments
        ).stdout.strip()


@pytest.fixture
def commands(coordinator: LiveCoordinator) -> Commands:
    return Commands(coordinator)


def told(watching: subprocess.Popen[bytes], wanted: str) -> list[str]:
    """The lines of a command that goes on and on, until one has `wanted` and it is interrupted."""
    assert watching.stdout
    lines = [next(watching.stdout).decode()]
    while wanted not in lines[-1]:
        lines.append(next(watching.stdout).decode())
    for _ in range(3):
        # An interrupt that falls into a finalizer is lost to Python, and a person presses again.
        watching.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            watching.wait(timeout=10)
            break
    assert watching.returncode == 130
    watching.stdout.close()
    return lines


def test_a_watched_status_is_a_line_for_each_change_where_there_is_no_terminal(
    commands: Commands, folder: Path
) -> None:
    watched = commands.start("admin", "status", "--watch")
    documents = commands.start("admin", "status", "--watch", "--json")
    assert watched.stdout and documents.stdout  # noqa: PT018 (for the type checker)
    assert watched.stdout.readline().startswith(b"runs none; workers 0 live of 0; blobs ")
    assert json.loads(documents.stdout.readline())["runs"] == {}
    commands.create(folder)
    lines = told(watched, "runs 1 running; ")
    assert len(set(lines)) == len(lines)
    assert json.loads(told(documents, '"running": 1')[-1])["runs"] == {"running": 1}


# ---------------------------------------------------------------- runs


def test_a_model_is_exported_as_it_was_uploaded(commands: Commands, folder: Path, tmp_path: Path) -> None:
    run = commands.create(folder)
    commands.say("run", "export", run, str(tmp_path / "out.safetensors"))
    exported, expected = load_file(tmp_path / "out.safetensors"), whole_tensors(MODEL)
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[name], expected[name]) for name in expected)


def test_an_exported_folder_is_a_model_folder_with_what_else_the_first_had(
    commands: Commands, folder: Path, tmp_path: Path
) -> None:
    run = commands.create(folder)
    out = tmp_path / "exported"
    commands.say("run", "export", "trial", str(out), "--model", str(folder))
    assert sorted(file.name for file in out.iterdir()) == [
        BLOCKS_FILE,
        "config.json",
        WEIGHTS_FILE,
        "tokenizer.json",
    ]
    again = commands.say("run", "create", str(tmp_path / "run.toml"), "--model", str(out), "--set", "name=again")
    assert again.stdout.strip() != run
    assert "sent 0 bytes; the weights have" in again.stderr


def test_an_export_with_adapters_tells_how_to_merge_them(commands: Commands, folder: Path, tmp_path: Path) -> None:
    commands.create(folder)
    plain, adapted, merged = (tmp_path / name for name in ("plain", "adapted", "merged"))
    assert "adapters" not in commands.say("run", "export", "trial", str(plain)).stderr
    made = model_folder(tmp_path / "lora", MODEL.model_copy(update={"lora": Lora(rank=2, alpha=4)}))
    commands.create(made, "--set", "name=lora")
    told = commands.say("run", "export", "lora", str(adapted)).stderr
    assert f"`tessera model merge {adapted} MERGED`" in told
    assert "adapters" not in commands.say("run", "export", "lora", f"{merged}.safetensors").stderr


def test_an_export_that_fails_leaves_nothing(commands: Commands, folder: Path, tmp_path: Path) -> None:
    run = commands.create(folder)
    before = sorted(tmp_path.iterdir())
    commands.say("run", "export", run, str(tmp_path / "out.safetensors"), "--version", "9", code=1)
    commands.say("run", "export", run, str(tmp_path / "no" / "out.safetensors"), code=2)
    assert sorted(tmp_path.iterdir()) == before


def test_the_same_key_gives_the_same_run(commands: Commands, folder: Path) -> None:
    first, second = (commands.create(folder, "--idempotency-key", "wish-1") for _ in range(2))
    assert (first, commands.create(folder) != first) == (second, True)


def test_a_run_is_found_by_the_beginning_of_its_id_and_by_name(commands: Commands, folder: Path) -> None:
    run = commands.create(folder)
    assert [commands.json("run", "show", named)["run"]["id"] for named in (run, run[:8], "trial")] == [run] * 3
    commands.create(folder)
    assert commands.json("run", "show", "trial", code=2)["code"] == "invalid"
    assert commands.json("run", "show", "trail", code=1)["code"] == "not-found"


def test_a_server_optimizer_of_the_file_or_the_command_line_is_shown(commands: Commands, folder: Path) -> None:
    settings = ("--set", "server_optimizer.kind=adam", "--set", "server_optimizer.learning_rate=0.01")
    run = commands.create(folder, *settings)
    shown = " ".join(commands.say("run", "show", run).stdout.split())
    assert "server optimizer adam (learning_rate 0.01, beta1 0.9, tau 0.001, beta2 0.99)" in shown


def test_a_run_that_waits_says_what_for(commands: Commands, coordinator: LiveCoordinator, folder: Path) -> None:
    run = commands.create(folder)
    told = "0 would take part now, fewer than the quorum of 1"
    assert told in " ".join(commands.say("run", "show", run).stderr.split())
    ScriptedWorker(coordinator.client("site", "south"), datasets={"elsewhere": 4}).enrol()
    assert "south/w: it has no data set data" in " ".join(commands.say("run", "show", run).stderr.split())
    worker = ScriptedWorker(coordinator.client("site", "north")).enrol()
    worker.take()
    assert told not in " ".join(commands.say("run", "show", run).stderr.split())


def test_a_run_is_paused_resumed_and_cancelled(commands: Commands, folder: Path) -> None:
    run = commands.create(folder)
    states = [commands.json("run", verb, run)["state"] for verb in ("pause", "resume", "cancel")]
    assert states == ["paused", "running", "cancelled"]
    assert commands.json("run", "resume", run, code=1)["code"] == "conflict"
    later = commands.create(folder)
    listed = {"": [later, run], "--state cancelled": [run], "--name TRI": [later, run], "--name x": []}
    for given, ids in listed.items():
        assert [item["id"] for item in commands.json("run", "list", *given.split())] == ids, given


def test_a_run_has_tags_and_a_note(commands: Commands, folder: Path) -> None:
    run = commands.create(folder)
    commands.say("run", "annotate", run, "--tag", "pilot", "--tag", "v2", "--note", "a first look")
    found = commands.json("run", "annotate", run, "--untag", "pilot", "--tag", "v2", "--tag", "v3")
    assert (found["tags"], found["note"]) == (["v2", "v3"], "a first look")
    assert commands.json("run", "annotate", run, "--tag", "no good", code=2)["errors"][0]["pointer"] == "/tags/2"
    assert "v2, v3" in commands.say("run", "list").stdout


@pytest.mark.parametrize(
    "named", variants(["", ".", "../sites", "{run}/rounds", "{run}#zzz", "{run}?x=1"], {"", "../sites"})
)
def test_a_run_is_not_found_by_what_only_contains_its_id(commands: Commands, folder: Path, named: str) -> None:
    run = commands.create(folder)
    refused = commands.say("run", "pause", named.format(run=run), code=1)
    assert f"there is no run {named.format(run=run)!r}" in refused.stderr
    assert commands.json("run", "show", run)["run"]["state"] == "running"


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [(">/dev/full", 1, "error: the output cannot be written: No space left on device; "), (">&-", 0, "")],
)
def test_output_that_cannot_be_written_ends_without_a_traceback(
    commands: Commands, redirection: str, code: int, message: str
) -> None:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND]
    answer = process("run", "list", command=shell, **commands.settings)
    assert (answer.returncode, answer.stderr[: len(message)], "Traceback" in answer.stderr) == (code, message, False)


def test_square_brackets_in_notes_and_paths_are_shown(commands: Commands, folder: Path, tmp_path: Path) -> None:
    run = commands.create(folder)
    note = "weights in [/mnt/data], [bold]see log[/bold]"
    assert note in commands.say("run", "annotate", run, "--note", note).stdout
    (tmp_path / "[").mkdir()
    for verb, file in (("export", "[/one].safetensors"), ("metrics", "[/one].csv")):
        path = str(tmp_path / file)
        written = commands.say("run", verb, run, *(["--csv"] if verb == "metrics" else []), path).stdout
        assert path in written


def test_a_change_that_a_live_run_cannot_have_names_the_command_that_starts_one_with_it(
    commands: Commands, folder: Path
) -> None:
    run = commands.create(folder)
    changed = commands.say("run", "change", run, "--set", "rounds=7", "--set", "cohort.deadline_seconds=60").stdout
    assert "7 rounds, quorum 1, deadline 60 s" in changed
    refusal = commands.json("run", "change", run, "--set", "training.epochs=2", "--set", "cohort.size=1", code=2)
    assert [fault["pointer"] for fault in refusal["errors"]] == ["/training/epochs", "/cohort/size"]
    command = shlex.split(refusal["remedy"].split("`")[1])
    other = commands.say(*command[1:]).stdout.strip()
    assert commands.json("run", "show", other)["run"]["spec"]["training"]["epochs"] == 2
    commands.say("run", "cancel", run)
    ended = commands.json("run", "change", run, "--set", "rounds=8", code=1)
    assert ended["remedy"].split("`")[1] == f"tessera run create --from {run} --set rounds=8"


class Contested(LiveCoordinator):
    """A coordinator at which another person annotates a run just before a change of it arrives."""

    def app(self) -> Any:
        app, self.others, self.contests = super().app(), list[Callable[[], object]](), True

        async def contested(scope: Any, receive: Any, send: Any) -> None:
            if scope.get("method") == "PATCH" and self.others and self.contests:
                self.contests = False
                await to_thread.run_sync(self.others.pop())
                self.contests = True
            await app(scope, receive, send)

        return contested


def test_a_run_is_steered_and_tagged_although_it_changes_at_the_same_time(tmp_path: Path, folder: Path) -> None:
    with Contested(tmp_path / "coordinator") as coordinator:
        commands, other = Commands(coordinator), coordinator.client()
        run = commands.create(folder)
        coordinator.others = [partial(other.patch_run, run, RunPatch(note=note)) for note in "abc"]
        assert commands.json("run", "pause", run)["state"] == "paused"
        coordinator.others = [partial(other.patch_run, run, RunPatch(tags=("theirs",)))]
        assert commands.json("run", "annotate", run, "--tag", "ours")["tags"] == ["theirs", "ours"]
        # It does not try for ever.
        coordinator.others = [partial(other.patch_run, run, RunPatch(note=str(at))) for at in range(2 * MAX_CHANGES)]
        assert commands.json("run", "cancel", run, code=1)["code"] == "precondition-failed"
        assert len(coordinator.others) == MAX_CHANGES


def test_watching_tells_each_round_and_ends_with_the_run(
    commands: Commands, coordinator: LiveCoordinator, folder: Path
) -> None:
    run = commands.create(folder, "--set", "rounds=2")
    watch = commands.start("run", "watch", run, "--json")
    worker = ScriptedWorker(coordinator.client("site", "north"))
    for _ in range(2):
        worker.train(worker.take())
    out, _ = watch.communicate(timeout=30)
    events = [json.loads(line) for line in out.splitlines()]
    rounds = [(e["number"], e["state"], e["accepted"]) for e in events if e["event"] == "round"]
    assert (watch.returncode, rounds) == (0, [(1, "committed", 1), (2, "committed", 1)])
    assert (events[-1]["event"], events[-1]["state"]) == ("run", "completed")


@pytest.mark.parametrize(("verb", "code"), [("pause", 3), pytest.param("cancel", 1, marks=pytest.mark.long)])
def test_watching_ends_with_a_code_for_how_it_ended(commands: Commands, folder: Path, verb: str, code: int) -> None:
    run = commands.create(folder)
    commands.say("run", verb, run)
    assert "trial is " in commands.say("run", "watch", run, code=code).stdout


def test_following_tells_every_attempt_once_and_in_order(coordinator: LiveCoordinator) -> None:
    client = coordinator.client("orchestrator")
    worker = ScriptedWorker(coordinator.client("site", "north")).enrol()
    run = start_run(client, MODEL, values(MODEL), rounds=2, cohort={"max_attempts": 5})
    steps = iter([_fail, _train, _fail, _train])
    told: list[tuple[int, int, str]] = []

    def work(_: float) -> None:
        if step := next(steps, None):
            step(worker)

    for glimpse in follow(client, run.id, sleep=work):
        told += [(o.round.number, o.round.attempt, o.round.state) for o in glimpse.ended]
    assert told == [(1, 1, "abandoned"), (1, 2, "committed"), (2, 1, "abandoned"), (2, 2, "committed")]


def _train(worker: ScriptedWorker) -> None:
    worker.train(worker.take())


def _fail(worker: ScriptedWorker) -> None:
    task = worker.take()
    worker.client.fail(task.id, Failure(token=task.token, code="failed", detail="no"))


def test_who_failed_and_why_is_shown_with_what_to_do(
    commands: Commands, coordinator: LiveCoordinator, folder: Path
) -> None:
    north, south = (ScriptedWorker(coordinator.client("site", site)) for site in ("north", "south"))
    few = ("--set", "cohort.size=3", "--set", "cohort.quorum=2")
    for worker in (north, south, ScriptedWorker(coordinator.client("site", "east"))):
        worker.enrol()
    run = commands.create(folder, *few)
    for worker, code in ((north, "policy-violation"), (south, "awaiting-approval")):
        task = worker.take()
        worker.client.fail(task.id, Failure(token=task.token, code=code, detail=f"{code} it\n\x1b[2Jis"))
    until(lambda: commands.json("run", "show", run)["rounds"][0]["state"] == "abandoned")
    commands.say("run", "pause", run)
    shown = commands.say("run", "show", run).stdout
    assert "round 1  north/w  failed: policy-violation: policy-violation it  [2Jis\n  The site's policy" in shown
    assert "round 1  south/w  withheld: awaiting-approval it  [2Jis\n  A person at the site decides" in shown
    assert "round 1  east/w  no update: it had not taken its task when the round ended\n" in shown
    assert re.search(r"reason +0 of 3 updates came and no more can come; the quorum is 2 \(", shown)
    assert "north/w: policy-violation, south/w: withheld)" in " ".join(shown.split())


def test_what_a_private_run_has_spent_is_shown_beside_its_bounds(
    commands: Commands, coordinator: LiveCoordinator, folder: Path
) -> None:
    worker = ScriptedWorker(coordinator.client("site", "north"))
    bounds = (
        "privacy.epsilon=4",
        "privacy.delta=1e-5",
        "privacy.clip_norm=1",
        "rounds=2",
        "privacy.selection=uncovered",
    )
    run = commands.create(folder, *(word for bound in bounds for word in ("--set", bound)))
    for epsilon in (1.25, 2.5):
        task = worker.take()
        update = worker.upload(task, worker.fetch(task))
        submission = Submission(token=task.token, version=task.version.digest, update=update, examples=10)
        worker.client.submit(task.id, submission.model_copy(update={"metrics": {"epsilon": epsilon}}))
    shown = commands.say("run", "show", run).stdout
    assert re.search(r"privacy +epsilon 4 at delta 1e-05 for each example of each worker; the choice", shown)
    assert re.search(r"worker +epsilon +delta +unit +round\nnorth/w +2.5 +1e-05 +example +2\n", shown)


def test_what_versions_have_spent_of_a_site_is_shown_apart_from_examples(
    commands: Commands, coordinator: LiveCoordinator, folder: Path
) -> None:
    worker = ScriptedWorker(coordinator.client("site", "north"))
    terms = ("epsilon=2", "delta=1e-5", "clip_norm=1", "expected_sites=4")
    settings = ("normalization=cohort", "rounds=1", *(f"client_privacy.{term}" for term in terms))
    run = commands.create(folder, *(word for setting in settings for word in ("--set", setting)))
    task = worker.take()
    shown = commands.say("run", "show", run).stdout
    assert re.search(r"privacy of a site +0 spent of epsilon 2 at delta 1e-05", shown)
    assert re.search(r"privacy +none", shown)
    worker.train(task)
    until(lambda: commands.json("run", "show", run)["run"]["state"] == "completed")
    assert re.search(r"privacy of a site +2 spent of epsilon 2", commands.say("run", "show", run).stdout)


def test_of_many_failures_the_newest_are_told(commands: Commands, coordinator: LiveCoordinator, folder: Path) -> None:
    worker = ScriptedWorker(coordinator.client("site", "north"))
    run = commands.create(folder, "--set", "cohort.max_attempts=12")
    for _ in range(12):
        _fail(worker)
    until(lambda: commands.json("run", "show", run)["run"]["state"] == "paused")
    told = re.findall(r"round 1 \(try (\d+)\)  north/w  failed", shown := commands.say("run", "show", run).stdout)
    assert [int(attempt) for attempt in told] == [*range(12, 2, -1)]
    assert "and 2 more, which --json has" in shown


def test_a_lapsed_task_and_a_refused_update_are_told_too() -> None:
    now = datetime.now(UTC)
    view = {"run": "r", "round": 4, "kind": "train", "token": 1, "attempts": 1}
    refusal = InvalidUpdate("it has faults", errors=[Fault(pointer="head", detail="is NaN")]).document()
    tasks = (
        TaskView(id="1", worker="a/w", state="expired", **view),
        TaskView(id="2", worker="b/w", state="rejected", problem=refusal, **view),
        TaskView(id="3", worker="c/w", state="cancelled", **view),
        TaskView(id="4", worker="d/w", state="accepted", **view),
    )
    open_ = Round(
        run="r", number=4, attempt=1, state="open", stage="train", opened_at=now, deadline_at=now, tasks=tasks
    )
    late = open_.model_copy(update={"number": 3, "state": "abandoned", "closed_at": now, "tasks": tasks[2:]})
    told = [(one.round.number, one.worker, one.end, one.reason) for one in task_failures([late, open_])]
    assert told == [
        (4, "a/w", "expired", "its lease ran out, and nothing was heard of it"),
        (4, "b/w", "refused", "invalid-update: it has faults"),
        (3, "c/w", "no update", "its update had not come when the round ended"),
    ]


# ---------------------------------------------------------------- administration


def test_a_site_is_added_with_a_token_that_admits_its_workers(
    commands: Commands, coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    told = commands.json("admin", "site", "add", "north", "--token-file", str(file))
    assert (told["site"]["name"], "secret" in told["token"]) == ("north", False)
    with Client(coordinator.url, file.read_text().strip(), verify=False) as client:
        ScriptedWorker(client, name="first").enrol()
    workers = commands.json("admin", "workers")
    assert [(worker["site"], worker["name"]) for worker in workers] == [("north", "first")]
    assert [site["name"] for site in commands.json("admin", "sites")] == ["north"]


def test_a_site_whose_token_could_not_be_issued_is_named_with_the_remedy(commands: Commands) -> None:
    commands.say("admin", "token", "create", "lakeside", "--role", "viewer")
    refused = commands.say("admin", "site", "add", "lakeside", code=1)
    assert "site lakeside exists now, without a token" in refused.stderr
    assert [site["name"] for site in commands.json("admin", "sites")] == ["lakeside"]
    (remedy,) = re.findall(r"`tessera (admin token create .*?)`", refused.stderr)
    assert commands.say(*remedy.replace("NAME", "lakeside-2").split()).stdout.strip()


def test_a_token_is_issued_listed_rotated_and_revoked(commands: Commands) -> None:
    issued = commands.say("admin", "token", "create", "reader", "--role", "viewer", "--days", "3")
    secret = issued.stdout.strip()
    reading = {"TESSERA_URL": commands.settings["TESSERA_URL"], "TESSERA_TOKEN": secret}
    assert tessera("run", "list", **reading).returncode == 0
    renewed = commands.say("admin", "token", "rotate", "reader")
    assert "another 600 s" in renewed.stderr
    reading["TESSERA_TOKEN"] = renewed.stdout.strip()
    assert tessera("run", "list", **reading).returncode == 0
    assert commands.json("admin", "token", "revoke", "reader")["revoked_at"] is not None
    assert tessera("run", "list", **reading).returncode == 3
    assert secret not in commands.say("admin", "token", "list").stdout


@pytest.mark.parametrize(
    "command",
    [("token", "rotate", "reader"), ("token", "create", "other", "--role", "viewer"),
     pytest.param(("site", "add", "north"), marks=pytest.mark.long),
     pytest.param(("join", "token", "--site", "north"), marks=pytest.mark.long)],
    ids=" ".join,
)  # fmt: skip
def test_without_room_for_a_secret_no_token_changes(
    commands: Commands, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "secret"
    secret = commands.say("admin", "token", "create", "reader", "--role", "viewer").stdout.strip()
    before = [token["id"] for token in commands.json("admin", "token", "list")]
    answer = zygote.piped(
        ["python", "-m", "tests.support.code", FULL_DISK, "admin", *command, "--token-file", str(file)],
        env=environment(**commands.settings),
    )
    said, _ = answer.communicate(timeout=60)
    assert (answer.returncode, file.exists()) == (2, False), said
    assert b"cannot be written: No space left on device; no token was issued or changed" in b" ".join(said.split())
    assert [token["id"] for token in commands.json("admin", "token", "list")] == before
    assert commands.json("admin", "sites") == []
    reading = {"TESSERA_URL": commands.settings["TESSERA_URL"], "TESSERA_TOKEN": secret}
    assert tessera("run", "list", **reading).returncode == 0


def test_the_coordinator_is_shown_at_a_glance(commands: Commands, coordinator: LiveCoordinator, folder: Path) -> None:
    commands.create(folder)
    ScriptedWorker(coordinator.client("site", "north")).enrol()
    until(lambda: commands.json("admin", "status")["live_runs"][0]["round"])
    assert commands.json("admin", "workers")[0]["site"] == "north"
    assert len(commands.json("admin", "audit", "--limit", "2")) == 2
    for shown in (("status",), ("workers",), ("sites",), ("audit",), ("token", "list")):
        assert commands.say("admin", *shown).stdout


# ---------------------------------------------------------------- who comes in


def ask(coordinator: LiveCoordinator, site: str) -> tuple[str, str]:
    """A worker that waits to be admitted: its secret and its code."""
    secret = new_secret("site")
    with Client(coordinator.url, verify=False) as client:
        wanted = EnrolmentSpec(site=site, worker="gpu-1", device="cpu", version="0.1.0", secret_hash=hash_of(secret))
        return secret, client.ask_to_join(wanted).code


def test_workers_that_ask_are_listed_approved_and_declined_by_their_codes(coordinator: LiveCoordinator) -> None:
    commands = Commands(coordinator)
    secret, code = ask(coordinator, "north")
    listed = commands.say("admin", "join", "list").stdout
    assert all(told in listed for told in (code, "north", "gpu-1", "cpu", "0.1.0", "127.0.0.1"))
    refused = commands.say("admin", "join", "approve", code, code=2)
    assert "there is no site 'north'" in refused.stderr
    assert "--site north" in refused.stderr
    approved = commands.json("admin", "join", "approve", code.lower(), "--site", "north")
    assert (approved["state"], approved["site"]) == ("approved", "north")
    with Client(coordinator.url, secret, verify=False) as client:
        assert client.enrolment(approved["id"]).state == "approved"
    # Of a site that is known, the next worker needs no more than its code.
    _, second = ask(coordinator, "north")
    assert "is admitted as a worker of site north" in commands.say("admin", "join", "approve", second).stdout
    _, third = ask(coordinator, "north")
    assert commands.json("admin", "join", "decline", third)["state"] == "declined"
    decided = commands.say("admin", "join", "approve", third, code=1).stderr
    assert re.search(rf"gpu-1 of site north was declined \d+ s ago, under the code {third}", decided)
    decided = commands.json("admin", "join", "approve", code, code=1)
    assert re.match(r"gpu-1 of site north was admitted \d+ s ago", decided["detail"])
    assert "no worker waits under the code 'X'" in commands.say("admin", "join", "decline", "X", code=1).stderr


def test_an_enrolment_token_is_issued_into_a_file(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    commands = Commands(coordinator)
    file = tmp_path / "ticket"
    issued = commands.json("admin", "join", "token", "--site", "north", "--token-file", str(file))
    assert (issued["token"]["role"], issued["token"]["uses_left"], issued["token"]["site"]) == (
        "enrolment",
        1,
        "north",
    )
    assert file.read_text().startswith("tessera_enrolment_")
    assert "join token" in commands.say("admin", "token", "create", "x", "--role", "enrolment", code=2).stderr


def test_a_token_that_admits_nobody_any_more_is_not_called_valid(
    commands: Commands, coordinator: LiveCoordinator
) -> None:
    tickets = [commands.say("admin", "join", "token", "--site", site, "--uses", "2") for site in ("north", "south")]
    with Client(coordinator.url, tickets[0].stdout.strip(), verify=False) as client:
        for worker in ("a", "b"):
            secret_hash = hash_of(new_secret("site"))
            client.ask_to_join(EnrolmentSpec(worker=worker, device="cpu", version="1", secret_hash=secret_hash))
    commands.say("admin", "token", "create", "old", "--role", "viewer", "--days", "1")
    with coordinator.services.database.transaction() as session:
        session.execute(update(TokenRow).where(TokenRow.name == "old").values(expires_at=time.time() - 7200))
    lines = (line.split() for line in commands.say("admin", "token", "list").stdout.splitlines())
    # A random part ends the names of tickets, of which a site may have several.
    ends = {re.sub("(?<=join-.....)-.*", "", line[1]): " ".join(line[-3:]) for line in lines}
    assert (ends["join-north"], ends["test-admin"]) == ("used up 0", "never valid -")
    assert re.fullmatch(r"[\d-]+ valid 2", ends["join-south"])
    assert ends["old"] == "h ago -"


def test_a_site_is_suspended_and_resumed_by_its_name(coordinator: LiveCoordinator) -> None:
    commands = Commands(coordinator)
    ScriptedWorker(coordinator.client("site", "north"), version="0.0.9").enrol()
    listed = commands.say("admin", "workers").stdout
    assert "north/w  live" in listed
    assert "0.0.9 older" in listed
    assert commands.say("admin", "site", "suspend", "north").stdout == "site north is suspended\n"
    assert "suspended" in commands.say("admin", "sites").stdout
    assert "north/w  suspended" in commands.say("admin", "workers").stdout
    assert commands.json("admin", "site", "resume", "north")["suspended_at"] is None
    refused = commands.say("admin", "site", "suspend", "nroth", code=1).stderr
    assert "there is no site 'nroth'; did you mean 'north'?" in refused
    refused = commands.say("admin", "token", "create", "n", "--role", "site", "--site", "nort", code=1).stderr
    assert "there is no site 'nort'; did you mean `north`?" in refused


def test_a_preview_says_who_would_take_part_and_create_warns_of_too_few(
    coordinator: LiveCoordinator, commands: Commands, folder: Path
) -> None:
    ScriptedWorker(coordinator.client("site", "a")).enrol()
    ScriptedWorker(coordinator.client("site", "b"), methods=("fedprox",)).enrol()
    asked = ("run", "preview", str(folder.parent / "run.toml"), "--model", str(folder))
    shown = commands.say(*asked)
    assert "a/w     yes" in shown.stdout
    assert "methods: it does not know the method fedavg, or may not use it" in shown.stdout
    assert "warning" not in shown.stderr
    misspelt = commands.say(*asked, "--set", 'cohort.sites=["a", "bb"]').stderr
    assert "no worker has ever connected from the site 'bb'; did you mean `b`?" in misspelt
    few = ("--set", "cohort.quorum=2")
    assert commands.json(*asked, *few, code=3)["eligible"] == 1
    made = commands.say("run", "create", *asked[2:], *few)
    assert "warning: 1 would take part now, fewer than the quorum of 2" in made.stderr


def test_runs_of_one_name_are_told_apart_before_one_is_chosen(
    commands: Commands, coordinator: LiveCoordinator
) -> None:
    model = small_model()
    runs = [start_run(coordinator.client(), model, values(model), name="twice", dataset="none") for _ in range(2)]
    commands.say("run", "pause", runs[1].id)
    said = commands.say("run", "cancel", "twice", code=2).stderr
    assert "'twice' could be any of 2 runs" in said
    for run, state in zip(runs, ("running", "paused"), strict=True):
        assert re.search(rf"{run.id}: twice, {state}, version 0 of 1, created \d+ s ago", said)
    assert "Give the id" in said

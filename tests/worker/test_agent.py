"""Whole tasks: a real coordinator, a real agent in a thread, real models, and methods that misbehave."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from sqlalchemy import func, select
from structlog.testing import capture_logs
from typer.testing import CliRunner

from tessera.coordinator.auth import tokens
from tessera.coordinator.db.tables import UploadRow
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.client.transport import ANSWER_SECONDS
from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    Method,
    MethodSettings,
    MethodSpec,
    Participant,
    Plan,
    State,
    TaskContext,
    TrainingStats,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import named, roles
from tessera.shared.problems import MEDIA_TYPE, OF_WORKERS, NameInUse, Unauthenticated
from tessera.shared.run_settings import DAYS
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.version import VERSION
from tessera.worker import agent as agent_module
from tessera.worker.agent import ALIVE_FILE, Agent
from tessera.worker.cli import worker as worker_command
from tessera.worker.cli.exits import DEVICE_FAILED
from tessera.worker.cli.exits import DISK_FULL as DISK_FULL_AT_START
from tessera.worker.enrolment import rotate
from tessera.worker.errors import NO_FIGURES, DataError, UnknownAttention
from tessera.worker.executor.slurm.launcher import CAUSES
from tessera.worker.faults.disk import DISK_FULL
from tessera.worker.faults.failures import REPORTABLE, failure_of
from tessera.worker.governance.opening_hours import local_time
from tessera.worker.governance.policy import Policy
from tessera.worker.settings import DataSource, SecureSumsSettings, SettingsError, WorkerSettings
from tessera.worker.state.atomic_files import written_whole
from tessera.worker.state.audit import ROLLED_BACK, StateRolledBack
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.error_feedback import PREFIX
from tessera.worker.state.privacy_ledger import ExactUse
from tessera.worker.state.site_keys import KEYS_FOLDER
from tessera.worker.state.vault import Vault
from tessera.worker.stores import STATE_ID, audit_of, ledger_of
from tessera.worker.task import heartbeat as heartbeat_module
from tessera.worker.task.heartbeat import Stop
from tessera.worker.training.progress import Report
from tests.support import zygote
from tests.support.chain_rows import audit_in
from tests.support.cli import HEAVY
from tests.support.coordinator import WAIT_SECONDS, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.in_process import in_process
from tests.support.paths import ROOT
from tests.support.scripted import Answer, Asked, answering, answering_by
from tests.support.tapping import Tap
from tests.support.task_document import task_of as task_document
from tests.support.tasks import DIGITS_VIT, untrained
from tests.worker.task.test_hostile_coordinator import Hasty

VIT = {**DIGITS_VIT, "hidden_dropout_prob": 0.2}
HEAD = "classifier.weight"
SECRET = "patient 4711"


class Personal(WorkerHalf[MethodSettings]):
    """Keeps the head at the site and sends the rest."""

    def collect(self, context: TaskContext, selected: Any, stats: TrainingStats) -> LocalResult:
        whole = super().collect(context, selected, stats).upload
        rounds_before = float(context.vault["rounds"][0]) if context.vault else 0.0
        keep = {name: array for name, array in whole.items() if name == HEAD}
        count = torch.tensor([rounds_before + 1]).numpy()
        sent = {name: array for name, array in whole.items() if name != HEAD}
        return LocalResult(sent, {**keep, "rounds": count}, {"rounds_before": rounds_before})


class Leaky(WorkerHalf[MethodSettings]):
    """Sends more than the plan asks for."""

    def collect(self, context: TaskContext, selected: Any, stats: TrainingStats) -> LocalResult:
        return LocalResult({block.name: context.read(block) for block in context.blocks})


class Talkative(WorkerHalf[MethodSettings]):
    """Fails with data in its message."""

    def select(self, context: TaskContext, batches: Any) -> Any:
        raise KeyError(SECRET)


class HeadOnly(CoordinatorHalf[MethodSettings]):
    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(upload=roles("head"))


class Hoarding(CoordinatorHalf[MethodSettings]):
    """Has every worker fetch a megabyte of server state."""

    def start(self, state: State) -> State:
        return replace(state, server_state={"ballast": ArrayTensor(np.zeros(250_000, np.float32))})

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(server_state=("bal*", "ballast"))


@pytest.fixture(autouse=True)
def _more_methods() -> Iterator[None]:
    """Installs the methods of this file, as an entry point would."""
    halves = {
        "personal": Personal,
        "leaky": Leaky,
        "talkative": Talkative,
        "hoarding": WorkerHalf[MethodSettings],
    }
    coordinators = {"leaky": HeadOnly, "hoarding": Hoarding}
    for name, half in halves.items():
        coordinator = coordinators.get(name, CoordinatorHalf[MethodSettings])
        methods()[name] = Method(name, coordinator=coordinator, worker=half, source="a test")
    yield
    for name in halves:
        del methods()[name]


def begin(client: Client, config: Mapping[str, Any] = VIT, **spec: Any) -> Run:
    document, start = untrained(config, "image-classification")
    training = Training(learning_rate=0.01, batch_size=256)
    wanted = {
        "dataset": "digits",
        "training": training,
        "cohort": Cohort(max_attempts=1, max_task_attempts=1),
        **spec,
    }
    return start_run(client, document, start, **wanted)


def settings_of(coordinator: LiveCoordinator, folder: Path, **settings: Any) -> WorkerSettings:
    """Those of a worker of site a."""
    digits = {"kind": "digits", "part": {"scheme": "iid", "count": 8, "index": 0}}
    given = {
        "url": coordinator.url, "token": coordinator.token("site", "a"), "name": "w", "state_dir": folder / "state",
        "datasets": {"digits": digits, "held-out": {"kind": "digits", "split": "test", "use": "evaluate"}},
        "threads": 1,
    }  # fmt: skip
    return WorkerSettings(**{**given, **settings})


def succeed(former: Path, state_dir: Path) -> None:
    """Let a new state folder be a former worker's, so that its name is not another's and it trains the same."""
    StateDatabase.of(state_dir).set_note(STATE_ID, StateDatabase.of(former).note(STATE_ID))
    if (key := former.with_name(f"{former.name}.key")).exists():
        state_dir.with_name(f"{state_dir.name}.key").write_bytes(key.read_bytes())


@contextmanager
def working(coordinator: LiveCoordinator, folder: Path, *, executes: bool = False, **settings: Any) -> Iterator[Stop]:
    """An agent of site a, at work in a thread; it `executes` its tasks itself if only this process has their method.
    Fails the test if it ends otherwise than by being stopped."""
    stop, given = Stop(), settings_of(coordinator, folder, **settings)
    agent = Agent(given, stop, executor=in_process(given) if executes else None)
    ended: list[str] = []

    def context() -> None:
        agent.run()
        ended.append("as asked")

    thread = threading.Thread(target=context)
    thread.start()
    try:
        yield stop
    finally:
        stop.request()
        thread.join(WAIT_SECONDS)
    assert ended == ["as asked"]


def task_of(client: Client, run: Run, number: int, ready: Callable[[TaskView], bool]) -> TaskView:
    def found() -> TaskView | None:
        tasks = [task for made in client.rounds(run.id) if made.number == number for task in made.tasks]
        return next((task for task in tasks if ready(task)), None)

    view: TaskView = until(found)
    return view


def uploads(coordinator: LiveCoordinator) -> int | None:
    with coordinator.services.database.snapshot() as session:
        return session.scalar(select(func.count()).select_from(UploadRow))


def failed(task: TaskView) -> bool:
    return task.state == "failed"


def test_a_worker_that_waits_gives_freed_memory_back(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    def held() -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) << 10

    # Too small to be mapped one by one. The last one keeps the others from being returned when they are freed.
    blocks = [b"x" * (60_000 + place % 2) for place in range(4000)]
    kept = blocks.pop()
    before = held()
    del blocks
    with working(coordinator, tmp_path):
        until(lambda: held() < before - (150 << 20))
    assert len(kept) == 60_001


def test_an_agent_trains_and_evaluates_a_run_to_its_end(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    frozen = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1, "scope": "v_head"})
    run = begin(client, method=frozen, rounds=2, evaluation=Evaluation(dataset="held-out"))
    with working(coordinator, tmp_path):
        until(lambda: client.run(run.id).state == "completed")
    scores = {found.version: found.metrics for found in client.measurements(run.id)}
    assert set(scores) >= {1, 2}
    assert set(scores[2]) == {"accuracy", "macro_f1", "loss", "calibration_error"}
    whole, partial = (made.tasks[0] for made in client.rounds(run.id))
    assert 0 < partial.upload_bytes < whole.upload_bytes
    assert whole.examples == partial.examples


AGENT = """
import atexit, sys
from pathlib import Path
from tessera.shared.cli.__main__ import main
found, heavy, *arguments = sys.argv[1:]
atexit.register(lambda: Path(found).write_text(" ".join(sys.modules.keys() & heavy.split())))
sys.argv = ["tessera", *arguments]
main()
"""


@pytest.mark.long
def test_an_agent_imports_no_heavy_module_from_its_start_to_its_end(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = begin(client, privacy={"epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}, evaluation=Evaluation(sites=True))
    config, found = tmp_path / "worker.toml", tmp_path / "found"
    config.write_text(
        f'url = "{coordinator.url}"\ntoken = "{coordinator.token("site", "a")}"\nname = "w"\n'
        f'state_dir = "{tmp_path}/state"\n[datasets.digits]\nkind = "digits"\nheld_out = 0.2\n'
    )
    # The accounting of privacy needs scipy.
    heavy = " ".join({*HEAVY} - {"scipy"})
    arguments = ["-c", AGENT, str(found), heavy, "worker", "run", "--config", str(config)]
    agent = subprocess.Popen([sys.executable, *arguments], cwd=ROOT)
    try:
        # Its executor imports for seconds, and much longer on a busy machine.
        until(lambda: client.run(run.id).state == "completed" and client.measurements(run.id), 300)
    finally:
        agent.terminate()
        assert agent.wait() == 0
    assert found.read_text() == ""


@pytest.mark.long
def test_an_agent_with_several_devices_trains_and_evaluates_alike(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client, scores, losses = coordinator.client(), [], []
    for devices in (1, 2):
        run = begin(client, seed=3, rounds=2, evaluation=Evaluation(dataset="held-out"))
        with working(coordinator, tmp_path / str(devices), device="cpu", devices=devices):
            until(lambda run=run: client.run(run.id).state == "completed", 300)
        scores.append({found.version: found.metrics for found in client.measurements(run.id)})
        losses.append([made.tasks[0].metrics["loss"] for made in client.rounds(run.id)])
    # Dropout draws other units.
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert {version: found.keys() for version, found in scores[1].items()} == {
        v: f.keys() for v, f in scores[0].items()
    }


def test_the_requests_of_one_task_share_a_trace(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    run = begin(client, rounds=2)
    with Tap(coordinator.url) as tap:
        with working(coordinator, tmp_path, url=tap.url):
            until(lambda: client.run(run.id).state == "completed")
        sent = re.findall(rb"(?:GET|POST|PATCH|HEAD) (\S+) HTTP/1.1\r\n(.*?)\r\n\r\n", bytes(tap.up), re.DOTALL)
    traces = [(path, found) for path, head in sent if (found := re.findall(rb"traceparent: 00-(\w{32})-", head))]
    # Two tasks, each with all that it fetched, sent and handed in; what asks for a task belongs to none.
    assert len({trace for _, (trace,) in traces}) == 2
    handed_in = [trace for path, trace in traces if path.endswith(b"/update")]
    fetched = [trace for path, trace in traces if b"/blobs/" in path]
    assert len(handed_in) == 2
    # What is new in the second round comes along with its task.
    assert handed_in[0] in fetched
    assert b"/v1/tasks/claim" not in {path for path, _ in traces}


def test_two_runs_from_one_seed_make_the_same_version(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client, made = coordinator.client(), []
    with working(coordinator, tmp_path):
        for seed in (3, 3, 4):
            run = begin(client, seed=seed, rounds=2)
            until(lambda run=run: client.run(run.id).state == "completed")
            made.append(client.run(run.id).version.digest)
    assert made[0] == made[1] != made[2]


def test_what_is_kept_comes_back_in_the_next_round_and_never_travels(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = begin(client, method=MethodSpec(name="personal"), rounds=3)
    with working(coordinator, tmp_path, executes=True, poll_seconds=1):
        until(lambda: client.run(run.id).state == "completed")
        # No task comes any more: the worker asks what became of its last update.
        kept = tmp_path / "state" / "vault" / run.id
        until(lambda: [path.name for path in kept.iterdir()] == ["current.safetensors"])
    assert [made.tasks[0].metrics["rounds_before"] for made in client.rounds(run.id)] == [0.0, 1.0, 2.0]
    first, *_, last = (client.manifest(version.digest).blocks for version in client.versions(run.id))
    assert {name for name in first if first[name] == last[name]} == {HEAD}


def test_vaults_of_ended_runs_are_removed_by_the_site_s_rule_and_those_of_live_runs_never(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client, vault = coordinator.client(), tmp_path / "state" / "vault"
    ended, live = (begin(client, method=MethodSpec(name="personal"), rounds=rounds) for rounds in (1, 1000))
    with working(coordinator, tmp_path, executes=True):
        until(lambda: client.run(ended.id).state == "completed")
        until((vault / live.id / "current.safetensors").exists)
    (vault / "of-another-coordinator").mkdir()

    def left(**settings: Any) -> set[str]:
        """The vaults that are there once a worker with these settings has tidied up."""
        agent = Agent(settings_of(coordinator, tmp_path, **settings), Stop())
        agent._tidy()
        agent.close()
        return {folder.name for folder in vault.iterdir()}

    every = {ended.id, live.id, "of-another-coordinator"}
    # What is pending is settled first, which is a use.
    until(lambda: left() == every and not list(vault.glob("*/accepted-*")))
    forty_days_ago = time.time() - 40 * 86400
    for folder in vault.iterdir():
        os.utime(folder, (forty_days_ago, forty_days_ago))
    assert left(keep_vaults_days=50) == left(keep_vaults_days="forever") == every
    assert left() == {live.id, "of-another-coordinator"}


@pytest.mark.parametrize("keep", [30, "forever"])
def test_a_worker_removes_verdicts_on_models_that_were_not_used_for_long(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "tessera" / "models"
    folder.mkdir(parents=True)
    for name, days in (("old", 31), ("recent", 29)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - days * 86400,) * 2)
    agent = Agent(settings_of(coordinator, tmp_path, keep_vaults_days=keep), Stop())
    agent._tidy()
    agent.close()
    assert [path.name for path in folder.iterdir()] == ["recent"]


def test_whoever_started_a_run_can_do_something_about_each_failure() -> None:
    folders = (ROOT / "worker" / "task", ROOT / "worker" / "executor")
    failures = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    codes = {
        *REPORTABLE.values(),
        *re.findall(r"(?:TaskFailure|ExecutorEnded|failing_as)\(\s*\"([a-z-]+)\"", failures),
    }
    jobs = {"slurm-no-gpu", *(f"slurm-{end}" for end in CAUSES if end != "done")}
    others = {NO_FIGURES[0], "out-of-memory", "data-unreadable", DISK_FULL, StateRolledBack.code, *jobs}
    assert sorted({*codes, *others} ^ set(OF_WORKERS)) == []


@pytest.mark.parametrize(
    ("method", "policy", "told_why"),
    [
        ("leaky", {}, "policy-violation: plan: the plan does not include"),
        ("fedavg", {"never_send": ["*embeddings*"]}, "policy-violation: never_send: "),
        ("fedavg", {"never_send": ["*embedings*"]}, "never_send: the model has no block called '*embedings*'"),
        ("fedavg", {"may_send": {"exclude": [{"layers": [99]}]}}, "policy-violation: may_send: no block matches"),
        ("fedavg", {"max_upload_bytes": 100}, "policy-violation: max_upload_bytes: "),
        ("fedavg", {"max_model_bytes": 100}, "policy-violation: max_model_bytes: "),
        ("fedavg", {"max_run_upload_bytes": 100}, "policy-violation: max_run_upload_bytes: "),
        ("fedavg", {"orchestrators": ["trial"]}, "policy-violation: orchestrators: runs of 'test-admin' are not"),
        ("fedavg", {"require_privacy": {"epsilon": 1}}, "policy-violation: require_privacy: the run has no diff"),
        ("hoarding", {"max_model_bytes": 500_000}, "max_model_bytes: server state of 1000000 bytes is larger"),
        ("talkative", {}, "failed: KeyError; the worker's own log has more"),
    ],
)
def test_what_may_not_be_done_fails_the_task_and_sends_nothing(
    coordinator: LiveCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    policy: dict[str, Any],
    told_why: str,
) -> None:
    # As a coordinator has it that does not heed what it is shown.
    monkeypatch.setattr(Policy, "advertised_policy", lambda *_: None)
    client = coordinator.client()
    run = begin(client, method=MethodSpec(name=method))
    uploads_before = uploads(coordinator)
    with working(coordinator, tmp_path, executes=method != "fedavg", policy=policy):
        task = task_of(client, run, 1, failed)
    assert task.problem is not None
    assert told_why in task.problem.detail
    assert ("log has the details" in task.problem.remedy) == (method == "talkative")
    assert SECRET not in task.problem.detail
    assert uploads(coordinator) == uploads_before
    assert list((tmp_path / "state").glob("*.tmp")) == []


def test_a_choice_that_fails_without_privacy_is_written_down_for_it_is_told(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = begin(client, method=MethodSpec(name="talkative"))
    with working(coordinator, tmp_path, executes=True):
        task_of(client, run, 1, failed)
    (entry,) = ledger_of(settings_of(coordinator, tmp_path)).read("digits")
    assert entry.events == (ExactUse(use="training"),)


def test_a_model_that_does_not_take_the_data_fails_in_words_that_tell_of_no_example(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    # Rows instead of images: of those nothing is said before, as some models take them.
    rows = {"pixel_values": torch.full((9, 77), 41.5), "labels": torch.arange(9)}
    save_file(rows, tmp_path / "rows.safetensors")
    client = coordinator.client()
    run = begin(client)
    data = {"digits": {"kind": "arrays", "file": tmp_path / "rows.safetensors"}}
    with working(coordinator, tmp_path, datasets=data):
        task = task_of(client, run, 1, failed)
    assert task.problem is not None
    assert task.problem.detail == (
        "input-mismatch: the model gives no output for a synthetic example of the data set (labels int64 [], "
        "pixel_values float32 [77]): ValueError: not enough values to unpack (expected 4, got 2). The model is a vit "
        "for image-classification, image_size 8, num_channels 1, num_labels 10"
    )
    assert task.problem.remedy == OF_WORKERS["input-mismatch"]


def test_an_agent_goes_on_after_a_task_that_failed(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    bad = begin(client, method=MethodSpec(name="talkative"))
    figures = tmp_path / "tessera.prom"
    with working(coordinator, tmp_path, metrics_file=figures):
        task_of(client, bad, 1, failed)
        good = begin(client)
        until(lambda: client.run(good.id).state == "completed")
    for outcome in ("failed", "done"):
        assert f'tessera_worker_tasks_total{{kind="train",outcome="{outcome}"}} 1.0' in figures.read_text()


def test_stopping_in_the_middle_of_training_gives_the_task_back_at_once(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = begin(client, training=Training(epochs=1000, batch_size=4))
    with working(coordinator, tmp_path, policy={"max_epochs": 1000}) as stop:
        task_of(client, run, 1, lambda task: task.state == "leased")
        stop.request()
        task_of(client, run, 1, lambda task: task.state == "offered")


def test_cancelling_a_run_ends_its_training_and_the_agent_takes_the_next(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator", lease_seconds=1.6) as coordinator:
        client = coordinator.client()
        run = begin(client, training=Training(epochs=1000, batch_size=4))
        with working(coordinator, tmp_path, policy={"max_epochs": 1000}):
            task_of(client, run, 1, lambda task: task.state == "leased")
            client.set_run_state(run.id, "cancelled")
            following = begin(client, cohort=Cohort(max_attempts=5, max_task_attempts=5))
            until(lambda: client.run(following.id).state == "completed")


def test_a_second_round_fetches_only_what_the_first_one_changed(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    head_only = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, "scope": "v_only"})
    run = begin(client, method=head_only, rounds=2)
    with working(coordinator, tmp_path):
        until(lambda: client.run(run.id).state == "completed")
    first, second = (made.tasks[0] for made in client.rounds(run.id))
    model = client.model(run.spec.model)
    changed = sum(block.nbytes for block in roles("value").resolve(model.blocks))
    manifest = len(client.read_blob(list(client.versions(run.id))[1].digest))
    assert second.download_bytes == changed + manifest
    assert first.download_bytes > model.nbytes


def test_a_worker_that_is_not_admitted_ends_with_the_reason(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    datasets: Any = {"digits": {"kind": "digits"}}
    settings = WorkerSettings(url=coordinator.url, token="no-such", name="w", state_dir=tmp_path, datasets=datasets)
    with capture_logs() as logged, pytest.raises(Unauthenticated):
        Agent(settings, Stop()).run()
    # What comes after it is for people; the log has it for programs.
    assert logged[-1]["event"] == "refused"
    assert "tessera worker join URL --site NAME" in logged[-1]["remedy"]
    last = audit_of(settings).read()[-1]
    assert (last.action, last.detail["reason"]) == ("worker.stop", "unauthenticated")


def test_a_worker_that_is_revoked_at_work_enters_how_its_task_and_it_ended(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator", lease_seconds=1.6) as coordinator:
        client = coordinator.client()
        run = begin(client, training=Training(epochs=1000, batch_size=4))
        datasets: Any = {"digits": {"kind": "digits"}}
        settings = WorkerSettings(
            url=coordinator.url, token=coordinator.token("site", "a"), name="w", state_dir=tmp_path / "state",
            datasets=datasets, policy=Policy(max_epochs=1000), threads=1,
        )  # fmt: skip
        agent = Agent(settings, Stop())
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(agent.run)
            task_of(client, run, 1, lambda task: task.state == "leased")
            client.revoke_token(next(token.id for token in client.tokens() if token.role == "site"))
            with pytest.raises(Unauthenticated, match="revoked"):
                working.result(WAIT_SECONDS)
    entries = audit_of(settings).read()
    assert [entry.action for entry in entries] == ["worker.start", "task.start", "task.drop", "worker.stop"]


def test_a_suspended_worker_drops_its_task_and_goes_on_once_its_site_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "SUSPENDED_SECONDS", 0.1)
    with LiveCoordinator(tmp_path / "coordinator", lease_seconds=1.6) as coordinator:
        client = coordinator.client()
        endless = begin(client, training=Training(epochs=1000, batch_size=4))
        with working(coordinator, tmp_path, policy={"max_epochs": 1000}):
            task_of(client, endless, 1, lambda task: task.state == "leased")
            (site,) = client.sites()
            client.suspend_site(site.id)
            until(lambda: "task.drop" in {entry.action for entry in audit_in(tmp_path / "state").read()})
            client.set_run_state(endless.id, "cancelled")
            following = begin(client, cohort=Cohort(max_attempts=5, max_task_attempts=5))
            client.resume_site(site.id)
            until(lambda: client.run(following.id).state == "completed")


def test_an_agent_goes_on_when_its_token_file_has_another_secret(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator", rotation_grace_seconds=0) as coordinator:
        client, file = coordinator.client(), tmp_path / "token"
        file.write_text(coordinator.token("site", "a"))
        with working(coordinator, tmp_path, token=None, token_file=file, poll_seconds=5):
            first = begin(client)
            until(lambda: client.run(first.id).state == "completed")
            # Amid a claim: none comes between the new secret and its file.
            until(lambda: coordinator.services.waiters.workers)
            rotate(lambda secret: Client(coordinator.url, secret, verify=False), file)
            second = begin(client)
            until(lambda: client.run(second.id).state == "completed")


def page(status: int) -> Answer:
    """What a proxy says by itself."""
    return Answer(status, b"<html>an odd page</html>", {"Content-Type": "text/html"})


def nowhere(url: str, folder: Path) -> WorkerSettings:
    """Settings for a coordinator of which only the URL is known."""
    datasets: Any = {"digits": {"kind": "digits"}}
    return WorkerSettings(url=url, token="any", name="w", state_dir=folder / "elsewhere", datasets=datasets)


@pytest.mark.parametrize(
    "answer",
    [*map(page, (200, 401, 403, 404, 405, 413, 422)), Answer(302), Answer(200, b"<html>log in</html>")],
    ids=lambda answer: f"{answer.status}-{len(answer.headers)}",
)
def test_an_odd_answer_is_waited_out_like_an_outage(tmp_path: Path, answer: Answer) -> None:
    with answering(answer, Answer(204, b"")) as (url, asked):
        stop = Hasty()
        agent = Agent(nowhere(url, tmp_path), stop)
        threading.Thread(target=lambda: (until(lambda: len(asked) >= 2), stop.request())).start()
        agent.run()
    assert [ask.path for ask in asked[:2]] == ["/v1/tasks/claim"] * 2


def test_a_worker_whose_name_another_one_keeps_ends_with_the_remedy(tmp_path: Path) -> None:
    body = NameInUse("another worker of this site is called w").document().model_dump_json().encode()
    taken = Answer(409, body, {"Content-Type": MEDIA_TYPE, "Retry-After": "60"})
    # The first may have been this worker's own past, in a container whose state folder ended with it.
    with (
        answering(taken, Answer(204, b""), taken, taken) as (url, asked),
        capture_logs() as logs,
        pytest.raises(NameInUse, match="another worker"),
    ):
        Agent(nowhere(url, tmp_path), Hasty()).run()
    assert len(asked) == 4
    assert "another name" in next(log for log in logs if log["event"] == "name-in-use")["remedy"]


def test_a_restarted_worker_names_the_same_state_folder(tmp_path: Path) -> None:
    claims = []
    for _ in range(2):
        with answering(Answer(204, b"")) as (url, asked):
            stop = Hasty()
            agent = Agent(nowhere(url, tmp_path), stop)
            threading.Thread(target=lambda: (until(lambda: asked), stop.request())).start()  # noqa: B023
            agent.run()
            claims.append(json.loads(asked[0].body))
    first, second = claims
    assert first["state_id"] == second["state_id"]
    assert first["started_at"] < second["started_at"]


def test_a_key_that_cannot_be_written_keeps_a_worker_from_claiming_and_does_not_end_it(tmp_path: Path) -> None:
    with answering(Answer(204, b"")) as (url, asked):
        sums = SecureSumsSettings(site="a", helper=False)
        settings = nowhere(url, tmp_path).model_copy(update={"secure_sums": sums})
        stop = Hasty()
        agent = Agent(settings, stop)
        keys = settings.state_dir / KEYS_FOLDER
        away = keys.rename(tmp_path / "away")
        keys.touch()
        with capture_logs() as logs:
            thread = threading.Thread(target=agent.run)
            thread.start()
            until(lambda: [log for log in logs if log["event"] == "files-unusable"])
            assert asked == []
            keys.unlink()
            away.rename(keys)
            until(lambda: asked)
            stop.request()
            thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_worker_that_is_too_old_for_a_run_logs_that_once(tmp_path: Path) -> None:
    left_out = Answer(204, b"", {"Tessera-Left-Out": "wards: its version of Tessera does not know training.novelty"})
    with answering(left_out, left_out, Answer(204, b"")) as (url, asked), capture_logs() as logs:
        stop = Hasty()
        threading.Thread(target=lambda: (until(lambda: len(asked) >= 3), stop.request())).start()
        Agent(nowhere(url, tmp_path), stop).run()
    (said,) = [log for log in logs if log["event"] == "version-too-old"]
    assert said["detail"].startswith("wards: ")
    assert "Install the coordinator's version" in said["remedy"]


def test_a_worker_of_another_protocol_waits_for_the_upgrade_of_either_side(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    stop = Hasty()
    agent = Agent(settings_of(coordinator, tmp_path), stop)
    agent._claim = agent._claim.model_copy(update={"protocol_min": 7, "protocol_max": 9})
    with capture_logs() as logs:
        assert agent._next() is None
    agent.close()
    (said,) = [log for log in logs if log["event"] == "protocol-mismatch"]
    assert "the worker speaks 7 to 9" in said["detail"]
    assert "The coordinator is older" in said["remedy"]
    assert VERSION not in said["remedy"]
    # A watchdog sees that the worker is alive.
    assert sum(stop.asked) == 3600
    assert max(stop.asked) <= 30


@pytest.mark.parametrize("content_type", ["text/html", MEDIA_TYPE])
def test_a_page_of_a_proxy_amid_a_task_does_not_end_the_worker(
    coordinator: LiveCoordinator, tmp_path: Path, content_type: str
) -> None:
    start_run(coordinator.client(), small_model(), values(small_model()))
    task = ScriptedWorker(coordinator.client("site", "a")).take()
    with answering(Answer(403, b"<h1>Blocked</h1>", {"Content-Type": content_type})) as (url, asked):
        agent = Agent(nowhere(url, tmp_path), Hasty())
        agent._runner = SimpleNamespace(run=lambda *_: agent._client._transport.once("HEAD", "/x"), audit=None)
        with capture_logs() as logs:
            agent._run_task(task)
        agent.close()
    # No failure is reported either.
    assert {ask.method for ask in asked} == {"HEAD"}
    assert [log["event"] for log in logs if log["event"].startswith("task-")] == ["task-dropped"]


def test_a_full_disk_amid_a_task_gives_it_back_and_is_no_failure(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    start_run(client, small_model(), values(small_model()))
    task = ScriptedWorker(coordinator.client("site", "a")).take()
    settings = settings_of(coordinator, tmp_path)
    agent = Agent(settings, Hasty())

    def write(*_: object) -> None:
        with written_whole(settings.state_dir / "update") as file, Path("/dev/full").open("wb", 0) as full:
            file.write(b"x" * 3_000_000)
            full.write(b"x")

    agent._runner = SimpleNamespace(run=write, audit=None, inbox=None)
    with capture_logs() as logs:
        agent._run_task(task)
    view = client.task(task.id)
    assert (view.state, view.attempts) == ("offered", 0)
    assert view.problem is not None
    assert re.match(
        rf"disk-full: {settings.state_dir}: No space left on device; 4\S* MB are needed, \S+ \w+ are free",
        view.problem.detail,
    )
    (said,) = [log for log in logs if log["event"] == "disk-full"]
    assert said["path"] == str(settings.state_dir)
    # There is room, in truth.
    assert not agent._is_closed()
    agent.close()


def test_a_worker_that_may_not_write_claims_nothing_until_it_may(tmp_path: Path) -> None:
    settings = nowhere("http://127.0.0.1:1", tmp_path)
    agent = Agent(settings, Hasty())
    blocked = OSError(errno.ENOSPC, "No space left on device", str(settings.state_dir / "here" / "x"))
    (settings.state_dir / "here").touch()
    assert agent._disk.note(blocked)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        closed = agent._is_closed()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert closed
    assert "No space left on device" in str(agent._closed)
    assert not agent._is_closed()
    agent.close()


def test_a_full_disk_does_not_let_a_worker_with_older_files_go_on(tmp_path: Path) -> None:
    settings = nowhere("http://127.0.0.1:1", tmp_path)
    agent, task = Agent(settings, Hasty()), task_document()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with capture_logs():
            outcome = agent._report_failure(task, StateRolledBack("older", "head"), agent._log)
            closed_while_full = agent._is_closed()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (outcome, closed_while_full) == ("given-back", True)
    assert agent._is_closed()
    # For `tessera worker adopt`, and for the next process.
    assert StateDatabase.of(settings.state_dir).note(ROLLED_BACK) == "head"
    agent.close()


@contextmanager
def running(folder: Path, dataset: str) -> Iterator[Callable[[], Result]]:
    """`tessera worker run` in this process, whose handlers of signals are restored."""
    file = folder / "worker.toml"
    about = f'url = "http://127.0.0.1:1"\ntoken = "t"\nname = "w"\nstate_dir = "{folder}/state"\n'
    file.write_text(f"{about}[datasets.digits]\n{dataset}\n")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield lambda: CliRunner().invoke(worker_command.app, ["run", "--config", str(file)])
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_worker_that_starts_on_a_full_disk_ends_with_a_status_that_starts_it_again(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with running(tmp_path, 'kind = "digits"') as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            ended = run()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.exit_code == DISK_FULL_AT_START
    assert "File too large" in ended.stderr


def test_a_worker_whose_executor_is_killed_at_its_start_ends_with_a_status_that_starts_it_again(
    tmp_path: Path,
) -> None:
    # Its reader waits for somebody to write.
    os.mkfifo(tmp_path / "rows.safetensors")

    before, over = len(zygote.SUPERVISORS), threading.Event()

    def kill() -> None:
        # One that ends before the worker waits for it is started again.
        while not over.wait(0.1):
            for supervisor in zygote.SUPERVISORS[before:]:
                supervisor.kill()

    with running(tmp_path, f'kind = "arrays"\nfile = "{tmp_path}/rows.safetensors"') as run:
        killer = threading.Thread(target=kill)
        killer.start()
        ended = run()
        over.set()
        killer.join()
    assert ended.exit_code == DEVICE_FAILED
    assert "start the worker again" in ended.stderr


def test_an_unreadable_data_set_is_no_full_disk(tmp_path: Path) -> None:
    settings = nowhere("http://127.0.0.1:1", tmp_path)
    agent = Agent(settings, Hasty())
    for number in (errno.EIO, errno.EACCES, errno.EMFILE):
        assert agent._disk.note(OSError(number, "no", str(tmp_path / "data.csv"))) is None
        assert agent._disk.note(OSError(number, "no", str(settings.state_dir / "vault" / "x")))
    assert agent._disk.note(DataError("an example cannot be read")) is None
    agent.close()


def test_a_coordinator_that_is_deaf_does_not_keep_a_worker_from_stopping(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "GIVE_BACK_SECONDS", 0.1)
    start_run(coordinator.client(), small_model(), values(small_model()))
    task = ScriptedWorker(coordinator.client("site", "a")).take()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        agent = Agent(nowhere(f"http://127.0.0.1:{deaf.getsockname()[1]}", tmp_path), Stop())
        giving = threading.Thread(target=agent._give_back, args=[task])
        giving.start()
        # Half of the time after which any other request gives up.
        giving.join(ANSWER_SECONDS / 2)
        assert not giving.is_alive()


def test_a_heartbeat_that_is_not_answered_does_not_keep_the_next_from_being_sent(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    start_run(coordinator.client(), small_model(), values(small_model()))
    task = ScriptedWorker(coordinator.client("site", "a")).take().model_copy(update={"lease_seconds": 1.0})
    asked, over = [], threading.Event()

    def renewed(ask: Asked) -> Answer:
        if ask is asked[0]:
            over.wait(WAIT_SECONDS)
        return Answer(200, b'{"lease_seconds": 1.0}')

    with answering_by(renewed, asked) as url:
        agent = Agent(nowhere(url, tmp_path), Stop())
        # Half of the time after which any other request gives up.
        agent._runner = SimpleNamespace(run=lambda *_: until(lambda: len(asked) >= 2, ANSWER_SECONDS / 2))
        agent._under_lease(task, Report())
        over.set()
        agent.close()
    assert {ask.path for ask in asked} == {f"/v1/tasks/{task.id}/heartbeat"}


def test_a_task_with_a_long_lease_shows_a_watchdog_that_the_worker_is_alive(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_module, "ALIVE_SECONDS", 0.01)
    start_run(coordinator.client(), small_model(), values(small_model()))
    task = ScriptedWorker(coordinator.client("site", "a")).take().model_copy(update={"lease_seconds": 3600.0})
    settings = nowhere(coordinator.url, tmp_path)
    agent = Agent(settings, Stop())
    agent._runner = SimpleNamespace(run=lambda *_: until((settings.state_dir / ALIVE_FILE).exists))
    agent._under_lease(task, Report())
    agent.close()


def test_before_it_loads_data_a_worker_removes_what_showed_that_an_earlier_one_was_alive(tmp_path: Path) -> None:
    missing = DataSource(kind="arrays", file=tmp_path / "missing.safetensors")
    settings = nowhere("http://127.0.0.1:1", tmp_path).model_copy(update={"datasets": {"digits": missing}})
    settings.state_dir.mkdir()
    (settings.state_dir / ALIVE_FILE).touch()
    with pytest.raises(SettingsError, match="missing"):
        Agent(settings, Stop())
    assert not (settings.state_dir / ALIVE_FILE).exists()


def test_only_texts_of_our_own_are_told_to_the_coordinator() -> None:
    assert failure_of(ValueError(SECRET)) == ("failed", "ValueError; the worker's own log has more")
    assert failure_of(MemoryError(SECRET))[0] == "out-of-memory"
    with pytest.raises(ValueError, match="no block matches") as refused:
        named(["x"]).resolve(())
    assert failure_of(refused.value) == ("invalid-plan", str(refused.value))
    assert failure_of(UnknownAttention("layer 3")) == ("unknown-architecture", "layer 3")
    assert failure_of(UnsupportedRun("set score to last")) == ("unsuited", "set score to last")


def test_two_workers_of_two_sites_make_one_version(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    run = begin(client, cohort=Cohort(size=2, quorum=2))
    other = ScriptedWorker(coordinator.client("site", "b"), name="v", datasets={"digits": 5})
    with working(coordinator, tmp_path):
        other.train(other.take(), step=0.0)
        until(lambda: client.run(run.id).state == "completed")
    assert {task.worker for made in client.rounds(run.id) for task in made.tasks} == {"a/w", "b/v"}


def test_what_a_slow_line_left_is_sent_once_when_the_line_is_fast(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    other = ScriptedWorker(coordinator.client("site", "b"), name="v", datasets={"digits": 5}).enrol()
    wide = {**VIT, "intermediate_size": 1000}
    run = begin(client, wide, rounds=2, upload_seconds=1.0, cohort=Cohort(size=2, quorum=2))
    slow = 0.4 * sum(block.nbytes for block in client.model(run.spec.model).blocks)
    with working(coordinator, tmp_path, resources={"upload_bytes_per_second": slow}):
        first = task_of(client, run, 1, lambda task: task.worker == "a/w" and task.is_accepted)
    other.train(other.take(), step=0.0)
    with working(coordinator, tmp_path):
        second = task_of(client, run, 2, lambda task: task.worker == "a/w" and task.is_accepted)
        other.train(other.take(), step=0.0)
        until(lambda: client.run(run.id).state == "completed")
        kept = tmp_path / "state" / "vault" / run.id
        until(lambda: [path.name for path in kept.iterdir()] == ["current.safetensors"])
    assert 0 < first.metrics["codec_error"] < 1
    assert "codec_error" not in second.metrics
    assert [name for name in Vault(tmp_path / "state" / "vault").load(run.id) if name.startswith(PREFIX)] == []


def test_outside_of_its_hours_a_worker_asks_for_nothing(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    tomorrow = DAYS[(local_time().weekday() + 1) % 7]
    with working(coordinator, tmp_path, policy={"hours": [f"{tomorrow} 10:00-10:01"]}):
        until((tmp_path / "state" / "alive").exists)
        time.sleep(0.5)
        assert list(coordinator.client().workers()) == []

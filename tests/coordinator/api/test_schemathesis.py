"""The live API against its own description, by schemathesis: whatever is sent, by whomever, answers are as described.

What is left out is in schemathesis.toml, each with its reason; what schemathesis cannot know is in its hooks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tessera.coordinator.dossier import signing_key
from tessera.shared.api.tasks import Task
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.paths import ROOT

CONFIG = Path(__file__).with_name("schemathesis.toml")

# Nobody is slowed down here, which other tests are about.
ROOM = {
    "auth_failures_per_minute": 1 << 30,
    "enrolments_per_minute": 1 << 30,
    "pending_enrolments": 1 << 20,
    "max_event_streams": 1 << 20,
    "max_wait_seconds": 0.1,
}

# First, while there is a worker to be heard of: the rest may suspend its site.
STREAMS = "listenTo"
# Last, for an administrator who revokes their own token, or rotates it twice, is nobody from then on.
REVOKING = "revokeToken$|rotateTokenById$"
# Of an option that is given twice only the last counts.
ONLY, WITHOUT = "--include-operation-id-regex=^({})", "--exclude-operation-id-regex=^({})"
OTHERS = WITHOUT.format(f"{STREAMS}|{REVOKING}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["admin", "orchestrator", "site", "nobody"])
def test_every_answer_is_as_the_description_says(tmp_path: Path, role: str) -> None:
    with judged(tmp_path) as coordinator:
        worker, leased = begun(coordinator, tmp_path)
        headers = {}
        if role != "nobody":
            headers = {"Authorization": f"Bearer {coordinator.token(role, 'north' if role == 'site' else None)}"}
        with alive(worker, leased):
            judge(coordinator, tmp_path, headers, ONLY.format(STREAMS))
        judge(coordinator, tmp_path, headers, OTHERS)
        if headers:
            answer = coordinator.bare(headers).get("/openapi.json")
            assert answer.status_code == 200, "the token ceased to hold meanwhile, and nothing was judged by it"
        judge(coordinator, tmp_path, headers, ONLY.format(REVOKING))


def test_a_few_answers_to_an_administrator_are_as_the_description_says(tmp_path: Path) -> None:
    with judged(tmp_path) as coordinator:
        begun(coordinator, tmp_path)
        headers = {"Authorization": f"Bearer {coordinator.token('admin')}"}
        few = ("--phases=fuzzing", "--max-examples=1")
        judge(coordinator, tmp_path, headers, OTHERS, *few)


def judged(folder: Path) -> LiveCoordinator:
    """A coordinator that signs dossiers."""
    return LiveCoordinator(folder / "coordinator", signing_key=signing_key.create(folder / "key.pem").path, **ROOM)


def begun(coordinator: LiveCoordinator, folder: Path) -> tuple[ScriptedWorker, Task]:
    """Start a run, and write down for schemathesis the description as it is served and what there is: the worker, and
    the task that it holds."""
    model = small_model()
    run = start_run(coordinator.client("orchestrator"), model, values(model), rounds=3)
    worker = ScriptedWorker(coordinator.client("site", "north"))
    done = until(worker.claim)
    worker.train(done)
    leased = until(worker.claim)
    description = coordinator.http("viewer").get("/openapi.json").json()
    (folder / "openapi.json").write_text(json.dumps(description))
    shutil.copy(CONFIG, folder)
    digests = [run.spec.model, run.version.digest, leased.version.digest]
    for name, there in {"digests": digests, "runs": [run.id], "tasks": [leased.id, done.id]}.items():
        (folder / name).write_text("".join(f'"{each}"\n' for each in there))
    return worker, leased


@contextmanager
def alive(worker: ScriptedWorker, task: Task) -> Iterator[None]:
    """Let a worker be heard of again and again, so that streams of events have one soon."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            worker.client.heartbeat(task.id, task.token)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def judge(coordinator: LiveCoordinator, folder: Path, headers: dict[str, str], *choice: str) -> None:
    """Run schemathesis. Fails the test with all that it says if an answer is not as the description says."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", folder / CONFIG.name, "run"]
    sent = [f"--header={name}: {value}" for name, value in headers.items()]
    done = subprocess.run(
        [*command, folder / "openapi.json", "--url", coordinator.url, *sent, *choice],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr

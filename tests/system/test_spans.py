"""One trace for all that is done for a round, in every process that does it; and nothing where nobody asks for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tessera.shared.telemetry.trace_ids import trace_of
from tessera.shared.updates.model_folder import ModelFolder
from tests.support.cli import NOWHERE, forked
from tests.support.coordinator import until
from tests.support.otlp import Receiver, Span, receiving
from tests.support.processes import CoordinatorProcess, worker_process

RUN = """
name = "cats"
dataset = "secretly-named"
rounds = 2
method = { name = "fedavg" }
cohort = { size = 1 }
training = { epochs = 1, batch_size = 256 }
"""
DATA = """
[datasets.secretly-named]
kind = "digits"
"""
TELLABLE = {
    "tessera.run", "tessera.round", "tessera.task", "tessera.kind", "tessera.attempt",
    "http.request.method", "http.route", "http.response.status_code", "error.type",
}  # fmt: skip

CLIENT, SERVER = 3, 2


@contextmanager
def traced(folder: Path, vit: ModelFolder) -> Iterator[tuple[Receiver, str, str]]:
    """A federation of two rounds in four processes: what was received of it, its run's id, and a token."""
    (folder / "run.toml").write_text(RUN)
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with CoordinatorProcess(folder / "coordinator", cohort_wait_seconds=0) as coordinator:
            worker = worker_process(coordinator, "north", DATA)
            token = (coordinator.folder / "admin.token").read_text().strip()
            told = forked(
                *("run", "create", str(folder / "run.toml"), "--model", str(vit.path), "--json"),
                TESSERA_URL=coordinator.url,
                TESSERA_TOKEN=token,
            )
            assert told.returncode == 0, told.stderr
            run = json.loads(told.stdout)["id"]
            client = coordinator.client(token)
            until(lambda: client.run(run).state == "completed", 60)
            assert worker.terminate() == 0
            coordinator.process.terminate()
        yield receiver, run, token


def test_all_that_is_done_for_a_round_is_one_trace_which_tells_no_secret(tmp_path: Path, vit: ModelFolder) -> None:
    with traced(tmp_path, vit) as (receiver, run, token):
        for number in (1, 2):
            _hold_together(receiver, run, number)
        _follow_from_the_command(receiver, run)
        _are_named_in_logs(tmp_path, run)
        assert {name for span in receiver.spans for name in span.attributes} <= TELLABLE
        for secret in (token, "secretly-named", "north"):
            assert secret.encode() not in receiver.raw


def _hold_together(receiver: Receiver, run: str, number: int) -> None:
    trace = trace_of(run, number)
    spans = [span for span in receiver.spans if span.trace == trace]
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)

    def one(name: str) -> Span:
        # A look between the commit of a merge and its end tries once more, and is refused before it reads anything.
        (found,) = [span for span in spans if span.name == name and not span.failed]
        return found

    whole = one("round")
    assert (whole.parent, whole.service, whole.attributes["tessera.run"]) == ("", "tessera-conductor", run)
    # Nothing hangs in the air.
    assert [span.name for span in spans if span is not whole and span.parent not in by_id] == []
    for name in ("open", "close", "merge"):
        assert (one(name).parent, one(name).service) == (whole.id, "tessera-conductor"), name
    task = one("task")
    for name in ("claim", "task"):
        assert (one(name).parent, one(name).service) == (whole.id, "tessera-worker"), name
    for name, parent in {"fetch": task, "train": task, "upload": task, "submit": one("upload")}.items():
        assert one(name).parent == parent.id, name
        assert one(name).seconds <= parent.seconds
    handled = one("POST /v1/tasks/{task_id}/update")
    asked = by_id[handled.parent]
    assert (handled.service, handled.kind, handled.attributes["http.response.status_code"]) == (
        "tessera-coordinator",
        SERVER,
        200,
    )
    assert (asked.service, asked.name, asked.kind) == ("tessera-worker", "POST", CLIENT)
    assert by_id[asked.parent] is one("submit")


def _follow_from_the_command(receiver: Receiver, run: str) -> None:
    (command,) = [span for span in receiver.spans if span.name == "tessera run create"]
    (created,) = [span for span in receiver.spans if span.name == "POST /v1/runs"]
    assert (command.service, command.parent) == ("tessera", "")
    assert (created.trace, created.links) == (command.trace, (trace_of(run, 1),))


def _are_named_in_logs(folder: Path, run: str) -> None:
    lines = [
        json.loads(line)
        for log in folder.rglob("*.log")
        for line in log.read_text().splitlines()
        if line.startswith("{")
    ]
    of_round = [line["event"] for line in lines if line.get("trace") == trace_of(run, 1)]
    assert "task-done" in of_round
    # It opened, closed and merged the round.
    assert of_round.count("conductor.acted") == 3


# FastAPI takes in the interfaces, which do nothing, wherever they are installed; what does something is the SDK.
def test_without_the_variables_nothing_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    look = (
        "import sys, tessera.coordinator.cli, tessera.shared.cli.main; "
        "from tessera.shared.telemetry import spans; spans.begin('x'); "
        "print('opentelemetry.sdk' in sys.modules)"
    )
    assert forked(look, module="tests.support.code").stdout == "False\n"


def test_a_receiver_that_is_gone_holds_nobody_up() -> None:
    look = """
import time
from tessera.shared.telemetry import spans
spans.begin("x")
with spans.span("y"):
    pass
began = time.monotonic()
spans.end()
print(time.monotonic() - began)
"""
    # The exporter itself would try again for half a minute.
    gone = {"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_EXPORTER_OTLP_TIMEOUT": "900"}
    done = forked(look, module="tests.support.code", **gone)
    assert float(done.stdout) < 15

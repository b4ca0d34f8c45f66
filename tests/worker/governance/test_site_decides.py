"""A whole site that decides: its people approve runs and release updates, and its chain tells what became of them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs
from typer.testing import CliRunner

from tessera.coordinator.db.tables import WorkerRow
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunPatch, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.selectors import roles
from tessera.shared.run_settings import Privacy
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import digest_of
from tessera.worker import agent as loop
from tessera.worker import settings_reload
from tessera.worker.agent import Agent
from tessera.worker.cli.audit import app as audit_app
from tessera.worker.cli.worker import app
from tessera.worker.governance.airlock import Airlock, HeldTask, summary_of
from tessera.worker.governance.departures import departures
from tessera.worker.governance.opening_hours import USAGE, DayUsage, Opening, local_time
from tessera.worker.settings import read_settings
from tessera.worker.settings_reload import SettingsFile
from tessera.worker.state.database import DATABASE_FILE, StateDatabase
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.task.heartbeat import Stop
from tests.support.chain_rows import audit_in
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.task_document import task_of
from tests.support.tasks import DIGITS_VIT as VIT
from tests.support.tasks import untrained
from tests.worker.governance.test_approvals import Asking

SETTINGS = """
url = "{url}"
token = "{token}"
name = "w"
state_dir = "{folder}/state"
threads = 1
poll_seconds = 1

[datasets.digits]
kind = "digits"
part = {{ scheme = "iid", count = 8, index = 0 }}

[policy]
"""


class Desk:
    """Where the site's people sit: a settings file, and the commands that read it."""

    def __init__(self, coordinator: LiveCoordinator, folder: Path, policy: str) -> None:
        self.file = folder / "worker.toml"
        self.text = SETTINGS.format(url=coordinator.url, token=coordinator.token("site", "a"), folder=folder)
        self.write(policy)
        self.settings = read_settings(self.file)

    def write(self, policy: str) -> None:
        self.file.write_text(self.text + policy)

    def say(self, command: str, *arguments: str) -> Any:
        result = CliRunner().invoke(app, [command, *arguments, "--config", str(self.file), "--json"])
        assert result.exit_code == 0, result.output
        # What the worker logs meanwhile goes to the same place.
        return json.JSONDecoder().raw_decode(result.stdout, result.stdout.index("{\n"))[0]

    def audit(self) -> list[str]:
        entries = audit_in(self.settings.state_dir).read()
        return [entry.action for entry in entries if not entry.action.startswith("worker.")]

    def details(self, action: str) -> list[dict[str, Any]]:
        entries = audit_in(self.settings.state_dir).read()
        return [entry.detail for entry in entries if entry.action == action]

    def compared(self) -> Any:
        """What `tessera audit compare` finds."""
        result = CliRunner().invoke(audit_app, ["compare", "--config", str(self.file), "--json"])
        return json.loads(result.stdout)

    @contextmanager
    def working(self) -> Iterator[Agent]:
        stop = Stop()
        agent = Agent(self.settings, stop, SettingsFile(self.file))
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            yield agent
        finally:
            stop.request()
            thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setenv("LOGNAME", "ann")
    monkeypatch.setattr(loop, "CLOSED_SECONDS", 0.1)
    monkeypatch.setattr(settings_reload, "SETTLED_SECONDS", 0.05)


def begin(client: Client, config: Mapping[str, Any] = VIT, **spec: Any) -> Run:
    document, start = untrained(config, "image-classification")
    wanted = {
        "name": "demo", "dataset": "digits", "training": Training(learning_rate=0.01, batch_size=256),
        "cohort": Cohort(max_attempts=2), **spec,
    }  # fmt: skip
    return start_run(client, document, start, **wanted)


def tasks(client: Client, run: Run) -> list[TaskView]:
    return [task for made in client.rounds(run.id) for task in made.tasks]


def test_a_run_is_done_once_a_person_has_approved_it(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client("orchestrator")
    desk = Desk(coordinator, tmp_path, "approve_runs = true\norchestrators = ['test-orchestrator']\n")
    with desk.working():
        # What is given back unasked costs no attempt.
        run = begin(client, cohort=Cohort(max_attempts=1))
        until(lambda: desk.say("inbox")["runs"])
        (asked,) = desk.say("inbox")["runs"]
        assert (asked["run"], asked["standing"]) == (run.id, "awaiting-approval")
        assert asked["summary"].startswith("Trains all blocks of a ViT with 1 layer on `digits` (180 examples)")
        assert "to orchestrator test-orchestrator" in asked["summary"]
        until(lambda: tasks(client, run) and tasks(client, run)[0].state == "cancelled")
        assert "update.leave" not in desk.audit()
        desk.say("approve", "demo")
        until(lambda: client.run(run.id).state == "completed")
    given_back, done = tasks(client, run)
    assert given_back.problem
    assert given_back.problem.code == "withheld"
    assert done.state == "merged"
    order = ["task.start", "run.ask", "task.give-back", "run.approve", "task.start", "update.leave", "update.count"]
    assert desk.audit() == order


def declared(coordinator: LiveCoordinator) -> str:
    with coordinator.services.database.snapshot() as session:
        return str(session.scalars(select(WorkerRow.declared)).all())


def test_a_run_that_is_measured_first_is_approved_once(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "approve_runs = true\n")
    desk.text = desk.text.replace('kind = "digits"\n', 'kind = "digits"\nheld_out = 0.2\n')
    desk.write("approve_runs = true\n")
    desk.settings = read_settings(desk.file)
    with desk.working():
        run = begin(client, evaluation=Evaluation(sites=True))
        (asked,) = until(lambda: desk.say("inbox")["runs"])
        assert asked["summary"].startswith("Trains ")
        assert asked["examples"] > 100
        desk.say("approve", "demo")
        until(lambda: client.run(run.id).state == "completed")
    assert len(desk.details("run.ask")) == len(desk.details("task.give-back")) == 1


def test_a_run_that_is_declined_is_asked_for_no_more(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "approve_runs = true\n")
    with desk.working():
        run = begin(client)
        until(lambda: desk.say("inbox")["runs"])
        desk.say("decline", run.id[:8], "--reason", "no ethics vote")
        until(lambda: client.preview_run(run.spec).workers)
        until(lambda: "declined: no ethics vote" in declared(coordinator))
    assert [task.state for task in tasks(client, run)] == ["cancelled"]
    assert desk.details("run.decline")[0]["by"] == "ann"


def test_a_site_trains_under_changed_terms_only_once_a_person_has_approved_them(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "approve_runs = true\n")
    with desk.working():
        run = begin(client, rounds=2, cohort=Cohort(deadline_seconds=600))
        until(lambda: tasks(client, run) and tasks(client, run)[0].state == "cancelled")
        client.patch_run(run.id, RunPatch.model_validate({"rounds": 1, "cohort": {"deadline_seconds": 900}}))
        desk.say("approve", "demo")
        _, asked = until(lambda: len(desk.say("inbox")["runs"]) == 2 and desk.say("inbox")["runs"])
        assert asked["summary"].startswith(
            "The run has changed since it last asked: rounds from 2 to 1, deadline_seconds from 600 to 900. Trains "
        )
        assert (asked["standing"], desk.details("update.leave")) == ("awaiting-approval", [])
        desk.say("approve", "demo")
        until(lambda: client.run(run.id).state == "completed")
    assert client.run(run.id).version.number == len(desk.details("update.leave")) == 1


def test_a_run_that_changes_back_to_approved_terms_goes_on_while_others_wait(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "approve_runs = true\n")
    with desk.working():
        run = begin(client, rounds=1)
        until(lambda: tasks(client, run) and tasks(client, run)[0].state == "cancelled")
        client.set_run_state(run.id, "paused")
        desk.say("approve", "demo")
        client.patch_run(run.id, RunPatch.model_validate({"rounds": 9, "state": "running"}))
        until(lambda: len(desk.say("inbox")["runs"]) == 2 and tasks(client, run)[-1].state == "cancelled")
        assert client.run(run.id).version.number == 0
        client.patch_run(run.id, RunPatch.model_validate({"rounds": 1}))
        until(lambda: client.run(run.id).state == "completed")
    assert [one["standing"] for one in desk.say("inbox")["runs"]] == ["approved", "awaiting-approval"]


def test_an_update_waits_for_its_release_and_is_told_in_the_chain(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "airlock = true\n")
    with desk.working():
        run = begin(client, method=MethodSpec(name="fedavg"), codec="raw")
        until(lambda: desk.say("airlock")["updates"])
        (held,) = desk.say("airlock")["updates"]
        assert tasks(client, run)[0].state == "leased"
        assert (held["run"], held["round"], held["examples"], held["epsilon"]) == (run.id, 1, 180, None)
        assert set(held["blocks"]) == {block.name for block in client.model(run.spec.model).blocks}
        assert Path(held["file"]).stat().st_size == held["nbytes"]
        desk.say("release", "--all")
        until(lambda: client.run(run.id).state == "completed")
    (task,) = tasks(client, run)
    assert (task.state, task.upload_bytes) == ("merged", held["nbytes"])
    # The coordinator measured the same norm of what it was sent.
    assert task.metrics["update_norm"] == pytest.approx(held["norm"], rel=1e-5)
    assert desk.audit() == ["task.start", "update.hold", "update.release", "update.leave", "update.count"]
    (left,) = desk.details("update.leave")
    assert (left["update"], left["bytes"], left["blocks"]) == (held["update"], held["nbytes"], len(held["blocks"]))
    # A person can see what left without the coordinator and without the model.
    assert left["block_names"] == sorted(held["blocks"])
    assert left["figures"] == held["metrics"]
    assert desk.compared() == {"agreed": 1, "earlier": 0, "differences": []}


def test_a_held_update_stops_no_other_run_and_everybody_sees_what_it_waits_for(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "airlock = true\n")
    with desk.working():
        runs = [begin(client)]
        until(lambda: desk.say("airlock")["updates"])
        runs.append(begin(client, name="other"))
        first, second = until(lambda: len(desk.say("airlock")["updates"]) == 2 and desk.say("airlock")["updates"])
        at = until(lambda: tasks(client, runs[0])[0].progress)
        assert at.phase == "held"
        assert at.held_since == datetime.fromisoformat(first["held_at"]).replace(microsecond=0)
        desk.say("release", second["id"])
        until(lambda: client.run(runs[1].id).state == "completed")
        assert tasks(client, runs[0])[0].state == "leased"
        client.set_run_state(runs[0].id, "cancelled")
        desk.say("release", first["id"])
        until(lambda: not desk.say("airlock")["updates"])
    assert "update.release" in desk.audit()
    assert [entry["update"] for entry in desk.details("update.leave")] == [second["update"]]


def test_an_update_that_a_stopped_worker_held_is_sent_by_the_next_one(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "airlock = true\n")
    with desk.working():
        run = begin(client)
        (held,) = until(lambda: desk.say("airlock")["updates"])
    desk.say("release", held["id"])
    with desk.working():
        until(lambda: client.run(run.id).state == "completed")
    (task,) = tasks(client, run)
    assert (task.update, task.attempts) == (held["update"], 1)
    order = ["task.start", "update.hold", "task.drop", "task.start", "update.release", "update.leave", "update.count"]
    assert desk.audit() == order
    assert desk.say("airlock")["updates"] == []


def test_a_run_that_is_declined_sends_nothing_that_waits_for_a_release(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "airlock = true\napprove_runs = true\n")
    with desk.working():
        run = begin(client)
        until(lambda: desk.say("inbox")["runs"])
        desk.say("approve", "demo")
        until(lambda: desk.say("airlock")["updates"])
        desk.say("decline", "demo", "--reason", "ethics vote ended", "--as", "Dr. Ann Lee")
        until(lambda: "declined: ethics vote ended" in declared(coordinator))
        withheld = until(lambda: (task := tasks(client, run)[1]).problem and task)
    assert withheld.problem
    assert (withheld.state, withheld.problem.code) == ("cancelled", "withheld")
    by = "Dr. Ann Lee (user ann)"
    assert [entry["by"] for entry in desk.details("run.decline")] == [by]
    assert [(entry["reason"], entry["by"]) for entry in desk.details("update.withhold")] == [
        ("declined: ethics vote ended", by)
    ]
    assert "update.leave" not in desk.audit()


def test_what_another_process_held_for_a_round_that_is_over_is_removed(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "airlock = true\n")
    with desk.working():
        run = begin(client)
        until(lambda: desk.say("airlock")["updates"])
    client.set_run_state(run.id, "cancelled")
    with desk.working():
        until(lambda: not desk.say("airlock")["updates"])


@pytest.mark.parametrize("name", [" ", "x" * 101, "Ann\nBob"])
def test_a_name_that_the_audit_could_not_show_decides_nothing(
    coordinator: LiveCoordinator, tmp_path: Path, name: str
) -> None:
    desk = Desk(coordinator, tmp_path, "approve_runs = true\n")
    Asking(desk.settings.state_dir).code(task_of(run="r1", run_name="demo"))
    refused = CliRunner().invoke(app, ["approve", "r1", "--as", name, "--config", str(desk.file)])
    assert refused.exit_code == 2
    assert "printable characters" in refused.stderr
    assert desk.audit() == []


def test_a_request_on_terms_that_a_person_has_not_read_is_not_approved(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    desk = Desk(coordinator, tmp_path, "approve_runs = true\n")
    asking = Asking(desk.settings.state_dir)
    private = task_of(run="r1", run_name="demo", privacy=Privacy(epsilon=1.0, delta=1e-5, clip_norm=1.0))
    asking.code(private)
    (asked,) = desk.say("inbox")["runs"]
    asking.code(task_of(run="r1", run_name="demo"))
    refused = CliRunner().invoke(app, ["approve", "r1", "--config", str(desk.file)])
    assert refused.exit_code == 1
    assert "name one with --terms" in refused.stderr
    assert desk.audit() == []
    (decided,) = desk.say("approve", "r1", "--terms", asked["terms"][:16])["runs"]
    assert decided["terms"] == asked["terms"]
    assert [entry["terms"] for entry in desk.details("run.approve")] == [asked["terms"]]
    assert {run["standing"] for run in desk.say("inbox")["runs"]} == {"approved", "awaiting-approval"}
    assert len(desk.say("decline", "r1", "--reason", "no")["runs"]) == 2
    assert {run["standing"] for run in desk.say("inbox")["runs"]} == {"declined"}


@pytest.mark.parametrize(
    ("selection", "unit", "said"),
    [("noisy", "example", ""), ("uncovered", "group", "epsilon does not cover what the choice of blocks reveals")],
)
def test_the_airlock_names_the_unit_of_epsilon_and_what_it_does_not_cover(
    coordinator: LiveCoordinator, tmp_path: Path, selection: str, unit: str, said: str
) -> None:
    desk = Desk(coordinator, tmp_path, "airlock = true\n")
    given = {"epsilon": 3.0, "delta": 1e-5, "clip_norm": 1.0, "selection": selection, "unit": unit}
    held = summary_of(
        TaskRef("r", "demo", 1, "abcdef0123456789", 1), orchestrator=None, dataset="digits", examples=10,
        held_at=datetime.now(UTC), update=digest_of(b"update"), nbytes=6, blocks={}, metrics={}, epsilon=1.5,
        privacy=Privacy.model_validate(given),
    )  # fmt: skip
    (made := tmp_path / "made").write_bytes(b"update")
    Airlock(desk.settings.state_dir).hold(made, held, HeldTask(work=held.update, blocks=()))
    (found,) = desk.say("airlock")["updates"]
    assert (found["epsilon"], found["unit"], found["covers_choice"]) == (1.5, unit, not said)
    shown = CliRunner().invoke(app, ["airlock", "--config", str(desk.file)], env={"COLUMNS": "200"}).output
    assert re.search(rf"1\.500 +{unit} ", shown)
    assert (f"{held.id}: epsilon does not cover" in shown) == bool(said)


def test_an_update_that_is_withheld_fails_its_task_by_name(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "airlock = true\n")
    with desk.working():
        run = begin(client, cohort=Cohort(max_attempts=1))
        (held,) = until(lambda: desk.say("airlock")["updates"])
        desk.say("withhold", held["id"], "--reason", "too few examples")
        until(lambda: client.run(run.id).state == "paused")
    (task,) = tasks(client, run)
    assert task.problem
    assert task.problem.detail == "withheld-by-site: too few examples"
    assert desk.audit() == ["task.start", "update.hold", "update.withhold", "task.fail"]


PROTOTYPES = {"method": MethodSpec(name="fedproto")}


@pytest.mark.parametrize(
    ("policy", "spec", "rule", "detail"),
    [
        ("max_epochs = 1", {"training": Training(epochs=2)}, "max_epochs", "2 epochs are more than the 1 allowed"),
        ("never_send = ['extra/c*']", PROTOTYPES, "never_send", "these blocks never leave: extra/counts"),
        (
            "may_send = { include = [{ roles = ['head'] }] }",
            PROTOTYPES,
            "may_send",
            "these blocks may not leave: extra/counts, extra/prototypes",
        ),
        (
            "figures = 'rounded'",
            PROTOTYPES,
            "figures",
            "exact figures over examples do not leave this site, such as extra/prototypes, extra/counts",
        ),
    ],
)
def test_what_the_policy_refuses_is_in_the_chain_by_its_rule(
    coordinator: LiveCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    spec: dict[str, Any],
    rule: str,
    detail: str,
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, f"{policy}\n")
    with desk.working() as agent:
        # As a coordinator has it that does not heed what it is shown.
        monkeypatch.setattr(agent, "_current_claim", lambda: agent._claim)
        run = begin(client, **spec, cohort=Cohort(max_attempts=1))
        until(lambda: client.run(run.id).state == "paused")
    assert desk.audit() == ["task.start", "task.refuse"]
    assert desk.details("task.refuse") == [{"rule": rule, "detail": detail}]


def test_a_person_reads_which_arrays_an_update_has_before_it_leaves(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "airlock = true\napprove_runs = true\n")
    with desk.working():
        run = begin(client, **PROTOTYPES)
        (asked,) = until(lambda: desk.say("inbox")["runs"])
        assert (
            "Beside blocks leave arrays computed from the examples, 680 bytes a round: extra/prototypes (10 x 16), "
            "extra/counts (10). A row of them over fewer than 20 examples leaves as zeros." in asked["summary"]
        )
        desk.say("approve", "demo")
        (held,) = until(lambda: desk.say("airlock")["updates"])
        assert held["blocks"].keys() == {"extra/counts", "extra/prototypes"}
        assert (held["norm"], held["withheld"].keys()) == (0.0, held["blocks"].keys())
        shown = CliRunner().invoke(app, ["airlock", "--config", str(desk.file)], env={"COLUMNS": "200"}).output
        assert "arrays extra/prototypes, extra/counts; rows withheld over too few examples:" in shown
        desk.say("release", held["id"])
        until(lambda: client.run(run.id).state == "completed")
    (left,) = departures(audit_in(desk.settings.state_dir).read(), None, None)
    rows = held["withheld"]["extra/counts"]
    assert left.blocks == (
        "2: no blocks and the arrays extra/prototypes, extra/counts; rows withheld: "
        f"{rows} of extra/counts, {rows} of extra/prototypes"
    )


def test_nothing_leaves_while_it_cannot_be_written_down(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "")
    desk.text = f'audit_dir = "{tmp_path}/state/audit"\n{desk.text}'
    desk.write("")
    desk.settings = read_settings(desk.file)
    (tmp_path / "state" / "audit" / DATABASE_FILE).mkdir(parents=True)
    with desk.working():
        run = begin(client, cohort=Cohort(max_attempts=1))
        until(lambda: (task := tasks(client, run)) and task[0].problem)
    (task,) = tasks(client, run)
    assert (task.state, task.upload_bytes) == ("offered", 0)
    assert task.problem
    assert task.problem.detail.startswith("disk-full: ")


def test_a_site_that_sends_only_some_blocks_takes_part_in_a_run_that_asks_for_these(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "may_send = {include = [{roles = ['value', 'head']}]}\n")
    with desk.working():
        run = begin(client, method=MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, "scope": "v_head"}))
        until(lambda: client.run(run.id).state == "completed")
    (left,) = desk.details("update.leave")
    sent = roles("value", "head").resolve(client.model(run.spec.model).blocks)
    assert left["blocks"] == len(sent)


def test_uploads_are_slowed_down_and_work_is_counted(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "max_upload_bytes_per_second = 16384\nmax_minutes_per_day = 60\n")
    with desk.working():
        run = begin(client, codec="raw")
        until(lambda: client.run(run.id).state == "completed")
    entries = {entry.action: entry for entry in audit_in(desk.settings.state_dir).read()}
    left, counted = entries["update.leave"], entries["update.count"]
    assert (counted.at - left.at).total_seconds() >= tasks(client, run)[0].upload_bytes / 16384
    used = json.loads(StateDatabase.of(desk.settings.state_dir).note(USAGE))["seconds"]
    assert (counted.at - left.at).total_seconds() <= used < 60


def test_an_update_that_was_leaving_when_the_worker_stopped_is_no_difference(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "max_upload_bytes_per_second = 16384\n")
    # Megabytes, which take minutes to leave.
    wide = {**VIT, "intermediate_size": 20_000}
    with desk.working():
        run = begin(client, wide, training=Training(steps=1, epochs=None))
        until(lambda: "update.leave" in desk.audit())
    assert desk.audit() == ["task.start", "update.leave", "task.drop"]
    assert desk.details("task.drop") == [{"code": "stopped"}]
    assert tasks(client, run)[0].state == "offered"
    assert desk.compared() == {"agreed": 0, "earlier": 0, "differences": []}


def test_a_worker_whose_minutes_are_used_up_asks_for_nothing_after_a_restart(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = local_time()
    # It stays today.
    monkeypatch.setattr(Opening.__init__, "__defaults__", (lambda: today, time.monotonic))
    desk = Desk(coordinator, tmp_path, "max_minutes_per_day = 1\n")
    used = DayUsage(day=today.date().isoformat(), seconds=60.0)
    StateDatabase.of(desk.settings.state_dir).set_note(USAGE, used.model_dump_json())
    with desk.working() as agent:
        until(lambda: agent._closed)
    assert list(coordinator.client().workers()) == []


def test_a_changed_policy_is_told_and_holds_for_what_is_not_begun(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "")
    with desk.working():
        first = begin(client)
        until(lambda: client.run(first.id).state == "completed")
        desk.write("approve_runs = true\nmax_epochs = 7\n")
        until(lambda: "'max_epochs': 7" in declared(coordinator))
        begin(client, name="next")
        until(lambda: desk.say("inbox")["runs"])
        desk.write("[privacy]\nepsilon = 2\ndelta = 1e-6\n")
        until(lambda: "'budgets': {'digits': {'epsilon': 2.0" in declared(coordinator))
    started, (stricter, budgeted) = desk.details("worker.start")[0], desk.details("policy.change")
    assert desk.audit().index("update.count") < desk.audit().index("policy.change") < desk.audit().index("run.ask")
    assert stricter["policy"] not in (started["policy"], budgeted["policy"])
    assert budgeted["policy"] == digest_of(canonical(read_settings(desk.file).policy))
    budget = {"epsilon": 2.0, "delta": 1e-6, "unit": "example", "evaluations": False, "acknowledge_exact": False}
    assert budgeted["budgets"] == {"digits": budget}


def test_while_the_settings_file_is_broken_nothing_is_begun(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    desk = Desk(coordinator, tmp_path, "")
    figures = tmp_path / "tessera.prom"
    # A claim that waits long enough to be waiting when the file breaks.
    desk.text = desk.text.replace("poll_seconds = 1", f'poll_seconds = 20\nmetrics_file = "{figures}"')
    desk.write("")
    desk.settings = read_settings(desk.file)
    with capture_logs() as logged, desk.working():
        until(lambda: list(client.workers()))
        desk.write("max_epoch = 1\n")
        run = begin(client)
        (told,) = until(lambda: [line for line in logged if line["event"] == "settings-unusable"])
        assert "policy.max_epoch: unknown key; did you mean `max_epochs`?" in told["detail"]
        # The run does not wait for the worker, and a person sees why.
        why = "it takes no tasks at present; its own log says why"
        until(lambda: why in client.preview_run(run.spec).model_dump_json())
        assert "tessera_worker_settings_valid 0.0" in figures.read_text()
        assert desk.audit() == []
        desk.write("max_epochs = 50\n")
        until(lambda: client.run(run.id).state == "completed")
    assert "tessera_worker_settings_valid 1.0" in figures.read_text()
    assert desk.audit()[:2] == ["policy.change", "task.start"]


def test_what_else_changes_is_said_to_need_a_restart(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    desk = Desk(coordinator, tmp_path, 'datasets = ["digits"]\n[datasets.later]\nkind = "digits"\n')
    with capture_logs() as logged, desk.working() as agent:
        until(lambda: list(coordinator.client().workers()))
        desk.text = desk.text.replace("threads = 1", "threads = 2")
        desk.write('[datasets.later]\nkind = "digits"\n[datasets.new]\nkind = "digits"\n')
        (told,) = until(lambda: [line for line in logged if line["event"] == "restart-needed"])
        assert told["settings"] == ["datasets.later", "datasets.new", "threads"]
        until(lambda: desk.details("policy.change"))
        assert set(agent._claim.datasets) == {"digits"}
        desk.write("datasets = []\n")
        until(lambda: not agent._claim.datasets)

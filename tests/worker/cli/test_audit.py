"""`tessera audit`, of a site and of a real coordinator."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tessera.shared.api.audit_chain import first_broken
from tessera.shared.api.tasks import Submission
from tessera.worker.agent import Agent
from tessera.worker.cli.audit import app
from tessera.worker.cli.worker import app as worker_app
from tessera.worker.settings import SettingsError, read_settings
from tessera.worker.state.database import DATABASE_FILE
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.stores import audit_of, ledger_of
from tessera.worker.task.heartbeat import Stop
from tests.support.chain_rows import ChainRows
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.task_document import task_of

SETTINGS = """
url = "{url}"
token = "{token}"
name = "w"
state_dir = "{folder}/state"

[datasets.digits]
kind = "digits"
"""


def read(said: Result) -> Any:
    """The JSON that was printed. What the coordinator logs meanwhile goes to the same place."""
    begin = min(found for mark in ("{\n", "[\n") if (found := said.stdout.find(mark)) >= 0)
    return json.JSONDecoder().raw_decode(said.stdout, begin)[0]


class Site:
    def __init__(self, coordinator: LiveCoordinator, folder: Path) -> None:
        self.config = folder / "worker.toml"
        self.config.write_text(
            SETTINGS.format(url=coordinator.url, token=coordinator.token("site", "a"), folder=folder)
        )
        self.audit = audit_of(read_settings(self.config))
        self.file = ChainRows(folder / "state", "audit")

    def say(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--config", str(self.config)])

    def json(self, *arguments: str) -> Any:
        return read(self.say(*arguments, "--json"))


@pytest.fixture
def site(coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("TESSERA_URL", raising=False)
    monkeypatch.delenv("TESSERA_TOKEN", raising=False)
    return Site(coordinator, tmp_path)


def test_a_chain_that_was_cut_off_is_found_by_a_digest_that_was_kept(site: Site) -> None:
    for number in range(3):
        site.audit.record("task.fail", None, number=number)
    kept = site.json("verify")
    assert (kept["holds"], kept["entries"]) == (True, 3)
    site.audit.record("worker.stop")
    assert site.say("verify", "--head", kept["head"]).exit_code == 0
    lines = site.file.lines()
    site.file.write_bytes(b"".join(lines[:2]))
    # By itself what is left is a whole chain.
    assert site.say("verify").exit_code == 0
    cut = site.say("verify", "--head", kept["head"])
    assert cut.exit_code == 1
    assert "the chain was cut off, or written again" in " ".join(cut.output.split())


def test_a_changed_chain_fails(site: Site) -> None:
    for _ in range(3):
        site.audit.record("worker.start")
    site.file.write_bytes(site.file.read_bytes().replace(b"worker.start", b"worker.stop", 1))
    assert site.say("verify").exit_code == 1
    assert "entry 1" in site.say("verify").output


def test_a_chain_is_exported_whole(site: Site) -> None:
    site.audit.record_of_run("run.approve", "r1", "demo", by="ann")
    site.audit.record("worker.stop")
    rows = list(csv.DictReader(io.StringIO(site.say("export").stdout)))
    assert [(row["action"], row["run"], row["detail"]) for row in rows] == [
        ("run.approve", "r1", '{"by": "ann"}'), ("worker.stop", "", "{}"),
    ]  # fmt: skip
    assert [row["detail"] for row in site.json("export")] == [{"by": "ann"}, {}]


def test_an_exported_chain_is_verified_without_the_database(site: Site, tmp_path: Path) -> None:
    for number in range(3):
        site.audit.record("task.fail", None, number=number)
    (out := tmp_path / "elsewhere" / "audit.jsonl").parent.mkdir()
    out.write_bytes(site.say("export", "--lines").stdout_bytes)
    key = tmp_path / "state.key"

    def found(*options: str) -> Any:
        return read(CliRunner().invoke(app, ["verify", "--file", str(out), *options, "--json"]))

    assert found("--key-file", str(key)) == site.json("verify")
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1].replace(b'"number":1', b'"number":7') + lines[2])
    assert "entry 2: this was changed" in found("--key-file", str(key))["fault"]
    out.write_bytes(lines[0] + lines[2])
    assert "entry 2: this was changed" in found("--key-file", str(key))["fault"]
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("damaged", [True, False])
@pytest.mark.parametrize("command", [["verify"], ["export"], ["export", "--lines"], ["compare"]])
def test_a_chain_that_cannot_be_read_ends_each_command_with_a_sentence(
    site: Site, tmp_path: Path, damaged: bool, command: list[str]
) -> None:
    file = tmp_path / "state" / DATABASE_FILE
    file.parent.mkdir(exist_ok=True)
    if damaged:
        file.write_bytes(b"no database" * 400)
    else:
        file.mkdir()
    result = site.say(*command)
    assert (result.exit_code, "error: " in result.output) == (1, True)
    assert str(file) in "".join(result.output.split())


def test_the_coordinator_s_chain_is_verified_and_exported_over_the_api(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = ScriptedWorker(coordinator.client("site", "a"))
    start_run(client, small_model(), values(small_model()))
    worker.train(worker.take())
    options = ["--url", coordinator.url, "--token", coordinator.token("admin")]
    found = read(CliRunner().invoke(app, [*options, "verify", "--json"]))
    entries = list(client.audit())
    assert (found["holds"], found["fault"]) == (True, None)
    assert found["head"] in {entry.digest for entry in entries}
    changed = [entries[0], entries[1].model_copy(update={"actor": "eve"}), *entries[2:]]
    assert first_broken(changed) == 2
    assert first_broken(entries[1:]) == 1
    actions = [row["action"] for row in read(CliRunner().invoke(app, [*options, "export", "--json"]))]
    assert "task.accept" in actions
    lost = CliRunner().invoke(app, [*options, "verify", "--head", "0" * 64])
    assert lost.exit_code == 1


def test_what_a_coordinator_counts_in_a_site_s_name_is_found(site: Site, coordinator: LiveCoordinator) -> None:
    site.audit.record("worker.start")
    worker = ScriptedWorker(coordinator.client("site", "a"))
    start_run(coordinator.client(), small_model(), values(small_model()))
    # Somebody with the site's token hands in what the site's worker never made.
    worker.train(worker.take())
    found = site.json("compare")
    assert [one["kind"] for one in found["differences"]] == ["counted-never-sent"]
    assert site.say("compare").exit_code == 1


def send(site: Site, worker: ScriptedWorker) -> None:
    """Hands in an update as a worker does that writes to the site's audit."""
    task = worker.take()
    digest = worker.upload(task, {"head.weight": worker.fetch(task)["head.weight"] + 1})
    head = site.audit.record("update.leave", TaskRef.of(task), update=digest, examples=10).digest
    worker.client.submit(
        task.id,
        Submission(token=task.token, version=task.version.digest, update=digest, examples=10, audit_head=head),
    )


def test_a_site_whose_folders_were_emptied_or_restored_finds_it_by_what_its_submissions_had(
    site: Site, coordinator: LiveCoordinator
) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    start_run(coordinator.client(), small_model(), values(small_model()))
    site.audit.record("worker.start")
    older = site.file.read_bytes()
    send(site, worker)
    whole = site.file.read_bytes()
    assert "chain-rolled-back" not in [one["kind"] for one in site.json("compare")["differences"]]
    for content in (older, b""):
        site.file.write_bytes(content)
        # By itself what is left is a whole chain.
        assert site.say("verify").exit_code == 0
        assert [one["kind"] for one in site.json("compare")["differences"]] == ["chain-rolled-back"]
        assert site.say("compare").exit_code == 1
    site.file.unlink()
    assert [one["kind"] for one in site.json("compare")["differences"]] == ["chain-rolled-back"]
    site.file.write_bytes(whole)
    assert "chain-rolled-back" not in [one["kind"] for one in site.json("compare")["differences"]]


def test_a_ledger_that_is_behind_the_audit_is_found_and_adopted_as_lost(site: Site) -> None:
    ledger = ledger_of(read_settings(site.config))
    with ledger.page("digits") as page:
        page.exact(TaskRef.of(task_of(dataset="digits")), 10, "training")
    head = ledger.leaving("digits")
    assert head
    site.audit.record("update.leave", None, ledger={"digits": head.model_dump()})
    assert site.say("verify").exit_code == 0
    file = ChainRows(site.file.folder, "ledger digits")
    file.unlink()
    assert "has 0 entries, and not those 1" in " ".join(site.say("verify").output.split())
    # The worker does not even start.
    with pytest.raises(SettingsError, match="tessera worker adopt"):
        Agent(read_settings(site.config), Stop())
    adopted = CliRunner().invoke(worker_app, ["adopt", "--config", str(site.config), "--json"])
    assert json.loads(adopted.stdout) == {"audit": False, "ledgers": ["digits"], "charged": {}}
    assert site.say("verify").exit_code == 0
    shown = CliRunner().invoke(worker_app, ["ledger", "--config", str(site.config), "--json"])
    assert list(json.loads(shown.stdout)["digits"]["exact"]) == ["lost"]


def test_a_removed_data_set_s_ledger_under_a_lost_key_is_found_at_the_start_and_adopted(site: Site) -> None:
    # Also where the name is a data set's again, whose ledger is another now.
    with site.config.open("a") as file:
        file.write('ledger = "people"\n')
    for name in ("digits", "old"):
        with Ledger(site.file.folder, b"lost" * 8).page(name) as page:
            page.exact(TaskRef.of(task_of(dataset=name)), 10, "training")
    with pytest.raises(SettingsError, match=r"ledger digits.*tessera worker adopt"):
        Agent(read_settings(site.config), Stop())
    assert site.say("verify").exit_code == 1
    adopted = CliRunner().invoke(worker_app, ["adopt", "--config", str(site.config), "--json"])
    assert json.loads(adopted.stdout) == {"audit": False, "ledgers": ["digits", "old"], "charged": {}}
    assert site.say("verify").exit_code == 0
    Agent(read_settings(site.config), Stop())


def test_a_site_reads_its_own_tasks_only(coordinator: LiveCoordinator) -> None:
    workers = [ScriptedWorker(coordinator.client("site", name)).enrol() for name in "ab"]
    start_run(coordinator.client(), small_model(), values(small_model()))
    for worker in workers:
        worker.train(worker.take())
    for worker, name in zip(workers, "ab", strict=True):
        (task,) = worker.client.tasks()
        assert (task.worker, task.state) == (f"{name}/w", "accepted")
        assert task.update
        assert task.created_at


def test_the_coordinator_s_chain_is_read_without_a_worker_s_packages() -> None:
    loaded = "import sys, tessera.worker.cli.audit; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

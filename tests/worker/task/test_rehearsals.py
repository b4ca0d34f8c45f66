"""A rehearsal trains two steps and sends a report: what it reads, what it spends, and what it leaves behind."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.rehearsals import Rehearsal
from tessera.shared.api.runs import Privacy, Training
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset, TableOnDisk
from tessera.worker.governance.approvals import Inbox, Unapproved
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation
from tessera.worker.governance.run_history import Record
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.state.site_keys import Keyring, SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.stores import audit_of, ledger_of
from tessera.worker.task.heartbeat import Renewal, Stop
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, start_run
from tests.support.runner import task_runner
from tests.support.secure_sums import Federation
from tests.support.tasks import CPU, VIT, images, untrained
from tests.worker.task.test_grouped_runs import GROUPS, agent_of
from tests.worker.task.test_packed_runs import LLAMA
from tests.worker.test_agent import begin, settings_of

COUNT = 40
TRAINING = Training(optimizer="sgd", learning_rate=0.1, batch_size=4)
PRIVATE = Privacy(epsilon=8.0, delta=1e-3, clip_norm=1.0)


class Pictures:
    """Images on disk, which note the places that are read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        whole = images(COUNT)
        self._pixels = whole.tensors["pixel_values"]
        table = TableOnDisk(self._transform, torch.arange(COUNT), {"pixel_values": ((1, 8, 8), torch.float32)})
        self.dataset = Dataset({"labels": whole.tensors["labels"]}, on_disk=table)

    def _transform(self, places: Sequence[int]) -> dict[str, torch.Tensor]:
        self.read += places
        return {"pixel_values": self._pixels[list(places)]}


class Site:
    """A worker with the pictures, and a runner of its tasks."""

    def __init__(self, coordinator: LiveCoordinator, folder: Path, name: str = "a", **env: Any) -> None:
        party = env.get("sums")
        self.admin, self.pictures = coordinator.client(), Pictures()
        self.progress = Report()
        self.beating = coordinator.client("site", name)
        self.worker = ScriptedWorker(
            coordinator.client("site", name),
            kinds=("train", "rehearse"),
            datasets={"data": COUNT},
            methods=("fedavg", "fedrep"),
            site_keys=party.keys.public(party.site, party.weight) if party else None,
        ).enrol()
        self.ledger = Ledger(folder / "ledger")
        self.runner: TaskRunner = task_runner(
            self.worker.client, {"data": self.pictures.dataset}, TrainingSetup(CPU), Vault(folder / "vault"),
            Cache(folder / "cache", 1 << 24), folder, ledger=self.ledger, **env,
        )  # fmt: skip

    def take(self, **spec: Any) -> Task:
        """A task of a new run."""
        document, start = untrained(VIT, "image-classification")
        given = {"rounds": 0, "rehearsal": 5, "training": TRAINING, **spec}
        start_run(self.admin, document, start, **given)
        return self.worker.take()

    def rehearse(self, **spec: Any) -> tuple[Task, Rehearsal]:
        task = self.take(**spec)
        beat = partial(self.beating.heartbeat, task.id, task.token)
        with Renewal(beat, task.lease_seconds, task.lease_seconds):
            self.runner.run(task, lambda: None, self.progress)
        (report,) = self.admin.reports(task.run)
        assert report.rehearsal
        return task, report.rehearsal


def test_no_rows_but_those_of_two_steps_are_read(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = Site(coordinator, tmp_path)
    task, report = site.rehearse()
    assert (task.kind, task.round, task.rounds) == ("rehearse", 1, 5)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(task.seed))
    assert sorted(set(site.pictures.read)) == sorted(order[:8].tolist())
    # 40 examples, 4 a step.
    assert (report.examples, report.steps, report.synthetic, report.epsilon) == (40, 10, False, None)
    assert report.host_bytes
    assert min(report.train_seconds, report.load_seconds, report.fetch_seconds, report.update_bytes) > 0
    # Blocks with equal values are one blob.
    assert 0 < report.download_bytes <= report.version_bytes == report.sent_bytes
    assert site.ledger.read("data") == ()


def test_each_phase_of_a_method_is_rehearsed(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = Site(coordinator, tmp_path)
    _, report = site.rehearse(method=MethodSpec(name="fedrep", settings={"head_epochs": 3}))
    # Three passes for the head, and one for the body, of ten batches each.
    assert report.steps == 40


def test_a_private_rehearsal_reads_no_row_and_is_charged_nothing(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    naps: list[float] = []
    quantum = {"duration_quantum_seconds": 100.0, "clock": lambda: sum(naps), "sleep": naps.append}
    site = Site(coordinator, tmp_path, allowances={"data": Allowance(epsilon=10.0, delta=1e-2)}, **quantum)
    _, report = site.rehearse(privacy=PRIVATE)
    assert site.pictures.read == []
    assert site.ledger.read("data") == ()
    assert (report.synthetic, report.examples, report.steps, report.host_bytes) == (True, 40, 10, None)
    # A new process may load the data set meanwhile.
    assert sum(naps) == 100.0
    assert site.progress.progress().phase_seconds == {}
    assert report.epsilon
    # The noise of the whole run is calibrated to its target.
    assert 7.5 < report.epsilon <= 8.0


def test_a_run_that_a_budget_refuses_is_refused_in_its_rehearsal(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = Site(coordinator, tmp_path, allowances={"data": Allowance(epsilon=1.0, delta=1e-2)})
    task = site.take(privacy=PRIVATE)
    with pytest.raises(PolicyViolation, match="budget"):
        site.runner.run(task, lambda: None, Report())
    assert site.ledger.read("data") == ()


def test_a_rehearsal_for_secure_sums_reads_no_row_and_needs_no_helper(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    federation = Federation(8, 4)
    party = SumParty("site-07", Keyring(tmp_path / "keys"), federation.roster, 3, helper=False, agreements=None)
    site = Site(coordinator, tmp_path, "site-07", sums=party, policy=Policy(require_secure_sums=True))
    sums = {"helpers": federation.names[:4], "quorum": 3}
    task, report = site.rehearse(secure_sums=sums, cohort=Cohort(quorum=3), training=Training(batch_size=16))
    assert site.pictures.read == []
    blocks = site.worker.model_of(task).blocks
    assert (report.synthetic, report.update_bytes) == (True, 4 * sum(block.numel for block in blocks))


def test_a_rehearsal_of_groups_is_of_synthetic_ones(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    agent, settings = agent_of(coordinator, tmp_path)
    document, start = untrained(LLAMA, "causal-lm")
    client = coordinator.client()
    given = {"dataset": "notes", "training": Training(batch_size=2), "privacy": GROUPS, "rounds": 0, "rehearsal": 3}
    run = start_run(client, document, start, **given)
    task: Task = until(agent._next)
    agent._run_task(task)
    agent.close()
    (report,) = client.reports(run.id)
    assert (report.problem, report.state) == (None, "accepted")
    assert report.rehearsal
    # Three patients, two a step.
    assert (report.rehearsal.examples, report.rehearsal.steps, report.rehearsal.synthetic) == (3, 2, True)
    assert ledger_of(settings).read("notes") == ()


def kept(folder: Path) -> dict[str, Any]:
    """What a worker keeps of its runs: its vault, checkpoints, ledgers and histories, and not its audit."""
    files = {path for part in ("vault", "airlock") for path in (folder / part).rglob("*") if path.is_file()}
    found: dict[str, Any] = {str(path): path.read_bytes() for path in files}
    with sqlite3.connect(StateDatabase.of(folder).path) as database:
        for table in ("sums", "evaluations", "descriptions", "held"):
            found[table] = database.execute(f"SELECT * FROM {table}").fetchall()
        found |= {f"run {run}": record for run, record in database.execute("SELECT * FROM runs")}
        found["ledgers"] = database.execute("SELECT * FROM entries WHERE chain NOT LIKE 'audit%'").fetchall()
    return found


def test_a_rehearsal_leaves_everything_as_it_was(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    """Vault, error feedback, ledger and history of another run that is under way, and of its own."""
    client, settings = coordinator.client(), settings_of(coordinator, tmp_path)
    agent = Agent(settings, Stop())
    about = {"method": MethodSpec(name="fedper"), "codec": "delta+int8", "rounds": 2}
    training = Training(learning_rate=0.01, batch_size=64, keep_moments=True)
    first = begin(client, **about, training=training)
    agent._run_task(until(agent._next))
    until(lambda: client.run(first.id).version.number == 1)
    # The second round's task comes with a receipt, by which the vault of the first one counts.
    agent._run_task(until(agent._next))
    until(lambda: client.run(first.id).state == "completed")
    agent._tidy()
    before = kept(settings.state_dir)
    run = begin(client, **{**about, "rounds": 0, "rehearsal": 2}, training=training)
    agent._run_task(until(agent._next))
    agent._tidy()
    agent.close()
    (report,) = client.reports(run.id)
    assert (report.state, report.problem) == ("accepted", None)
    after = kept(settings.state_dir)
    # With these a run of the same id cannot rehearse by other terms.
    own = Record.model_validate_json(after.pop(f"run {run.id}"))
    assert (own.terms["rounds"], own.handed, own.upload_bytes) == (2, {}, 0)
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] != after[name]] == []
    assert before["ledgers"]
    (left,) = [entry for entry in audit_of(settings).read() if entry.action == "figures.leave"]
    assert report.rehearsal
    assert left.detail["rehearsal"] == report.rehearsal.model_dump(mode="json")


def test_a_task_after_a_rehearsal_trains_on_all_rows(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = Site(coordinator, tmp_path)
    sent = []
    for rehearses in (False, True):
        if rehearses:
            site.rehearse()
        task = site.take(rounds=1, rehearsal=None)
        site.pictures.read.clear()
        site.runner.run(task, lambda: None, Report())
        assert sorted(set(site.pictures.read)) == list(range(COUNT))
        sent.append(site.admin.task(task.id).update)
    assert sent[0] == sent[1]


def test_a_person_approves_a_rehearsal_by_what_leaves(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox")
    site = Site(coordinator, tmp_path, inbox=inbox)
    task = site.take(training=TRAINING)
    with pytest.raises(Unapproved):
        site.runner.run(task, lambda: None, Report())
    (request,) = inbox.requests()
    assert "trains all blocks of a ViT with 2 layers for 2 steps on `data` (40 examples)" in request.summary
    assert "Only a report leaves" in request.summary
    assert site.pictures.read == []


def test_a_rehearsal_that_fails_is_no_retry(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client, agent = coordinator.client(), Agent(settings_of(coordinator, tmp_path, policy={"max_batch": 16}), Stop())
    agent._policy = agent._policy.model_copy(update={"max_batch": 1 << 20})
    run = begin(client, rounds=0, rehearsal=3, cohort=Cohort(max_task_attempts=3))
    agent._run_task(until(agent._next))
    until(lambda: client.run(run.id).state == "paused")
    (report,) = client.reports(run.id)
    assert report.problem
    assert (report.state, report.rehearsal) == ("failed", None)
    assert report.problem.detail.startswith("policy-violation: max_batch")
    assert report.problem.remedy
    assert client.run(run.id).reason == "0 of 1 sites answered (a/w: policy-violation); the quorum is 1"
    agent.close()

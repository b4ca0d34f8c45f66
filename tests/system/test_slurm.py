"""A worker whose tasks are jobs of a real Slurm: what ends a job, its daemons or the agent changes no result."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, RunSpec, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.run_settings import Privacy
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.state.privacy_ledger import Ledger
from tests.support import slurm as support
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, Process, audit_key, start_worker, worker_process
from tests.support.slurm import Slurm

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not support.is_here(), reason=support.LACKING),
]

Keep = Callable[[Process], Process]

DIGITS = """
[datasets.digits]
kind = "digits"
[executor]
launcher = "slurm"
"""
OFTEN = 0.002
"""Minutes between two checkpoints."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with support.in_environment(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(autouse=True)
def no_jobs(slurm: Slurm) -> Iterator[None]:
    """Each test leaves the node idle."""
    yield
    slurm.run("scancel", "--user=root")
    until(lambda: not slurm.run("squeue", "--noheader").strip(), seconds=60)


class Site:
    """A coordinator with one worker, whose jobs have these options, and one run of a long task."""

    def __init__(
        self,
        folder: Path,
        running: Keep,
        vit: ModelFolder,
        checkpoint_minutes: float = OFTEN,
        lease: float = 600,
        **options: Any,
    ) -> None:
        self._running = running
        self._vit, self._checkpoint_minutes = vit, checkpoint_minutes
        # A lease that outlasts the test: a task goes on under it.
        self.coordinator = CoordinatorProcess(folder, lease_seconds=lease)
        self._options = {"partition": "low", "look_seconds": 0.5, "lines": ["--ntasks=1"], **options}
        self.state = folder / "a" / "state"

    def __enter__(self) -> Self:
        self.coordinator.__enter__()
        lines = [f"{name} = {json.dumps(value)}" for name, value in self._options.items()]
        datasets = "\n".join([DIGITS, *self._more(), "[executor.slurm]", *lines])
        self.worker = self._running(
            worker_process(self.coordinator, "a", datasets, checkpoint_minutes=self._checkpoint_minutes)
        )
        self.client: Client = self.coordinator.admin()
        return self

    def __exit__(self, *fault: object) -> None:
        if self.worker.popen.poll() is None:
            self.worker.kill()
        self.coordinator.__exit__(*fault)

    def _more(self) -> list[str]:
        return []

    def begin(self, epochs: int = 8, privacy: Privacy | None = None, attempts: int = 1) -> Run:
        uploaded = upload_model(self.client, self._vit)
        self.run = self.client.create_run(
            RunSpec(
                name="long",
                method=MethodSpec(name="fedavg"),
                model=uploaded.model,
                version=uploaded.version,
                dataset="digits",
                rounds=1,
                cohort=Cohort(size=1, max_task_attempts=attempts, max_attempts=1),
                training=Training(epochs=epochs, batch_size=4, learning_rate=1e-3),
                privacy=privacy,
            )
        )
        return self.run

    def restart(self) -> None:
        """kill -9 of the agent and all its processes on this machine, and a new one."""
        self.worker.kill()
        self.worker = self._running(start_worker(self.coordinator.folder / "a"))

    def task(self) -> TaskView:
        found: list[TaskView] = until(
            lambda: [task for round_ in self.client.rounds(self.run.id) for task in round_.tasks], seconds=120
        )
        return found[0]

    def steps(self) -> int:
        """The number of steps that the present job has done."""
        texts = [path.read_text() for path in self.state.glob("slurm/*/home/task/progress.json")]
        return max((json.loads(text)["report"]["step"] for text in texts), default=0)

    def doing(self) -> str:
        progress = self.task().progress
        return progress.doing if progress else ""

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = self.worker.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if f'"event": "{event}"' in line]

    def output(self) -> str:
        """What the jobs whose folders are there have printed."""
        return "".join(path.read_text(errors="replace") for path in self.state.glob("slurm/*/output.log"))

    def checkpointed(self, count: int = 1) -> None:
        until(lambda: self.output().count('"event": "checkpoint"') >= count, seconds=200)

    def digest(self) -> str:
        """The digest of the version that the run ends with: one task, one attempt, one lease."""
        until(lambda: self.client.run(self.run.id).state != "running", seconds=300)
        assert self.client.run(self.run.id).state == "completed", self.task().problem
        task = self.task()
        assert (task.attempts, task.token) == (1, 1)
        until(lambda: not list(self.state.glob("slurm/*")))
        return self.client.run(self.run.id).version.digest


def program() -> psutil.Process:
    """The program of the present job."""
    found = psutil.process_iter(["cmdline"])
    return next(one for one in found if "tessera.worker.executor.slurm.job" in (one.info["cmdline"] or ()))


def send(number: int) -> None:
    """Signal the present job's program and its ranks."""
    for process in (program(), *program().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory, vit: ModelFolder) -> str:
    """The digest that each run of this module's task ends with."""
    started: list[Process] = []

    def keep(process: Process) -> Process:
        started.append(process)
        return process

    with Site(tmp_path_factory.mktemp("undisturbed"), keep, vit) as site:
        site.begin()
        found = site.digest()
        (job,) = site.logged("slurm-submitted")
        until(lambda: slurm.state(job["job"]) == "COMPLETED", seconds=60)
    return found


def test_a_task_is_one_job_that_ends_by_itself_and_leaves_nothing(undisturbed: str) -> None:
    assert undisturbed


def test_a_killed_agent_finds_its_job_again(
    undisturbed: str, slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    with Site(tmp_path, running, vit) as site:
        site.begin()
        site.checkpointed()
        before = slurm.jobs()
        site.restart()
        until(lambda: site.logged("slurm-job-found"), seconds=120)
        assert site.digest() == undisturbed
        assert slurm.jobs() == before
        assert len(site.logged("slurm-submitted")) == 1


def test_a_killed_job_is_followed_by_one_that_resumes(
    undisturbed: str, slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    with Site(tmp_path, running, vit) as site:
        site.begin()
        site.checkpointed()
        program().kill()
        until(lambda: len(site.logged("slurm-submitted")) == 2, seconds=120)
        assert site.logged("executor-restarted")[0]["code"] == "slurm-failed"
        assert site.digest() == undisturbed


def test_killed_daemons_of_slurm_change_nothing(
    undisturbed: str, slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    with Site(tmp_path, running, vit) as site:
        site.begin()
        site.checkpointed()
        slurm.kill("slurmd")
        slurm.kill("slurmctld")
        until(lambda: site.logged("slurm-away"), seconds=120)
        slurm.start_controller()
        slurm.start_daemon()
        assert site.digest() == undisturbed
        assert len(site.logged("slurm-submitted")) == 1


def test_a_preempted_task_goes_on_from_the_checkpoint_of_its_last_seconds(
    undisturbed: str, slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    with Site(tmp_path, running, vit, checkpoint_minutes=60) as site:
        site.begin()
        until(site.steps, seconds=200)
        # However fast the machine is, the task ends neither before the preemption nor within its grace time.
        send(signal.SIGSTOP)
        (job,) = site.logged("slurm-submitted")
        urgent = slurm.run(
            "sbatch", "--parsable", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 20"
        ).strip()
        until(lambda: "PreemptTime=2" in slurm.run("scontrol", "show", "job", job["job"]), seconds=60)
        send(signal.SIGCONT)
        site.checkpointed()
        send(signal.SIGSTOP)
        until(lambda: site.logged("executor-restarted"), seconds=120)
        assert site.logged("executor-restarted")[0]["code"] == "slurm-preempted"
        until(lambda: "training-resumed" in site.output(), seconds=200)
        assert slurm.state(urgent) == "COMPLETED"
        assert site.digest() == undisturbed


def test_a_private_task_of_a_killed_agent_is_charged_once(
    slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    # For a checkpoint the job asks its agent, through files that are looked at four times a second.
    with Site(tmp_path, running, vit, checkpoint_minutes=0.05) as site:
        site.begin(privacy=Privacy(epsilon=4.0, delta=1e-5, clip_norm=1.0))
        site.checkpointed(2)
        (first,) = site.logged("slurm-submitted")
        site.restart()
        # What the first job asked of its agent went with the agent: another job goes on from the checkpoint.
        until(lambda: "training-resumed" in site.output(), seconds=200)
        assert slurm.state(first["job"]) == "CANCELLED"
        site.digest()
    entries = Ledger(site.state, audit_key("a")).read("digits")
    assert [event.kind for entry in entries for event in entry.events] == ["noisy-steps"]


LONGEST = 30.0
"""Longest time of a task in seconds, by the policy of a `QueuedSite`."""


class QueuedSite(Site):
    """A `Site` whose tasks may take less long than they wait."""

    def _more(self) -> list[str]:
        return ["[policy]", f"max_task_seconds = {LONGEST}"]

    def waited(self) -> float:
        progress = self.task().progress
        return progress.phase_seconds.get("waiting", 0.0) if progress else 0.0


def test_a_queued_task_says_so_and_a_cancelled_run_or_a_stopped_agent_cancels_its_job(
    slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    # A lease has four heartbeats.
    with QueuedSite(tmp_path, running, vit, lease=40, partition="closed") as site:
        site.begin()
        until(lambda: "(PartitionDown)" in site.doing(), seconds=120)
        until(lambda: site.waited() > LONGEST, seconds=120)
        assert site.doing().startswith("queued in Slurm since")
        first = slurm.jobs()[-1]
        site.client.set_run_state(site.run.id, "cancelled")
        until(lambda: slurm.state(first) == "CANCELLED", seconds=120)
        until(lambda: not list(site.state.glob("slurm/*")))
        site.begin()
        until(lambda: len(site.logged("slurm-submitted")) == 2, seconds=120)
        second = slurm.jobs()[-1]
        site.worker.terminate()
        assert slurm.state(second) == "CANCELLED"
        assert not list(site.state.glob("slurm/*"))
        assert site.task().state == "offered", site.task().problem


def test_a_full_disk_gives_the_task_back_until_there_is_room(
    undisturbed: str, slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    jobs = tmp_path / "a" / "state" / "slurm"
    jobs.mkdir(parents=True)
    slurm.run("mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(jobs))
    try:
        with Site(tmp_path, running, vit) as site:
            site.begin()
            until(lambda: site.logged("disk-full"), seconds=120)
            slurm.run("mount", "-o", "remount,size=64m", str(jobs))
            until(lambda: site.client.run(site.run.id).state == "completed", seconds=300)
            assert site.task().attempts == 1
            assert site.client.run(site.run.id).version.digest == undisturbed
    finally:
        slurm.run("umount", "--lazy", str(jobs))


SCRIPT = """
import torch
import tessera.site

task = tessera.site.task()
model = task.model()
print("trains", task.steps, flush=True)
with torch.no_grad():
    for name, tensor in model.named_parameters():
        tensor += 0.5
task.report(task.steps, 0.25)
task.submit(model, {"loss": 0.25})
"""


class ScriptSite(Site):
    """A `Site` with a script of its own."""

    def _more(self) -> list[str]:
        path = self.coordinator.folder / "train.py"
        path.write_text(SCRIPT)
        return [f"command = {json.dumps([sys.executable, str(path)])}"]


def test_a_script_of_the_site_s_own_trains_in_a_job(
    slurm: Slurm, tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    with ScriptSite(tmp_path, running, vit) as site:
        site.begin()
        site.digest()
        (job,) = site.logged("slurm-submitted")
        until(lambda: slurm.state(job["job"]) in ("COMPLETED", "CANCELLED"), seconds=60)
        assert site.logged("task-done")[0]["metrics"]["loss"] == 0.25

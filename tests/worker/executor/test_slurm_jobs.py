"""Jobs of a real Slurm, as their launcher sees them."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from tessera.worker.cli.worker import app
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.folder import FAILURE, FailureRecord, read_document, write_document
from tessera.worker.executor.launcher import SETTINGS, RankSettings
from tessera.worker.executor.slurm.examination import findings
from tessera.worker.executor.slurm.launcher import JOB, Job, SlurmLauncher
from tessera.worker.settings import SlurmSettings
from tests.support import slurm as support
from tests.support.coordinator import until
from tests.support.processes import free_port
from tests.support.slurm import Slurm

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not support.is_here(), reason=support.LACKING),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with support.in_environment(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def launcher(home: Path, *command: str, arguments: Sequence[str] = (), **settings: object) -> SlurmLauncher:
    given = SlurmSettings.model_validate({"partition": "low", "look_seconds": 0.2, **settings})
    return SlurmLauncher(given, home / "jobs", arguments or ("--", *command))


def submitted(jobs: SlurmLauncher, key: str = "task key") -> Job:
    return jobs.submit(jobs.prepare().folder, key)


def ended(jobs: SlurmLauncher, job: Job) -> TaskFailure:
    """The failure of a job, once it has ended."""
    until(lambda: not jobs.poll(job), seconds=150)
    return jobs.fault(job)


def runs(jobs: SlurmLauncher, job: Job) -> None:
    until(lambda: jobs.poll(job) and job.running_at, seconds=60)


def test_a_job_has_the_worker_s_folder_and_no_secret(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_WORKER_TOKEN", "a-secret")
    monkeypatch.setenv("SITE_PASSWORD", "a-secret")
    monkeypatch.setenv("COLOUR", "blue")
    jobs = launcher(tmp_path, "/bin/sh", "-c", 'env > "$TESSERA_TASK/env"; exit 3', lines=["--comment=ours"])
    job = submitted(jobs)
    until(lambda: not jobs.poll(job), seconds=60)
    assert jobs.exit_code(job) == 3
    told = (job.folder / "env").read_text()
    assert "a-secret" not in told
    assert "COLOUR=blue" in told
    assert "Comment=ours" in slurm.run("scontrol", "show", "job", str(job.id))
    found = [path for path in (tmp_path / "jobs").rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not [path for path in found if path.is_dir()]
    assert jobs.release(job)
    assert not job.place.exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"partition": "nope"}, "Invalid partition name specified"),
        ({"gpus": 4}, "Requested node configuration is not available|BadConstraints"),
    ],
)
def test_a_refused_submission_has_slurm_s_reason(
    slurm: Slurm, tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    assert slurm
    jobs = launcher(tmp_path, "true", **settings)
    fault = ended(jobs, submitted(jobs))
    assert fault.code == "slurm-refused"
    assert re.fullmatch(f"Slurm refused the job: ({reason})", str(fault))


def test_a_job_in_the_queue_says_why(slurm: Slurm, tmp_path: Path) -> None:
    jobs = launcher(tmp_path, "true", partition="closed")
    job = submitted(jobs)
    until(lambda: jobs.poll(job) and job.state.reason == "PartitionDown", seconds=60)
    assert job.activity.startswith("queued in Slurm since 20")
    assert jobs.release(job)
    assert slurm.state(job.id or slurm.jobs()[-1]) == "CANCELLED"


def test_a_cancelled_job_and_one_at_its_time_limit_are_told_apart(slurm: Slurm, tmp_path: Path) -> None:
    jobs = launcher(tmp_path, "sleep", "600", time="1")
    limited, cancelled = submitted(jobs), submitted(jobs)
    runs(jobs, cancelled)
    slurm.run("scancel", str(cancelled.id))
    assert ended(jobs, cancelled).code == "slurm-cancelled"
    fault = ended(jobs, limited)
    assert fault.code == "slurm-timeout"
    assert "reached its time limit (TIMEOUT" in str(fault)


def test_an_agent_finds_its_job_again_and_submits_no_second(slurm: Slurm, tmp_path: Path) -> None:
    jobs = launcher(tmp_path, "sleep", "600")
    job = submitted(jobs)
    runs(jobs, job)
    before = slurm.jobs()
    (found,) = [launcher(tmp_path, "sleep", "600").find("task key")]
    assert found
    assert found.id == job.id
    # Killed before it wrote the id.
    (job.place / JOB).unlink()
    again = Job(job.place)
    runs(jobs, again)
    assert again.id == job.id
    assert slurm.jobs() == before
    assert launcher(tmp_path, "sleep", "600").find("another key") is None
    until(lambda: slurm.state(str(before[-1])) == "CANCELLED", seconds=60)


def test_a_second_job_for_one_folder_ends_at_once(slurm: Slurm, tmp_path: Path) -> None:
    jobs = launcher(tmp_path, "sleep", "600")
    job = submitted(jobs)
    runs(jobs, job)
    until((job.folder.parent / "started").exists)
    second = slurm.run("sbatch", "--parsable", f"--output={tmp_path}/second", str(job.place / "job.sh")).strip()
    until(lambda: slurm.state(second) == "FAILED", seconds=60)
    assert "FileExistsError" in (tmp_path / "second").read_text()
    assert jobs.poll(job)
    assert jobs.release(job)


def test_a_lost_job_is_one_that_slurm_does_not_know_twice(slurm: Slurm, tmp_path: Path) -> None:
    assert slurm
    jobs = launcher(tmp_path, "true")
    job = jobs.prepare()
    (job.place / JOB).write_text("999999")
    job = jobs.submit(job.folder, "task key")
    fault = ended(jobs, job)
    assert (fault.code, job.unknown) == ("slurm-lost", 2)


def test_the_id_of_a_lost_job_may_be_another_job_s(slurm: Slurm, tmp_path: Path) -> None:
    jobs = launcher(tmp_path, "sleep", "600")
    other = submitted(jobs)
    runs(jobs, other)
    job = jobs.prepare()
    identifier = str(other.id)
    (job.place / JOB).write_text(identifier)
    job = jobs.submit(job.folder, "task key")
    assert ended(jobs, job).code == "slurm-lost"
    assert jobs.release(Job(job.place))
    assert slurm.state(identifier) == "RUNNING"
    assert jobs.release(other, wait=True)
    assert slurm.state(identifier) == "CANCELLED"


def test_a_controller_that_is_away_is_asked_again(slurm: Slurm, tmp_path: Path) -> None:
    jobs = launcher(tmp_path, "sleep", "600")
    job = submitted(jobs)
    runs(jobs, job)
    slurm.kill_controller()
    with capture_logs() as seen:
        until(lambda: jobs.poll(job) and job.is_away, seconds=120)
        assert job.activity == "Slurm does not answer"
        slurm.start_controller()
        # It may have read an older state of the job.
        until(lambda: jobs.poll(job) and job.activity.startswith("running in Slurm since"), seconds=120)
    assert [line["event"] for line in seen].count("slurm-away") == 1
    assert jobs.release(job)


def test_a_node_without_the_gpu_that_was_asked_for_fails_the_task(slurm: Slurm, tmp_path: Path) -> None:
    assert slurm
    jobs = launcher(tmp_path, arguments=("1",), gpus=1)
    job = jobs.prepare()
    write_document(job.folder.parent / SETTINGS, RankSettings(devices=("cuda:0",), in_job=True))
    job = jobs.submit(job.folder, "task key")
    until(lambda: jobs.poll(job) and (job.folder / FAILURE).exists(), seconds=150)
    failure = read_document(FailureRecord, job.folder / FAILURE)
    assert failure.code == "slurm-no-gpu"
    assert "cuda:0" in failure.detail
    assert jobs.release(job)


def doctor(folder: Path, partition: str, gpus: int = 0) -> dict[str, Any]:
    """The finding of `tessera worker doctor` that follows the version's, without a coordinator."""
    settings = f"""
url = "http://127.0.0.1:{free_port()}"
token = "none"
name = "w"
state_dir = "{folder}/state"
[datasets.digits]
kind = "digits"
[executor]
launcher = "slurm"
[executor.slurm]
partition = "{partition}"
gpus = {gpus}
"""
    (folder / "worker.toml").write_text(settings)
    said = CliRunner().invoke(app, ["doctor", "--config", str(folder / "worker.toml"), "--json"]).stdout
    findings = json.JSONDecoder().raw_decode(said, said.index("{\n"))[0]["findings"]
    found: list[dict[str, Any]] = [one for one in findings if one["name"] == "slurm"]
    return found[1] if len(found) > 1 else found[0]


def test_doctor_names_what_is_in_the_way_of_jobs(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor(tmp_path, "low")["verdict"] == "ok"
    refused = doctor(tmp_path, "nope")
    assert (refused["verdict"], refused["remedy"]) == ("fail", "Correct [executor.slurm]: `sinfo` lists partitions.")
    assert "Invalid partition name specified" in refused["detail"]
    assert doctor(tmp_path, "low", gpus=4)["verdict"] == "fail"
    slurm.kill_controller()
    away = doctor(tmp_path, "low")
    assert (away["verdict"], away["remedy"]) == ("fail", "Start slurmctld, or wait for it: `scontrol ping`.")
    slurm.start_controller()
    until(lambda: doctor(tmp_path, "low")["verdict"] == "ok", seconds=120)
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = doctor(tmp_path, "low")
    assert (absent["verdict"], absent["detail"]) == ("fail", "sbatch cannot be run: No such file or directory")
    assert absent["remedy"].startswith("Install Slurm's commands")


def test_doctor_says_whether_slurm_would_take_a_job(slurm: Slurm, tmp_path: Path) -> None:
    version, takes, folder = findings(SlurmSettings(partition="low", lines=("--ntasks=1",)), tmp_path)
    assert [version.verdict, takes.verdict] == ["ok", "ok"]
    assert version.detail.startswith("slurm")
    assert "takes a job with --partition=low --ntasks=1" in takes.detail
    assert str(tmp_path) in folder.detail
    _, refused, _ = findings(SlurmSettings(partition="nope"), tmp_path)
    assert (refused.verdict, "Invalid partition name specified" in refused.detail) == ("fail", True)
    # It submits nothing.
    assert not [job for job in slurm.jobs() if slurm.state(job) in ("PENDING", "RUNNING")]

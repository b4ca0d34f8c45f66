"""What Slurm's commands print, as the worker understands it, and the settings of jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.worker.executor.slurm.commands import AWAY, JobState, SlurmAway, SlurmRefusal, parsed, reason_in, run
from tessera.worker.executor.slurm.launcher import JobEnded
from tessera.worker.settings import ExecutorSettings

# Slurm 22.05's, without its other fields.
PENDING = (
    "JobId=2 JobName=tessera-1 UserId=root(0) Priority=1 Account=(null) JobState=PENDING Reason=Resources "
    "Dependency=(null) Requeue=0 Restarts=0 ExitCode=0:0 SubmitTime=2026-12-01T03:48:26 StartTime=Unknown "
)
RUNNING = PENDING.replace("PENDING Reason=Resources", "RUNNING Reason=None").replace("Unknown", "2026-12-01T03:50:01")


def test_a_job_in_the_queue_says_why_and_since_when() -> None:
    state = parsed(PENDING)
    assert (state.condition, state.is_live) == ("queued", True)
    assert state.activity == "queued in Slurm since 2026-12-01 03:48 (Resources)"


def test_a_running_job_says_since_when() -> None:
    state = parsed(RUNNING)
    assert (state.condition, state.is_live) == ("running", True)
    assert state.activity == "running in Slurm since 2026-12-01 03:50"


@pytest.mark.parametrize("reason", ["AssocGrpGRESMinutes", "x" * 200, "None", "(null)"])
def test_what_is_shown_fits_a_progress(reason: str) -> None:
    activity = parsed(PENDING.replace("Resources", reason)).activity
    assert len(activity) <= 64
    assert "None" not in activity
    assert "null" not in activity


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("COMPLETED", "done"),
        ("CANCELLED", "cancelled"),
        ("TIMEOUT", "timeout"),
        ("DEADLINE", "timeout"),
        ("PREEMPTED", "preempted"),
        ("NODE_FAIL", "node-failed"),
        ("FAILED", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("A_STATE_OF_A_LATER_SLURM", "failed"),
        ("REQUEUED", "queued"),
        ("CONFIGURING", "queued"),
        ("SUSPENDED", "running"),
        ("COMPLETING", "running"),
    ],
)
def test_each_state_of_slurm_has_a_meaning(name: str, condition: str) -> None:
    assert JobState(name).condition == condition


def test_only_ends_that_are_not_the_tasks_fault_begin_it_again() -> None:
    again = {"preempted", "node-failed", "lost"}
    for name in (*again, "timeout", "failed"):
        assert JobEnded(f"slurm-{name}", "").repeats == (name in again)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "sbatch: error: nope\nsbatch: error: Batch job submission failed: Invalid partition name specified",
            "Invalid partition name specified",
        ),
        ("slurm_load_jobs error: Invalid job id specified", "slurm_load_jobs error: Invalid job id specified"),
        ("", "no reason given"),
    ],
)
def test_a_refusal_has_the_last_reason(output: str, reason: str) -> None:
    assert reason_in(output) == reason


@pytest.mark.parametrize(
    "output",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
    ],
)
def test_a_controller_that_is_away_is_no_refusal(output: str) -> None:
    assert AWAY.search(output)
    assert not AWAY.search("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy")


def test_commands_are_bounded_and_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No real Slurm prints without an end, or lacks its commands."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, body in {"squeue": "exec yes", "scancel": "echo scancel: error: no >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(SlurmAway, match="squeue ended with -"):
        run("squeue")
    with pytest.raises(SlurmRefusal, match=r"^no$"):
        run("scancel")
    with pytest.raises(SlurmAway, match="sbatch-of-nobody cannot be run: No such file"):
        run("sbatch-of-nobody")


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({}, 'it lacks command or launcher = "slurm"'),
        ({"launcher": "slurm", "timeout_seconds": 5}, "it lacks command, beside timeout_seconds"),
        ({"command": ["true"], "slurm": {}}, "set launcher"),
        ({"launcher": "slurm", "slurm": {"lines": ["rm -rf"]}}, "String should match"),
        ({"launcher": "slurm", "slurm": {"lines": ["--qos=a\nrm"]}}, "String should match"),
        ({"launcher": "slurm", "slurm": {"time": "1:00 --x"}}, "String should match"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        ExecutorSettings.model_validate(given)

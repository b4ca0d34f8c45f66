"""Slurm's commands `sbatch`, `scontrol`, `squeue`, `sacct` and `scancel`, and the meaning of their output.

Only options and forms that Slurm 22.05 and newer have are used. Imports no torch.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Timer
from typing import Literal

COMMAND_SECONDS = 60.0
"""Longest time of a command: Slurm's own commands give up earlier if the controller does not answer."""
OUTPUT_BYTES = 1 << 16
"""The most that is read of a command's output."""

Condition = Literal["queued", "running", "done", "cancelled", "timeout", "preempted", "node-failed", "failed", "lost"]
"""The worker waits for a job, reads its result, or says how it ended."""

QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "RESIZING", "SIGNALING")
CONDITIONS: Mapping[str, Condition] = {
    **dict.fromkeys(QUEUED, "queued"),
    **dict.fromkeys(RUNNING, "running"),
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node-failed",
    "BOOT_FAIL": "node-failed",
    "LAUNCH_FAILED": "node-failed",
    "RECONFIG_FAIL": "node-failed",
    "REVOKED": "lost",
    "LOST": "lost",
}
UNKNOWN = "Invalid job id specified"
"""Slurm's answer about a job that it does not know, or no more."""
AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Slurm backup controller in standby|"
    r"Zero Bytes were transmitted|No route to host|Connection timed out|Transport endpoint|munge|"
    r"resources? temporarily unavailable|temporarily unable to accept job",
    re.IGNORECASE,
)
"""Parts of messages about a Slurm that does not answer now. All other failures are its answers."""
SUBMISSION_FAILED = "Batch job submission failed: "


class SlurmAway(Exception):
    """Slurm does not answer, or its commands cannot be run. The text is for the worker's log."""


class SlurmRefusal(Exception):
    """Slurm answered with a refusal. The text is Slurm's reason."""


@dataclass(frozen=True)
class JobState:
    """A job's state as Slurm names it, its reason, and the time since which it waits or runs."""

    name: str
    reason: str = ""
    since: str = ""
    exit_code: str = ""

    @property
    def condition(self) -> Condition:
        """The meaning of the state. A state that this code does not know counts as a failure."""
        return CONDITIONS.get(self.name, "failed")

    @property
    def is_live(self) -> bool:
        """True if the job waits or runs."""
        return self.condition in ("queued", "running")

    @property
    def activity(self) -> str:
        """The state in at most 64 characters, for the task's progress."""
        since = f" since {self.since[:16].replace('T', ' ')}" if self.since else ""
        if self.condition == "queued":
            since += f" ({self.reason})" if self.reason else ""
            return f"queued in Slurm{since}"[:64]
        return f"{self.name.lower()} in Slurm{since}"[:64]


LOST = JobState("LOST")


def run(*line: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a command. Raises SlurmAway, and SlurmRefusal with the last line of its error."""
    told = {**(os.environ if environment is None else environment), "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        process = subprocess.Popen(  # noqa: S603  (Slurm's commands, found as the site's PATH says)
            line, env=told, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as fault:
        raise SlurmAway(f"{line[0]} cannot be run: {fault.strerror}") from fault
    timer = Timer(COMMAND_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout  # noqa: S101  (made with a pipe)
        with process.stdout as pipe:
            output = pipe.read(OUTPUT_BYTES).decode(errors="replace").strip()
        # More than that is no answer that is asked for here.
        code = process.wait(COMMAND_SECONDS)
    finally:
        process.kill()
        process.wait()
        timer.cancel()
    if code < 0 or (code and AWAY.search(output)):
        raise SlurmAway(f"{line[0]} ended with {code}: {output[-300:]}")
    if code:
        raise SlurmRefusal(reason_in(output))
    return output


def reason_in(output: str) -> str:
    """Return the reason in the output of a command that failed: its last line, without the command's name."""
    lines = output.splitlines()
    last = re.sub(r"^\w+: (error: )?", "", lines[-1]) if lines else "no reason given"
    return last.removeprefix(SUBMISSION_FAILED)[:200]


def submit(script: str, options: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submit a batch script. Return the job's id. Raises SlurmAway and SlurmRefusal."""
    output = run("sbatch", "--parsable", *options, script, environment=environment)
    # ID, or ID;CLUSTER. Warnings may come before it.
    found = re.fullmatch(r"(\d+)(;.*)?", output.splitlines()[-1] if output else "")
    if not found:
        raise SlurmAway(f"sbatch printed no job id: {output[-300:]}")
    return found[1]


def state_of(job: str, name: str) -> JobState:
    """Return the state of the job with this id and name; `LOST` if Slurm does not know it. Raises SlurmAway.

    A controller that is killed may forget its newest jobs, and then gives their ids to others.
    """
    try:
        line = run("scontrol", "--oneliner", "show", "job", job)
        return parsed(line) if f" JobName={name} " in line else LOST
    except SlurmRefusal as refusal:
        if UNKNOWN not in str(refusal):
            raise SlurmAway(f"scontrol: {refusal}") from refusal
    try:
        # Of a cluster with accounting, which keeps jobs longer.
        form = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode")
        found = run("sacct", *form, f"--jobs={job}", f"--name={name}")
    except (SlurmAway, SlurmRefusal):
        return LOST
    state, _, code = found.partition("\n")[0].partition("|")
    # CANCELLED by 1000
    return JobState(state.split(" ")[0], exit_code=code) if code else LOST


def parsed(line: str) -> JobState:
    """Return the state in a line of `scontrol --oneliner show job`."""
    fields = dict(re.findall(r"(?:^| )(JobState|Reason|SubmitTime|StartTime|ExitCode)=(\S+)", line))
    if "JobState" not in fields:
        raise SlurmAway(f"scontrol printed no state: {line[:300]}")
    state = JobState(fields["JobState"])
    reason = fields.get("Reason", "").replace("None", "").replace("(null)", "")
    since = fields.get("SubmitTime" if state.condition == "queued" else "StartTime", "").replace("Unknown", "")
    return JobState(state.name, reason, since, fields.get("ExitCode", ""))


def named(name: str) -> str | None:
    """Return the id of this user's job with a name, unless it has ended. Raises SlurmAway."""
    try:
        return next(iter(run("squeue", "--me", "--noheader", f"--name={name}", "--format=%A").split()), None)
    except SlurmRefusal as refusal:
        raise SlurmAway(f"squeue: {refusal}") from refusal


def cancel(job: str, name: str) -> None:
    """Cancel the job with this id and name, unless it has ended. Raises SlurmAway."""
    try:
        run("scancel", f"--name={name}", job)
    except SlurmRefusal as refusal:
        if UNKNOWN not in str(refusal) and "already complet" not in str(refusal):
            raise SlurmAway(f"scancel: {refusal}") from refusal

"""A real Slurm on this machine: one node, and two partitions of which one preempts the other. It needs root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.coordinator import until
from tests.support.processes import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel", "scontrol")
PACKAGES = "slurmctld slurmd slurm-client munge"
LACKING = f"Slurm is not installed, or this is not root: apt-get install {PACKAGES}"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout={timeout}
KillWait=2
MinJobAge=3600
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 Gres=gpu:1
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=15 OverSubscribe=NO
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF OverSubscribe=NO
PartitionName=closed Nodes={host} State=DOWN
"""
"""`low` is preempted by `high`. Jobs in `closed` wait. The GPU is none: a job that asks for it finds a file."""


def is_here() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program, path=_PATH) for program in PROGRAMS)


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Slurm:
    """The daemons of a cluster of one node, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        self.configuration = folder / "slurm.conf"
        ports = {"controller": free_port(), "daemon": free_port()}
        self.configuration.write_text(CONFIGURATION.format(host=host, folder=folder, timeout=300, **ports))
        (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration), "PATH": _PATH}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Returns once a job can run."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed", "log")]
        socket_file = munge.parent / "munge.socket"
        # A test's folder is not open to the user `munge`, so it runs as root: `--force` lets it.
        line = ["munged", "--foreground", "--force", *files, f"--socket={socket_file}", "--num-threads=2"]
        self._start("munged", line)
        until(socket_file.exists)
        self.start_controller()
        self.start_daemon()
        until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%t", "--partition=low"))

    def start_controller(self, *options: str) -> None:
        self._start("slurmctld", ["slurmctld", "-D", *options, "-f", str(self.configuration)])

    def start_daemon(self) -> None:
        self._start("slurmd", ["slurmd", "-D", "-f", str(self.configuration)])

    def run(self, *line: str) -> str:
        """The output of a command, and of its failure."""
        done = subprocess.run(line, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def kill(self, name: str) -> None:
        """kill -9 of a daemon, not of the jobs."""
        self.daemons[name].kill()
        self.daemons.pop(name).wait()

    def kill_controller(self) -> None:
        """kill -9, once it has saved all that it knows: it forgets the last 5 s."""
        # Any change is saved, with all others.
        job = self.run("sbatch", "--parsable", "--partition=closed", "--output=/dev/null", "--wrap=true").strip()
        known_at, saved = time.time(), self.folder / "state" / "job_state"
        self.run("scancel", job)
        until(lambda: saved.exists() and saved.stat().st_mtime > known_at, seconds=60)
        self.kill("slurmctld")

    def jobs(self) -> list[str]:
        """The ids of all jobs that Slurm still knows, in the order of their submission."""
        return sorted(self.run("squeue", "--noheader", "--states=all", "--format=%A").split(), key=int)

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").strip()

    def end(self) -> None:
        if "slurmctld" in self.daemons:
            self.run("scancel", "--user=root")
            with suppress(AssertionError):
                until(lambda: not self.run("squeue", "--noheader").strip(), seconds=20)
        for name in reversed(list(self.daemons)):
            self.daemons[name].send_signal(signal.SIGTERM)
            try:
                self.daemons[name].wait(20)
            except subprocess.TimeoutExpired:
                self.daemons[name].kill()
                self.daemons[name].wait()

    def _start(self, name: str, line: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            given = {"env": self.environment, "stdout": log, "stderr": log, "start_new_session": True}
            self.daemons[name] = subprocess.Popen(line, stdin=subprocess.DEVNULL, **given)


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.end()


@contextmanager
def in_environment(folder: Path) -> Iterator[Slurm]:
    """A cluster which commands of this process, and of those that it starts, use."""
    before = dict(os.environ)
    try:
        with cluster(folder) as slurm:
            os.environ.update(slurm.environment)
            yield slurm
    finally:
        os.environ.clear()
        os.environ.update(before)

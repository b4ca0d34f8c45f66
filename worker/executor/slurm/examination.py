"""The findings of `tessera worker check` and `doctor` about Slurm. Submits no job."""

import sys
from collections.abc import Iterator
from pathlib import Path

from tessera.shared.diagnostics import Finding, fail, ok, warn
from tessera.worker.executor.slurm import commands
from tessera.worker.executor.slurm.commands import SlurmAway, SlurmRefusal
from tessera.worker.executor.slurm.launcher import limits_of
from tessera.worker.settings import SlurmSettings
from tessera.worker.state.database import file_system

LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "ramfs"}
"""Types of file systems of one machine, unless an administrator exports them to the nodes under the same path."""

REMEDY = "Correct [executor.slurm]: `sinfo` lists partitions."


def findings(settings: SlurmSettings, state_dir: Path) -> Iterator[Finding]:
    """Yield findings: Slurm's commands are there, Slurm would take a job, and nodes see its folder."""
    try:
        yield ok("slurm", commands.run("sbatch", "--version"))
    except (SlurmAway, SlurmRefusal) as fault:
        yield fail("slurm", str(fault), "Install Slurm's commands (Debian: slurm-client), and its slurm.conf.")
        return
    options = [*limits_of(settings), *settings.lines]
    named = " ".join(options) or "Slurm's defaults"
    try:
        said = commands.run("sbatch", "--test-only", *options, "--wrap=true")
        yield ok("slurm", f"takes a job with {named}: {said.splitlines()[-1]}"[:300])
    except SlurmRefusal as refusal:
        yield fail("slurm", f"takes no job with {named}: {refusal}", REMEDY)
    except SlurmAway as fault:
        yield fail("slurm", str(fault), "Start slurmctld, or wait for it: `scontrol ping`.")
    kind = file_system(state_dir.absolute())
    detail = f"the jobs' folder is in {state_dir}, a file system of type {kind or 'unknown'}"
    if kind in LOCAL:
        yield warn(
            "slurm", detail, f"Nodes must see it, and {sys.prefix}, under the same paths: use a shared file system."
        )
    else:
        yield ok("slurm", detail)

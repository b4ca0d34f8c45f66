"""A site's opt-out list: the groups, such as patients, whose examples no task may use."""

from dataclasses import replace
from pathlib import Path

import torch

from tessera.shared.near_names import unread
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import group_name, is_unnamed
from tessera.worker.data.load_report import OptedOut
from tessera.worker.errors import DataError


def read_opt_out(path: Path) -> frozenset[bytes]:
    """Return the groups in a list of one identifier a line. Raises DataError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(f"opt_out: {path} cannot be read, so that no task starts: {unread(path, fault)}") from fault
    return frozenset(map(group_name, filter(str.strip, lines)))


def without(dataset: Dataset, path: Path) -> Dataset:
    """Return the data set without the examples of the groups in a list. Raises DataError."""
    listed, groups = read_opt_out(path), dataset.groups
    if groups is None:
        raise DataError("opt_out: its lines are values of `group`, which is not set: name the column in group")
    if unnamed := sum(map(is_unnamed, groups)):
        raise DataError(f"opt_out: {unnamed} examples have no group, and may be of people on the list: fill them in")
    leaves = torch.tensor([group in listed for group in groups])
    if leaves.all():
        raise DataError(f"opt_out: every example is of a group in {path}: remove the data set")
    found = OptedOut(len(listed), len(listed.intersection(groups)), int(leaves.sum()))
    kept = dataset.rows((~leaves).nonzero().flatten()) if found.examples else dataset
    return replace(kept, report=replace(dataset.report, opted_out=found))

"""The blocks in which two versions of a run differ, as an exact difference: smaller than these blocks.

A worker that holds the earlier version makes the later one of it, and checks each block against its digest.
"""

from __future__ import annotations

from typing import BinaryIO

from tessera.shared.api.versions import Manifest
from tessera.shared.model.spec import Model
from tessera.shared.rounds.versions import States
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.update_file import TrainedBlock, write_update


def write_difference(file: BinaryIO, states: States, model: Model, since: Manifest, later: Manifest) -> None:
    """Write it as an update from the earlier version to the later one. `file` must be seekable."""
    blocks = [model.by_name[name] for name in later.changed(since)]
    changes = [TrainedBlock(block, states.tensor(block, later), states.tensor(block, since)) for block in blocks]
    write_update(file, LOSSLESS, changes)

"""The blocks in which two versions of a run differ, as an exact difference: smaller than these blocks.

A worker that holds the earlier version makes the later one of it, and checks each block against its digest.
"""

from __future__ import annotations

from typing import BinaryIO

from shared.codecs import LOSSLESS
from shared.model import Model
from shared.states import States
from shared.update import Change, write_update
from shared.wire import Manifest


def write_difference(file: BinaryIO, states: States, model: Model, since: Manifest, later: Manifest) -> None:
    """Writes it as an update from the earlier version to the later one. `file` must be seekable."""
    blocks = [model.by_name[name] for name in later.changed(since)]
    changes = [Change(block, states.tensor(block, later), states.tensor(block, since)) for block in blocks]
    write_update(file, LOSSLESS, changes)

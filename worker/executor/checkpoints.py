"""Checkpoints of a group's training: rank 0 writes them, with the parts that differ between the ranks."""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from tessera.worker.executor.group import Group
from tessera.worker.training.checkpoints import (
    CheckpointFile,
    Document,
    Position,
    PrefixView,
    TrainingCheckpoints,
    under,
)

RANKS = "ranks"
"""The part of a checkpoint with a part for each rank."""
OWN = ("generators", "current")
"""The parts of a document that are a rank's own: its random states, and the size of its pieces."""


class GroupCheckpoints(TrainingCheckpoints):
    """A rank's view of the checkpoints of one task. All ranks write at the same step, which `agree` decides."""

    def __init__(self, stored: CheckpointFile, seconds: float, group: Group) -> None:
        super().__init__(stored, seconds)
        self._group = group
        self._agreed = False
        if self.document:
            self.document = {**self.document, **self.document[RANKS][group.rank]}

    @property
    def due(self) -> bool:
        return self._agreed

    @property
    def wanted(self) -> bool:
        """True if the first rank's clock says that it is time; false in the others."""
        return self._group.is_first and super().due

    def agree(self) -> None:
        """Have the next checkpoint written after this step. All ranks call it together."""
        self._agreed = True

    @contextmanager
    def tensors(self) -> Iterator[Mapping[str, Tensor]]:
        with super().tensors() as stored:
            yield ChainMap(PrefixView(f"{RANKS}/{self._group.rank}", stored), stored)  # type: ignore[arg-type]  # read only

    def write(self, position: Position, document: Document, tensors: Mapping[str, Tensor]) -> None:
        self._agreed = False
        states = {name: tensor for name, tensor in tensors.items() if name.startswith("generators/")}
        own = {name: document[name] for name in OWN if name in document}
        of_ranks = self._group.each((own, states))
        if self._group.is_first:
            stored = {name: tensor for name, tensor in tensors.items() if name not in states}
            for rank, (_, theirs) in enumerate(of_ranks):
                stored |= under(f"{RANKS}/{rank}", theirs)
            super().write(position, {**document, RANKS: [theirs for theirs, _ in of_ranks]}, stored)

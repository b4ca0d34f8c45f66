"""The records that an agent hands to its executor, and gets back from it. They hold no tensors of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import LocalResult
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import Array
from tessera.worker.model.layouts import MappingFile
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.state.error_feedback import Feedback


@dataclass(frozen=True)
class CheckedModel:
    """The model of a task that the executor can execute."""

    blocks: tuple[Block, ...]
    """The model's block table, computed here."""
    four_bits: frozenset[str] = frozenset()
    """The matrices to keep in 4 bits."""
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The further names of tensors with several, if they were asked for."""


@dataclass(frozen=True)
class FetchedVersion:
    """A version on this machine and the description of its model."""

    document: Model
    mapping: MappingFile | None
    manifest: Manifest
    blocks: tuple[Block, ...]
    """The model's block table, computed here."""
    bases: Mapping[str, BlobTensor]
    """The version's value of each fetched block."""
    four_bits: frozenset[str] = frozenset()
    """The matrices to keep in 4 bits."""
    server_state: Mapping[str, Array] = field(default_factory=dict)
    """The server state that the plan requests."""
    kept: Mapping[str, Array] = field(default_factory=dict)
    """The tensors that this site keeps between the run's rounds, without residuals."""
    tokenizer: Mapping[FileName, bytes] = field(default_factory=dict)
    """The files of the run's tokenizer, if the data set takes it."""
    transfer: tuple[int, float] = (0, 0.0)
    """The bytes of blocks that were not here, and the seconds of their transfer."""
    feedback: Feedback = field(default_factory=Feedback)
    """The residuals of earlier updates, of which the executor knows nothing."""

    @property
    def is_whole(self) -> bool:
        """True if every block is fetched, so that a model of the last round is overwritten: local values of a block
        that is not fetched must not leak into this round."""
        return len(self.bases) == len(self.blocks)

    def content(self, block: Block) -> str:
        """Return the digest of a block's values."""
        return self.document.external.get(block.name) or self.manifest.blocks[block.name]


@dataclass(frozen=True)
class TaskOutcome:
    """The outcome of a task."""

    examples: int
    """The number of examples, or of protected groups."""
    result: LocalResult | None = None
    """The method's result; None of an evaluation."""
    moments: Mapping[str, Array] = field(default_factory=dict)
    """The optimizer's moments, to keep for the run's next round."""
    losses: Array | None = None
    """The loss of each example, float64 [training examples and then held-out ones]; of an attack alone."""
    weights: Mapping[str, int] | None = None
    """Of a region, whose `result` has steps in place of values: the examples behind blocks that fewer than all of its
    sites sent."""

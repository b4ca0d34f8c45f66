"""A rank's view of its group: its rows of each batch, and what the ranks sum or agree on."""

import hashlib
import hmac
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from tessera.shared.methods.base import Phase
from tessera.shared.model.attention_stats import LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Head
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.executor import mapped
from tessera.worker.executor.sharding import bytes_here, gathered, keep_shard, shard
from tessera.worker.model.build import read_block
from tessera.worker.model.forward import forward, label_count
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.training.context import LocalTaskContext, synthetic_batch
from tessera.worker.training.ranks import Pieces

T = TypeVar("T")
N = TypeVar("N", float, Tensor)

SHARED_FILE = "shared"
"""The file of the data set that the first rank has made last."""

SIGNATURE_BYTES = hashlib.sha256().digest_size

BUCKET = 1 << 24
"""Largest number of gradient values in one reduction, unless a single tensor has more: the memory it takes."""


class FirstRankFailed(Stopped):
    """The first rank failed in a computation for all ranks, and reports the reason itself."""


class Group:
    """`worker.training.ranks.Ranks`, in a process of an initialised process group. `folder` is for its files.

    Ranks sign the objects that they send each other with `key`: gloo's ports take connections of any user of the
    machine, and a pickle of another user would run code.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        self._folder, self._key = folder, key
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._shared: WeakKeyDictionary[Dataset, Dataset] = WeakKeyDictionary()
        self.alone = False
        """True while the first rank computes something for all."""
        self.sharded = False
        """True while the ranks divide the model's parameters among them (`compute.shard`)."""
        self._dataset: Dataset | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # ------------------------------------------------------------ parameters

    @property
    def shards(self) -> int:
        return self.size if self.sharded else 1

    def shard(self, model: nn.Module, on: torch.device) -> None:
        if self.sharded:
            shard(model, on, self.size)

    def keep_shard(self, tensor: Tensor, values: Tensor) -> None:
        keep_shard(tensor, values, self.rank, self.size)

    def context(self, context: LocalTaskContext) -> LocalTaskContext:
        if self.sharded:
            nbytes = sum(each.nbytes for each in context.model.parameters())
            log = structlog.get_logger("worker")
            log.info("model-sharded", rank=self.rank, bytes=bytes_here(context.model), model_bytes=nbytes)
        return GroupContext.of(context, self)

    def take_part(self, model: PreTrainedModel, head: Head, dataset: Dataset) -> None:
        if self.sharded:
            forward(model, head, synthetic_batch(model, dataset))

    # ------------------------------------------------------------ rows

    def share_of(self, dataset: Dataset) -> Dataset:
        # Loaders go on while their data set is the same.
        self._dataset = dataset
        if dataset not in self._shared:
            self._shared[dataset] = replace(dataset, share=(self.rank, self.size))
        return self._shared[dataset]

    def examples(self, count: int) -> int:
        return int(self.total(count))

    # ------------------------------------------------------------ steps

    def start_phase(self, parameters: Sequence[Tensor]) -> None:
        for parameter in () if self.sharded else parameters:
            dist.broadcast(parameter.detach(), 0)
        # Otherwise each rank would drop out the same units of its rows.
        if self.rank:
            torch.manual_seed(next_seed(torch.initial_seed(), self.rank))

    def weigh(self, pieces: Pieces, labels: Tensor, context: LocalTaskContext) -> Pieces:
        objective = context.objective
        own = float(label_count(context.head, labels))
        whole = self.total(own)
        # The loss of a batch without any label is 0, as in one process.
        of_all: float | Tensor = own / whole if whole else 1 / self.size
        if whole and objective is not None and objective.class_weights is not None:
            weight = torch.stack([objective.weight_of(context.head, piece[LABELS]) for piece, _ in pieces]).sum()
            of_all = weight / self.total(weight)
        if own or (len(labels) and not whole):
            return [(piece, share * of_all) for piece, share in pieces]
        if self.sharded and self._dataset:
            # The other ranks wait for this one at each layer. It adds nothing to the gradients.
            return [(synthetic_batch(context.model, self._dataset), 0.0)]
        return []

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.sharded:
            # The backward pass has summed them.
            return
        with_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(with_gradient, dist.ReduceOp.MAX)
        # A parameter that no rank's rows depend on keeps no gradient, as in one process.
        used = [parameter for parameter, any_rank in zip(parameters, with_gradient, strict=True) if any_rank]
        for bucket in _buckets(used):
            flat = torch.cat([self._gradient(parameter).flatten() for parameter in bucket])  # float32
            dist.all_reduce(flat)
            for parameter, part in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def rows(self, rows: Tensor) -> Tensor:
        return rows[self.rank :: self.size]

    def total(self, value: N) -> N:
        if isinstance(value, Tensor):
            summed = value.detach().clone()
            dist.all_reduce(summed)
            return summed
        return float(self.total(torch.tensor(value, dtype=torch.float64)))

    def _gradient(self, parameter: Tensor) -> Tensor:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return gradient.float()

    # ------------------------------------------------------------ agreement

    def any_rank(self, true: bool) -> bool:
        """Return True if `true` is true in any rank."""
        return bool(self.total(true))

    def same(self, compute: Callable[[], T]) -> T:
        # `compute`, which only the first rank calls, may itself call `same`.
        if self.alone:
            return compute()
        value, fault = self._alone(compute) if self.is_first else (None, None)
        value, failed = self._sent((value, fault is not None), 0)
        if fault:
            raise fault
        if failed:
            raise FirstRankFailed
        return value  # type: ignore[no-any-return]

    def shared(self, make: Callable[[], Dataset]) -> Dataset:
        path = self._folder / SHARED_FILE
        self.same(lambda: mapped.write(path, make()))
        return mapped.read(path)  # type: ignore[no-any-return]

    def each(self, own: object) -> list[Any]:
        """Return each rank's object, in their order."""
        return [self._sent(own, rank) for rank in range(self.size)]

    def _alone(self, compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Return a result, or an exception."""
        self.alone = True
        try:
            return compute(), None
        except Exception as fault:  # noqa: BLE001  (each rank has to end the task)
            return None, fault
        finally:
            self.alone = False

    def _sent(self, value: object, rank: int) -> Any:
        """Return a rank's object, in each rank."""
        document = self._signed(value) if self.rank == rank else b""
        length = torch.tensor(len(document))
        dist.broadcast(length, rank)
        raw = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == rank:
            raw = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        dist.broadcast(raw, rank)
        return self._verified(raw.numpy().tobytes())

    def _signed(self, value: object) -> bytes:
        document = pickle.dumps(value)
        return hmac.digest(self._key, document, "sha256") + document

    def _verified(self, signed: bytes) -> Any:
        """Return a signed object. Raises RuntimeError, before it is read, if no rank of this group signed it."""
        signature, document = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, document, "sha256")):
            raise RuntimeError("a message between ranks was signed by no rank of this group")
        return pickle.loads(document)  # noqa: S301  (of a rank of this group)


def next_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's randomness in a phase, from that of the phase before, or of all ranks."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank}".encode()).digest()[:8], "big") >> 1


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in runs of at most `BUCKET` values."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and sum(each.numel() for each in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class GroupContext(LocalTaskContext):
    """A context whose measurements are the first rank's, since those of two GPUs differ by rounding."""

    group: Group

    @classmethod
    def of(cls, context: LocalTaskContext, group: Group) -> "GroupContext":
        made = cls(**{each.name: getattr(context, each.name) for each in fields(LocalTaskContext)})
        made.group = group
        return made

    def read(self, block: Block) -> Array:
        tensors = {name: gathered(tensor) for name, tensor in self._tensor(block).items()}
        if self.group.sharded and not self.group.is_first:
            # Of a sharded model, rank 0's result alone is read.
            return np.zeros(block.shape, NUMPY_DTYPES[block.dtype])
        return read_block(tensors, block)

    def read_all(self, blocks: Iterable[Block]) -> dict[str, Array]:
        return {block.name: self.read(block) for block in blocks}

    def images_once(self, data: Dataset, phases: Sequence[Phase] | None = None) -> AbstractContextManager[Dataset]:
        """Return the data set as it is: ranks that share a tower's weights must all call it for each batch."""
        return nullcontext(data)

    def attention(self, batches: Iterable[Mapping[str, Tensor]], tokens: TaskTokens) -> dict[str, LayerAttention]:
        return self.group.same(lambda: super(GroupContext, self).attention(batches, tokens))

    def attention_rows(self, batch: Mapping[str, Tensor], queries: int) -> dict[str, Array]:
        return self.group.same(lambda: super(GroupContext, self).attention_rows(batch, queries))

    def gradient_norms(self, batches: Iterable[Mapping[str, Tensor]], blocks: Sequence[Block]) -> dict[str, float]:
        return self.group.same(lambda: super(GroupContext, self).gradient_norms(batches, blocks))

    def fisher(self, batches: Iterable[Mapping[str, Tensor]], blocks: Sequence[Block]) -> dict[str, float]:
        return self.group.same(lambda: super(GroupContext, self).fisher(batches, blocks))

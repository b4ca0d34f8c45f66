"""A rank's view of its group: its rows of each batch, and what the ranks sum or agree on."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from tessera.shared.model.spec import Head
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.model.forward import forward, label_count
from tessera.worker.ranks.serialization import dumps, loads
from tessera.worker.ranks.sharding import keep_shard, shard
from tessera.worker.ranks.shared_dataset import SharedDataset
from tessera.worker.training.context import LocalTaskContext, synthetic_batch
from tessera.worker.training.ranks import Pieces

T = TypeVar("T")
N = TypeVar("N", float, Tensor)

BUCKET = 1 << 24
"""Largest number of gradient values in one reduction, unless a single tensor has more: the memory it takes."""


class Group:
    """`worker.training.ranks.Ranks`, in a process of an initialised process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._shared: WeakKeyDictionary[Dataset, SharedDataset] = WeakKeyDictionary()
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

    def take_part(self, model: PreTrainedModel, head: Head, dataset: Dataset) -> None:
        if self.sharded:
            forward(model, head, synthetic_batch(model, dataset))

    # ------------------------------------------------------------ rows

    def share_of(self, dataset: Dataset) -> Dataset:
        # Loaders go on while their data set is the same.
        self._dataset = dataset
        if dataset not in self._shared:
            self._shared[dataset] = SharedDataset.of(dataset, self.rank, self.size)
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
        """Return whether it is true in any rank."""
        return bool(self.total(true))

    def same(self, compute: Callable[[], T]) -> T:
        # What the first rank computes for all may itself ask for this.
        if self.alone:
            return compute()
        document, cause = self._outcome(compute) if self.is_first else (b"", None)
        value, fault = self._sent(document, 0)
        if fault:
            # The cause has the traceback, for this rank's log.
            raise fault from cause
        return value  # type: ignore[no-any-return]

    def each(self, own: object) -> list[Any]:
        """Return each rank's object, in their order."""
        document = dumps(own)
        return [self._sent(document, rank) for rank in range(self.size)]

    def _outcome(self, compute: Callable[[], object]) -> tuple[bytes, Exception | None]:
        """Return the document of a result and of an exception, one of which is None, and this exception."""
        self.alone = True
        try:
            return dumps((compute(), None)), None
        except Exception as fault:  # noqa: BLE001  (each rank raises it)
            return dumps((None, fault)), fault
        finally:
            self.alone = False

    def _sent(self, document: bytes, rank: int) -> Any:
        """Return what a rank's document holds, in each rank."""
        length = torch.tensor(len(document))
        dist.broadcast(length, rank)
        raw = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == rank:
            raw = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        dist.broadcast(raw, rank)
        return loads(raw.numpy().tobytes())


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

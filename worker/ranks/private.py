"""Differential privacy in a rank. The agent keeps the accounting, and rank 0 draws the samples and the noise."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from tessera.shared.api.tasks import Task
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Dataset
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients, sampling
from tessera.worker.privacy.noise import NoiseSource
from tessera.worker.privacy.private_task import PrivateProgress, PrivateTask
from tessera.worker.ranks.group import Group
from tessera.worker.training.batches import Batch
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import LocalTraining


class RankPrivacy(PrivateTask):
    """A `PrivateTask` whose ledger is the agent's."""

    def __init__(self, task: Task, call: Callable[..., Any], group: Group, *, resumes: bool) -> None:
        """`call` calls a method of the agent's `PrivateTask`, in all ranks together. `resumes` is true for a task
        that goes on from a checkpoint."""
        self._given = task
        self._call = call
        self._group = group
        self._resumes = resumes

    def watched(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        return _Watched(batches, self._call)

    def top_k(self, scores: Array, count: int, picks: int | None = None) -> list[int]:
        return self._call("top_k", scores, count, picks)  # type: ignore[no-any-return]

    def check_choice(self) -> None:
        self._call("check_choice")

    def begin(self, steps: int) -> None:
        self._call("begin", steps)
        progress = PrivateProgress.model_validate(self._call("progress"))
        # The agent's last draw was the seed of its own randomness, which is that of the ranks. The checkpoint of a
        # task that resumes has it.
        drawn = progress.words_drawn if self._resumes else progress.words_drawn - 1
        self._source = NoiseSource(bytes.fromhex(progress.noise_key), drawn)
        self._noise = progress.charged_steps.noise_multiplier
        if not self._resumes:
            seed_everything(self._source.seed())

    def progress(self) -> dict[str, JsonValue]:
        # Rank 0 has drawn further than the agent, and than the others.
        return self._group.same(lambda: {**self._call("progress"), "words_drawn": self._source.state[1]})

    def phase(self, local: LocalTraining, freeze: Freeze, dataset: Dataset) -> NoisyGradients:
        if self._given.privacy is None:
            raise RuntimeError("the task has no privacy")
        samples = sampling(dataset.examples, self._given.training.batch_size)
        mechanism = Mechanism(samples, self._given.privacy.clip_norm, self._noise)
        return NoisyGradients(local, freeze, dataset, mechanism, self._source)

    def disclosed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return self._call("disclosed", metrics)  # type: ignore[no-any-return]

    def spent(self) -> float:
        return self._call("spent")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Watched:
    """Batches of which the agent learns when they are read."""

    batches: Iterable[Batch]
    call: Callable[..., Any]

    def __iter__(self) -> Iterator[Batch]:
        self.call("look")
        return iter(self.batches)

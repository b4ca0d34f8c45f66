"""Differential privacy in a rank. The agent keeps the accounting, and rank 0 draws the samples and the noise."""

from collections.abc import Callable
from typing import Any

from pydantic import JsonValue

from tessera.shared.api.tasks import Task
from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.groups import Groups
from tessera.worker.privacy.dp_sgd import sampling
from tessera.worker.privacy.private_task import PrivateProgress, PrivateTask
from tessera.worker.ranks.group import Group
from tessera.worker.training.randomness import seed_everything


class RankPrivacy(PrivateTask):
    """A `PrivateTask` whose ledger is the agent's."""

    def __init__(self, task: Task, examples: int, call: Callable[..., Any], group: Group, *, resumes: bool) -> None:
        """Take over a private task on this number of examples. `call` calls a method of the agent's `PrivateTask`,
        in all ranks together. `resumes` is true for a task that goes on from a checkpoint."""
        if task.privacy is None:
            raise ValueError("the task has no privacy")
        self._privacy = task.privacy
        self._call = call
        self.groups: Groups | None = call("handed_groups") if task.privacy.unit == "group" else None
        self.units = self.groups.count if self.groups else examples
        self._sampling = sampling(self.units, task.training.batch_size)
        self._group = group
        self._resumes = resumes

    def look(self) -> None:
        self._call("look")

    def start(self) -> None:
        self._call("start")

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
        self._noise_source = NoiseSource(bytes.fromhex(progress.noise_key), drawn)
        self._mechanism = self._with_noise_of(progress.charged_steps)
        if not self._resumes:
            seed_everything(self._noise_source.seed())

    def progress(self) -> dict[str, JsonValue]:
        # Rank 0 has drawn further than the agent, and than the others.
        return self._group.same(lambda: {**self._call("progress"), "words_drawn": self._noise_source.state[1]})

    def spent(self) -> float:
        return self._call("spent")  # type: ignore[no-any-return]

"""The private half of a task's training: its samples, its noise and its choices. Its account charges the ledger.

Needs the extra `privacy`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from pydantic import JsonValue, NonNegativeInt
from torch import Tensor

from tessera.shared.api.tasks import Task
from tessera.shared.privacy.noise import KEY_BYTES, NoiseSource, secret_key
from tessera.shared.schema import Value
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Groups
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.privacy.account import choice_of
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients
from tessera.worker.privacy.known_examples import known_examples
from tessera.worker.privacy.pieces import GroupSampling
from tessera.worker.privacy.sampling import sampling
from tessera.worker.privacy.selection import WatchedBatches, bounded_sums, epsilon_per_pick, private_top_k
from tessera.worker.state.privacy_ledger import NoisySteps
from tessera.worker.training.batches import Batch
from tessera.worker.training.context import LocalTaskContext, largest
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.ranks import OneRank, Ranks
from tessera.worker.training.setup import LocalTraining


class Account(Protocol):
    """The account of a task as its training sees it: a `PrivacyAccount`, here or in the agent's process."""

    @property
    def units(self) -> int: ...
    def look(self) -> None: ...
    def choose(self) -> None: ...
    def begin(self, steps: int) -> NoisySteps: ...
    def start(self) -> None: ...
    def charges(self) -> dict[str, JsonValue]: ...
    def spent(self) -> float: ...


class NoiseState(Value):
    """The noise and the choices of a task in its checkpoint, to resume with the same: as secret as the data."""

    noise_key: str
    """In hexadecimal digits."""
    words_drawn: NonNegativeInt
    chosen: tuple[tuple[int, ...], ...]
    """The results of `top_k`, in that order."""


class PrivateTask:
    """One task's training under differential privacy."""

    def __init__(
        self,
        account: Account,
        task: Task,
        groups: Groups | None = None,
        key: bytes | None = None,
        resumed: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Prepare a task. `groups` are the data set's, if the run protects groups. `key` seeds all randomness; if
        None, it is secret and new. With `resumed`, the `progress` in a checkpoint, noise and choices continue."""
        if task.privacy is None:
            raise ValueError("the task has no privacy")
        if (groups is not None) != (task.privacy.unit == "group"):
            raise ValueError(f"groups are given if they are the unit; privacy.unit is {task.privacy.unit!r}")
        self._account = account
        self._privacy = task.privacy
        self.groups = groups
        """The groups that the run protects, if it does."""
        self.units = account.units
        """The number of protected units: examples, or groups."""
        self._sampling = sampling(self.units, task.training.batch_size)
        self._choice = choice_of(task.privacy, task.trainings)
        self._ranks = ranks or OneRank()
        self._resumed = NoiseState.model_validate(resumed["noise"]) if resumed else None
        if self._resumed:
            self._noise_source = NoiseSource(bytes.fromhex(self._resumed.noise_key), self._resumed.words_drawn)
        else:
            self._noise_source = NoiseSource(key or secret_key())
        self._mechanism: Mechanism | None = None
        self._choices: list[tuple[int, ...]] = []
        self._chosen = False
        self._looked = False
        self._picks_left = 0
        self._epsilon_per_pick = 0.0

    # ------------------------------------------------------------ choosing blocks

    def watched(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches for a method that chooses blocks by them. Reading them spends privacy, or raises
        PolicyViolation."""
        return WatchedBatches(batches, self.look)

    def known(self, context: LocalTaskContext, dataset: Dataset) -> Tensor:
        """Return the mask of examples that may reach the model in a choice, bool [examples]. It needs the context's
        placeholder."""
        if context.placeholder is None:
            raise RuntimeError("the context of a private task has no placeholder")
        return known_examples(context, dataset, context.placeholder)

    def look(self) -> None:
        """Spend the privacy of reading the data for a choice, the first time. Raises PolicyViolation."""
        self._account.look()
        self._looked = True

    def top_k(self, scores: Array, count: int, picks: int | None = None) -> list[int]:
        """Return as `TaskContext.top_k`, by noisy sums if the run sets so. Each choice after the first spends
        privacy."""
        place, before = len(self._choices), self._resumed.chosen if self._resumed else ()
        # A resumed task chose already: other noise would be another choice.
        chosen = list(before[place]) if place < len(before) else self._top_k(scores, count, picks)
        self._chosen = True
        self._choices.append(tuple(chosen))
        return chosen

    def _top_k(self, scores: Array, count: int, picks: int | None) -> list[int]:
        if self._privacy.selection != "noisy":
            return largest(scores, count)
        if not self._looked:
            raise PolicyViolation("privacy", "the method chooses blocks without reading the data of this task")
        if not self._chosen or count > self._picks_left:
            if self._chosen:
                self._account.choose()
            self._picks_left = max(1, count, picks or 0)
            self._epsilon_per_pick = epsilon_per_pick(self._choice.rho, self._picks_left)
        self._picks_left -= count
        sums = bounded_sums(scores, self.groups)
        return self._ranks.same(lambda: private_top_k(sums, count, self._epsilon_per_pick, self._noise_source))

    def check_choice(self) -> None:
        """Raise PolicyViolation if blocks were chosen without noise. Call it after the choice."""
        if self._privacy.selection == "noisy" and self._looked and not self._chosen:
            raise PolicyViolation("privacy", "the method read the data and chose blocks without any noise")

    # ------------------------------------------------------------ training

    def begin(self, steps: int) -> None:
        """Reserve the privacy of a number of steps, and reseed all randomness. Raises PolicyViolation.

        A resumed task has reserved it, and its randomness is that of its checkpoint.
        """
        event = NoisySteps.model_validate(self._account.begin(steps))
        self._mechanism = Mechanism(self._sampling, self._privacy.clip_norm, event.noise_multiplier)
        if not self._resumed:
            # Dropout is off. Other random draws of a model's code must be unpredictable too.
            seed_everything(self._ranks.same(self._noise_source.seed))

    def progress(self) -> dict[str, JsonValue]:
        """Return the state from which the task can resume, for its checkpoint: `Charges` and `NoiseState` in JSON."""
        key, drawn = self._noise_source.state
        noise = NoiseState(noise_key=key.hex(), words_drawn=drawn, chosen=tuple(self._choices))
        return {"account": self._account.charges(), "noise": noise.model_dump(mode="json")}

    def fit(self, local: LocalTraining, freeze: Freeze, dataset: Dataset, size: PieceSize) -> None:
        """Set `size` to the number of examples of a phase that fit into memory together, without any of the data.
        Raises ExampleTooLarge."""
        # Neither the clip norm nor the noise takes memory.
        mechanism = Mechanism(self._sampling, 1.0, 1.0)
        gradients = NoisyGradients(local, freeze, dataset, mechanism, NoiseSource(bytes(KEY_BYTES)), self.grouped)
        try:
            gradients.fit(size)
        finally:
            gradients.close()

    def phase(self, local: LocalTraining, freeze: Freeze, dataset: Dataset) -> NoisyGradients:
        if self._mechanism is None:
            raise RuntimeError("call begin before phase: it reserves the privacy")
        self._account.start()
        parts = freeze.parts if self._privacy.clip == "per-layer" else ()
        mechanism = replace(self._mechanism, parts=parts)
        return NoisyGradients(local, freeze, dataset, mechanism, self._noise_source, self.grouped)

    @property
    def grouped(self) -> GroupSampling | None:
        """The groups whose gradients are clipped, if they are the unit."""
        return GroupSampling(self.groups, self._privacy.examples_per_unit) if self.groups else None

    def spent(self) -> float:
        """Return the epsilon that the run has spent on this data set so far, at the run's delta."""
        return self._account.spent()

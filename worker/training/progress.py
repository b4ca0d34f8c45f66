"""A task's metrics for the log, and its progress for the coordinator."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from tessera.shared.api.class_counts import Counts, GroupCounts
from tessera.shared.api.tasks import Progress
from tessera.shared.schema import MAX_NUMBER, Phase

FIGURE_DIGITS = 3
CALIBRATING = "calibrating noise"
HIDDEN = "private: no progress"


def rounded(figure: float) -> float:
    """Round a figure that was measured on examples to the precision that leaves the site.

    More digits have no use, and would reveal single examples to a comparison of two nearly equal versions.
    """
    return float(f"{figure:.{FIGURE_DIGITS}g}")


@dataclass
class Report:
    """Counters of a task: written by the task's thread, read by the thread that renews its lease."""

    examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    class_counts: Counts | None = None
    """Of an evaluation, if they may leave."""
    subgroup_counts: dict[str, GroupCounts] = field(default_factory=dict)
    """Likewise."""
    withheld: dict[str, int] = field(default_factory=dict)
    """The number of rows of each extra array that are over too few examples. The coordinator does not learn it."""
    download_bytes: int = 0
    upload_bytes: int = 0
    phase: Phase = "waiting"
    activity: str | None = None
    is_queued: bool = False
    """True while a job waits in the queue of a cluster: the task does not work."""
    step: int = 0
    steps: int = 0
    """0 if unknown."""
    loss: float | None = None
    """The epoch's mean so far, if it may be reported."""
    total_bytes: int = 0
    """Bytes to transfer until the end of this phase, with those already transferred."""
    hides: bool = False
    """Report neither steps nor durations: they follow from the examples, of which the task may reveal nothing."""
    resumed_seconds: float = 0.0
    """Time in training before the checkpoint from which it resumed, in earlier processes."""
    held_since: datetime | None = None
    """The instant from which on the update has waited for its release."""
    gpu_use: dict[str, float] = field(default_factory=dict)
    """The memory and the load of the GPUs, as `LiveValues` names them."""
    began: list[tuple[float, Phase]] = field(default_factory=list)
    """The instants at which phases began, in seconds since 1970."""

    def begin(self, phase: Phase, *, steps: int = 0, total_bytes: int = 0) -> None:
        self.step, self.steps, self.loss, self.total_bytes, self.activity = 0, steps, None, total_bytes, None
        self.is_queued = False
        if not (self.hides and phase == self.phase):
            # Otherwise the site's log would show when the preparation of the first step ended.
            self.began.append((time.time(), phase))
        self.phase = phase

    def resume(self, step: int, seconds: float) -> None:
        """Continue from a checkpoint's step, after this time in training."""
        self.step, self.resumed_seconds = step, 0.0
        # Some of it has passed in this process if only its ranks ended.
        self.resumed_seconds = max(0.0, seconds - self.training_seconds)

    @property
    def training_seconds(self) -> float:
        """Time in training until now, to the second, with that before a checkpoint."""
        return self.phase_seconds().get("training", 0.0)

    def phase_seconds(self) -> dict[Phase, float]:
        """Return the time in each phase until now, to the second: more would be a figure of the data's size."""
        began, seconds = [*self.began, (time.time(), self.phase)], dict[Phase, float]()
        if self.resumed_seconds:
            seconds["training"] = self.resumed_seconds
        for (begin, phase), (end, _) in pairwise(began):
            # The clock may have been set back.
            seconds[phase] = seconds.get(phase, 0.0) + max(0.0, end - begin)
        return {phase: float(round(each)) for phase, each in seconds.items()}

    def advance(self) -> None:
        """Count a step."""
        self.step += 1

    def progress(self) -> Progress:
        """Return the progress for a heartbeat."""
        held_since = self.held_since if self.phase == "held" else None
        if self.hides:
            moves = self.phase in ("fetching", "uploading")
            return Progress(
                phase=self.phase,
                activity=f"{self.phase} ({HIDDEN})" if self.phase in ("training", "evaluating") else self.activity,
                bytes=self._moved() if moves else None,
                total_bytes=self.total_bytes or None if moves else None,
                held_since=held_since,
            )
        loss = None if self.loss is None else rounded(self.loss)
        return Progress(
            phase=self.phase,
            activity=self.activity,
            step=self.step if self.phase in ("training", "evaluating") else None,
            steps=self.steps or None,
            loss=loss if loss is not None and abs(loss) < MAX_NUMBER else None,
            bytes=self._moved(),
            total_bytes=self.total_bytes or None,
            phase_seconds=self.phase_seconds(),
            held_since=held_since,
        )

    def _moved(self) -> int | None:
        return {"fetching": self.download_bytes, "uploading": self.upload_bytes}.get(self.phase)


Check = Callable[[], None]
"""A function that is called between batches and raises an exception to end the task early."""

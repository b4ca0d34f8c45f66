"""A task's metrics for the log, and its progress for the coordinator."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from tessera.shared.api.class_counts import ClassCounts
from tessera.shared.api.tasks import Progress
from tessera.shared.schema import MAX_NUMBER, Phase

FIGURE_DIGITS = 3
CALIBRATING = "calibrating noise"


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
    class_counts: ClassCounts | None = None
    """Of an evaluation, if they may leave."""
    download_bytes: int = 0
    upload_bytes: int = 0
    phase: Phase = "waiting"
    activity: str | None = None
    step: int = 0
    steps: int = 0
    """0 if unknown."""
    loss: float | None = None
    """The epoch's mean so far, if it may be reported."""
    total_bytes: int = 0
    """Bytes to transfer until the end of this phase, with those already transferred."""
    by_quarter: bool = False
    """Report only full quarters of the steps: the duration of a single step would reveal the size of its batch."""
    resumed_seconds: float = 0.0
    """Time in training before the checkpoint from which it resumed, in earlier processes."""
    began: list[tuple[float, Phase]] = field(default_factory=list)
    """The instants at which phases began, in seconds since 1970."""

    def begin(self, phase: Phase, *, steps: int = 0, total_bytes: int = 0, by_quarter: bool = False) -> None:
        self.step, self.steps, self.loss, self.total_bytes, self.activity = 0, steps, None, total_bytes, None
        self.by_quarter = by_quarter
        self.phase = phase
        self.began.append((time.time(), phase))

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
        loss = None if self.loss is None else rounded(self.loss)
        return Progress(
            phase=self.phase,
            activity=self.activity,
            step=self._step() if self.phase in ("training", "evaluating") else None,
            steps=self.steps or None,
            loss=loss if loss is not None and abs(loss) < MAX_NUMBER else None,
            bytes={"fetching": self.download_bytes, "uploading": self.upload_bytes}.get(self.phase),
            total_bytes=self.total_bytes or None,
            phase_seconds=self.phase_seconds(),
        )

    def _step(self) -> int:
        if not self.by_quarter:
            return self.step
        return 4 * self.step // self.steps * self.steps // 4 if self.steps else 0


Check = Callable[[], None]
"""A function that is called between batches and raises an exception to end the task early."""

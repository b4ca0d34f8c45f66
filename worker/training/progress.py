"""What doing a task comes to, for the log, and how far it is, for the coordinator's people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tessera.shared.api.tasks import Progress
from tessera.shared.schema import MAX_NUMBER, Phase

FIGURE_DIGITS = 3


def rounded(figure: float) -> float:
    """Round a figure that was measured on examples to the digits that leave the site.

    More digits serve nobody, and tell of single examples whoever compares two versions that hardly differ.
    """
    return float(f"{figure:.{FIGURE_DIGITS}g}")


@dataclass
class Report:
    """Counted up by the thread that does the task, and read by the one that renews its lease."""

    examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    download_bytes: int = 0
    upload_bytes: int = 0
    phase: Phase = "waiting"
    step: int = 0
    steps: int = 0
    """0 where nobody knows."""
    loss: float | None = None
    total_bytes: int = 0
    """Those that are to be moved in this phase, together with what was moved before."""
    by_quarter: bool = False
    """Whether only full quarters of the steps are told: how long a single step takes tells the size of its batch."""

    def begin(self, phase: Phase, *, steps: int = 0, total_bytes: int = 0, by_quarter: bool = False) -> None:
        self.step, self.steps, self.loss, self.total_bytes = 0, steps, None, total_bytes
        self.by_quarter = by_quarter
        self.phase = phase

    def advance(self, loss: float | None = None) -> None:
        """One step more; `loss` is the epoch's mean so far, where it may be told."""
        self.step += 1
        self.loss = loss

    def progress(self) -> Progress:
        """Return what a heartbeat says."""
        moved = {"fetching": self.download_bytes, "uploading": self.upload_bytes}.get(self.phase)
        works = self.phase in ("training", "evaluating")
        loss = None if self.loss is None else rounded(self.loss)
        return Progress(
            phase=self.phase,
            step=self._step() if works else None,
            steps=self.steps or None,
            loss=loss if loss is not None and abs(loss) < MAX_NUMBER else None,
            bytes=moved,
            total_bytes=self.total_bytes or None,
        )

    def _step(self) -> int:
        if not self.by_quarter:
            return self.step
        quarters = 4 * self.step // self.steps if self.steps else 0
        return quarters * self.steps // 4


Check = Callable[[], None]
"""Called between batches; raises whatever ends the task early."""

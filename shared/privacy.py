"""What differential privacy a run asks of its workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from shared.blocks import Frozen


class Budget(Frozen):
    """How much may be told of one example: (epsilon, delta), example level, examples added or removed."""

    epsilon: float = Field(gt=0, le=1000)
    delta: float = Field(gt=0, lt=0.1, description="well below one over the number of examples")


class Privacy(Budget):
    """DP-SGD at each worker, on whatever the round trains (Abadi et al. 2016, arXiv 1607.00133, algorithm 1).

    (epsilon, delta) is what all of the run's updates together may tell of one example of one worker's data set. It
    says nothing of whole patients, users or sites that bring many examples, and nothing of evaluations.
    """

    clip_norm: float = Field(
        gt=0, le=1e6, description="l2 norm that one example's gradient over all that trains is clipped to"
    )
    selection: Literal["refused", "noisy", "uncovered"] = Field(
        default="refused",
        description="what becomes of a method that looks at the data to choose blocks: it may not, it chooses with "
        "noise that is paid for, or it chooses freely and what the choice tells is not covered",
    )
    selection_share: float = Field(
        default=0.1, gt=0, lt=1, description="of the budget, for noisy selection (measured in zCDP)"
    )
    selections: PositiveInt | None = Field(
        default=None, description="noisy choices that a worker makes in the run; one a round if left out"
    )

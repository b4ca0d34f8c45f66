"""What differential privacy a run asks of its workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, PositiveInt

from tessera.shared.schema import Frozen


class Budget(Frozen):
    """How much may be told of one example: (epsilon, delta), of neighbours of which one has nothing in the place
    of one example of the other."""

    epsilon: float = Field(gt=0, le=1000)
    delta: float = Field(gt=0, lt=0.1, description="well below one over the number of examples")


def rho_of(target: Budget) -> float:
    """Return the zCDP that would use up the target (Bun and Steinke 2016, arXiv 1605.02065, proposition 1.3)."""
    log = math.log(1 / target.delta)
    # epsilon = rho + 2 sqrt(rho log(1/delta)), solved for the root of rho.
    return (math.sqrt(log + target.epsilon) - math.sqrt(log)) ** 2


def about_together(budgets: Iterable[Budget], delta: float) -> float:
    """Return the epsilon at `delta` of what would use up all of the budgets, if it were zCDP: an estimate, within
    some percent of what an accountant of the mechanisms themselves finds."""
    rho = sum(map(rho_of, budgets))
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


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

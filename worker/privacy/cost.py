"""The epsilon of recorded events. Imports the accountant, which needs the extra `privacy`, only when needed."""

import importlib
import math
from collections.abc import Iterable

from tessera.worker.state.privacy_ledger import Cost, ExactUse


def epsilon_of(events: Iterable[Cost], delta: float) -> float:
    """Return the epsilon of a run's events at `delta`; infinite if one of them is exact.

    Raises ImportError without the extra `privacy`.
    """
    return _cost("epsilon", events, delta)


def least_budget_of(events: Iterable[Cost], delta: float) -> float:
    """Return the least epsilon of a site's budget at `delta` that admits the events of all runs.

    Infinite if one of them is exact. Raises ImportError without the extra `privacy`.
    """
    return _cost("least_budget", events, delta)


def _cost(function: str, events: Iterable[Cost], delta: float) -> float:
    events = list(events)
    if any(isinstance(event, ExactUse) for event in events):
        return math.inf
    if not events:
        return 0.0
    cost: float = getattr(importlib.import_module("tessera.worker.privacy.accountant"), function)(events, delta)
    return cost

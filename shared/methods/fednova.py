"""FedNova: each update is divided by its local work, so that a worker with more steps does not count more.

The equations are in `shared.aggregation.local_work`: a run with fitted work (`cohort.work`) merges by them with other
methods too.
"""

from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings
from tessera.shared.schema import Compatibility


class FedNovaCoordinator(CoordinatorHalf[MethodSettings]):
    normalized = True
    regional = Compatibility("steps are divided by the local work of single sites")


METHOD = Method(
    name="fednova",
    good_for="sites with very different numbers of examples",
    sends="the whole model, and the number of local steps",
    coordinator=FedNovaCoordinator,
    source="Wang et al., Tackling the Objective Inconsistency Problem, arXiv 2007.07481, Section 4",
)

"""FedBN: normalization blocks stay with their site, all others are averaged, as in FedPer.

Li et al. 2021, Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623, Algorithm 1.
Batch normalizations stay whole, with their running statistics and wherever they are: in a head or an
attention they have its role. In most transformers the blocks are the layer norms' scales and shifts.
"""

from glob import escape

from pydantic import Field

from tessera.shared.methods.base import Method, Participant, Plan, RunInfo, State
from tessera.shared.methods.fedper import FedPerCoordinator, FedPerSettings, FedPerWorker
from tessera.shared.model.selectors import Match, Selector, roles
from tessera.shared.tensors.statistics import is_statistic, module_of


class FedBnSettings(FedPerSettings):
    private: tuple[Match, ...] = Field(
        default=roles("norm").include,
        min_length=1,
        description="the blocks that stay with their site, beside all batch normalizations",
    )


class FedBnCoordinator(FedPerCoordinator):
    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(stage="body", upload=Selector(exclude=_kept(self.settings, self.run)))


class FedBnWorker(FedPerWorker):
    def private(self) -> Selector:
        return Selector(include=_kept(self.settings, self.run))


def _kept(settings: FedPerSettings, run: RunInfo) -> tuple[Match, ...]:
    norms = {module_of(block.tensor) for block in run.blocks if is_statistic(block.tensor)}
    names = tuple(escape(block.name) for block in run.blocks if module_of(block.tensor) in norms)
    return (*settings.private, Match(names=names)) if names else settings.private


METHOD = Method(
    name="fedbn",
    good_for="images from different devices: each site keeps its own normalisation layers",
    sends="everything but the normalisation layers",
    settings=FedBnSettings,
    coordinator=FedBnCoordinator,
    worker=FedBnWorker,
    source="Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623",
)

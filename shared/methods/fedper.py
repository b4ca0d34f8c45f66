"""FedPer: the body is averaged, the head stays with its site.

Arivazhagan et al. 2019, arXiv 1912.00818: body and head train together; the head is never sent, and a site continues
with its own head in each round. Until a site has trained, its head is that of the run's first version.
"""

from pydantic import Field

from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, Participant, Plan, State, WorkerHalf
from tessera.shared.model.selectors import Match, Selector, roles


class FedPerSettings(MethodSettings):
    private: tuple[Match, ...] = Field(
        default=roles("head").include, min_length=1, description="the blocks that stay with their site"
    )

    @property
    def kept(self) -> Selector:
        return Selector(include=self.private)

    @property
    def shared(self) -> Selector:
        return Selector(exclude=self.private)


class FedPerCoordinator(CoordinatorHalf[FedPerSettings]):
    def start(self, state: State) -> State:
        self.run.require_trainable(self.settings.kept, "keeps the blocks of method.settings.private at each site")
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(stage="body", upload=self.settings.shared)


class FedPerWorker(WorkerHalf[FedPerSettings]):
    def private(self) -> Selector:
        return self.settings.kept


METHOD = Method(
    name="fedper",
    good_for="sites with labels or tasks of their own: each keeps its own head (the last, classifying layer)",
    sends="everything but the head",
    settings=FedPerSettings,
    coordinator=FedPerCoordinator,
    worker=FedPerWorker,
    source="Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818",
)

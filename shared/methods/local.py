"""Local training only: nothing is sent or averaged, and each site trains its own model.

The baseline for every federated method. The run's version does not change; a site's model is in its vault, and a
personal evaluation measures it.
"""

from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, Participant, Plan, State, WorkerHalf
from tessera.shared.model.selectors import NOTHING, Selector


class LocalMethodCoordinator(CoordinatorHalf[MethodSettings]):
    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(stage="local", upload=NOTHING)


class LocalWorker(WorkerHalf[MethodSettings]):
    def private(self) -> Selector:
        return self.run.trainable


METHOD = Method(
    name="local",
    good_for="a control: the score of each site alone",
    sends="nothing",
    coordinator=LocalMethodCoordinator,
    worker=LocalWorker,
    source="no averaging: the control in McMahan et al., arXiv 1602.05629",
)

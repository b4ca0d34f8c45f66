"""FedAvg on the head alone."""

from __future__ import annotations

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    UnsupportedRun,
)
from tessera.shared.model.selectors import Match, Selector

HEAD = Match(roles=("head",))


class HeadOnlyCoordinator(CoordinatorHalf[MethodSettings]):
    def start(self, state: State) -> State:
        if not any(HEAD.holds(block) for block in self.run.blocks):
            raise UnsupportedRun("the model has no head of its own")
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        head = Selector(include=(HEAD,))
        return Plan(train=head, upload=head)


METHOD = Method(
    name="head-only", settings=MethodSettings, coordinator=HeadOnlyCoordinator, source="none: for benchmarks"
)

"""FedFrozen: warm up the whole model, then freeze where tokens look (query, key) and go on with what they carry.

arXiv 2605.06446. The paper leaves open what, besides the value blocks, is trained once query and key are frozen;
`scope` names the readings of it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.blocks import EVERYTHING, Selector, all_but, roles
from shared.methods.contract import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    WorkerHalf,
)

Scope = Literal["all_but_qk", "attn_vo", "v_head", "v_only"]

SCOPES: dict[Scope, Selector] = {
    "all_but_qk": all_but("query", "key"),
    "attn_vo": roles("value", "output", "head"),
    "v_head": roles("value", "head"),
    "v_only": roles("value"),
}


class FedFrozenSettings(MethodSettings):
    warmup_rounds: int = Field(default=5, ge=0, description="rounds in which everything trains")
    scope: Scope = Field(default="all_but_qk", description="what trains once query and key are frozen")


class FedFrozenCoordinator(CoordinatorHalf[FedFrozenSettings]):
    def plan_for(self, state: State, worker: Participant) -> Plan:
        if state.round < self.settings.warmup_rounds:
            return Plan(stage="warm-up", train=EVERYTHING, upload=EVERYTHING)
        open_blocks = SCOPES[self.settings.scope]
        return Plan(stage="frozen", train=open_blocks, upload=open_blocks)


METHOD = Method(
    name="fedfrozen",
    settings=FedFrozenSettings,
    coordinator=FedFrozenCoordinator,
    worker=WorkerHalf[FedFrozenSettings],
    source="FedFrozen, arXiv 2605.06446, two-stage algorithm",
)

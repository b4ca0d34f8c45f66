"""FedBABU: the head is never trained; the body is averaged, and a site fine-tunes before personal evaluation.

Oh et al. 2022, arXiv 2106.06042, Algorithm 1. All sites keep the head of the run's first version, so that their
bodies learn for the same head. Fine-tuning starts again from each version, and its result is discarded.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Phase,
    Plan,
    State,
    TaskContext,
    WorkerHalf,
)
from tessera.shared.model.selectors import EVERYTHING, Match, Selector, roles
from tessera.shared.schema import Condition


class FedBabuSettings(MethodSettings):
    conditions = (Condition(("tune",), lambda settings: settings.tune_epochs > 0, "tune_epochs above 0"),)

    head: tuple[Match, ...] = Field(
        default=roles("head").include, min_length=1, description="the blocks that keep their first value"
    )
    tune: Literal["full", "body", "head"] = Field(default="full", description="the part that a site fine-tunes")
    tune_epochs: int = Field(default=5, ge=0, le=1000, description="fine-tuning epochs before a personal evaluation")

    @property
    def body(self) -> Selector:
        return Selector(exclude=self.head)

    @property
    def tuned(self) -> Selector:
        return {"full": EVERYTHING, "body": self.body, "head": Selector(include=self.head)}[self.tune]


class FedBabuCoordinator(CoordinatorHalf[FedBabuSettings]):
    def start(self, state: State) -> State:
        self.run.require_trainable(self.settings.tuned, f"fine-tunes the part {self.settings.tune!r} at each site")
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(stage="body", train=self.settings.body, upload=self.settings.body)


class FedBabuWorker(WorkerHalf[FedBabuSettings]):
    def personalization_phases(self, context: TaskContext) -> Sequence[Phase]:
        return [Phase(self.settings.tuned, epochs=self.settings.tune_epochs, name="fine-tuning")]


METHOD = Method(
    name="fedbabu",
    good_for="a body to fine-tune at each site later; the head (its last, classifying layer) stays fixed",
    sends="everything but the head",
    settings=FedBabuSettings,
    coordinator=FedBabuCoordinator,
    worker=FedBabuWorker,
    source="Oh et al., FedBABU: Toward Enhanced Representation for FL, arXiv 2106.06042, Algorithm 1",
)

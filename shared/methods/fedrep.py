"""FedRep: each round the site's own head is trained on the frozen body, then the body on the frozen head.

Collins et al. 2021, arXiv 2102.07078, Algorithm 1. The head stays and the body is averaged, as in FedPer.
"""

from collections.abc import Sequence

from pydantic import Field

from tessera.shared.methods.base import Method, Phase, TaskContext
from tessera.shared.methods.fedper import FedPerCoordinator, FedPerSettings, FedPerWorker
from tessera.shared.model.selectors import Selector


class FedRepSettings(FedPerSettings):
    head_epochs: int = Field(default=1, ge=1, le=1000, description="epochs for the head, before the body")

    def epochs_left(self, most: int) -> int:
        return most - self.head_epochs


class FedRepWorker(FedPerWorker):
    settings: FedRepSettings

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(self.settings.kept, epochs=self.settings.head_epochs), Phase(self.settings.shared)]


METHOD = Method(
    name="fedrep",
    good_for="the same as fedper, with head (the last, classifying layer) and body trained in turn",
    sends="everything but the head",
    settings=FedRepSettings,
    coordinator=FedPerCoordinator,
    worker=FedRepWorker,
    source="Collins et al., Exploiting Shared Representations for Personalized FL, arXiv 2102.07078, Algorithm 1",
)

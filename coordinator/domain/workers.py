"""Live workers, as planning sees them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.coordinator.domain.eligibility import policy_of
from tessera.shared.api.tasks import AdvertisedPolicy
from tessera.shared.methods.base import Participant


@dataclass(frozen=True)
class LiveWorker:
    """A live worker: its row's id, its name, which orders and seeds everything, and its declaration."""

    id: str
    name: str
    site: str
    declared: dict[str, Any]
    last_round: int = 0
    """As `Participant.last_round`, if it was looked up."""

    @property
    def advertised_policy(self) -> AdvertisedPolicy | None:
        return policy_of(self.declared)

    def participant(self, dataset: str) -> Participant:
        examples = self.declared["datasets"].get(dataset, 0)
        resources = self.declared.get("resources", {})
        return Participant(self.name, examples, resources, self.site, self.last_round)


def ids(workers: Sequence[LiveWorker]) -> set[str]:
    return {worker.id for worker in workers}


def sites_of(workers: Iterable[LiveWorker]) -> set[str]:
    return {worker.site for worker in workers}

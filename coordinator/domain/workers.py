"""Live workers, as planning sees them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.coordinator.domain.eligibility import policy_of, refused_plans
from tessera.shared.api.runs import Ineligibility, RunSpec
from tessera.shared.api.tasks import AdvertisedPolicy
from tessera.shared.methods.base import Participant, Plan, State
from tessera.shared.methods.registry import epochs_left
from tessera.shared.model.spec import Model
from tessera.shared.rounds.planning import own_steps, plan_round
from tessera.shared.schedule import Pace, local_steps, steps_per_epoch, trains_on_few
from tessera.shared.schema import DEFAULT_STUDY


@dataclass(frozen=True)
class LiveWorker:
    """A live worker: its row's id, its name, which orders and seeds everything, and its declaration."""

    id: str
    name: str
    site: str
    declared: dict[str, Any]
    last_round: int = 0
    """As `Participant.last_round`, if it was looked up."""
    studies: frozenset[str] = frozenset([DEFAULT_STUDY])
    """The studies of its site."""
    steps: int | None = None
    """As `Participant.steps`."""

    @property
    def advertised_policy(self) -> AdvertisedPolicy | None:
        return policy_of(self.declared)

    def participant(self, dataset: str) -> Participant:
        examples = self.declared["datasets"].get(dataset, 0)
        resources = self.declared.get("resources", {})
        return Participant(self.name, examples, resources, self.site, self.last_round, self.steps)


def in_study(study: str, workers: Iterable[LiveWorker]) -> list[LiveWorker]:
    """Return the workers of the study's sites, which alone may have tasks of its runs."""
    return [worker for worker in workers if study in worker.studies]


def ids(workers: Sequence[LiveWorker]) -> set[str]:
    return {worker.id for worker in workers}


def sites_of(workers: Iterable[LiveWorker]) -> set[str]:
    return {worker.site for worker in workers}


def with_steps(spec: RunSpec, workers: Sequence[LiveWorker], measured: Mapping[str, Pace]) -> list[LiveWorker]:
    """Return the workers with their numbers of steps in a round of fitted work, as `own_steps`
    returns them, within their sites' policies."""
    found = {one.name: one for one in own_steps(spec, [each.participant(spec.dataset) for each in workers], measured)}
    return [replace(one, steps=_permitted(spec, found[one.name], one.advertised_policy)) for one in workers]


def _permitted(spec: RunSpec, worker: Participant, policy: AdvertisedPolicy | None) -> int | None:
    """Return a worker's number of steps within its site's policy; None for as many as the run's settings say."""
    training, steps = spec.training, worker.steps
    if steps is None or policy is None:
        return steps
    usual = local_steps(training, worker.examples)
    if spec.privacy and spec.privacy.unit == "group":
        # Only the site knows how many steps an epoch over its groups has.
        most = usual
    else:
        most = epochs_left(spec.method, policy.max_epochs) * steps_per_epoch(training, worker.examples)
    steps = min(steps, max(most, usual))
    few = trains_on_few(training.of_steps(steps), worker.examples, policy.min_batch or 0)
    return None if few or steps == usual else steps


def plan_willing(
    spec: RunSpec, model: Model, state: State, willing: Sequence[LiveWorker], quorum: int = 1
) -> tuple[Mapping[str, Plan], dict[str, Ineligibility]]:
    """Return plans for the workers whose sites would send what is planned, as far as they advertise their policies,
    and why the others would not; no plans for fewer sites than the quorum. Raises what the method raises."""
    refused: dict[str, Ineligibility] = {}
    while len(sites_of(left := [worker for worker in willing if worker.name not in refused])) >= quorum:
        plans = plan_round(spec, model, state, [worker.participant(spec.dataset) for worker in left])
        more = refused_plans(spec, model, plans, {w.name: w.advertised_policy for w in left if w.name in plans})
        if not more:
            return plans, refused
        refused |= more
    return {}, refused

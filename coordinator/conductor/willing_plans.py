"""Plans for a round's workers that their sites would accept."""

from collections.abc import Collection, Mapping, Sequence

from tessera.coordinator.conductor.liveness import TooFewWilling, require
from tessera.coordinator.domain.eligibility import Vocabulary, unsuited
from tessera.coordinator.domain.workers import LiveWorker, plan_willing, sites_of
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import Plan, State
from tessera.shared.model.spec import Model


def plans_beside(
    at_work: Collection[str],
    spec: RunSpec,
    model: Model,
    state: State,
    vocabulary: Vocabulary,
    willing: Sequence[LiveWorker],
    *,
    again: bool,
) -> Mapping[str, Plan]:
    """Plan for the workers whose sites would do what is planned, beside the sites that are at work. Raises
    TooFewWilling; with `again` also if there is no such worker."""
    if not (cohort := spec.cohort.beside(at_work)):
        require(not again, "the cohort has as many sites at work as its size")
        return {}
    spec = spec.model_copy(update={"cohort": cohort})
    refused = {w.name: no for w in willing if (no := unsuited(spec, w.declared, model, vocabulary))}
    suited = [worker for worker in willing if worker.name not in refused]
    plans, more = plan_willing(spec, model, state, suited, max(spec.cohort.quorum, 1))
    refused |= more
    sites = sites_of(worker for worker in willing if worker.name not in refused)
    if spec.cohort.lack(sites) or (again and not plans):
        said = "; ".join(f"{name}: {found.rule}: {found.detail}" for name, found in sorted(refused.items())[:4])
        raise TooFewWilling(f"{len(sites)} sites would do what the round asks: {said}")
    return plans

"""Previews and rehearsals of a run, attacks on its model, and the notes to read before it starts."""

import math
import time
from collections.abc import Collection, Iterator

from tessera.shared.api.runs import Preview, Run, RunSpec, SiteReport
from tessera.shared.client.client import Client
from tessera.shared.problems import Invalid, Problem
from tessera.shared.rounds.run_forecast import RunForecast

LOOK_SECONDS = 0.5


def preview_notes(found: Preview) -> Iterator[str]:
    """Yield remarks and warnings to read before the run is started."""
    yield from found.remarks_on_sites
    if found.eligible < found.quorum:
        after = f"; {found.awaiting_approval} more once their sites approve it" if found.awaiting_approval else ""
        yield f"warning: {found.eligible} would take part now, fewer than the quorum of {found.quorum}{after}"
    yield from (f"{one.worker} never sends: {'; '.join(one.never_sends)}" for one in found.workers if one.never_sends)
    left = [f"{one.worker} {one.evaluations_left}" for one in found.workers if one.evaluations_left is not None]
    if left:
        yield f"evaluations left for this run: {', '.join(left)}"
    yield from (f"warning: {warning}" for warning in found.warnings)


def previewed(client: Client, spec: RunSpec) -> Preview | None:
    """Return a run's preview; None if that fails, which does not prevent the run's start."""
    try:
        return client.preview_run(spec)
    except Problem:
        return None


def rehearsal_of(spec: RunSpec) -> RunSpec:
    """Return the run that rehearses a run. Raises Invalid for a run that trains nothing."""
    if spec.rounds == 0:
        remedy = "Set rounds to those of the run that you want to start."
        raise Invalid("a run without rounds trains nothing that could be rehearsed", remedy=remedy)
    return RunSpec.model_validate({**spec.model_dump(mode="json"), "rounds": 0, "rehearsal": spec.rounds})


def attack_of(spec: RunSpec) -> RunSpec:
    """Return the run that attacks the first version of a run, at the same sites."""
    cohort = spec.cohort.model_dump(mode="json", include={"sites", "deadline_seconds"})
    training = spec.training.model_dump(mode="json", include={"batch_size", "precision"})
    names = ("study", "model", "version", "dataset", "seed")
    kept = {name: getattr(spec, name) for name in names}
    about = {"name": f"attack-{spec.name}"[:64], "rounds": 0, "membership_attack": True}
    return RunSpec.model_validate({**kept, **about, "cohort": cohort, "training": training})


def remarks(found: Preview, asked: Collection[str]) -> Iterator[str]:
    """Yield the remarks of a preview beside the reports of a run without rounds: the workers that were not `asked`,
    with the reasons, and its warnings."""
    yield from (*found.remarks_on_sites, *found.warnings)
    for one in found.workers:
        reasons = one.warnings if one.worker in asked else one.ineligibilities
        said = "; ".join(f"{each.rule}: {each.detail}" for each in reasons)
        if said:
            yield f"{one.worker}{'' if one.worker in asked else ' is not asked'}: {said}"


def ended(client: Client, run: Run, seconds: float = math.inf) -> tuple[Run, list[SiteReport]]:
    """Return a run and the reports on it, once each site has answered or the run is over, after `seconds` at the
    latest."""
    until = time.monotonic() + seconds
    while run.state == "running" and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        run = client.run(run.id)
    return run, client.reports(run.id)


def forecast_of(client: Client, run: Run, *, wait: bool = True) -> tuple[Run, RunForecast]:
    """Return a rehearsal, as `ended` does, and the forecast of its run."""
    run, reports = ended(client, run, math.inf if wait else 0.0)
    return run, RunForecast.of(run.spec, reports)

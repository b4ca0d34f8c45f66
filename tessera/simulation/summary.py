"""The summary of a simulation: metrics and cost of its last version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.convergence import Curve
from tessera.shared.metrics.site_spread import PERSONAL, headlines, spreads

if TYPE_CHECKING:
    from tessera.simulation.result import Result

MEASUREMENTS = "measurements.csv"
MODEL = "model"
SUMMARY = "summary.json"


def summary_of(result: Result, reach: Sequence[float] = ()) -> dict[str, Any]:
    """Return the summary, as the result's folder has it in SUMMARY."""
    curve = result.history.curve()
    last, outcomes = result.versions[-1], result.outcomes
    at_sites = spreads(result.measurements).get(last.number, {})
    return {
        "name": result.spec.name,
        "method": result.spec.method.name,
        "seed": result.spec.seed,
        "version": last.number,
        "digest": last.digest,
        "scores": result.scores().get(last.number, {}),
        "sites": {name: asdict(spread) for name, spread in at_sites.items()},
        "scalars": last.scalars,
        "warnings": last.warnings,
        "curve": curve and asdict(curve),
        "convergence": curve and asdict(curve.convergence(reach)),
        "unmeasured": [_unmeasured(task) for task in result.unmeasured],
        "download_bytes": sum(outcome.download_bytes for outcome in outcomes),
        "upload_bytes": sum(outcome.upload_bytes for outcome in outcomes),
        "simulated_seconds": result.simulated_seconds,
        "model": str(result.folder / MODEL),
        "measurements": str(result.folder / MEASUREMENTS),
    }


def _unmeasured(task: TaskView) -> dict[str, Any]:
    problem = task.problem
    reason, remedy = (problem.detail, problem.remedy) if problem else ("", "")
    return {"version": task.round, "worker": task.worker, "reason": reason, "remedy": remedy}


def figures_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the main metrics and the bytes moved, by the names that people read.

    A method with own models is measured by these: they have the names that other methods' versions have, so that both
    are in the same row of a comparison, and its own versions have other names.
    """
    at_sites = summary["sites"]
    of_version = " of the version" if _own(at_sites) else ""

    def named(name: str) -> str:
        return name.removeprefix(PERSONAL) if name.startswith(PERSONAL) else name + of_version

    figures = {named(name): value for name, value in summary["scores"].items()}
    for name in headlines(at_sites):
        spread = at_sites[name]
        figures |= {f"{named(name)} (mean of sites)": spread["mean"], f"{named(name)} (worst site)": spread["worst"]}
    if (curve := curve_of(summary)) and (jitter := curve.convergence().jitter) is not None:
        figures[f"jitter of {named(curve.title)}"] = jitter
    figures["megabytes down"] = summary["download_bytes"] / 1e6
    figures["megabytes up"] = summary["upload_bytes"] / 1e6
    figures["simulated hours"] = max(summary["simulated_seconds"].values()) / 3600
    return dict(sorted(figures.items(), key=lambda pair: of_version != "" and of_version in pair[0]))


def curve_of(summary: Mapping[str, Any]) -> Curve | None:
    """Return the main score by version; None if no version was measured, or by a version of Tessera without it."""
    return Curve.read(summary.get("curve"))


def remarks_on(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield remarks for a reader of `figures_of`."""
    at_sites = summary["sites"]
    if own := _own(at_sites):
        yield "the scores are those of the sites' own models"
        measured, every = at_sites[own[0]]["sites"], max(spread["sites"] for spread in at_sites.values())
        if measured < every:
            yield f"only {measured} of {every} sites had an own model: the scores are over these"


def _own(at_sites: Mapping[str, Any]) -> list[str]:
    return [name for name in at_sites if name.startswith(PERSONAL)]


def not_in_all(figures: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of the figures that some have and others lack."""
    return [name for name in dict.fromkeys(chain.from_iterable(figures)) if not all(name in each for each in figures)]

"""The summary of a simulation: metrics and cost of its last version."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.site_spread import headlines, spreads
from tessera.worker.simulation.result import Result

MEASUREMENTS = "measurements.csv"
MODEL = "model"
SUMMARY = "summary.json"


def summary_of(result: Result) -> dict[str, Any]:
    """Return the summary, as the result's folder has it in SUMMARY."""
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
        "unmeasured": [_unmeasured(task) for task in result.unmeasured],
        "download_bytes": sum(outcome.download_bytes for outcome in outcomes),
        "upload_bytes": sum(outcome.upload_bytes for outcome in outcomes),
        "seconds": sum(outcome.seconds() or 0.0 for outcome in outcomes),
        "model": str(result.folder / MODEL),
        "measurements": str(result.folder / MEASUREMENTS),
    }


def _unmeasured(task: TaskView) -> dict[str, Any]:
    problem = task.problem
    reason, remedy = (problem.detail, problem.remedy) if problem else ("", "")
    return {"version": task.round, "worker": task.worker, "reason": reason, "remedy": remedy}


def figures_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the main metrics and the bytes moved, by the names that people read."""
    figures = dict(summary["scores"])
    at_sites = summary["sites"]
    for name in headlines(at_sites):
        spread = at_sites[name]
        figures |= {f"{name} (mean of sites)": spread["mean"], f"{name} (worst site)": spread["worst"]}
    figures["megabytes down"] = summary["download_bytes"] / 1e6
    figures["megabytes up"] = summary["upload_bytes"] / 1e6
    return figures

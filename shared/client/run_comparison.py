"""Comparison of runs by their rounds and measurements."""

from collections.abc import Sequence

from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.metrics.comparison import History, RunComparison
from tessera.shared.metrics.comparison import compare as compared
from tessera.shared.problems import Invalid


def compare_runs(
    client: Client, runs: Sequence[Run], metric: str | None = None, reach: Sequence[float] = ()
) -> RunComparison:
    """Compare two runs or more. Raises Invalid for fewer, and for a metric that no run has."""
    if len({run.id for run in runs}) < max(2, len(runs)):
        named = ", ".join(run.spec.name for run in runs)
        raise Invalid(
            f"a comparison needs two or more different runs, not {named or 'none'}",
            remedy="Name each run once; `tessera run list` lists them.",
        )
    histories = [History.of(run, client.rounds(run.id), client.measurements(run.id)) for run in runs]
    if metric:
        known = {name for history in histories for one in history.measurements for name in one.metrics}
        if metric not in known:
            raise Invalid(
                f"none of these runs has the score {metric!r}",
                remedy=f"Measured were: {', '.join(sorted(known))}." if known else "None of them was evaluated.",
            )
    return compared(histories, metric, reach)

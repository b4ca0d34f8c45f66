"""Runs side by side."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.charts.run_charts import (
    AXES,
    Along,
    axis_of,
    choices,
    download,
    moved_to,
)
from tessera.coordinator.dashboard.queries import MAX_POINTS, evaluations, measured, round_costs
from tessera.coordinator.dashboard.runs import Metric, Reach
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, Signed, Visitor
from tessera.coordinator.dashboard.templating import NOTHING, metric_name, number, render
from tessera.coordinator.db import views
from tessera.coordinator.services import Services
from tessera.shared.api.runs import Run
from tessera.shared.metrics import svg_charts
from tessera.shared.metrics.comparison import History, RunComparison, best_version, compare, setting_text
from tessera.shared.metrics.site_spread import PERSONAL, is_better_low
from tessera.shared.metrics.svg_charts import Panel, Series, svg_file
from tessera.shared.problems import Invalid

router = APIRouter(prefix=f"{PREFIX}/runs/compare", include_in_schema=False, route_class=PageRoute)

MAX_COMPARED = 6

Runs = Annotated[list[str] | None, Query(alias="run", max_length=50)]


@router.get("")
def show_comparison(
    request: Request,
    serving: Serving,
    who: Signed,
    run: Runs = None,
    metric: Metric = None,
    x: Along = "version",
    reach: Reach = None,
) -> Response:
    """Show the runs that were ticked: a score of each in one chart, their cost, and the settings that differ."""
    histories = _histories(serving, who, run or [], metric)
    names = choices((one.site, name) for history in histories for one in history.measurements for name in one.metrics)
    found = compare(histories, metric if metric in names else None, reach or ())
    return render(
        request,
        "compare.html",
        who,
        found=found,
        top=_top(found),
        converged=[(run.name, *fact) for run in found.runs if run.convergence for fact in run.convergence.facts()],
        score=reach,
        address="&".join(f"run={history.run.id}" for history in histories),
        metrics=names,
        x=x,
        axes=AXES,
        panel=_panel(found, x),
        settings={
            name: [NOTHING if value is None else setting_text(value) for value in values]
            for name, values in found.settings.items()
        },
    )


@router.get("/chart.svg")
def download_chart(
    serving: Serving, who: Signed, run: Runs = None, metric: Metric = None, x: Along = "version"
) -> Response:
    """Return the chart of a comparison as a file of its own."""
    panel = _panel(compare(_histories(serving, who, run or [], metric), metric), x)
    return download(svg_file(panel), "comparison.svg", "image/svg+xml")


def _histories(serving: Services, who: Visitor, ids: list[str], metric: str | None) -> list[History]:
    chosen = list(dict.fromkeys(ids))
    if not 2 <= len(chosen) <= MAX_COMPARED:
        raise Invalid(
            f"a comparison needs two to {MAX_COMPARED} different runs, not {len(chosen)}",
            remedy="Go back to the list of runs, and tick them there.",
        )
    with serving.reading(who.principal) as session:
        runs = [views.run_view(session, views.find_run(session, one)) for one in chosen]
        return [_history(session, run, metric) for run in runs]


def _history(session: Session, run: Run, metric: str | None) -> History:
    every = evaluations(session, run, metric)
    marked = [best.number for name in {metric, None} if (best := best_version(every, metric=name))]
    return History(run, round_costs(session, run), measured(session, run, every, MAX_POINTS // 2, marked), every)


def _panel(found: RunComparison, along: Along) -> Panel:
    """Chart the compared score of each run; the table has bytes and seconds too."""
    drawn = []
    for one in found.runs:
        best = one.best.number if one.best and one.best.metric == one.metric else None
        own = one.metric != found.metric and (one.metric or "").startswith(PERSONAL)
        line = Series(f"{one.name}, own models" if own else one.name, one.scores, main=True, best=best)
        axis = one.bytes if along == "bytes" else one.seconds
        drawn.append(line if along == "version" else moved_to(line, axis_of(axis)))
    title = metric_name(found.title or "accuracy")
    places = sorted({at for line in drawn for at, _ in line.ordered}, reverse=True)
    exact = svg_charts.digits([value for line in drawn for _, value in line.ordered])
    values = [dict(line.ordered) for line in drawn]
    rows = [[AXES[along](at), *(number(points.get(at), exact) for points in values)] for at in places]
    picture = svg_charts.lines("comparison-chart", title, drawn, along=along, label=AXES[along])
    return Panel("comparison", title, picture, [along, *(line.name for line in drawn)], rows, drawn)


def _top(found: RunComparison) -> float | None:
    """Return the best of the runs' best values, if all are of the same score over the same sites."""
    best = [one.best for one in found.runs if one.best]
    if len({(one.metric.removeprefix(PERSONAL), one.sites) for one in best}) != 1:
        return None
    return (min if is_better_low(best[0].metric) else max)(one.value for one in best)

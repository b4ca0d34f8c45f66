"""Charts of a run, each with a table of the same values."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from fastapi import Response
from markupsafe import Markup
from sqlalchemy.orm import Session

from tessera.coordinator.dashboard.queries import (
    MAX_BARS,
    RoundSum,
    by_worker,
    evaluations,
    layer_shares,
    measured,
    natural,
    round_costs,
    round_sums,
    short_layers,
    stage_bands,
    thinned,
    version_numbers,
    version_times,
)
from tessera.coordinator.dashboard.templating import first_up, metric_name, number, percent, size
from tessera.shared.aggregation.drift import DISAGREEMENT, MOVEMENT
from tessera.shared.api.runs import Run
from tessera.shared.methods.base import Chart
from tessera.shared.methods.registry import charts
from tessera.shared.metrics import svg_charts
from tessera.shared.metrics.comparison import (
    MAIN_SCORES,
    BestVersion,
    MainScore,
    best_of,
    different_sites,
    main_score,
    totals,
)
from tessera.shared.metrics.convergence import Curve, RoundCost
from tessera.shared.metrics.site_spread import BETTER_LOW, PERSONAL, SiteScores, scores_by_site
from tessera.shared.metrics.svg_charts import Band, Panel, Points, Series
from tessera.shared.run_settings import with_meaning
from tessera.shared.schema import EPSILON, SCORED_LABELS

MAX_LINES = 8
MAX_COLUMNS = 40
MAX_CHOICES = 64
"""Most metrics to choose from on a page."""
TRAINING_LOSS = "training_loss"
"""The loss that workers report of their training, beside the metrics of evaluations."""

Along = Literal["version", "bytes", "time"]
AXES: Mapping[Along, Callable[[float], str]] = {
    "version": svg_charts.whole,
    "bytes": size,
    "time": svg_charts.seconds,
}
"""The horizontal axes of scores, and how their values are written."""


CLIENT_DRIFT = Chart(
    "client drift by role",
    (DISAGREEMENT, MOVEMENT),
    "they need a round with two updates",
    description="How far sites' steps are from their mean step, and its length: as shares of the blocks' length.",
)


def _charts(run: Run) -> Sequence[Chart]:
    """Return the charts of metrics that the run's method, or its settings of signals, add to versions."""
    return [*charts(run.spec.method), *([CLIENT_DRIFT] if run.spec.signals.drift else [])]


@dataclass(frozen=True)
class ChartFigures:
    """Figures of a run, for its charts."""

    run: Run
    measurements: Sequence[SiteScores]
    main: MainScore | None
    """The main score in all evaluations; `measurements` may be a selection."""
    best: BestVersion | None
    """Among all evaluations."""
    sums: Sequence[RoundSum]
    costs: Sequence[RoundCost]

    @classmethod
    def of(cls, session: Session, run: Run) -> Self:
        every = evaluations(session, run)
        main = main_score(every)
        best = best_of(main) if main else None
        found = measured(session, run, every, best=[best.number] if best else [])
        return cls(run, found, main, best, round_sums(session, run, MAX_BARS), round_costs(session, run))

    @cached_property
    def curve(self) -> Curve | None:
        """The main score of each measured version, with its cost."""
        return Curve.of(self.main.name, self.main.title, self.main.values, self.costs) if self.main else None

    @cached_property
    def metrics(self) -> list[str]:
        """The names to choose from: the main scores, the others, and the workers' training loss."""
        reported = {(one.site, *one.metrics) for one in self.measurements}
        names = choices((site, name.removeprefix(PERSONAL)) for site, *metrics in reported for name in metrics)
        return [*names, *([TRAINING_LOSS] if self.run.version.number else [])]

    def chosen(self, metric: str | None) -> str:
        """Return the metric to show for a person's choice."""
        names = [*self.metrics, "accuracy"]
        return metric if metric in names else names[0]


def choices(measured: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names to choose from, the main scores first, of pairs of a site and a name that it measured.

    Of too many, the names that most sites measured: one site's inventions displace no others.
    """
    sites = Counter(name for _, name in set(measured) if name != SCORED_LABELS)
    shown = sorted(sites, key=lambda name: (name not in MAIN_SCORES, -sites[name], name))[:MAX_CHOICES]
    main = [name for name in MAIN_SCORES if name in shown]
    return [*main, *sorted(set(shown).difference(main))]


def panels(session: Session, figures: ChartFigures, metric: str | None, along: Along) -> list[Panel]:
    """Return the charts of a run that have a picture: a score, a loss, bytes, layers, and those of its method."""
    run = figures.run
    bands = stage_bands(session, run.id)
    step = thinned(run)
    every = f"Every {step} versions." if step > 1 else ""
    moved, lasted = totals(figures.costs) if along != "version" else ({}, {})
    axis = axis_of(moved if along == "bytes" else lasted) if along != "version" else None
    first = figures.chosen(metric)
    second = next((name for name in ("loss", TRAINING_LOSS) if name in figures.metrics and name != first), "")
    shown = [_metric(session, figures, name, bands, every, along, axis) for name in (first, second) if name]
    shown += [_versions_by_time(session, run, every), _bytes_by_round(figures.sums), *_layers(session, run)]
    declared = _charts(run)
    metrics = version_numbers(session, run, tuple(name for chart in declared for name in chart.scalars))
    shown += [_declared(chart, metrics, bands, every) for chart in declared]
    shown.append(_epsilon(session, run, bands, every))
    return [panel for panel in shown if panel.picture]


def absent(run: Run, measurements: Sequence[SiteScores], shown: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each expected chart that is missing, and the reason."""
    evaluation, method = run.spec.evaluation, run.spec.method
    if evaluation is None:
        yield "scores", "the run asks for no evaluation"
    elif not measurements:
        yield "scores", "nothing has been evaluated yet"
    elif not any(one.held_out for one in measurements):
        why = "no site has evaluated yet" if evaluation.sites else "the run does not have sites evaluate"
        yield "scores by site", why
    if "bytes" in shown and "heat" not in shown:
        yield "layers by site", "every update has the same layers"
    for chart in _charts(run):
        if _ident(chart) not in shown:
            lacking = [f"{n} is {value}" for n, value in chart.requires.items() if method.settings.get(n) != value]
            yield chart.name, f"they are measured if {' and '.join(lacking)}" if lacking else chart.missing
    if run.spec.privacy and "epsilon" not in shown:
        yield "epsilon by worker", "no update has been accepted yet"


def _declared(chart: Chart, metrics: Mapping[str, Mapping[int, float]], bands: Sequence[Band], every: str) -> Panel:
    """Draw a chart that the run's method declares."""
    lines = [
        Series((name.partition(".")[2] or name).replace("_", " "), points, main=True)
        for name, points in sorted(metrics.items(), key=lambda pair: natural(pair[0]))
        if name.startswith(chart.scalars)
    ]
    of_all = f"The first {MAX_LINES} of {len(lines)}." if len(lines) > MAX_LINES else ""
    note = " ".join(filter(None, (chart.description, of_all, every)))
    title = (chart.title or first_up(chart.name)) + (f" ({chart.unit})" if chart.unit else "")
    return _along(_ident(chart), title, lines[:MAX_LINES], bands, note)


def _ident(chart: Chart) -> str:
    """Return the HTML id of a method's chart, distinct from the dashboard's own charts."""
    return f"method-{chart.name.replace(' ', '-')}"


def _metric(
    session: Session,
    figures: ChartFigures,
    name: str,
    bands: Sequence[Band],
    note: str,
    along: Along,
    axis: Mapping[int, float] | None,
) -> Panel:
    """Chart a metric of the global model, of the sites' own models, and of the global one at each site."""
    marked = {figures.best.metric: figures.best.number} if figures.best else {}
    title = name
    if name == TRAINING_LOSS:
        apart = by_worker(session, figures.run, "loss")
        numbers = sorted({number for points in apart.values() for number in points})
        of_all = {n: [points[n] for points in apart.values() if n in points] for n in numbers}
        lines = [Series("mean of workers", {n: sum(values) / len(values) for n, values in of_all.items()}, main=True)]
        note = f"As workers report it, over those of each round. {note}".strip()
    else:
        own_name, lines = PERSONAL + name, []
        found = [score for each in (name, own_name) if (score := main_score(figures.measurements, each))]
        for score in found:
            line = "sites' own models" if score.name == own_name else "global"
            lines.append(Series(line, score.values, main=True, best=marked.get(score.name)))
            title = score.title.removeprefix(PERSONAL)
        if remark := different_sites(found):
            note = f"{first_up(remark)}. {note}".strip()
        apart = scores_by_site(figures.measurements, name)
    room = MAX_LINES - len(lines)
    if len(apart) > room:
        what = "workers" if name == TRAINING_LOSS else "sites"
        note = f"{note} Of {len(apart)} {what}, those with the worst last value.".strip()
    low = name in BETTER_LOW or name == TRAINING_LOSS
    worst = sorted(apart, key=lambda one: _last(apart[one]), reverse=low)[:room]
    lines += [Series(one, apart[one]) for one in sorted(worst)]
    return _along(name, metric_name(title), [line for line in lines if line.points], bands, note, along, axis)


def _epsilon(session: Session, run: Run, bands: Sequence[Band], every: str) -> Panel:
    """Chart the epsilon that the run has spent at each worker; of many, at those with the most."""
    privacy = run.spec.privacy
    spent = by_worker(session, run, EPSILON) if privacy else {}
    most = sorted(spent, key=lambda worker: _last(spent[worker]), reverse=True)[:MAX_LINES]
    lines = [Series(worker, spent[worker]) for worker in sorted(most)]
    bound = (
        f"At delta {privacy.delta:g} for each {privacy.unit}; the limit of the run is "
        f"{with_meaning(privacy.epsilon, f'{privacy.epsilon:g}')}{privacy.caveat}."
        if privacy
        else ""
    )
    note = f"{bound} Only a site's ledger has the total of all runs on a data set. {every}"
    return _along("epsilon", "Epsilon spent, by worker", lines, bands, note.strip())


def _last(points: Mapping[int, float]) -> float:
    return points[max(points)]


def _along(
    ident: str,
    title: str,
    lines: Sequence[Series],
    bands: Sequence[Band],
    note: str,
    along: Along = "version",
    axis: Mapping[int, float] | None = None,
) -> Panel:
    """Chart lines by version or, with `axis`, by the cost of each version."""
    places = sorted({int(at) for line in lines for at in line.points}, reverse=True)
    exact = svg_charts.digits([value for line in lines for _, value in line.ordered])
    columns, drawn = ["version", *(line.name for line in lines)], lines
    values = [dict(line.points) for line in lines]
    rows = [[str(at), *(number(points.get(at), exact) for points in values)] for at in places]
    if axis is not None:
        drawn, bands = [moved_to(line, axis) for line in lines], ()
        rows = [[row[0], AXES[along](axis[at]), *row[1:]] for at, row in zip(places, rows, strict=True) if at in axis]
        columns.insert(1, along)
    picture = svg_charts.lines(f"{ident}-chart", title, drawn, bands=bands, along=along, label=AXES[along])
    return Panel(ident, title, picture, columns, rows, lines[:MAX_LINES], note)


def axis_of(totals_by_version: Mapping[int, float]) -> dict[int, float]:
    """Return each version's position, its total; of versions with the same total only the last one has it."""
    by_place = {total: number for number, total in sorted(totals_by_version.items())}
    return {number: total for total, number in by_place.items()}


def moved_to(line: Series, axis: Mapping[int, float]) -> Series:
    """Return a line by version as one along another axis, by version too."""
    points: Points = {axis[int(at)]: value for at, value in line.ordered if int(at) in axis}
    return Series(line.name, points, line.main, axis.get(int(line.best)) if line.best is not None else None)


def _versions_by_time(session: Session, run: Run, note: str) -> Panel:
    """Chart when versions were made; no picture before there are two beside the first."""
    times = version_times(session, run) if run.version.number > 1 else {}
    line = Series("version", {at: float(number) for number, at in times.items()}, main=True)
    title, label = "Versions by time", AXES["time"]
    picture = svg_charts.lines("versions-chart", title, [line], along="time", label=label)
    rows = [[str(number), label(at)] for number, at in sorted(times.items(), reverse=True)]
    return Panel("versions", title, picture, ("version", "made after"), rows, (), note)


def _bytes_by_round(sums: Sequence[RoundSum]) -> Panel:
    rounds = {one.round.number: one.moved for one in reversed(sums) if one.moved.updates}
    down = Series("down", {n: float(one.down) for n, one in rounds.items()})
    up = Series("up", {n: float(one.up) for n, one in rounds.items()})
    full = Series("whole models both ways", {n: float(one.full) for n, one in rounds.items()})
    whole, total = sum(full.points.values()), sum(down.points.values()) + sum(up.points.values())
    sent = f"{size(total)} sent, of {size(whole)} for whole models both ways." if whole else ""
    picture = svg_charts.bars(
        "bytes-chart", "Bytes by round", (down, up), full, along="round", label=size, description=sent
    )
    rows = [
        [str(n), size(down.points[n]), size(up.points[n]), size(full.points[n]),
         percent((down.points[n] + up.points[n]) / full.points[n])]
        for n in sorted(rounds, reverse=True)
    ]  # fmt: skip
    note = f"{sent} The dashed line shows whole models."
    if len(sums) == MAX_BARS:
        note = f"The latest {MAX_BARS} rounds. {note}"
    columns = ("round", "down", "up", "whole models", "of whole")
    return Panel("bytes", "Bytes by round", picture, columns, rows, (down, up), note, "bars")


def _layers(session: Session, run: Run) -> list[Panel]:
    """Chart the layers of each site's and of each round's updates; without a picture if all have the same."""
    layers, by_site, by_round = layer_shares(session, run, MAX_COLUMNS)
    names = short_layers(layers)
    by_layer = {f"layer {name}": [shares[place] for shares in by_round.values()] for place, name in enumerate(names)}
    return [
        _heat("heat", "Layers that each site trained", by_site, names, "site", "layer"),
        _heat("heat-rounds", "Layers that each round trained", by_layer, list(by_round), "layer", "round"),
    ]


def _heat(
    ident: str, title: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str], of: str, along: str
) -> Panel:
    description = f"The share of each {'site' if of == 'site' else 'round'}'s updates with blocks of a layer."
    varied = any(share < 1 for shares in rows.values() for share in shares)
    picture = svg_charts.heat(f"{ident}-chart", title, rows, columns, description, along) if varied else Markup("")
    table = [[name, *(percent(share) for share in shares)] for name, shares in rows.items()]
    return Panel(ident, title, picture, (of, *columns), table, (), description, "heat")


# ---------------------------------------------------------------- downloads


def download(content: str, name: str, media_type: str) -> Response:
    """Return a file for the browser to store."""
    return Response(content, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'})

"""Runs and their rounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import fmean
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParam
from fastapi.responses import RedirectResponse
from markupsafe import Markup
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving, require_role
from tessera.coordinator.dashboard import svg_charts
from tessera.coordinator.dashboard.queries import (
    MAX_BARS,
    RoundSum,
    TrafficTotals,
    epsilon_by_worker,
    forecast,
    layers_by_site,
    measured,
    moved_by_round,
    moved_by_run,
    natural,
    past_seconds,
    round_sums,
    short_layers,
    stage_bands,
    thinned,
    version_numbers,
)
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import STEERING, Fields, PageRoute, Sender, Signed, Visitor
from tessera.coordinator.dashboard.svg_charts import Interval, Series
from tessera.coordinator.dashboard.templating import first_up, number, percent, plural, render, size
from tessera.coordinator.db import views
from tessera.coordinator.db.snapshots import candidates, invitation, live_workers
from tessera.coordinator.db.tables import AuditRow, RoundRow, RunRow, VersionRow
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.coordinator.domain.workers import sites_of
from tessera.coordinator.operations.runs import patch_run
from tessera.coordinator.services import Services
from tessera.shared.api.runs import Measurement, Round, Run, RunPatch, RunSpec
from tessera.shared.api.tasks import TaskView
from tessera.shared.methods.base import Chart
from tessera.shared.methods.registry import charts
from tessera.shared.metrics.site_spread import BETTER_LOW, PERSONAL, scores_by_site, scores_by_version, spreads
from tessera.shared.problems import Fault, Invalid, NotFound
from tessera.shared.rounds.eta import LIVE_TASKS
from tessera.shared.rounds.outliers import DISTANCE, JUDGES, NORM
from tessera.shared.run_settings import Privacy
from tessera.shared.schema import RunState

router = APIRouter(prefix=f"{PREFIX}/runs", include_in_schema=False, route_class=PageRoute)

STATES = ("running", "paused", "cancelled")
AT_A_TIME = 50
SHOWN_ROUNDS = 10
MAX_LINES = 8
HEADLINE = ("accuracy", "macro_f1", "loss")
ODD = 2.0
"""Multiple of the round's median from which an outlier score is marked."""

Scores = Mapping[int, Mapping[str, float]]
"""Metrics by version and name."""

Before = Annotated[str | None, Query(max_length=64)]
RoundNumber = Annotated[int, PathParam(ge=1, lt=1 << 31)]
Attempt = Annotated[int | None, Query(ge=1, lt=1 << 31)]


@dataclass(frozen=True)
class Panel:
    """A chart with its title, and a table of the same values."""

    ident: str
    title: str
    picture: Markup
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    series: Sequence[Series] = ()
    note: str = ""


@router.get("")
def list_runs(
    request: Request, serving: Serving, who: Signed, state: RunState | None = None, before: Before = None
) -> Response:
    with serving.database.snapshot() as session:
        query = select(RunRow).order_by(RunRow.created_at.desc(), RunRow.id.desc()).limit(AT_A_TIME + 1)
        if state is not None:
            query = query.where(RunRow.state == state)
        if before is not None:
            last = views.find_run(session, before)
            same = (RunRow.created_at == last.created_at) & (RunRow.id < last.id)
            query = query.where((RunRow.created_at < last.created_at) | same)
        rows = session.scalars(query).all()
        of_state = f"state={state}&" if state else ""
        older = f"{PREFIX}/runs?{of_state}before={rows[AT_A_TIME - 1].id}" if len(rows) > AT_A_TIME else None
        return render(
            request,
            "runs.html",
            who,
            state=state or "",
            counts=views.counts_by_state(session, RunRow),
            runs=[views.run_view(session, row) for row in rows[:AT_A_TIME]],
            by_run=moved_by_run(session),
            newer=f"{PREFIX}/runs?{of_state}" if before else None,
            older=older,
        )


@router.get("/{run_id}")
def show_run(run_id: str, request: Request, serving: Serving, who: Signed) -> Response:
    """Show a run: its progress, metrics and traffic."""
    now = serving.database.now()
    with serving.database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, run_id))
        open_round = _open_round(session, run)
        measurements = measured(session, run)
        scores = scores_by_version(measurements)
        latest = max(scores, default=None)
        at_sites = spreads(one for one in measurements if one.version == latest)
        shown = scores.get(latest, {}) if latest is not None else {}
        sums = round_sums(session, run, MAX_BARS)
        moved = moved_by_run(session, run_id).get(run_id, TrafficTotals())
        end = forecast(session, now, open_round) if open_round else None
        panels = [panel for panel in _charts(session, run, measurements, scores, sums) if panel.picture]
        facts = facts_of(run.spec, run.model_bytes)
        until = now if run.state in LIVE_RUN else run.updated_at.timestamp()
        return render(
            request,
            "run.html",
            who,
            run=run,
            steerable=_steers(session, who, run),
            warnings=session.get_one(VersionRow, (run_id, run.version.number)).warnings,
            measured=latest,
            headline=[(name, shown[name]) for name in HEADLINE if name in shown],
            spreads=at_sites.get(latest, {}) if latest is not None else {},
            moved=moved,
            remaining=_remaining(session, now, run, end),
            took=until - run.created_at.timestamp(),
            round=open_round,
            end=end,
            waiting_for=_waiting_for(session, serving, now, run),
            charts=panels,
            absent=list(_absent(run, measurements, {panel.ident for panel in panels})),
            rounds=sums[:SHOWN_ROUNDS],
            facts=[*facts, ("A site counts", run.bounds.summary)] if run.bounds else facts,
        )


@router.get("/{run_id}/rounds")
def list_rounds(
    run_id: str, request: Request, serving: Serving, who: Signed, before: Annotated[int | None, Query(ge=1)] = None
) -> Response:
    with serving.database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, run_id))
        rounds = round_sums(session, run, AT_A_TIME, before)
        here = f"{PREFIX}/runs/{run_id}/rounds"
        more = len(rounds) == AT_A_TIME and rounds[-1].round.number > 1
        return render(
            request,
            "rounds.html",
            who,
            run=run,
            rounds=rounds,
            newer=here if before else None,
            older=f"{here}?before={rounds[-1].round.number}" if more else None,
        )


@router.get("/{run_id}/rounds/{number}")
def show_round(
    run_id: str, number: RoundNumber, request: Request, serving: Serving, who: Signed, attempt: Attempt = None
) -> Response:
    """Show one attempt at a round, by default the latest: what each worker did when."""
    now = serving.database.now()
    with serving.database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, run_id))
        same = (RoundRow.run_id == run_id) & (RoundRow.number == number)
        attempts = session.scalar(select(func.max(RoundRow.attempt)).where(same))
        row = session.scalars(select(RoundRow).where(same, RoundRow.attempt == (attempt or attempts))).one_or_none()
        if row is None:
            raise NotFound(f"run {run_id} has no round {number}" + (f", try {attempt}" if attempt else ""))
        view = views.round_view(session, row)
        latest = session.scalar(select(func.max(RoundRow.number)).where(RoundRow.run_id == run_id))
        evaluated = moved_by_round(session, run, number, number)[number].evaluated if view.attempt == 1 else 0
        return render(
            request,
            "round.html",
            who,
            run=run,
            round=view,
            attempts=attempts,
            latest=latest,
            accepted=sum(task.is_accepted for task in view.tasks),
            judges=JUDGES,
            up=sum(task.upload_bytes for task in view.tasks),
            down=sum(task.download_bytes for task in view.tasks) + evaluated,
            evaluated=evaluated,
            end=forecast(session, now, view),
            picture=_timeline(session, now, view, row.id),
            rows=[(task, is_unusual(task.metrics), short_layers(task.layers)) for task in view.tasks],
        )


def _steers(session: Session, who: Visitor, run: Run) -> bool:
    """Return whether the visitor may pause, resume and cancel the run: as its owner or an administrator."""
    own = who.administers or session.get_one(RunRow, run.id).owner == who.principal.owner
    return who.steers and own and run.state in LIVE_RUN


# ---------------------------------------------------------------- a run's figures


def _open_round(session: Session, run: Run) -> Round | None:
    live = (RoundRow.run_id == run.id) & RoundRow.state.in_(LIVE_ROUND)
    row = session.scalars(select(RoundRow).where(live)).one_or_none()
    return views.round_view(session, row) if row else None


def _remaining(session: Session, now: float, run: Run, end: datetime | None) -> float | None:
    """Return the expected seconds until the run's end, from its latest rounds."""
    if run.state != "running" or end is None:
        return None
    stage = session.scalar(
        select(RoundRow.stage).where(RoundRow.run_id == run.id).order_by(RoundRow.number.desc()).limit(1)
    )
    past = past_seconds(session, run.id, stage or "")
    after = max(0, run.spec.rounds - run.version.number - 1)
    return max(0.0, end.timestamp() - now) + after * fmean(past)


def _waiting_for(session: Session, serving: Services, now: float, run: Run) -> str:
    live = live_workers(session, now - serving.settings.liveness_seconds)
    able = len(sites_of(candidates(session, invitation(session, session.get_one(RunRow, run.id)), live)))
    quorum = run.spec.cohort.quorum
    if able < quorum:
        return f"{able} of the {quorum} sites that it needs are live."
    over = run.version.number == run.spec.rounds
    return "its last version is being evaluated." if over else "the next one is about to open."


def facts_of(spec: RunSpec, model_bytes: int | None) -> list[tuple[str, str]]:
    """Return the run's settings for people."""
    settings = ", ".join(f"{name} {value}" for name, value in spec.method.settings.items())
    training, cohort = spec.training, spec.cohort
    batches = training.batch_size or "all"
    facts = [
        ("Method", spec.method.name + (f" ({settings})" if settings else "")),
        *([("Model", size(model_bytes))] if model_bytes is not None else []),
        ("Data set", spec.dataset),
        ("Cohort", f"{plural(cohort.size, 'site') if cohort.size else 'all live sites'}, quorum {cohort.quorum}"),
        ("Training", f"{plural(training.epochs, 'epoch')}, batches of {batches}"),
        ("Optimizer", f"{training.optimizer}, learning rate {training.learning_rate:g}"),
        ("Codec", spec.codec),
        ("Averaged over", spec.normalization),
        ("Robust rule", spec.robust.rule),
        ("Server optimizer", spec.server_optimizer.kind),
    ]
    privacy = spec.privacy
    bound = f"epsilon {privacy.epsilon:g}, delta {privacy.delta:g} at each worker" if privacy else "none"
    facts.append(("Differential privacy", bound))
    if spec.evaluation:
        where = [spec.evaluation.dataset] if spec.evaluation.dataset else []
        where += ["what sites hold out"] if spec.evaluation.sites else []
        facts.append(("Measured on", f"{' and '.join(where)}, every {spec.evaluation.every}"))
    if spec.cohort.sites:
        facts.append(("Sites", ", ".join(spec.cohort.sites)))
    return facts


def _charts(
    session: Session, run: Run, measurements: Sequence[Measurement], scores: Scores, sums: Sequence[RoundSum]
) -> list[Panel]:
    bands = stage_bands(session, run.id)
    step = thinned(run)
    every = f"Every {step} versions." if step > 1 else ""
    panels = [_metric(measurements, scores, name, bands, every) for name in ("accuracy", "loss")]
    panels += [_bytes_by_round(sums), _heat(session, run)]
    declared = charts(run.spec.method)
    metrics = version_numbers(session, run, tuple(name for chart in declared for name in chart.scalars))
    panels += [_declared(chart, metrics, bands, every) for chart in declared]
    if run.spec.privacy:
        panels.append(_epsilon(session, run, run.spec.privacy, bands, every))
    return panels


def _absent(run: Run, measurements: Sequence[Measurement], shown: set[str]) -> Iterator[tuple[str, str]]:
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
    for chart in charts(method):
        if _ident(chart) not in shown:
            lacking = [f"{n} is {value}" for n, value in chart.requires.items() if method.settings.get(n) != value]
            yield chart.name, f"they are measured if {' and '.join(lacking)}" if lacking else chart.missing
    if run.spec.privacy and "epsilon" not in shown:
        yield "epsilon by worker", "no update has been accepted yet"


def _declared(
    chart: Chart, metrics: Mapping[str, Mapping[int, float]], bands: Sequence[svg_charts.Band], every: str
) -> Panel:
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
    measurements: Sequence[Measurement], scores: Scores, name: str, bands: Sequence[svg_charts.Band], note: str
) -> Panel:
    """Chart a metric of the global model, of the sites' own models, and of the global one at each site."""
    of_global = {version: metrics[name] for version, metrics in scores.items() if name in metrics}
    lines = [Series("global", of_global, main=True)]
    personal = [one for one in measurements if PERSONAL + name in one.metrics]
    own = {v: s[PERSONAL + name].mean for v, s in spreads(personal).items()} if personal else {}
    if own:
        lines.append(Series("sites' own models, mean", own, main=True))
    sites = scores_by_site(measurements, name)
    room = MAX_LINES - len(lines)
    if len(sites) > room:
        note = f"{note} Of {len(sites)} sites, those with the worst last value.".strip()
    worst = sorted(sites, key=lambda site: _last(sites[site]), reverse=name in BETTER_LOW)[:room]
    lines += [Series(site, sites[site]) for site in sorted(worst)]
    return _along(name, name.replace("_", " ").capitalize(), [line for line in lines if line.points], bands, note)


def _epsilon(session: Session, run: Run, privacy: Privacy, bands: Sequence[svg_charts.Band], every: str) -> Panel:
    """Chart the epsilon that the run has spent at each worker; of many, at those with the most."""
    spent = epsilon_by_worker(session, run)
    most = sorted(spent, key=lambda worker: _last(spent[worker]), reverse=True)[:MAX_LINES]
    lines = [Series(worker, spent[worker]) for worker in sorted(most)]
    bound = f"At delta {privacy.delta:g}; the limit of the run is {privacy.epsilon:g}."
    note = f"{bound} Only a site's ledger has the total of all runs on a data set. {every}"
    return _along("epsilon", "Epsilon spent, by worker", lines, bands, note.strip())


def _last(points: Mapping[int, float]) -> float:
    return points[max(points)]


def _along(ident: str, title: str, lines: Sequence[Series], bands: Sequence[svg_charts.Band], note: str) -> Panel:
    picture = svg_charts.lines(f"{ident}-chart", title, lines, bands=bands, along="version")
    places = sorted({at for line in lines for at in line.points}, reverse=True)
    exact = svg_charts.digits([value for line in lines for _, value in line.ordered])
    rows = [[str(at), *(number(line.points.get(at), exact) for line in lines)] for at in places]
    return Panel(ident, title, picture, ("version", *(line.name for line in lines)), rows, lines[:MAX_LINES], note)


def _bytes_by_round(sums: Sequence[RoundSum]) -> Panel:
    rounds = {one.round.number: one.moved for one in reversed(sums) if one.moved.updates}
    down = Series("down", {n: float(one.down) for n, one in rounds.items()})
    up = Series("up", {n: float(one.up) for n, one in rounds.items()})
    full = Series("whole models both ways", {n: float(one.full) for n, one in rounds.items()})
    whole, total = sum(full.points.values()), sum(down.points.values()) + sum(up.points.values())
    sent = f"{size(total)} sent, of {size(whole)} for whole models both ways." if whole else ""
    picture = svg_charts.bars("bytes-chart", "Bytes by round", (down, up), full, along="round", description=sent)
    rows = [
        [str(n), size(down.points[n]), size(up.points[n]), size(full.points[n]),
         percent((down.points[n] + up.points[n]) / full.points[n])]
        for n in sorted(rounds, reverse=True)
    ]  # fmt: skip
    note = f"{sent} The dashed line shows whole models."
    if len(sums) == MAX_BARS:
        note = f"The latest {MAX_BARS} rounds. {note}"
    columns = ("round", "down", "up", "whole models", "of whole")
    return Panel("bytes", "Bytes by round", picture, columns, rows, (down, up), note)


def _heat(session: Session, run: Run) -> Panel:
    """Chart the layers of each site's updates; without a picture if all have the same."""
    rows, layers = layers_by_site(session, run.id)
    columns = short_layers(layers)
    description = "The share of each site's updates with blocks of a layer."
    varied = any(share < 1 for shares in rows.values() for share in shares)
    title = "Layers that each site trained"
    picture = svg_charts.heat("heat-chart", title, rows, columns, description) if varied else Markup("")
    table = [[site, *(percent(share) for share in shares)] for site, shares in rows.items()]
    return Panel("heat", title, picture, ("site", *columns), table, (), description)


# ---------------------------------------------------------------- a round's figures


def is_unusual(metrics: Mapping[str, float]) -> bool:
    """Return whether an update is far from the others of its round."""
    return max(metrics.get(NORM, 0.0), metrics.get(DISTANCE, 0.0)) >= ODD


ENDS = {"accept": "accepted", "reject": "failed", "fail": "failed", "expire": "failed"}


def _timeline(session: Session, now: float, round_: Round, round_id: str) -> Markup:
    """Draw each task's activities from its audit entries."""
    begin = round_.opened_at.timestamp()
    over = round_.closed_at.timestamp() if round_.closed_at else now
    most = max(over - begin, 1.0)
    by_task: dict[str, list[tuple[float, str]]] = {task.id: [] for task in round_.tasks}
    entries = select(AuditRow.subject, AuditRow.at, AuditRow.action).where(AuditRow.subject.in_(by_task))
    for subject, at, action in session.execute(entries.order_by(AuditRow.seq)):
        by_task[subject].append((at - begin, action.removeprefix("task.")))
    rows = {task.worker: _intervals(task, by_task[task.id], most) for task in round_.tasks}
    if (merged := _merge(session, round_, round_id, most)) is not None:
        rows["merge"] = [merged]
    description = "; ".join(
        f"{worker}: {', '.join(one.label for one in intervals)}" for worker, intervals in rows.items()
    )
    deadline = round_.deadline_at.timestamp() - begin
    return svg_charts.timeline(
        "timeline", "Timeline of the round", rows, most, {"deadline": deadline}, description[:2000] or "No task."
    )


def _merge(session: Session, round_: Round, round_id: str, most: float) -> Interval | None:
    """Return the time from the round's closing to its end, if it closed."""
    of_round = (AuditRow.subject == round_id) & (AuditRow.action == "round.close")
    closed_at = session.scalar(select(func.max(AuditRow.at)).where(of_round))
    if closed_at is None:
        return None
    begin = closed_at - round_.opened_at.timestamp()
    return Interval("merging", begin, most, f"merge {number(most - begin, 3)} s")


def _by_phase(task: TaskView, work: Interval) -> Iterator[Interval]:
    """Yield the phases of a task's last piece of work, scaled to its time, for the worker counts by its own clock."""
    seconds = {phase: took for phase, took in (task.progress.phase_seconds if task.progress else {}).items() if took}
    scale, at = (work.end - work.begin) / sum(seconds.values()) if seconds else 0.0, work.begin
    for phase, took in seconds.items():
        end = at + took * scale
        yield Interval(phase, at, end, f"{phase} {number(took, 3)} s")
        at = end


def _intervals(task: TaskView, happened: Sequence[tuple[float, str]], most: float) -> list[Interval]:
    """Return a task's intervals of waiting and working; the last one shows how it ended."""
    intervals: list[Interval] = []
    at, working = 0.0, False
    for when, action in happened:
        kind = ENDS.get(action, "leased") if working else "offered"
        word = {"accepted": "worked, accepted", "failed": f"worked, {action}", "leased": "worked"}.get(kind, "waited")
        intervals.append(Interval(kind, at, when, f"{word} {number(when - at, 3)} s"))
        at, working = when, action == "lease"
    if task.state in LIVE_TASKS:
        kind, word = ("leased", "at work for") if working else ("offered", "waiting for")
        intervals.append(Interval(kind, at, most, f"{word} {number(most - at, 3)} s"))
    last = intervals[-1] if intervals else None
    if last and last.kind in ("leased", "accepted") and (phases := list(_by_phase(task, last))):
        # How it ended stays visible as a narrow part at the end.
        ended = [] if last.kind == "leased" else [replace(last, begin=last.end - 0.01 * most)]
        intervals[-1:] = [*phases, *ended]
    return intervals


# ---------------------------------------------------------------- pause, resume, cancel


@router.get("/{run_id}/cancel")
def confirm_cancel(run_id: str, request: Request, serving: Serving, who: Signed) -> Response:
    require_role(who.principal, *STEERING)
    with serving.database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, run_id))
    detail = (
        f"It is at version {run.version.number} of {run.spec.rounds}. Its open round ends at once and the work of "
        "its workers is discarded. This cannot be undone; its versions stay."
    )
    here = f"{PREFIX}/runs/{run.id}"
    return render(
        request, "confirm.html", who, question=f"Cancel {run.spec.name}?", detail=detail, action=f"{here}/state",
        fields={"revision": run.revision, "state": "cancelled"}, label="Cancel the run", dangerous=True,
        keep="Keep it", back=here,
    )  # fmt: skip


@router.post("/{run_id}/state")
def set_state(run_id: str, serving: Serving, who: Sender, fields: Fields) -> Response:
    """Raise PreconditionFailed if the run is no longer what was shown to the person."""
    require_role(who.principal, *STEERING)
    wanted, revision = fields.get("state", ""), fields.get("revision", "")
    if wanted not in STATES:
        fault = Fault(pointer="/state", detail=f"one of {', '.join(STATES)}")
        raise Invalid("the form names no state", errors=[fault])
    patch = RunPatch.model_validate({"state": wanted})
    patch_run(serving, who.principal, run_id, patch, f'"{revision[:20]}"')
    return RedirectResponse(f"{PREFIX}/runs/{run_id}", status_code=303)

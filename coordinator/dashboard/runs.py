"""Runs and their rounds."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from statistics import fmean
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParam
from fastapi.responses import RedirectResponse
from markupsafe import Markup
from sqlalchemy import ColumnElement, Select, String, cast, func, or_, select
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving, require_role
from tessera.coordinator.dashboard.charts.run_charts import AXES, Along, ChartFigures, absent, download, panels
from tessera.coordinator.dashboard.queries import (
    TrafficTotals,
    forecast,
    latest_scores,
    moved_by_round,
    moved_by_run,
    past_seconds,
    round_sums,
    short_layers,
)
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import STEERING, Fields, PageRoute, Signed, SteeringSender, Visitor
from tessera.coordinator.dashboard.sorting import PageNumber, Sorted, Sorting
from tessera.coordinator.dashboard.templating import number, plural, render, size, span
from tessera.coordinator.db import views
from tessera.coordinator.db.coverage import by_site
from tessera.coordinator.db.helper_tasks import sum_record
from tessera.coordinator.db.snapshots import candidates, live_workers, terms_of
from tessera.coordinator.db.tables import RUNS, AuditRow, RoundRow, RunRow, TaskRow, VersionRow, one_of
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.coordinator.domain.workers import sites_of
from tessera.coordinator.operations.runs import etag, patch_run, require_owner
from tessera.coordinator.services import Services
from tessera.shared.api.runs import Measurement, Round, Run, RunPatch, RunSpec
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Version
from tessera.shared.metrics import svg_charts
from tessera.shared.metrics.classification import FigureTables, group_figures
from tessera.shared.metrics.comparison import (
    MAIN_SCORES,
    PAIRWISE,
    different_sites,
    has_own_models,
    main_score,
    setting_text,
)
from tessera.shared.metrics.data_comparison import DataAnswers, SummedCounts
from tessera.shared.metrics.eta import LIVE_TASKS
from tessera.shared.metrics.membership import AttackResult
from tessera.shared.metrics.rows import rows_of, write_csv
from tessera.shared.metrics.site_spread import LISTED, PERSONAL, SiteScores, is_better_low, spreads
from tessera.shared.metrics.svg_charts import Interval, svg_file
from tessera.shared.model.dataset_schema import class_names
from tessera.shared.problems import Conflict, Fault, Invalid, NotFound, PreconditionFailed, validated
from tessera.shared.rounds.count_table import BLOCK, CountTable
from tessera.shared.rounds.outliers import DISTANCE, JUDGES, NORM
from tessera.shared.rounds.run_forecast import RunForecast
from tessera.shared.run_settings import Training
from tessera.shared.sanitize import fit_to_show
from tessera.shared.schema import DEFAULT_STUDY, RunState

router = APIRouter(prefix=f"{PREFIX}/runs", include_in_schema=False, route_class=PageRoute)

STATES = ("running", "paused", "cancelled")
AT_A_TIME = 50
MAX_TICKED = 50
MAX_SCORED = 200
"""Runs that are sorted by a value that has to be computed for each: the newest that match."""
SHOWN_ROUNDS = 10
ODD = 2.0
"""Multiple of the round's median from which an outlier score is marked."""

RoundNumber = Annotated[int, PathParam(ge=1, lt=1 << 31)]
Ordinal = Annotated[int | None, Query(ge=1, lt=1 << 31)]
Metric = Annotated[str | None, Query(max_length=64)]
Reach = Annotated[list[float] | None, Query(alias="score", max_length=8)]
"""Scores to reach."""
Text = Annotated[str, Query(max_length=64)]


@router.get("")
def list_runs(
    request: Request,
    serving: Serving,
    who: Signed,
    sorting: Sorted,
    state: RunState | Literal[""] = "",
    method: Text = "",
    dataset: Text = "",
    study: Text = "",
    q: Text = "",
    run: Annotated[list[str] | None, Query()] = None,
    page: PageNumber = 1,
) -> Response:
    """List runs by state, method, data set, study, and a text in their names, tags and notes. Those named by `run`
    stay ticked for a comparison, also on other pages."""
    chosen = {"state": state, "method": method, "dataset": dataset, "study": study, "q": q.strip()}
    with serving.reading(who.principal) as session:
        names = {"method": RunRow.spec["method"]["name"].as_string(), "dataset": RunRow.spec["dataset"].as_string()}
        names["study"] = RunRow.study
        query = RUNS
        for name, column in {"state": RunRow.state, **names}.items():
            if chosen[name]:
                query = query.where(column == chosen[name])
        if text := chosen["q"].lower():
            # As it stands in JSON, which tags are stored as.
            columns = (RunRow.name, RunRow.note, cast(RunRow.tags, String))
            query = query.where(or_(*(func.lower(column).contains(text, autoescape=True) for column in columns)))
        moved, begin = moved_by_run(session), (page - 1) * AT_A_TIME
        rows = _sorted_runs(session, query, sorting, names, moved, begin)
        shown, ticked = {line.run.id for line in rows[:AT_A_TIME]}, [*dict.fromkeys(run or ())][:MAX_TICKED]
        elsewhere = select(RunRow.id, RunRow.name).where(RunRow.id.in_(set(ticked) - shown)).order_by(RunRow.name)
        return render(
            request,
            "runs.html",
            who,
            chosen=chosen,
            counts=views.runs_by_state(session),
            choices={name: sorted(session.scalars(select(column).distinct())) for name, column in names.items()},
            rows=rows[:AT_A_TIME],
            sorting=sorting,
            scored=MAX_SCORED if sorting.column in COMPUTED else None,
            ticked=ticked,
            elsewhere=session.execute(elsewhere).all(),
            page=page,
            more=len(rows) > AT_A_TIME,
        )


@dataclass(frozen=True)
class RunLine:
    run: Run
    scores: Mapping[str, float]
    moved: TrafficTotals

    @classmethod
    def of_all(cls, session: Session, rows: Iterable[RunRow], moved: Mapping[str, TrafficTotals]) -> list[Self]:
        runs = [views.run_view(session, row) for row in rows]
        scores = latest_scores(session, [run.id for run in runs])
        return [cls(run, scores[run.id], moved.get(run.id, TrafficTotals())) for run in runs]

    @property
    def score(self) -> float | None:
        """Its score where higher is better."""
        return next((value for name, value in self.scores.items() if not is_better_low(name)), None)


COMPUTED: Mapping[str, Callable[[RunLine], Any]] = {
    "score": lambda one: one.score,
    "sent": lambda one: one.moved.saved,
}
"""Columns that no column of the database has."""


def _sorted_runs(
    session: Session,
    query: Select[RunRow, VersionRow],
    sorting: Sorting,
    names: Mapping[str, ColumnElement[str]],
    moved: Mapping[str, TrafficTotals],
    begin: int,
) -> list[RunLine]:
    """Return a page of runs, and one more if there are more: newest first, unless another order was chosen."""
    columns: dict[str, Any] = {"name": func.lower(RunRow.name), "state": RunRow.state, **names}
    columns |= {"versions": RunRow.version_number, "model": RunRow.model_bytes, "began": RunRow.created_at}
    query = query.order_by(*sorting.ordering(columns), RunRow.created_at.desc(), RunRow.id.desc())
    here = slice(begin, begin + AT_A_TIME + 1)
    computed = sorting.column in COMPUTED
    query = query.limit(MAX_SCORED) if computed else query.offset(here.start).limit(AT_A_TIME + 1)
    lines = RunLine.of_all(session, (row for row, _ in session.execute(query)), moved)
    return sorting.sorted(lines, COMPUTED)[here] if computed else lines


@router.get("/{run_id}")
def show_run(
    run_id: str,
    request: Request,
    serving: Serving,
    who: Signed,
    metric: Metric = None,
    x: Along = "version",
    reach: Reach = None,
) -> Response:
    """Show a run: its progress, metrics and traffic."""
    now = serving.database.now()
    with serving.reading(who.principal) as session:
        row = views.find_run(session, run_id)
        run = views.run_view(session, row)
        open_round = _open_round(session, run)
        figures = ChartFigures.of(session, run)
        latest = max((one.version for one in figures.measurements), default=None)
        of_latest = [one for one in figures.measurements if one.version == latest]
        names = [*(PERSONAL + name for name in MAIN_SCORES[:-1] if has_own_models(of_latest)), *LISTED]
        shown = [score for name in names if (score := main_score(of_latest, name))]
        moved = moved_by_run(session, run_id).get(run_id, TrafficTotals())
        end = forecast(session, now, open_round) if open_round else None
        charts = panels(session, figures, metric, x)
        converged = figures.curve.convergence(reach or ()) if figures.curve and run.spec.rounds else None
        facts = facts_of(run.spec, run)
        counted = _counted_figures(session, serving, run, of_latest)
        shows_sites = run.coverage is not None or run.spec.cohort.buffers
        covered = by_site(session, row, now - serving.settings.liveness_seconds) if shows_sites else []
        until = now if run.state in LIVE_RUN else run.updated_at.timestamp()
        return render(
            request,
            "run.html",
            who,
            run=run,
            forecast=RunForecast.of(run.spec, views.site_reports(session, run_id)) if run.spec.rehearsal else None,
            owned=_owns(session, who, run),
            warnings=session.get_one(VersionRow, (run_id, run.version.number)).warnings,
            measured=latest,
            best=figures.best,
            converged=list(converged.facts()) if converged else [],
            score=reach,
            uneven=PAIRWISE if figures.main and different_sites([figures.main]) else "",
            headline=shown,
            spreads=next(iter(spreads(of_latest, names).values()), {}),
            sites=len({one.site for one in figures.measurements if one.held_out}),
            moved=moved,
            remaining=_remaining(session, now, run, end),
            took=until - run.created_at.timestamp(),
            round=open_round,
            end=end,
            waiting_for=None if open_round else _waiting_for(session, serving, now, run),
            charts=charts,
            metrics=figures.metrics,
            metric=figures.chosen(metric),
            x=x,
            axes=AXES,
            absent=list(absent(run, figures.measurements, {panel.ident for panel in charts})),
            figures=counted,
            rounds=figures.sums[:SHOWN_ROUNDS],
            answers=_answers(session, serving, run) if run.spec.describe else None,
            attack=AttackResult.of(run, views.site_reports(session, run_id)) if run.spec.membership_attack else None,
            covered=covered,
            parts=[one for one in covered if one.buffered],
            live_settings=_live_settings(run.spec),
            facts=[*facts, ("A site counts", run.bounds.summary)] if run.bounds else facts,
        )


def _answers(session: Session, serving: Services, run: Run) -> DataAnswers:
    """Return the sites' descriptions, or the totals of a secure sum once it is open."""
    if not run.spec.rounds:
        return DataAnswers.of(run, views.site_reports(session, run.id))
    if not run.version.number:
        return DataAnswers({}, {})
    counted = select(func.count()).where(TaskRow.run_id == run.id, TaskRow.state == "merged")
    senders = session.scalar(counted) or 0
    raw = serving.blobs.read(serving.states.manifest(run.version.digest).blocks[BLOCK.name])
    return DataAnswers({}, {}, SummedCounts(senders, CountTable(run.spec.dataset).totals(raw, senders)))


@router.get("/{run_id}/charts/{ident}.svg")
def download_chart(
    run_id: str, ident: str, serving: Serving, who: Signed, metric: Metric = None, x: Along = "version"
) -> Response:
    """Return a chart of a run as a file of its own."""
    with serving.reading(who.principal) as session:
        run = views.run_view(session, views.find_run(session, run_id))
        shown = panels(session, ChartFigures.of(session, run), metric, x)
    found = next((panel for panel in shown if panel.ident == ident), None)
    if found is None:
        raise NotFound(f"run {run_id} has no chart {ident[:64]!r}")
    return download(svg_file(found), f"{run.spec.name}-{ident}.svg", "image/svg+xml")


@router.get("/{run_id}/metrics.{kind}")
def download_metrics(
    run_id: str, kind: Literal["csv", "json"], serving: Serving, who: Signed, reach: Reach = None
) -> Response:
    """Return all measurements of a run, one value a row, as `tessera run metrics` writes them."""
    with serving.reading(who.principal) as session:
        run = views.run_view(session, views.find_run(session, run_id))
        rounds = session.scalars(
            select(RoundRow)
            .options(views.WITH_TASKS)
            .where(RoundRow.run_id == run_id)
            .order_by(RoundRow.number, RoundRow.attempt)
        )
        versions = session.scalars(select(VersionRow).where(VersionRow.run_id == run_id).order_by(VersionRow.number))
        rows = rows_of(
            run,
            [views.round_view(row) for row in rounds],
            [views.view_of(Version, row) for row in versions],
            views.counted_measurements(session, run.id, run.spec),
            reach or (),
        )
        if kind == "csv":
            write_csv(rows, text := StringIO(newline=""))
            return download(text.getvalue(), f"{run.spec.name}-metrics.csv", "text/csv")
        return download(
            json.dumps([row._asdict() for row in rows]), f"{run.spec.name}-metrics.json", "application/json"
        )


@router.get("/{run_id}/rounds")
def list_rounds(
    run_id: str,
    request: Request,
    serving: Serving,
    who: Signed,
    before: Ordinal = None,
    attempt: Annotated[int, Query(ge=1, lt=1 << 31)] = 1,
) -> Response:
    """List attempts at rounds, newest first: those before an attempt at round `before`, by default its first."""
    with serving.reading(who.principal) as session:
        run = views.run_view(session, views.find_run(session, run_id))
        found = round_sums(session, run, AT_A_TIME + 1, (before, attempt) if before else None)
        rounds = found[:AT_A_TIME]
        here = f"{PREFIX}/runs/{run_id}/rounds"
        last = rounds[-1].round if len(found) > AT_A_TIME else None
        return render(
            request,
            "rounds.html",
            who,
            run=run,
            rounds=rounds,
            newer=here if before else None,
            older=f"{here}?before={last.number}&attempt={last.attempt}" if last else None,
        )


@router.get("/{run_id}/rounds/{number}")
def show_round(
    run_id: str,
    number: RoundNumber,
    request: Request,
    serving: Serving,
    who: Signed,
    sorting: Sorted,
    attempt: Ordinal = None,
) -> Response:
    """Show one attempt at a round, by default the latest: the work of each worker by time."""
    now = serving.database.now()
    with serving.reading(who.principal) as session:
        run = views.run_view(session, views.find_run(session, run_id))
        same = (RoundRow.run_id == run_id) & (RoundRow.number == number)
        attempts = session.scalar(select(func.max(RoundRow.attempt)).where(same))
        chosen = same & (RoundRow.attempt == (attempt or attempts))
        row = session.scalars(select(RoundRow).options(views.WITH_TASKS).where(chosen)).one_or_none()
        if row is None:
            raise NotFound(f"run {run_id} has no round {number}" + (f", try {attempt}" if attempt else ""))
        view = views.open_round_view(session, row, run.spec.cohort)
        earlier = views.earlier_tasks(session, row) if run.spec.cohort.buffers and view.version else []
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
            asked=sum(task.round == number for task in view.tasks),
            judges=JUDGES,
            up=sum(task.upload_bytes for task in view.tasks),
            down=sum(task.download_bytes for task in view.tasks) + evaluated,
            evaluated=evaluated,
            end=forecast(session, now, view),
            sums=sum_record(session, row, run.spec),
            picture=_timeline(session, now, view, row.id),
            rows=[
                (task, is_unusual(task.metrics), short_layers(task.layers))
                for task in sorting.sorted([*view.tasks, *earlier], OF_TASKS)
            ],
            sorting=sorting,
        )


def _owns(session: Session, who: Visitor, run: Run) -> bool:
    """Return True if the visitor may steer and annotate the run: as its owner or an administrator."""
    own = who.administers or session.get_one(RunRow, run.id).owner == who.principal.owner
    return who.steers and own


# ---------------------------------------------------------------- a run's figures


def _open_round(session: Session, run: Run) -> Round | None:
    live = (RoundRow.run_id == run.id) & one_of(RoundRow.state, *LIVE_ROUND)
    row = session.scalars(select(RoundRow).options(views.WITH_TASKS).where(live)).one_or_none()
    return views.open_round_view(session, row, run.spec.cohort) if row else None


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


_FIGURES: dict[tuple[object, ...], FigureTables | None] = {}
"""The tables of versions that pages showed lately, by run, version and the workers that measured it: an accepted
evaluation does not change, and its counts are long."""

MAX_FIGURES = 64


def _counted_figures(
    session: Session, serving: Services, run: Run, latest: Sequence[Measurement | SiteScores]
) -> FigureTables | None:
    """Return the figures of the latest measured version that follow from its sites' counts."""
    evaluation, workers = run.spec.evaluation, sorted(one.worker for one in latest if one.class_counts)
    if evaluation is None or not workers:
        return None
    known = (run.id, latest[0].version, *workers)
    if known not in _FIGURES:
        counted = views.counted_measurements(session, run.id, run.spec, latest[0].version)
        found = list(group_figures(counted, evaluation.specificity))
        names = class_names(serving.states.model(run.spec.model))
        if len(_FIGURES) >= MAX_FIGURES:
            _FIGURES.clear()
        _FIGURES[known] = FigureTables.of(found, evaluation.subgroups, names)
    return _FIGURES[known]


def _waiting_for(session: Session, serving: Services, now: float, run: Run) -> str:
    live = live_workers(session, now - serving.settings.liveness_seconds)
    able = sites_of(candidates(session, terms_of(session, run.id), live))
    if len(able) < (quorum := run.spec.cohort.quorum):
        return f"{len(able)} of the {quorum} sites that it needs are live."
    if absent := run.spec.cohort.absent(able):
        return f"{', '.join(absent)} must take part, and no worker there can at the moment."
    if not run.spec.rounds:
        return "It waits for the answers of sites, and for further sites."
    over = run.version.number == run.spec.rounds
    return "its last version is being evaluated." if over else "the next one is about to open."


def facts_of(spec: RunSpec, run: Run | None = None) -> list[tuple[str, str]]:
    """Return the settings of a run, or of one that may be created, for people."""
    settings = ", ".join(f"{name} {setting_text(value)}" for name, value in spec.method.settings.items())
    training, cohort, privacy, sites = spec.training, spec.cohort, spec.privacy, spec.client_privacy
    batches = training.batch_size or "all"
    length = plural(training.steps, "step") if training.steps else plural(training.epochs or 0, "epoch")
    length += " or more or fewer, by each worker's speed" if cohort.work == "fitted" else ""
    facts = [
        ("Method", spec.method.name + (f" ({settings})" if settings else "")),
        *([("Model", size(run.model_bytes))] if run else []),
        *([("Study", spec.study)] if spec.study != DEFAULT_STUDY else []),
        ("Data set", spec.dataset),
        ("Cohort", plural(cohort.asked, "site") if cohort.asked else "all live sites"),
        ("Round", f"quorum {cohort.quorum}, deadline {span(cohort.deadline_seconds)}"),
        ("Training", f"{length}, batches of {batches}"),
        ("Optimizer", ", ".join(_optimizer_facts(training))),
        ("Codec", spec.codec),
        ("Averaged over", spec.normalization),
        ("Robust rule", spec.robust.rule),
        ("Server optimizer", spec.server_optimizer.kind),
        ("Differential privacy", privacy.at_workers if privacy else "none"),
    ]
    spent = f"{run.client_epsilon or 0:.3g} spent of " if run else ""
    facts += [("Privacy of a site", spent + sites.bound)] if sites else []
    if sums := spec.secure_sums:
        facts.append(("Secure sums", f"over {sums.quorum} sites or more, opened by {', '.join(sums.helpers)}"))
    if spec.evaluation:
        where = [spec.evaluation.dataset] if spec.evaluation.dataset else []
        where += ["what sites hold out"] if spec.evaluation.sites else []
        facts.append(("Measured on", f"{' and '.join(where)}, every {spec.evaluation.every}"))
    if spec.evaluation and spec.evaluation.sites:
        rounds = spec.privacy or spec.client_privacy or spec.secure_sums
        facts.append(("Figures of sites", "rounded" if rounds else "exact, but rounded where a site's rules say so"))
    if spec.cohort.sites:
        facts.append(("Sites", ", ".join(spec.cohort.sites)))
    if spec.cohort.require:
        facts.append(("Required sites", ", ".join(spec.cohort.require)))
    return facts


def _optimizer_facts(training: Training) -> Iterator[str]:
    yield training.optimizer
    yield f"learning rate {training.learning_rate:g}"
    if training.rates:
        by_role = ", ".join(f"{factor:g} for {role}" for role, factor in sorted(training.rates.items()))
        yield f"times {by_role}"
    if training.scheduled:
        warmup = f" after a warm-up over {training.warmup:.3g} of the run" if training.warmup else ""
        yield f"{training.schedule}{warmup}"
    if training.optimizer == "adamw" and training.betas != Training().betas:
        yield f"betas {training.betas[0]:g} and {training.betas[1]:g}"
    if training.keep_moments:
        yield "moments kept between rounds"
    if training.weight_decay and not training.decay_norms_and_biases:
        yield "no decay of norms and biases"
    if training.gradient_checkpointing:
        yield "gradient checkpointing"
    yield from _loss_facts(training)
    if training.augments:
        changes = training.augmentation.model_dump(exclude_defaults=True)
        yield f"images changed by {', '.join(sorted(changes))}"


def _loss_facts(training: Training) -> Iterator[str]:
    if training.label_smoothing:
        yield f"labels smoothed by {training.label_smoothing:g}"
    if training.class_weights is not None:
        yield "weighted classes"
    if training.loss:
        yield f"direct preference optimization, beta {training.dpo_beta:g}"


# ---------------------------------------------------------------- a round's figures


def is_unusual(metrics: Mapping[str, float]) -> bool:
    """Return True if an update is far from the others of its round."""
    return max(metrics.get(NORM, 0.0), metrics.get(DISTANCE, 0.0)) >= ODD


OF_TASKS: Mapping[str, Callable[[TaskView], Any]] = {
    "worker": lambda task: task.worker,
    "state": lambda task: task.state,
    "attempts": lambda task: task.attempts,
    "examples": lambda task: task.examples,
    "loss": lambda task: task.metrics.get("loss"),
    "up": lambda task: task.upload_bytes,
    "down": lambda task: task.download_bytes,
    "size": lambda task: task.metrics.get(NORM),
}
"""The columns by which a round's workers are sorted."""

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
    with serving.reading(who.principal) as session:
        row = views.find_run(session, run_id)
        require_owner(who.principal, row)
        run = views.run_view(session, row)
    if run.state not in LIVE_RUN:
        raise Conflict(f"run {run.spec.name} is {run.state} already", remedy="There is nothing left to cancel.")
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
def set_state(run_id: str, serving: Serving, who: SteeringSender, fields: Fields) -> Response:
    """Raise PreconditionFailed if the run is no longer what was shown to the person."""
    wanted, revision = fields.get("state", ""), fields.get("revision", "")
    if wanted not in STATES:
        fault = Fault(pointer="/state", detail=f"one of {', '.join(STATES)}")
        raise Invalid("the form names no state", errors=[fault])
    patch = RunPatch.model_validate({"state": wanted})
    patch_run(serving, who.principal, run_id, patch, f'"{revision[:20]}"')
    return RedirectResponse(f"{PREFIX}/runs/{run_id}", status_code=303)


def _live_settings(spec: RunSpec) -> list[tuple[str, str, str]]:
    """Return the name, label and value of each setting that a live run may change."""
    cohort = spec.cohort
    return [
        ("rounds", "Rounds", str(spec.rounds)),
        ("quorum", "Quorum, in sites", str(cohort.quorum)),
        ("deadline_seconds", "Deadline of a round, in seconds", repr(cohort.deadline_seconds).removesuffix(".0")),
    ]


@router.post("/{run_id}/settings")
def change_settings(run_id: str, serving: Serving, who: SteeringSender, fields: Fields) -> Response:
    """Change settings of a live run. Raise PreconditionFailed if they are no longer what was shown to the person."""
    with serving.reading(who.principal) as session:
        run = views.run_view(session, views.find_run(session, run_id))
    present = {name: value for name, _, value in _live_settings(run.spec)}
    # The same form may come twice.
    if any(value not in (fields.get(f"old_{name}", ""), fields.get(name)) for name, value in present.items()):
        raise PreconditionFailed("the settings have changed meanwhile")
    given: dict[str, Any] = {name: fields.get(name, value) for name, value in present.items()}
    patch = validated(RunPatch, {"rounds": given.pop("rounds"), "cohort": given}, "the settings are invalid")
    patch_run(serving, who.principal, run_id, patch, etag(run.revision))
    return RedirectResponse(f"{PREFIX}/runs/{run_id}", status_code=303)


@router.post("/{run_id}/notes")
def annotate(run_id: str, serving: Serving, who: SteeringSender, fields: Fields) -> Response:
    """Change the tags and the note. Raise PreconditionFailed if they are no longer what was shown to the person."""
    with serving.reading(who.principal) as session:
        run = views.run_view(session, views.find_run(session, run_id))
    # A page shows characters that cannot be seen as others, and so the form comes back with those.
    shown = fit_to_show(run.note)
    if [*run.tags] != fields.get("old_tags", "").split() or shown != _lines(fields.get("old_note", "")):
        raise PreconditionFailed("the tags or the note have changed meanwhile")
    tags = [*dict.fromkeys(fields.get("tags", "").replace(",", " ").split())]
    note = _lines(fields.get("note", "")).strip()
    given = {"tags": tags, "note": run.note if note == shown.strip() else note}
    patch = validated(RunPatch, given, "the tags or the note are invalid")
    patch_run(serving, who.principal, run_id, patch, etag(run.revision))
    return RedirectResponse(f"{PREFIX}/runs/{run_id}", status_code=303)


def _lines(text: str) -> str:
    # Browsers send the ends of lines as in mails.
    return text.replace("\r\n", "\n")

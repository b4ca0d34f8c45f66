"""Workers by site, a worker's own page, tokens, and the actions of administrators on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import ColumnElement, Row, case, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased, undefer

from tessera.coordinator.alerts.failures import FAULTS
from tessera.coordinator.api.dependencies import Serving, require_role
from tessera.coordinator.dashboard.runs import is_unusual
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import AdminSender, Fields, PageRoute, Signed
from tessera.coordinator.dashboard.sorting import PageNumber, Sorted
from tessera.coordinator.dashboard.templating import number, plural, render, size, span
from tessera.coordinator.db import views
from tessera.coordinator.db.studies import is_present, shared_sites
from tessera.coordinator.db.tables import IS_LEASED, AuditRow, RunRow, SiteRow, TaskRow, TokenRow, WorkerRow, find
from tessera.coordinator.db.workers import HOUR_SECONDS, UPTIME_HOURS
from tessera.coordinator.domain.eligibility import policy_of
from tessera.coordinator.operations import sites, studies
from tessera.coordinator.operations.withdrawal import withdraw
from tessera.shared.api.admin import WITHDRAWAL, Site, Token, WorkerView
from tessera.shared.api.tasks import AdvertisedPolicy, LiveValues, TaskView
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.problems import Conflict, Invalid, NotFound
from tessera.shared.rounds.outliers import ABSENT, DISTANCE, NORM
from tessera.shared.run_settings import UnitBudget
from tessera.shared.schema import ACCEPTED

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

MAX_WORKERS = 500
MAX_TASKS = 25
TOKENS = 100

HEALTHS = ("failing", "silent", "unusual", "working", "well", "suspended", "revoked")
"""From the states that need attention to the states that an administrator decided."""
NEEDY = HEALTHS[:3]

Health = Literal["attention", "failing", "silent", "unusual", "working", "well", "suspended", "revoked"]
Text = Annotated[str, Query(max_length=128)]


@dataclass(frozen=True)
class WorkerLine:
    view: WorkerView
    task: TaskView | None = None
    accepted: int = 0
    faulty: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def health(self) -> str:
        """The worker's condition in a word."""
        if not self.view.live:
            return "suspended" if self.view.suspended else "revoked" if self.view.revoked else "silent"
        if self.faulty > self.accepted:
            return "failing"
        if is_unusual(self.scores):
            return "unusual"
        return "working" if self.task else "well"

    @property
    def urgency(self) -> tuple[int, str]:
        """The key of its place among the workers of its site."""
        return HEALTHS.index(self.health), self.view.name

    def matches(self, text: str, health: Health | None) -> bool:
        view = self.view
        words = (f"{view.site}/{view.name}", view.device, view.version, *view.datasets)
        wanted = health is None or self.health == health or (health == "attention" and self.health in NEEDY)
        return wanted and any(text.lower() in word.lower() for word in words)


COLUMNS: Mapping[str, Callable[[WorkerLine], Any]] = {
    "worker": lambda line: (line.view.site, line.view.name),
    "health": lambda line: line.urgency,
    "seen": lambda line: line.view.last_seen_at,
    "device": lambda line: line.view.device,
    "version": lambda line: line.view.version or None,
    "done": lambda line: line.accepted,
    "failures": lambda line: line.faulty,
    "size": lambda line: line.scores.get(NORM),
}
"""The columns by which workers are sorted, and with them their sites."""


@router.get("/sites")
def list_sites(
    request: Request, serving: Serving, who: Signed, sorting: Sorted, q: Text = "", health: Health | Literal[""] = ""
) -> Response:
    """Show the workers of all sites, with those that need attention first."""
    since = serving.database.now() - serving.settings.liveness_seconds
    with serving.reading(who.principal) as session:
        present = select(SiteRow).where(is_present(session)).order_by(SiteRow.name)
        every = {row.id: views.view_of(Site, row) for row in session.scalars(present)}
        query = select(WorkerRow, SiteRow).join_from(WorkerRow, SiteRow).where(is_present(session))
        lines = worker_lines(session, session.execute(query.order_by(SiteRow.name, WorkerRow.name)).all(), since)
    counts = Counter(line.health for line in lines)
    urgent = sorted((line for line in lines if line.matches(q, health or None)), key=lambda line: line.urgency)
    matching = sorting.sorted(urgent, COLUMNS)
    by_site: dict[str, list[WorkerLine]] = defaultdict(list)
    for line in matching[:MAX_WORKERS]:
        by_site[line.view.site].append(line)
    # A dictionary keeps the order in which its keys came: that of each site's first worker.
    named = {site.name: site for site in every.values()}
    idle = [] if q or health else [site for site in every.values() if site.name not in by_site]
    return render(
        request,
        "sites.html",
        who,
        sites=[*((named[name], of_site) for name, of_site in by_site.items()), *((site, []) for site in idle)],
        totals=Counter(line.view.site for line in lines),
        live=Counter(line.view.site for line in lines if line.view.live),
        versions=sorted(Counter(line.view.version for line in lines).items()),
        counts={word: counts[word] for word in HEALTHS if counts[word]},
        attention=sum(counts[word] for word in NEEDY),
        more=max(0, len(matching) - MAX_WORKERS),
        absent=ABSENT,
        sorting=sorting,
        q=q,
        health=health,
    )


def worker_lines(session: Session, rows: Sequence[Row[WorkerRow, SiteRow]], since: float) -> list[WorkerLine]:
    ids = [row.id for row, _ in rows]
    # Of the expired ones there are few: they are offered again, or cancelled with their round.
    expired = Counter(
        session.scalars(select(TaskRow.worker_id).where(TaskRow.worker_id.in_(ids), TaskRow.state == "expired"))
    )
    counts = {row.id: (row.accepted, row.faulty) for row, _ in rows}
    elsewhere = shared_sites(session)
    if shared := [row.id for row, site in rows if site.id in elsewhere]:
        # The counters of a worker are over all studies.
        by_state = [func.sum(case((TaskRow.state.in_(states), 1), else_=0)) for states in (ACCEPTED, FAULTS)]
        of_workers = select(TaskRow.worker_id, *by_state).where(TaskRow.worker_id.in_(shared))
        counted = session.execute(of_workers.group_by(TaskRow.worker_id))
        counts |= dict.fromkeys(shared, (0, 0)) | {row_id: (done, faulty) for row_id, done, faulty in counted}
    scores = _latest_scores(session, ids)
    tasks = _tasks_in_hand(session, dict(zip(ids, ids, strict=True)))
    return [
        WorkerLine(
            views.worker_view(row, site, since),
            tasks.get(row.id),
            counts[row.id][0],
            counts[row.id][1] + expired[row.id],
            scores.get(row.id, {}),
        )
        for row, site in rows
    ]


def _tasks_in_hand(session: Session, names: Mapping[str, str]) -> dict[str, TaskView]:
    """Return the leased tasks of these workers (id to name), by worker name."""
    rows = session.scalars(select(TaskRow).where(IS_LEASED))
    named = [(names[row.worker_id], row) for row in rows if row.worker_id in names]
    return {name: views.task_view(row, name, row.version_number) for name, row in named}


def _latest_scores(session: Session, worker_ids: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the distance of each worker's latest update from the others of its round, if it was compared."""
    task = aliased(TaskRow)
    # One for each state, which an index finds without the others.
    newest = [
        select(task.id)
        .where(task.worker_id == WorkerRow.id, task.state == state, task.kind == "train")
        .order_by(task.created_at.desc())
        .limit(1)
        .scalar_subquery()
        for state in ACCEPTED
    ]
    values = [TaskRow.metrics[name].as_float() for name in (NORM, DISTANCE)]
    latest = select(TaskRow.worker_id, *values).join_from(WorkerRow, TaskRow, TaskRow.id.in_(newest))
    rows = session.execute(latest.where(WorkerRow.id.in_(worker_ids)).order_by(TaskRow.created_at))
    found = {worker_id: dict(zip((NORM, DISTANCE), scores, strict=True)) for worker_id, *scores in rows}
    return {worker_id: {k: v for k, v in scores.items() if v is not None} for worker_id, scores in found.items()}


# ---------------------------------------------------------------- a worker


@router.get("/workers/{worker_id}")
def show_worker(worker_id: str, request: Request, serving: Serving, who: Signed) -> Response:
    now = serving.database.now()
    with serving.reading(who.principal) as session:
        found = session.execute(
            select(WorkerRow, SiteRow)
            .join_from(WorkerRow, SiteRow)
            .where(WorkerRow.id == worker_id, is_present(session))
            .options(undefer(WorkerRow.live_values), undefer(WorkerRow.seen_hour), undefer(WorkerRow.seen_hours))
        ).one_or_none()
        if found is None:
            raise NotFound(f"there is no worker {worker_id}")
        worker, site = found
        (line,) = worker_lines(session, [found], now - serving.settings.liveness_seconds)
        token = session.get(TokenRow, worker.token_id) if who.administers and worker.token_id else None
        policy = policy_of(worker.declared)
        # Its machine, policy and budgets tell of its work for all its studies.
        whole = site.id not in shared_sites(session)
        live_values = worker.live_values if whole else {}
        return render(
            request,
            "worker.html",
            who,
            line=line,
            site=views.view_of(Site, site),
            # The columns of one page, which a heartbeat may replace.
            whole=whole,
            values=LiveValues.model_validate(live_values),
            told_at=views.instant(live_values["at"]) if live_values else None,
            hours=uptime(worker, now),
            rules=_rules(policy) if policy and whole else None,
            budgets=_budgets(policy) if policy and whole else [],
            token=views.token_view(token, site.name, serving.last_seen.last_use(token.id)) if token else None,
            tasks=_latest_tasks(session, worker_id, line.view),
        )


def uptime(worker: WorkerRow, now: float) -> list[bool | None]:
    """Return for each of the latest hours, oldest first, whether the worker called; None before its enrolment."""
    this, first = int(now // HOUR_SECONDS), int(worker.created_at // HOUR_SECONDS)
    bits = worker.seen_hours << min(UPTIME_HOURS, max(0, this - worker.seen_hour))
    hours = range(UPTIME_HOURS - 1, -1, -1)
    return [None if this - back < first else bool(bits >> back & 1) for back in hours]


def _rules(policy: AdvertisedPolicy) -> list[tuple[str, str]]:
    """Return the advertised policy for people: the limits that are set."""
    offset = policy.utc_offset_minutes
    zone = f"UTC{'-' if offset < 0 else '+'}{abs(offset) // 60}:{abs(offset) % 60:02}"
    default = AdvertisedPolicy()
    limits: list[tuple[str, str, Callable[[float], str]]] = [
        ("Epochs of a task", "max_epochs", number),
        ("Examples of a batch", "max_batch", number),
        ("Size of a model", "max_model_bytes", size),
        ("Upload of a task", "max_upload_bytes", size),
        ("Upload of a run", "max_run_upload_bytes", size),
        ("Upload speed", "max_upload_bytes_per_second", lambda value: f"{size(value)}/s"),
        ("Time of a task", "max_task_seconds", span),
        ("Time of a day", "max_minutes_per_day", lambda value: span(60 * value)),
    ]
    most = [
        (name, f"at most {shown(getattr(policy, key))}")
        for name, key, shown in limits
        if getattr(policy, key) != getattr(default, key)
    ]
    lists = (
        ("Orchestrators", policy.orchestrators),
        ("Studies", policy.studies),
        ("Models", policy.models),
        ("Never sends", policy.all_never_sent),
    )
    noise = policy.figures_privacy
    needed, of_site, weekly = policy.require_privacy, policy.require_client_privacy, policy.max_weekly_privacy
    return [
        ("Hours", f"{', '.join(policy.hours)} ({zone})" if policy.hours else "always open"),
        *most,
        *((name, ", ".join(values[:8]) + (" …" if len(values) > 8 else "")) for name, values in lists if values),
        *([("Privacy of each run", f"at most {needed.in_words}")] if needed else []),
        *([("Privacy of the site", f"at most {of_site.bound}, in secure sums")] if of_site else []),
        *([("Privacy of seven days", f"at most {weekly.in_words}, on each data set")] if weekly else []),
        *([("Noise of figures", f"{noise.bound}, for an example in one evaluation")] if noise else []),
        ("Figures", "rounded in all runs" if policy.rounds_figures else f"exact, but rounded in {_rounding(policy)}"),
        *([("Secure sums", "required: updates leave only under masks")] if policy.require_secure_sums else []),
        *([("Training", "by a script of the site's own, which counts as not private")] if policy.own_script else []),
        *([("Runs", "a person at the site approves each")] if policy.approve_runs else []),
        *([("Updates", "a person at the site releases each")] if policy.airlock else []),
    ]


def _rounding(policy: AdvertisedPolicy) -> str:
    """Return the places where a site that does not round all its figures rounds them."""
    on = f", and on {', '.join(policy.budgets)}" if policy.budgets else ""
    return f"private runs and secure sums{on}"


def _budgets(policy: AdvertisedPolicy) -> list[tuple[str, float, UnitBudget]]:
    """Return each data set with a privacy budget, and that of all together, with the epsilon spent of it."""
    budgets = [(name, policy.spent.get(name, 0.0), budget) for name, budget in policy.budgets.items()]
    total = policy.max_total_privacy
    return [*budgets, *([("all data sets", policy.total_spent or 0.0, total)] if total else [])]


def _latest_tasks(session: Session, worker_id: str, worker: WorkerView) -> list[tuple[TaskView, str, float | None]]:
    """Return the worker's latest tasks with the names of their runs and the seconds that it worked on each."""
    query = select(TaskRow, RunRow.name).join_from(TaskRow, RunRow).where(TaskRow.worker_id == worker_id)
    rows = session.execute(query.order_by(TaskRow.created_at.desc(), TaskRow.id.desc()).limit(MAX_TASKS)).all()
    leased = case((AuditRow.action == "task.lease", AuditRow.at))
    times = session.execute(
        select(AuditRow.subject, func.max(leased), func.max(AuditRow.at))
        .where(AuditRow.subject.in_([task.id for task, _ in rows]))
        .where(AuditRow.action.in_([f"task.{word}" for word in ("lease", "accept", "reject", "fail", "expire")]))
        .group_by(AuditRow.subject)
    )
    took = {subject: end - begin for subject, begin, end in times if begin is not None and end > begin}
    return [
        (
            views.task_view(task, f"{worker.site}/{worker.name}", task.version_number + (task.kind == "train")),
            run,
            took.get(task.id),
        )
        for task, run in rows
    ]


# ---------------------------------------------------------------- administrators


TOKEN_COLUMNS: Mapping[str, Any] = {
    "name": func.lower(TokenRow.name),
    "role": TokenRow.role,
    "site": SiteRow.name,
    "created": TokenRow.created_at,
    "expires": TokenRow.expires_at,
}
"""The columns by which tokens are sorted."""


@router.get("/tokens")
def list_tokens(
    request: Request,
    serving: Serving,
    who: Signed,
    sorting: Sorted,
    q: Text = "",
    page: PageNumber = 1,
) -> Response:
    """Show the tokens, newest first; for administrators, as in the API."""
    require_role(who.principal, "admin")
    with serving.reading(who.principal) as session:
        query = select(TokenRow, SiteRow.name).outerjoin_from(TokenRow, SiteRow)
        if q:
            query = query.where(containing(TokenRow.name, q) | containing(SiteRow.name, q))
        order = *sorting.ordering(TOKEN_COLUMNS), TokenRow.created_at.desc(), TokenRow.id.desc()
        rows = session.execute(query.order_by(*order).offset((page - 1) * TOKENS).limit(TOKENS + 1)).all()
        shown = [views.token_view(row, site, serving.last_seen.last_use(row.id)) for row, site in rows[:TOKENS]]
    return render(request, "tokens.html", who, tokens=shown, q=q, sorting=sorting, page=page, more=len(rows) > TOKENS)


def containing(column: ColumnElement[str] | InstrumentedAttribute[str], text: str) -> ColumnElement[bool]:
    """Return the condition that a column has this text in it, in any case of its letters."""
    return func.lower(column).contains(text.lower(), autoescape=True)


@router.get("/studies")
def list_studies(request: Request, serving: Serving, who: Signed) -> Response:
    """Show the studies and their members; for administrators."""
    require_role(who.principal, "admin")
    names = [study.name for study in studies.list_studies(serving, who.principal).items]
    shown = [studies.get_study(serving, who.principal, name) for name in names]
    return render(request, "studies.html", who, studies=shown)


SiteAction = Literal["suspend", "resume", "withdraw"]


@router.get("/sites/{site_id}/{action}")
def confirm_site(site_id: str, action: SiteAction, request: Request, serving: Serving, who: Signed) -> Response:
    require_role(who.principal, "admin")
    with serving.reading(who.principal) as session:
        name = find(session, SiteRow, site_id).name
        workers = session.scalar(select(func.count()).where(WorkerRow.site_id == site_id)) or 0
    told = {
        "suspend": "The coordinator refuses all tokens of the site from now on and gives its workers no task. Tasks "
        "that they hold are lost. Nothing is deleted: you can resume the site.",
        "resume": "The coordinator accepts the tokens of the site again, and gives its workers tasks.",
        "withdraw": WITHDRAWAL,
    }[action]
    question = f"{action.capitalize()} {name}?"
    detail = f"It has {plural(workers, 'worker')}. {told}"
    return render(
        request, "confirm.html", who, question=question, detail=detail, action=f"{PREFIX}/sites/{site_id}/{action}",
        fields={}, label=f"{action.capitalize()} the site", dangerous=action != "resume", keep="Go back",
        back=f"{PREFIX}/sites", typed=name if action == "withdraw" else None,
    )  # fmt: skip


@router.post("/sites/{site_id}/{action}")
def set_site(site_id: str, action: SiteAction, serving: Serving, who: AdminSender, fields: Fields) -> Response:
    if action == "withdraw":
        with serving.database.snapshot() as session:
            name = find(session, SiteRow, site_id).name
        if fields.get("name") != name:
            raise Invalid("the name that you typed is not the site's", remedy=f"Type {name} to withdraw it.")
        withdraw(serving, who.principal, site_id)
        return RedirectResponse(f"{PREFIX}/sites", status_code=303)
    sites.set_suspended(serving, who.principal, site_id, suspended=action == "suspend")
    return RedirectResponse(f"{PREFIX}/sites", status_code=303)


@router.get("/tokens/{token_id}/{action}")
def confirm_token(
    token_id: str, action: Literal["revoke", "rotate"], request: Request, serving: Serving, who: Signed
) -> Response:
    require_role(who.principal, "admin")
    with serving.reading(who.principal) as session:
        token, replaced = _token(session, token_id), find(session, TokenRow, token_id).previous_until
    if token.revoked_at:
        raise Conflict(f"token {token.name} was revoked", remedy="Issue a new one.")
    grace = span(serving.settings.rotation_grace_seconds)
    detail = {
        "revoke": "The coordinator refuses it from now on, and its sessions end. This cannot be undone.",
        "rotate": "It gets a new secret, which the next page shows once. The present secret stays valid for "
        f"{grace}. Give the new one to the token's holder over a channel that you trust.",
    }[action]
    if action == "rotate" and (left := (replaced or 0.0) - serving.database.now()) > 0:
        detail += f" It was rotated before: the secret from then, valid for another {span(left)}, ends at once."
    if action == "rotate" and token.role == "site":
        detail += " A worker can do this itself, and then only its site knows the secret: tessera worker rotate."
    return render(
        request, "confirm.html", who, question=f"{action.capitalize()} {token.name}?",
        detail=f"It is a token of role {token.role}{f' of {token.site}' if token.site else ''}. {detail}",
        action=f"{PREFIX}/tokens/{token_id}/{action}", fields={}, label=f"{action.capitalize()} the token",
        dangerous=action == "revoke", keep="Go back", back=f"{PREFIX}/tokens",
    )  # fmt: skip


@router.post("/tokens/{token_id}/revoke")
def revoke_token(token_id: str, serving: Serving, who: AdminSender) -> Response:
    sites.revoke_token(serving, who.principal, token_id)
    return RedirectResponse(f"{PREFIX}/tokens", status_code=303)


@router.post("/tokens/{token_id}/rotate")
def rotate_token(token_id: str, request: Request, serving: Serving, who: AdminSender) -> Response:
    with serving.reading(who.principal) as session:
        token = _token(session, token_id)
    secret = new_secret(token.role)
    rotated = sites.rotate_token(serving, who.principal, token_id, hash_of(secret))
    return render(request, "secret.html", who, token=token, secret=secret, grace=rotated.grace_seconds)


def _token(session: Session, token_id: str) -> Token:
    row = find(session, TokenRow, token_id)
    site = session.get(SiteRow, row.site_id) if row.site_id else None
    return views.token_view(row, site.name if site else None)

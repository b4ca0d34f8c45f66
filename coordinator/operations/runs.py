"""Creation, preview, pause, resumption and cancellation of runs."""

from collections.abc import Collection, Mapping
from typing import Any

from opentelemetry.trace import get_current_span
from sqlalchemy import update
from sqlalchemy.orm import Session

from tessera.coordinator.auth.permissions import find_run, readable_blobs, require_study
from tessera.coordinator.db import audit, round_tasks, versions, views
from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.tables import RunBlobRow, RunRow, new_id
from tessera.coordinator.db.transitions import move_run
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.preview import preview
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.domain.workers import in_study
from tessera.coordinator.operations.idempotency import once
from tessera.coordinator.services import Services
from tessera.shared.api.runs import LIVE_SETTINGS, ParentVersion, Preview, Run, RunPatch, RunSpec
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.model.selectors import SelectorError
from tessera.shared.model.spec import Model
from tessera.shared.problems import Conflict, Fault, Forbidden, Invalid, PreconditionFailed
from tessera.shared.rounds.planning import begun, check_method, warnings_of, with_changes
from tessera.shared.telemetry.trace_ids import ids_in, traceparent_of

EVENTS = {"paused": "pause", "running": "resume", "cancelled": "cancel"}
"""The event that leads to a state which a person requests."""


def create_run(services: Services, caller: Principal, spec: RunSpec, key: str | None = None) -> Run:
    """Start a run from an uploaded model and version; repeating it with the same `key` returns the same run."""
    model, manifest = _start_of(services, caller, spec)
    given = services.states.load(model, manifest, 0)
    # The first version includes the method's initial server state.
    state = begun(spec, model, given)
    started, new = (manifest, []) if state == given else services.states.store(state, spec.version)
    warnings = warnings_of(spec, model, state)
    with services.database.transaction() as session:
        now = services.database.now()
        # Again: a member may have left, and its key's first answer is of a study of others then.
        require_study(session, caller, spec.study)

        def create() -> Run:
            services.blobs.record(session, now, new)
            run = RunRow(
                id=new_id(),
                study=spec.study,
                name=spec.name,
                state="running",
                spec=spec.model_dump(mode="json"),
                model_bytes=model.nbytes,
                version_number=0,
                revision=1,
                created_at=now,
                resumed_at=now,
                updated_at=now,
                owner=caller.owner,
            )
            session.add(run)
            session.flush()
            first = VersionRef(number=0, digest=new[-1].digest if new else spec.version)
            versions.add_version(session, now, run.id, first, started, warnings)
            # A hostile model may name one blob in two places.
            for digest in sorted({spec.model, *(ref.digest for ref in model.preprocessing.values())}):
                session.merge(RunBlobRow(run_id=run.id, digest=digest))
            helpers = spec.secure_sums.helpers if spec.secure_sums else ()
            audit.reserve(session, {*(spec.cohort.sites or ()), *spec.cohort.require, *helpers})
            audit.record(session, now, caller.actor, "run.create", run.id, run_id=run.id, spec=run.spec)
            return views.run_view(session, run)

        run = once(session, now, caller, key, spec, Run, create)
    services.wake_conductor(run.id)
    get_current_span().add_link(ids_in(traceparent_of(run.id, 1)))
    return run


def preview_run(services: Services, caller: Principal, spec: RunSpec) -> Preview:
    """Return the workers that would take part in a run, why others would not, and the first round's workload."""
    model, manifest = _start_of(services, caller, spec)
    state = begun(spec, model, services.states.load(model, manifest, 0))
    now = services.database.now()
    with services.database.snapshot() as session:
        known = in_study(spec.study, live_workers(session, 0.0))
        live = {worker.name for worker in live_workers(session, now - services.settings.liveness_seconds)}
    invited = RunTerms(spec, model.nbytes, caller.name)
    return preview(invited, model, state, known, live, now, services.states.vocabulary)


def set_base(services: Services, caller: Principal, run_id: str, base: ParentVersion) -> Run:
    """Record the parent's version on which a region's run goes on. Repeating it changes nothing.

    Raise NotFound, Forbidden, Conflict and Invalid.
    """
    with services.reading(caller) as session:
        row = find_run(session, caller, run_id)
        require_owner(caller, row)
        before = RunSpec.model_validate(row.spec)
    if before.parent is None:
        raise Conflict("the run is no region's", remedy="Create it with `parent`, as `tessera regional` does.")
    spec = before.model_copy(update={"version": base.version})
    model, _ = _start_of(services, caller, spec)
    try:
        for selector in (base.plan.fetch, base.plan.train, base.plan.upload):
            selector.resolve(model.blocks)
    except SelectorError as fault:
        raise Invalid("the plan does not fit the model", errors=[Fault(pointer="/plan", detail=str(fault))]) from None
    with services.database.transaction() as session:
        row = find_run(session, caller, run_id)
        before = RunSpec.model_validate(row.spec)
        assert before.parent  # noqa: S101 (it never changes)
        if before.parent.base != base:
            if base.number <= (number := before.parent.base.number):
                # As after a restore of the parent: sites refuse two versions under one number too.
                raise Conflict(f"the run is on the parent's version {number}, and {base.number} is no later one")
            if row.state not in LIVE_RUN:
                raise Conflict(f"the run is {row.state}, which is final")
            parent = before.parent.model_copy(update={"base": base})
            after = before.model_copy(update={"parent": parent}).model_dump(mode="json")
            now, changes = services.database.now(), RunRow.changes + 1
            values = {"spec": after, "changes": changes, "revision": RunRow.revision + 1, "updated_at": now}
            session.execute(update(RunRow).where(RunRow.id == row.id).values(values))
            about = {"number": base.number, "version": base.version}
            audit.record(session, now, caller.actor, "run.base", row.id, run_id=row.id, **about)
            session.refresh(row)
        run = views.run_view(session, row)
    services.wake_conductor(run.id)
    return run


def patch_run(services: Services, caller: Principal, run_id: str, patch: RunPatch, if_match: str) -> Run:
    """Change the state, tags, note or some settings of a run with entity tag `if_match`.

    Raise NotFound, Forbidden, PreconditionFailed, Conflict and Invalid.
    """
    with services.database.transaction() as session:
        row = find_run(session, caller, run_id)
        require_owner(caller, row)
        wanted = patch.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        settings = {name: wanted.pop(name) for name in LIVE_SETTINGS if name in wanted}
        settings = _without_same(settings, row.spec)
        changed = {name: value for name, value in wanted.items() if value != getattr(row, name)}
        if not (changed or settings):
            # A repetition whose first response was lost, or another person did the same.
            return views.run_view(session, row)
        if if_match != etag(row.revision):
            raise PreconditionFailed(f"the run is at revision {row.revision}; If-Match names {if_match[:64]}")
        now = services.database.now()
        state = changed.pop("state", None)
        if (state or settings) and row.state not in LIVE_RUN:
            raise Conflict(f"the run is {row.state}, which is final", remedy=_new_run(row, settings))
        if settings:
            _change(services, session, now, caller, row, settings)
        if state:
            move_run(session, now, caller.actor, run_id, EVENTS[state])
            if state == "cancelled" and round_tasks.live_round(session, run_id) is None:
                round_tasks.end_training(session, now, run_id)
        if changed:
            # `updated_at` stays: it is the end of a run that has ended.
            values = {**changed, "revision": RunRow.revision + 1}
            session.execute(update(RunRow).where(RunRow.id == run_id).values(values))
            audit.record(session, now, caller.actor, "run.annotate", run_id, run_id=run_id, **changed)
        session.refresh(row)
        run = views.run_view(session, row)
    services.wake_conductor(run.id)
    return run


def _without_same(settings: dict[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the present ones, in the same shape."""
    found = {
        name: _without_same(value, present[name]) if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return {name: value for name, value in found.items() if value not in ({}, present[name])}


def _new_run(row: RunRow, settings: Mapping[str, Any]) -> str:
    """Return the remedy for changes that a run cannot have any more."""
    flat = {name: value for name, value in settings.items() if name != "cohort"}
    flat |= {f"cohort.{name}": value for name, value in settings.get("cohort", {}).items()}
    given = "".join(f" --set {name}={value}" for name, value in flat.items())
    return f"Start a new run from its last version: `tessera run create --from {row.id}{given}`."


def _change(
    services: Services, session: Session, now: float, caller: Principal, row: RunRow, settings: dict[str, Any]
) -> None:
    """Change settings of a live run. Its live round keeps those that it opened with, which its sites agreed to, but a
    longer deadline is its own too: it only waits for more of their updates. Raise Invalid and Conflict."""
    before = RunSpec.model_validate(row.spec)
    wanted = with_changes(before, services.states.model(before.model), settings, _new_run(row, settings))
    round_ = round_tasks.live_round(session, row.id)
    if wanted.rounds < (least := round_.number if round_ else row.version_number):
        begun = f"round {least} is under way" if round_ else f"{least} rounds are done"
        raise Conflict(
            f"rounds cannot be {wanted.rounds}: {begun}",
            remedy=f"Set rounds to {least} to complete the run after it, or `tessera run cancel {row.id}`.",
        )
    if round_:
        round_.opened_with = round_.opened_with or before.model_dump(mode="json", include=LIVE_SETTINGS)
        if round_.state == "open":
            round_.deadline_at = max(round_.deadline_at, round_.opened_at + wanted.cohort.deadline_seconds)
    values = {"spec": wanted.model_dump(mode="json"), "changes": RunRow.changes + 1, "revision": RunRow.revision + 1}
    session.execute(update(RunRow).where(RunRow.id == row.id).values({**values, "updated_at": now}))
    replaced = before.model_dump(
        mode="json", include={n: set(v) if n == "cohort" else True for n, v in settings.items()}
    )
    audit.record(session, now, caller.actor, "run.change", row.id, run_id=row.id, before=replaced, after=settings)


def require_owner(caller: Principal, row: RunRow) -> None:
    """Raise Forbidden unless the caller created the run or is an administrator."""
    if caller.role != "admin" and row.owner != caller.owner:
        raise Forbidden(f"run {row.id} was created by another caller", remedy="Ask its creator or an administrator.")


def etag(revision: int) -> str:
    """Return the entity tag of a run at this revision."""
    return f'"{revision}"'


def _start_of(services: Services, caller: Principal, spec: RunSpec) -> tuple[Model, Manifest]:
    """Return the model and first version of a run. Raise Invalid for an unknown method or study or an unreadable
    blob."""
    with services.database.snapshot() as session:
        require_study(session, caller, spec.study)
    check_method(spec.method)

    def readable(digests: Collection[str]) -> set[str]:
        """Return the digests that the caller may read: a run must not be a way to read others."""
        with services.reading(caller) as session:
            return readable_blobs(session, caller, digests)

    named = {"/model": spec.model, "/version": spec.version}
    known = readable(named.values())
    faults = [
        Fault(pointer=pointer, detail=f"blob {digest} was not uploaded")
        for pointer, digest in named.items()
        if digest not in known
    ]
    if faults:
        raise Invalid(f"{len(faults)} of the run's blobs are not there", errors=faults, remedy="Upload them first.")
    model, manifest = services.states.check(spec.model, spec.version, readable)
    services.states.check_files(model, readable)
    return model, manifest

"""The life of a task as its worker drives it: claim it, renew its lease, report on it."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from anyio import to_thread
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.auth import tokens
from tessera.coordinator.blobs.uploads import find_finished, require_digest, retain
from tessera.coordinator.db import tasks, views
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.studies import memberships
from tessera.coordinator.db.tables import RunRow, SiteRow, TaskRow, WorkerRow
from tessera.coordinator.db.tasks import LoadedTask
from tessera.coordinator.db.workers import enrol, enrolled, note_live
from tessera.coordinator.domain.eligibility import too_old
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.coordinator.telemetry.metrics import RECEIVED_BYTES, SENT_BYTES, UPDATES_TOTAL
from tessera.shared.api.secure_sums import HELPER_KINDS, HelperReport, SumTask
from tessera.shared.api.tasks import (
    Claim,
    EvaluationResult,
    Failure,
    Heartbeat,
    Lease,
    Release,
    ReportResult,
    Submission,
    Task,
    TaskView,
)
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import layers_of
from tessera.shared.model.spec import Model
from tessera.shared.problems import (
    Conflict,
    Fault,
    Invalid,
    InvalidUpdate,
    Problem,
    Withheld,
    WorkerFailed,
    problem_from,
)
from tessera.shared.rounds.planning import check_report, run_facts
from tessera.shared.rounds.secure_sums import check_masked
from tessera.shared.schema import GIVEN_BACK, MAX_INLINE_BLOBS, Page
from tessera.shared.secure_sums.committee import check_abandonment, check_agreement, sender_set
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.masked_update import read_ring
from tessera.shared.secure_sums.messages import Agreement, SiteKeys, SumDocument, Terms
from tessera.shared.version import VERSION, numbers_of

# ---------------------------------------------------------------- claim


async def claim(
    services: Services,
    caller: Principal,
    request: Claim,
    wait_seconds: float,
    disconnected: Callable[[], Coroutine[Any, Any, None]],
) -> Task | None:
    """Lease the worker's next task within `wait_seconds`. Lease none to a caller for whom `disconnected` returned."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + wait_seconds
    worker_id = await to_thread.run_sync(declare, services, caller, request)
    with services.waiters.waiting(worker_id) as wakeup:
        watcher, woken = asyncio.create_task(disconnected()), False
        watcher.add_done_callback(lambda _: wakeup.set())
        try:
            while not watcher.done():
                wakeup.clear()
                about = (worker_id, request.instance, request.holding)
                next_task = partial(lease, services, caller, *about, woken=woken)
                if task := await to_thread.run_sync(next_task):
                    return task
                with suppress(TimeoutError):
                    if not services.waiters.closed:
                        await asyncio.wait_for(wakeup.wait(), deadline - clock())
                woken = wakeup.is_set()
                if services.waiters.closed or not woken:
                    break
        finally:
            watcher.cancel()
    return None


def declare(services: Services, caller: Principal, request: Claim) -> str:
    """Store the worker's declaration if it changed; return the worker's id. Raise NameInUse and QuotaExceeded."""
    site_id = caller.site_id or ""
    now = services.database.now()
    with services.database.snapshot() as session:
        worker_id = enrolled(session, site_id, request)
    if worker_id is None:
        services.admission.count_declaration(site_id)
        with services.database.transaction() as session:
            most, liveness = services.settings.max_workers_per_site, services.settings.liveness_seconds
            worker_id, nbytes = enrol(session, now, site_id, request, most, liveness)
            services.disk.require(nbytes)
            services.uploads.quota.note_bytes(session, now, site_id, nbytes)
            tasks.withhold(session, now, caller.actor, worker_id, request)
        services.wake_conductor()
    services.last_seen.note(worker_id, now, caller.token_id)
    return worker_id


def left_out(services: Services, caller: Principal, version: str) -> str | None:
    """Return the name of a live run that leaves out workers of this version, and why, for the worker's own log."""
    if numbers_of(version) >= numbers_of(VERSION):
        return None
    with services.database.snapshot() as session:
        site = session.get_one(SiteRow, caller.site_id).name
        live = select(RunRow.id, RunRow.changes).where(
            RunRow.state.in_(LIVE_RUN), RunRow.study.in_(memberships(session, "site", caller.site_id or ""))
        )
        for run, changes in session.execute(live):
            terms = terms_of(session, run, changes)
            if terms.lets_know(site) and (reason := too_old(terms, version)):
                return f"{terms.spec.name}: {reason}"
    return None


def lease(
    services: Services,
    caller: Principal,
    worker_id: str,
    instance: str,
    holding: Sequence[str] = (),
    *,
    woken: bool,
) -> Task | None:
    """Lease the worker's next task, if there is one; `woken` means that there should be."""
    settings, now = services.settings, services.database.now()
    if not woken or holding:
        # A worker that polls repeatedly must not block writers; a task that it holds wakes it at every tick.
        with services.database.snapshot() as session:
            if woken:
                tokens.principal_for_token(session, now, caller.token_id)
            if not tasks.is_claimable(session, worker_id, instance, holding):
                return None
    seconds = settings.lease_seconds
    limits = {"inline_bytes": settings.submission_bytes, "stream_bytes": settings.max_upload_bytes}
    with services.database.transaction() as session:
        if woken:
            # Revoking a token also wakes the claims that wait with it.
            tokens.principal_for_token(session, now, caller.token_id)
        record = tasks.claimable(session, worker_id, instance, holding)
        if record is None:
            return None
        try:
            tasks.lease(session, now, caller.actor, record.task, instance, seconds)
        except Conflict:
            # Another claim of this worker was faster.
            return None
        task = tasks.task_message(session, record, seconds, **limits)
        earlier, has_another = tasks.known_to_worker(session, record.task)
        task = task.model_copy(update={"audit_head": record.worker.audit_head})
    # A rehearsal measures the line.
    if task.kind in (*HELPER_KINDS, "rehearse"):
        return task
    if has_another or earlier == task.version.digest:
        return task
    # If a blob cannot be read, the worker finds out and reports it.
    with suppress(Problem):
        return task.model_copy(update={"inline_blobs": _inline_blobs(services, task, earlier)})
    return task


def _inline_blobs(services: Services, task: Task, earlier: str | None) -> tuple[bytes, ...]:
    """Return the blobs that are new since an earlier version, manifest first, if small, or else the manifest: each
    saves a request."""
    manifest, blocks = services.states.manifest(task.version.digest), services.states.model(task.model).by_name
    changed = manifest.changed(services.states.manifest(earlier)) if earlier else manifest.blocks
    new = {name: digest for name, digest in changed.items() if task.plan.fetch.holds(blocks[name])}
    digests = dict.fromkeys([task.version.digest, *new.values()])
    left = services.settings.submission_bytes - services.blobs.size(task.version.digest)
    if left < 0:
        return ()
    if sum(blocks[name].nbytes for name in new) > left or len(digests) > MAX_INLINE_BLOBS:
        digests = {task.version.digest: None}
    services.blobs.expect(digests)
    inline = tuple(map(services.blobs.read, digests))
    SENT_BYTES.inc(sum(map(len, inline)))
    return inline


# ---------------------------------------------------------------- read


def list_tasks(
    services: Services, caller: Principal, run: str | None, limit: int, cursor: str | None
) -> Page[TaskView]:
    """Return a page of the calling site's tasks, oldest first."""
    query = tasks.RECORDS.where(WorkerRow.site_id == caller.site_id)
    if run is not None:
        query = query.where(TaskRow.run_id == run)
    keys = (TaskRow.created_at, TaskRow.id)
    with services.database.snapshot() as session:
        return views.page(session, query, keys, lambda row: _view(tasks.record_of(row), caller), limit, cursor)


def get_task(services: Services, caller: Principal, task_id: str) -> TaskView:
    """Return a task. Raise NotFound if it is another site's, or of a study of others."""
    with services.reading(caller) if caller.site_id is None else services.database.snapshot() as session:
        return _view(tasks.find_task(session, task_id, caller.site_id), caller)


def _view(record: LoadedTask, caller: Principal) -> TaskView:
    view = views.task_view(record.task, f"{record.site}/{record.worker.name}", record.number)
    return view if caller.site_id is None else views.task_for_site(view)


# ---------------------------------------------------------------- report


def heartbeat(services: Services, caller: Principal, task_id: str, request: Heartbeat) -> Lease:
    """Renew the lease. Raise LeaseLost, TaskCancelled or RoundClosed."""
    seconds = services.settings.lease_seconds
    with services.database.transaction() as session:
        now = services.database.now()
        record = tasks.find_task(session, task_id, caller.site_id)
        record.require_lease(request.token)
        tasks.renew(session, record.task, now + seconds, request.progress)
        if request.live:
            note_live(session, record.worker.id, now, request.live)
        services.last_seen.note(record.worker.id, now, caller.token_id)
    return Lease(lease_seconds=seconds)


def submit_update(services: Services, caller: Principal, task_id: str, report: Submission) -> TaskView:
    """Validate an update and accept it. Raise InvalidUpdate to reject it, and Invalid if it was not uploaded."""
    with services.database.snapshot() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if tasks.was_accepted(record, report.token, report.update):
            return _view(record, caller)
        task = record.task
        # A repetition gets the first rejection again.
        if (task.state, task.token, task.update_digest) == ("rejected", report.token, report.update) and task.problem:
            raise problem_from(task.problem)
        tasks.require_report(record, report, "train")
        spec, plan, sums = record.spec, record.plan, tasks.sum_task(record)
        if report.data is None:
            length = _uploaded_bytes(session, caller.owner, report.update)
    if report.data is not None:
        _receive(services, report.update, report.data)
        length = len(report.data)
    try:
        model = services.states.model(spec.model)
        check_report(spec, model, plan, report.examples, report.metrics)
        if sums:
            statement, blocks = _check_masked(services, record, report, sums, model)
            metrics = views.without_scores(report.metrics)
        else:
            manifest = services.states.manifest(record.version.digest)
            # This reads the whole update, outside of any transaction.
            measured, blocks = services.inspector.checked(
                report.update,
                model,
                manifest,
                plan,
                spec.max_update_norm,
                report.data,
                report.examples if coordinator_half(spec.method, run_facts(spec, model)).takes_regions else None,
            )
            statement, metrics = None, {**views.without_scores(report.metrics), **measured}
    except InvalidUpdate as problem:
        _reject(services, caller, record, report, problem)
        raise
    layers = [layer.name for layer in layers_of(model.by_name[name] for name in blocks)]
    columns = {**_accepted(report, metrics), "layers": layers, "update_digest": report.update, "upload_bytes": length}
    if statement:
        columns["statement"] = statement
    view = _accept(services, caller, record, columns, report.data)
    UPDATES_TOTAL.labels(outcome="accepted").inc()
    return view


def _check_masked(
    services: Services, record: LoadedTask, report: Submission, sums: SumTask, model: Model
) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the envelope of a masked update, and its blocks. Raises InvalidUpdate."""
    terms = Terms.model_validate_json(services.blobs.read(sums.terms))
    asked = [block.name for block in record.plan.upload.resolve(model.blocks)]
    about = (report.update, asked, services.blobs, report.data)
    keys = record.worker.declared.get("site_keys") or {}
    weight = 1 if terms.noise else keys.get("weight", 1) if keys else None
    envelope, blocks = check_masked(report.envelope, terms, record.site, weight, *about, keys.get("identity"))
    return envelope.model_dump(mode="json"), blocks


def submit_helper_report(services: Services, caller: Principal, task_id: str, report: HelperReport) -> TaskView:
    """Accept a helper's signature, or the sums of masks that it uploaded. Raises Invalid for others."""
    with services.database.snapshot() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if tasks.was_accepted(record, report.token, report.mask_sums):
            return _view(record, caller)
        tasks.require_kind(record, report, *HELPER_KINDS)
        sums, settings = tasks.sum_task(record), record.spec.secure_sums
        helpers = settings.helpers if settings else ()
        length = _uploaded_bytes(session, caller.owner, report.mask_sums) if report.mask_sums else 0
    columns = {
        "metrics": {},
        "download_bytes": report.download_bytes,
        "audit_head": report.audit_head,
        "upload_bytes": length,
        "update_digest": report.mask_sums,
    }
    try:
        columns["statement"] = _check_helper(services, record, helpers, sums, report)
    except SumRefused as refusal:
        fault = Fault(pointer="/agreement" if report.agreement else "/mask_sums", detail=str(refusal)[:300])
        raise Invalid("the helper's result cannot be used", errors=[fault]) from None
    return _accept(services, caller, record, columns)


def _check_helper(
    services: Services, record: LoadedTask, helpers: tuple[str, ...], sums: SumTask | None, report: HelperReport
) -> dict[str, Any] | None:
    """Return the helper's signature, if its task was to sign. `helpers` are the sites. Raises SumRefused."""
    kind = record.task.kind
    wanted = report.mask_sums if kind == "open" else report.agreement
    if sums is None or wanted is None:
        raise SumRefused("malformed", f"the report is not one of a task to {kind}")
    if isinstance(wanted, Agreement) and helpers[wanted.helper : wanted.helper + 1] != (record.site,):
        raise SumRefused("signature", f"the agreement is of another helper than {record.site}")
    if isinstance(wanted, Agreement) and kind == "abandon":
        keys = SiteKeys.model_validate(record.worker.declared["site_keys"])
        check_abandonment(sums.terms, wanted, [keys] * len(helpers))
        return wanted.model_dump(mode="json")
    terms = Terms.model_validate_json(services.blobs.read(sums.terms))
    document = SumDocument.model_validate_json(services.blobs.read(sums.document or ""))
    found = sender_set(terms, document.envelopes)
    if isinstance(wanted, Agreement):
        check_agreement(found, wanted)
        return wanted.model_dump(mode="json")
    read_ring(partial(services.blobs.open, wanted), services.blobs.size(wanted), terms, sorted(found.senders))
    return None


def submit_evaluation(services: Services, caller: Principal, task_id: str, report: EvaluationResult) -> TaskView:
    """Accept the metrics of an evaluation."""
    with services.database.snapshot() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if tasks.was_accepted(record, report.token):
            return _view(record, caller)
        tasks.require_report(record, report, "evaluate")
    counts = report.class_counts and report.class_counts.model_dump(mode="json")
    columns = _accepted(report, dict(report.metrics)) | {"class_counts": counts}
    if report.subgroup_counts:
        columns["subgroup_counts"] = report.model_dump(mode="json", include={"subgroup_counts"})["subgroup_counts"]
    return _accept(services, caller, record, columns)


def submit_report(services: Services, caller: Principal, task_id: str, report: ReportResult) -> TaskView:
    """Accept the report of a task in a run without rounds."""
    kind, found = report.of_kind
    with services.database.snapshot() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if tasks.was_accepted(record, report.token):
            return _view(record, caller)
        tasks.require_kind(record, report, kind)
    return _accept(services, caller, record, {"report": found.model_dump(mode="json"), **_received(report)})


def fail(services: Services, caller: Principal, task_id: str, report: Failure) -> TaskView:
    """End a task that its worker cannot do. One that its site has not approved is withheld, which is no failure. A
    helper's fails all the same, since no other site can do it."""
    with services.database.transaction() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        withheld = report.code in GIVEN_BACK and record.task.kind not in HELPER_KINDS
        problem = Withheld(report.detail) if withheld else WorkerFailed.of(report.code, report.detail)
        if not tasks.was_failed(record, report.token):
            event, columns = "withhold" if withheld else "fail", {"problem": problem.json()}
            tasks.settle(session, services.database.now(), caller.actor, record, report.token, event, columns)
            if withheld:
                tasks.note_withheld(record, problem.detail)
        view = _view(record, caller)
    services.wake_conductor(view.run)
    return view


def release(services: Services, caller: Principal, task_id: str, request: Release) -> TaskView:
    """Take an unfinished task back and offer it again at once. Its lease does not count as an attempt.

    Raise Conflict if the task was given back `MAX_RELEASES` times; its lease then expires.
    """
    with services.database.transaction() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if not tasks.was_released(record, request.token):
            tasks.require_releases_left(record, request)
            columns: dict[str, Any] = {"attempts": record.task.attempts - 1, "lease_expires_at": None}
            if request.code:
                columns["problem"] = WorkerFailed.of(request.code, request.detail).json()
            now = services.database.now()
            tasks.settle(session, now, caller.actor, record, request.token, "release", columns)
        view, worker_id = _view(record, caller), record.worker.id
    services.wake_workers([worker_id])
    return view


def _uploaded_bytes(session: Session, owner: str, digest: str) -> int:
    """Return the length of an update that was uploaded. Raise Invalid if it was not."""
    upload = find_finished(session, owner, digest)
    if upload is None:
        missing = Fault(pointer="/update", detail="your site has no complete upload with this digest")
        raise Invalid(f"{digest} was not uploaded", errors=[missing], remedy="Upload it, then submit again.")
    return upload.length


def _receive(services: Services, digest: str, data: bytes) -> None:
    """Count the bytes of an update inside its submission. Raise Invalid if they are too many, and DigestMismatch."""
    if len(data) > (most := services.settings.submission_bytes):
        fault = Fault(pointer="/data", detail=f"{len(data)} bytes; a submission may contain {most}")
        raise Invalid("the update is too large for its submission", errors=[fault], remedy="Upload it first.")
    RECEIVED_BYTES.inc(len(data))
    services.memory.require()
    require_digest(digest, data)


def _accepted(report: Submission | EvaluationResult, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the columns of a task whose report is accepted."""
    about = {"examples": report.examples, "metrics": metrics, "download_bytes": report.download_bytes}
    return about | _received(report)


def _received(report: Submission | EvaluationResult | ReportResult) -> dict[str, Any]:
    """Return the columns of any accepted report."""
    progress = {"progress": report.progress.model_dump(mode="json", exclude_none=True)} if report.progress else {}
    return progress | {"audit_head": report.audit_head}


def _accept(
    services: Services, caller: Principal, judged: LoadedTask, columns: dict[str, Any], data: bytes | None = None
) -> TaskView:
    """Accept a report that was validated, under the token of its validation, and with it the update that it contains
    or names."""
    token, digest, site_id = judged.task.token, columns.get("update_digest"), caller.site_id or ""
    # On disk, if it is large, before the transaction that makes it a blob.
    stored = services.blobs.put([data]) if data is not None else None
    with services.database.transaction() as session:
        now, record = services.database.now(), tasks.reload(session, judged)
        if not tasks.was_accepted(record, token, digest):
            counted = ("metrics", "class_counts", "subgroup_counts", "report")
            nbytes = len(json.dumps([columns.get(name) for name in counted]))
            if stored:
                services.uploads.enter(session, now, caller.owner, stored, site_id=site_id, more_bytes=nbytes)
            else:
                # Counted but never refused, so that work in progress can finish.
                services.uploads.quota.note_bytes(session, now, site_id, nbytes)
            if digest and not stored:
                retain(session, now, caller.owner, digest)
            tasks.settle(session, now, caller.actor, record, token, "accept", columns)
        view = _view(record, caller)
        is_waited_for = tasks.is_waited_for(session, record.task, record.spec)
    if is_waited_for:
        services.change_feed.notify()
    else:
        services.wake_conductor(view.run)
    return view


def _reject(
    services: Services, caller: Principal, judged: LoadedTask, report: Submission, problem: InvalidUpdate
) -> None:
    columns = {"problem": problem.json(), "update_digest": report.update, "audit_head": report.audit_head}
    with services.database.transaction() as session:
        now, record = services.database.now(), tasks.reload(session, judged)
        tasks.settle(session, now, caller.actor, record, judged.task.token, "reject", columns)
    services.wake_conductor(judged.task.run_id)
    UPDATES_TOTAL.labels(outcome="rejected").inc()

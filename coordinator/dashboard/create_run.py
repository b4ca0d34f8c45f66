"""Creation of a run: a form generated from the API's models, a preview for each site, and the run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving, require_role
from tessera.coordinator.auth.permissions import readable_blobs
from tessera.coordinator.dashboard.forms import Field, fields_of, filled, placed
from tessera.coordinator.dashboard.runs import facts_of
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import (
    FORM_TOKEN,
    STEERING,
    Fields,
    PageRoute,
    Signed,
    SteeringSender,
    Visitor,
)
from tessera.coordinator.dashboard.templating import render
from tessera.coordinator.db import views
from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.studies import CallerSession, is_present
from tessera.coordinator.db.tables import RUNS, RunRow, SiteRow, UploadRow, VersionRow, WorkerRow, new_id
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations import runs
from tessera.coordinator.services import Services
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, RunSpec
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import Method
from tessera.shared.methods.registry import methods
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.problems import Conflict, Fault, Invalid, NotFound, faults_of
from tessera.shared.run_settings import Privacy, Training

router = APIRouter(prefix=f"{PREFIX}/runs/new", include_in_schema=False, route_class=PageRoute)

START, METHOD, REQUEST_KEY, STEP = "start", "method", "request_key", "step"
FIRST = ("name", "dataset", "rounds")
APART = ("cohort", "training", "privacy", "evaluation", "method", "model", "version")
MAX_RUNS = 50
MAX_UPLOADS = 50
MAX_DATASETS = 100


@dataclass
class FormSection:
    title: str
    fields: Sequence[Field]
    opened: bool = True


@router.get("")
def show_form(
    request: Request,
    serving: Serving,
    who: Signed,
    method: Annotated[str | None, Query(max_length=64)] = None,
    start: Annotated[str, Query(max_length=192)] = "",
    dataset: Annotated[str, Query(max_length=64)] = "",
    copy: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """Ask for model, data set and method first; then show the form, filled in with the answers or another run's."""
    require_role(who.principal, *STEERING)
    if copy is not None:
        with serving.reading(who.principal) as session:
            spec = views.run_view(session, views.find_run(session, copy)).spec
        return _form(request, serving, who, _method(spec.method.name), _given_by(spec))
    if method is None:
        choices = _choices(serving, who.principal)
        # The method that is good for a first run is first, and preselected.
        offered = sorted(methods().values(), key=lambda method: (not method.is_preselected, method.name))
        return render(request, "methods.html", who, methods=offered, **choices)
    chosen = _method(method)
    given = {REQUEST_KEY: new_id(), "/evaluation/sites": "true", "/dataset": dataset}
    given |= {START: start} if start else {}
    given |= {f"/training/{name}": str(value) for name, value in chosen.training.items()}
    return _form(request, serving, who, chosen, given)


def _given_by(spec: RunSpec) -> dict[str, str]:
    """Return a run's settings as the fields of a form that starts it again."""
    given = {REQUEST_KEY: new_id(), START: f"{spec.model} {spec.version}"}
    document = spec.model_dump(mode="json", exclude_unset=True)
    document["name"] = f"{spec.name[:61]}-2"
    for section in _sections(_method(spec.method.name)):
        for field in section.fields:
            *above, last = field.pointer[1:].split("/")
            place: Any = document
            for step in above:
                place = place.get(step) or {}
            # An empty field would mean its default, which a null is not.
            if last in place and (place[last] is not None or field.default):
                given[field.pointer] = field.written(place[last])
    return given


@router.post("")
def take_form(request: Request, serving: Serving, who: SteeringSender, fields: Fields) -> Response:
    """Return the form with its errors, the preview, or the created run."""
    method = _method(fields.get(METHOD, ""))
    if fields.get(STEP) == "change":
        return _form(request, serving, who, method, fields)
    try:
        spec = _spec(method, fields)
        if fields.get(STEP) == "start":
            run = runs.create_run(serving, who.principal, spec, fields.get(REQUEST_KEY) or None)
            return RedirectResponse(f"{PREFIX}/runs/{run.id}", status_code=303)
        preview = runs.preview_run(serving, who.principal, spec)
    except (Invalid, Conflict) as refusal:
        faults = refusal.errors or [Fault(pointer="", detail=refusal.detail)]
        return _form(request, serving, who, method, fields, faults, refusal.advice)
    kept = {name: value for name, value in fields.items() if name not in (FORM_TOKEN, STEP)}
    facts = [("Name", spec.name), ("Rounds", str(spec.rounds)), *facts_of(spec)]
    return render(request, "preview.html", who, preview=preview, spec=spec, facts=facts, kept=kept)


def _method(name: str) -> Method[Any]:
    if (method := methods().get(name)) is None:
        raise NotFound(f"there is no method {name[:64]!r}", remedy="Choose a method of the list.")
    return method


def _sections(method: Method[Any]) -> list[FormSection]:
    run = fields_of(RunSpec, skip=APART)
    first = [field for field in run if field.pointer[1:] in FIRST]
    more = [field for field in run if field.pointer[1:] not in FIRST]
    own = fields_of(method.settings, "/method/settings")
    return [
        FormSection("Run", first),
        *([FormSection(f"Method: {method.name}", own, opened=False)] if own else []),
        FormSection("Cohort", fields_of(Cohort, "/cohort"), opened=False),
        FormSection("Training", fields_of(Training, "/training"), opened=False),
        FormSection("Evaluation", fields_of(Evaluation, "/evaluation"), opened=False),
        FormSection("Privacy", fields_of(Privacy, "/privacy"), opened=False),
        FormSection("More", more, opened=False),
    ]


def _spec(method: Method[Any], given: Mapping[str, str]) -> RunSpec:
    """Return the run that was filled in. Raise Invalid with a pointer to each fault."""
    fields = [field for section in _sections(method) for field in section.fields]
    document, faults = filled(fields, given)
    settings = document.pop("method", {}).get("settings", {})
    chosen, digests = given.get(START, "").split(), [given.get(name, "").strip() for name in ("/model", "/version")]
    start = chosen[:2] or digests
    if chosen and any(digests):
        faults.append(Fault(pointer="/model", detail="choose from the list or give digests, not both"))
    elif len(start) != 2 or not all(start):
        faults.append(Fault(pointer="/model", detail="choose a model, or give both digests"))
        start = ["", ""]
    try:
        method.settings.model_validate(settings)
    except ValidationError as refusal:
        faults += faults_of(refusal, "/method/settings", method.settings)
    chosen_parts = {"method": {"name": method.name, "settings": settings}, "model": start[0], "version": start[1]}
    try:
        spec = RunSpec.model_validate({**document, **chosen_parts})
    except ValidationError as refusal:
        named = {fault.pointer for fault in faults}
        faults += [fault for fault in faults_of(refusal, model=RunSpec) if fault.pointer not in named]
    if faults:
        if start == ["", ""]:
            faults = [fault for fault in faults if fault.pointer != "/version"]
        raise Invalid("the form is invalid; see the errors", errors=faults)
    return spec


def _form(
    request: Request,
    serving: Services,
    who: Visitor,
    method: Method[Any],
    given: Mapping[str, str],
    faults: Sequence[Fault] = (),
    remedy: str = "",
) -> Response:
    sections = _sections(method)
    fields = [field for section in sections for field in section.fields]
    by_field, rest = placed(faults, [*(field.pointer for field in fields), "/model"])
    for section in sections:
        section.opened |= any(by_field.get(field.pointer) for field in section.fields)
    return render(
        request,
        "start.html",
        who,
        status=422 if faults else 200,
        method=method,
        parts=sections,
        given=given,
        wrong=by_field,
        rest=rest,
        remedy=remedy,
        request_key=given.get(REQUEST_KEY) or new_id(),
        **_choices(serving, who.principal, given.get(START, "")),
    )


def _choices(serving: Services, caller: Principal, chosen: str = "") -> dict[str, Any]:
    """Return the models to start from, and the data sets of all workers, each with the number of its live ones."""
    with serving.reading(caller) as session:
        starts = [*_of_runs(session), *_uploaded(session, serving, caller)]
        live = live_workers(session, serving.database.now() - serving.settings.liveness_seconds)
        datasets = Counter(name for worker in live for name in worker.declared["datasets"])
        here = select(WorkerRow.declared).join(SiteRow).where(~WorkerRow.revoked, is_present(session))
        for declared in session.scalars(here):
            datasets.update(dict.fromkeys(declared["datasets"], 0))
    if chosen and chosen not in dict(starts):
        starts.insert(0, (chosen, f"the start of the copied run ({chosen[7:15]})"))
    return {"starts": starts, "datasets": sorted(datasets.most_common(MAX_DATASETS))}


def _of_runs(session: Session) -> list[tuple[str, str]]:
    """Return the last stored version of each of the latest runs: its model's digest, its own and the run's id, which
    distinguishes equal versions, and a label."""
    stored = RUNS.where(VersionRow.retired_at.is_(None)).order_by(RunRow.updated_at.desc()).limit(MAX_RUNS)
    return [
        (
            f"{run.spec['model']} {version.digest} {run.id}",
            f"{run.name} ({run.id[:8]}, {run.state}), version {version.number}",
        )
        for run, version in session.execute(stored)
    ]


def _uploaded(session: CallerSession, serving: Services, caller: Principal) -> list[tuple[str, str]]:
    """Return the same of the caller's recently uploaded models, each with every version of its blocks."""
    digests = session.scalars(
        select(UploadRow.digest)
        .where(UploadRow.owner == caller.owner, UploadRow.complete, UploadRow.length <= MAX_DOCUMENT_BYTES)
        .order_by(UploadRow.created_at.desc())
        .limit(MAX_UPLOADS)
    )
    models: dict[str, Model] = {}
    manifests: dict[str, Manifest] = {}
    for digest in digests:
        try:
            raw = serving.blobs.read(digest)
            if raw[:1] != b"{":
                continue
            if b'"config"' in raw:
                models[digest] = serving.states.model(digest)
            else:
                readable = partial(readable_blobs, session, caller)
                manifests[digest] = serving.states.manifest_of(digest, readable)
        except (ValueError, NotFound, Invalid):
            continue
    return [
        (f"{model} {version}", f"{models[model].config['model_type']}, uploaded ({model[7:15]}, {version[7:15]})")
        for model in models
        for version in manifests
        if manifests[version].blocks.keys() == {block.name for block in models[model].stored}
    ]

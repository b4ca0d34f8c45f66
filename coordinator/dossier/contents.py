"""The documents of a dossier: what was trained, by whom, on how much data, how well, and under which promises."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from tessera.coordinator.db import views
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.studies import find_study
from tessera.coordinator.db.tables import RunRow
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.dossier import records
from tessera.coordinator.dossier.card import front_page, model_card
from tessera.coordinator.dossier.records import Record
from tessera.coordinator.operations.exports import kept_version
from tessera.coordinator.services import Services
from tessera.shared.diagnostics import toml_file
from tessera.shared.methods.registry import methods
from tessera.shared.model.dataset_schema import class_names
from tessera.shared.model.spec import Model
from tessera.shared.version import VERSION

RUN_FILE = """\
# Settings of the run {run}. Its model is {model},
# its first version {version}. To repeat it:
#   tessera run export {run} model --version 0 && tessera run create run.toml --model model

"""


def documents(services: Services, caller: Principal, run_id: str, number: int) -> dict[str, bytes]:
    """Return the files of the dossier on a version of a run, by name, from one snapshot of the caller's rows. The
    version's manifest is not among them.

    Raise NotFound for an unknown run or version, and Gone for a version whose blocks are no longer kept.
    """
    now = services.database.now()
    with services.reading(caller) as session:
        run = views.find_run(session, run_id)
        version = kept_version(session, run, number)
        terms = terms_of(session, run.id, run.changes)
        model = services.states.model(terms.spec.model)
        versions = records.versions_of(session, run, number)
        sites = records.sites_of(session, terms, run, number, now - services.settings.liveness_seconds)
        measured = records.evaluations_of(session, run, version)
        found = {
            "made_at": records.at(now),
            "made_by": f"Tessera {VERSION}",
            "origin": records.origin_of(session, run, terms.spec),
            "run": _about(session, run, terms, model),
            "terms": records.terms_record(terms, run),
            "version": versions[-1],
            "versions": versions,
            "sites": sites,
            "classes": class_names(model),
            "results": [result for each in measured for result in records.results_of(session, *each)],
            # With other data, an attack asks about records that the run did not train on.
            "attacks": [
                records.attack_of(session, one)
                for one, spec, _ in measured
                if spec.membership_attack and spec.dataset == terms.spec.dataset
            ],
            "audit": records.audit_of(session, run_id, sites),
        }
    settings = RUN_FILE.format(run=run.id, model=terms.spec.model, version=terms.spec.version)
    return {
        "README.md": model_card(found).encode(),
        "report.html": front_page(found).encode(),
        "run.toml": (settings + toml_file(terms.spec.settings)).encode(),
        "versions.json": _json(versions),
        "sites.json": _json({name: found[name] for name in ("origin", "terms", "sites")}),
        "results.json": _json({name: found[name] for name in ("classes", "results", "attacks")}),
        "audit.json": _json({name: found[name] for name in ("made_at", "made_by", "audit")}),
    }


def _json(document: Record | Sequence[Record]) -> bytes:
    return f"{json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)}\n".encode()


def _about(session: Session, run: RunRow, terms: RunTerms, model: Model) -> Record:
    """Return the run's purpose, state and settings for people."""
    spec, view = terms.spec, views.run_view(session, run)
    study, method = find_study(session, spec.study), methods().get(spec.method.name)
    changed = spec.model_dump(mode="json", exclude_defaults=True, exclude={"name", "model", "version", "study"})
    about: dict[str, Any] = {
        "id": run.id,
        "name": run.name,
        "study": spec.study,
        "purpose": study.purpose if study else "",
        "state": view.state,
        "reason": run.reason,
        "began_at": records.at(run.created_at),
        "latest": run.version_number,
        "spec": spec,
        "settings": [line for line in toml_file(changed).splitlines() if line],
        "source": method.source if method else "",
        "head": model.head,
        "architecture": str(model.config["model_type"]),
        "bytes": model.nbytes,
        "external": bool(model.external),
        "bounds": view.bounds.summary if view.bounds else "",
    }
    return about

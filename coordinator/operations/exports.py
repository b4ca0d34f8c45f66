"""Export of a run's version."""

from dataclasses import dataclass

from sqlalchemy.orm import Session

from tessera.coordinator.blobs.portions import Portion
from tessera.coordinator.db import views
from tessera.coordinator.db.tables import RunRow, VersionRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import Manifest
from tessera.shared.model.spec import Model
from tessera.shared.problems import Gone, NotFound
from tessera.shared.rounds.export import Export


@dataclass(frozen=True)
class VersionExport:
    """A version whose tensors are kept, with the run that it belongs to. Instants are seconds since 1970."""

    run_id: str
    spec: RunSpec
    number: int
    digest: str
    started_at: float
    """Creation of the run."""
    ended_at: float
    """Creation of the version."""
    model: Model
    manifest: Manifest
    weights: Export
    unverified: list[Portion]
    """To be hashed before they are read."""


def kept_version(session: Session, run: RunRow, number: int) -> VersionRow:
    """Return a version of a run. Raises NotFound, and Gone if its tensors are not kept."""
    version = session.get(VersionRow, (run.id, number))
    if version is None:
        raise NotFound(f"run {run.id} has no version {number}; the latest is {run.version_number}")
    if version.retired_at is not None:
        raise Gone(f"the blocks of version {number} are no longer kept (setting keep_versions)")
    return version


def find_export(services: Services, caller: Principal, run_id: str, number: str) -> VersionExport:
    """Return a version by its number, or the `latest`. Raises NotFound, and Gone if its tensors are not kept."""
    with services.reading(caller) as session:
        run = views.find_run(session, run_id)
        wanted = run.version_number if number == "latest" else int(number)
        version = kept_version(session, run, wanted)
        spec, digest = RunSpec.model_validate(run.spec), version.digest
        started_at, ended_at = run.created_at, version.created_at
    model, manifest = services.states.model(spec.model), services.states.manifest(digest)
    with services.reading(caller) as session:
        portions = services.blobs.portions(session, [manifest.blocks[block.name] for block in model.stored])
    return VersionExport(
        run_id,
        spec,
        wanted,
        digest,
        started_at,
        ended_at,
        model,
        manifest,
        Export(services.states.load(model, manifest, wanted), model),
        services.blobs.unverified(portions),
    )

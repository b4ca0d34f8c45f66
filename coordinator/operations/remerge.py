"""Merging a run's rounds again from the updates that it kept, without one site, or with all of them as a check."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit, versions
from tessera.coordinator.db.engine import insert_missing
from tessera.coordinator.db.studies import sites_of_studies
from tessera.coordinator.db.tables import BlobRow, RunBlobRow, RunRow, SiteRow, VersionRow, new_id
from tessera.coordinator.services import Services
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.problems import Gone, Invalid
from tessera.shared.rounds.aggregate import AcceptedUpdate, Aggregation, NextVersion, observed
from tessera.shared.rounds.planning import run_facts

ACTOR = "remerge"


@dataclass(frozen=True)
class MergedRun:
    """A run whose rounds are merged, from which their updates can be merged again."""

    row: RunRow
    spec: RunSpec
    stored: Sequence[VersionRow]
    """Its versions, by number."""
    updates: Mapping[int, Sequence[AcceptedUpdate]]
    """The updates that were assigned to each version."""


@dataclass(frozen=True)
class RemergedRun:
    """The result of merging a run's rounds again."""

    first: int
    """The first version that was merged again."""
    digests: tuple[str, ...]
    """The digests of this version and the later ones."""
    same: bool
    """True if all of them are the run's own."""
    run: str | None = None
    """The run that has these versions; None for a check."""


def remerge(services: Services, run_id: str, *without: str) -> RemergedRun:
    """Merge a run's rounds again, each update against the version that it started from.

    Without some sites, begin at the first version into which an update of one of them was merged, and create a paused
    or completed run with the versions. Else only compare the digests. A process that is killed leaves blobs that
    garbage collection removes. Raises Invalid and Gone.
    """
    with services.database.snapshot() as session:
        merged = _read(session, run_id)
        first, latest = _require_possible(session, merged, without)
    aggregation, made = Aggregation(services.states, services.inspector), list[NextVersion]()
    current, bounds = _ref(merged.stored[first - 1]), _bounds_before(services, merged, first)
    refs = list[VersionRef]()
    for number in range(first, len(merged.stored)):
        updates = [update for update in merged.updates[number] if update.site not in without]
        current = VersionRef(number=number - 1, digest=current.digest)
        if updates:
            made.append(aggregation.merge(merged.spec, bounds, current, updates, latest=list(latest.values())))
            latest |= {update.site: update for update in updates if update.worker in made[-1].merged}
            with services.database.transaction() as session:
                services.blobs.record(session, services.database.now(), made[-1].blobs)
            current, bounds = made[-1].ref, made[-1].bounds
        # A round in which no other site took part changed nothing.
        refs.append(VersionRef(number=number, digest=current.digest))
    digests = tuple(ref.digest for ref in refs)
    same = digests == tuple(row.digest for row in merged.stored[first:])
    if not without:
        return RemergedRun(first, digests, same)
    created = _created(services, merged, without, refs, bounds, {version.ref.number: version for version in made})
    return RemergedRun(first, digests, same, created)


def _read(session: Session, run_id: str) -> MergedRun:
    row = session.get_one(RunRow, run_id)
    stored = session.scalars(select(VersionRow).where(VersionRow.run_id == run_id).order_by(VersionRow.number)).all()
    updates = {each.number: versions.assigned_updates(session, run_id, each.number) for each in stored[1:]}
    session.expunge_all()
    return MergedRun(row, RunSpec.model_validate(row.spec), stored, updates)


def _require_possible(
    session: Session, merged: MergedRun, without: Sequence[str]
) -> tuple[int, dict[str, AcceptedUpdate]]:
    """Return the first version to merge again, and the updates in the run's memory before it, by site. Raises Invalid
    for a run that does not allow it, and Gone if updates or versions are no longer kept."""
    spec = merged.spec
    if hidden := "secure_sums" if spec.secure_sums else "client_privacy" if spec.client_privacy else None:
        reason = "single updates are hidden in sums" if spec.secure_sums else "the key of a round's noise is erased"
        raise Invalid(f"rounds with {hidden} cannot be merged again: {reason}", remedy=_ANEW)
    sites = {number: {update.site for update in sent} for number, sent in merged.updates.items()}
    if unknown := sorted(set(without).difference(*sites.values())):
        raise Invalid(f"no update of {unknown[0]} was merged into {merged.row.name}", remedy="Check the site's name.")
    if not sites:
        raise Invalid("no round of the run was merged", remedy="Wait for its first version.")
    if not all(sites.values()):
        raise Invalid(
            "the run has versions that no round of its own made", remedy="Name the run that its note names."
        )
    first = min(number for number, names in sites.items() if not without or names.intersection(without))
    later = [update for number, sent in merged.updates.items() if number >= first for update in sent]
    needed = [update for update in later if update.site not in without]
    if without and any(update.plan.server_state for update in needed):
        raise Invalid(
            f"{spec.method.name} sends sites the server's memory of all sites, which their updates then rest on",
            remedy=_ANEW,
        )
    latest = versions.latest_updates(session, merged.row.id, first) if spec.cohort.memory else []
    needed += latest
    left = {number: names.difference(without) for number, names in sites.items() if number >= first}
    if without and (few := [number for number, names in left.items() if 0 < len(names) < spec.cohort.quorum]):
        # A version of too few sites would show their updates.
        reason = (
            f"version {few[0]} would rest on {len(left[few[0]])} sites, and cohort.quorum is {spec.cohort.quorum}"
        )
        raise Invalid(reason, remedy=_ANEW)
    bases = {*range(first - 1, len(merged.stored)), *(update.base.number for update in needed)}
    if retired := [str(row.number) for row in merged.stored if row.retired_at is not None and row.number in bases]:
        raise Gone(f"versions {', '.join(retired)} are no longer kept (setting keep_versions)", remedy=_ANEW)
    digests = {update.digest for update in needed}
    if lost := digests - set(_present(session, digests)):
        raise Gone(
            f"{len(lost)} of {len(digests)} updates are no longer kept",
            remedy=f'{_ANEW} Runs with keep_updates = "run" keep theirs.',
        )
    return first, {update.site: update for update in latest}


_ANEW = "Start from before the site: `tessera run create --from RUN --without SITE`."


def _present(session: Session, digests: Iterable[str]) -> Iterable[str]:
    for digest in digests:
        yield from session.scalars(select(BlobRow.digest).where(BlobRow.digest == digest))


def _bounds_before(services: Services, merged: MergedRun, first: int) -> Bounds:
    """Return the bounds with which version `first` was merged."""
    half = coordinator_half(merged.spec.method, run_facts(merged.spec, services.states.model(merged.spec.model)))
    bounds = versions.bounds_in_force(merged.row).model_copy(update={"median_norm": 0.0})
    for number in range(1, first):
        bounds = observed(half, bounds, merged.updates[number])
    return bounds


def _created(
    services: Services,
    merged: MergedRun,
    without: Sequence[str],
    refs: Sequence[VersionRef],
    bounds: Bounds,
    made: Mapping[int, NextVersion],
) -> str:
    """Create the run with the versions before the site's influence and the new ones; return its id."""
    row, last = merged.row, refs[-1].number
    with services.database.transaction() as session:
        now, ended = services.database.now(), last >= merged.spec.rounds
        run = RunRow(
            id=new_id(),
            name=row.name,
            study=row.study,
            state="completed" if ended else "paused",
            reason=None if ended else f"it was merged again without {', '.join(without)}; resume it to go on",
            spec=_spec_without(session, merged.spec, without),
            model_bytes=row.model_bytes,
            version_number=last,
            revision=1,
            created_at=now,
            resumed_at=now,
            updated_at=now,
            owner=row.owner,
            bounds=bounds.model_dump(),
            note=f"Versions {refs[0].number} to {last} were merged again from the updates of run {row.id}.",
        )
        session.add(run)
        session.flush()
        for before in merged.stored[: refs[0].number]:
            if before.retired_at is None:
                manifest = services.states.manifest(before.digest)
                versions.add_version(session, now, run.id, _ref(before), manifest, (), scalars=before.scalars)
        for ref in refs:
            version = made.get(ref.number)
            warnings, scalars = (version.warnings, version.scalars) if version else ((), None)
            manifest = services.states.manifest(ref.digest)
            versions.add_version(session, now, run.id, ref, manifest, warnings, scalars=scalars)
        model = services.states.model(run.spec["model"])
        documents = {merged.spec.model, *(ref.digest for ref in model.preprocessing.values())}
        insert_missing(session, RunBlobRow, [{"run_id": run.id, "digest": one} for one in sorted(documents)])
        about = {"of": row.id, "without": [*without], "versions": {str(ref.number): ref.digest for ref in refs}}
        audit.record(session, now, ACTOR, "run.remerge", run.id, run_id=run.id, **about, spec=run.spec)
        return run.id


def _spec_without(session: Session, spec: RunSpec, without: Sequence[str]) -> dict[str, object]:
    of_study = SiteRow.id.in_(sites_of_studies([spec.study], present=True))
    others = session.scalars(select(SiteRow.name).where(of_study).order_by(SiteRow.name))
    cohort = spec.cohort.without(without, others)
    try:
        return RunSpec.model_validate({**spec.model_dump(), "cohort": cohort}).model_dump(mode="json")
    except ValidationError as fault:
        reason = f"the run cannot go on without {', '.join(without)}: {fault.errors()[0]['msg']}"
        raise Invalid(reason, remedy=_ANEW) from None


def _ref(row: VersionRow) -> VersionRef:
    return VersionRef(number=row.number, digest=row.digest)

"""The start of a run that contains nothing of one site: the last version before the site's first merged update."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.client.lookup import only
from tessera.shared.problems import Invalid


class MergedUpdate(NamedTuple):
    """A site's first update that was merged into a run's versions."""

    version: int
    digest: str | None


class CleanStart(NamedTuple):
    """A version without a site's influence, and the site's first merged update behind it, if there is one."""

    run: Run
    number: int
    first: MergedUpdate | None


def clean_start(client: Client, run: Run, until: int, site: str) -> CleanStart:
    """Return the last version, up to version `until` of a run, that rests on no update of a site: of the run itself,
    or of the run from whose version it started, and so on."""
    number, first, origin = until, first_merged(client, run, until, site), run
    if first:
        number = first.version - 1
    while parent := _parent(client, origin):
        origin, at = parent
        if earlier := first_merged(client, origin, at, site):
            run, number, first = origin, earlier.version - 1, earlier
    return CleanStart(run, number, first)


def first_merged(client: Client, run: Run, until: int, site: str) -> MergedUpdate | None:
    """Return the site's first update that was merged into a run's versions, up to version `until`."""
    merged = (
        MergedUpdate(round_.version, task.update)
        for round_ in client.rounds(run.id)
        if round_.version is not None and round_.version <= until
        for task in round_.tasks
        if task.state == "merged" and task.worker.partition("/")[0] == site
    )
    return min(merged, key=lambda update: update.version, default=None)


def _parent(client: Client, run: Run) -> tuple[Run, int] | None:
    """Return the run from whose version a run started, by the version's digest, and the version's number; None for a
    run from a model folder."""
    for other in client.runs():
        if other.created_at < run.created_at and other.spec.model == run.spec.model:
            for version in client.versions(other.id):
                if version.digest == run.spec.version and version.number > 0:
                    return other, version.number
    return None


def settings_without(client: Client, settings: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Return a run's settings whose cohort names all sites but one. Raises NotFound for an unknown site, and Invalid
    if the run needs it or no other is left."""
    sites = list(client.sites())
    left = only("site", site, sites, lambda one: one.id, lambda one: one.name).name
    cohort = dict(settings.get("cohort") or {})
    others = [one.name for one in sites if one.withdrawn_at is None]
    cohort["sites"] = [name for name in cohort.get("sites") or others if name != left]
    if not cohort["sites"]:
        raise Invalid(f"no site is left without {left}", remedy="Name others in cohort.sites.")
    if left in ((settings.get("secure_sums") or {}).get("helpers") or ()):
        raise Invalid(f"{left} is a helper of the run's secure sums", remedy="Name another in secure_sums.helpers.")
    return {**settings, "cohort": cohort}

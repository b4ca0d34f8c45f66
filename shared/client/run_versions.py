"""Look-up of a run's versions: by number, the latest, or the best by the run's main score. Start of another run."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.api.versions import Version
from tessera.shared.client.client import Client
from tessera.shared.client.export import export_file, export_folder
from tessera.shared.client.lookup import find_run, only
from tessera.shared.client.model_upload import upload_model
from tessera.shared.client.run_file import changed
from tessera.shared.metrics.comparison import BestVersion, best_version
from tessera.shared.problems import Gone, Invalid, NotFound
from tessera.shared.units import size
from tessera.shared.updates.model_folder import ModelFolder

LATEST = "latest"
BEST = "best"

Wanted = int | Literal["latest", "best"]
"""A version: its number, or one of these words."""


def parse_version(text: str) -> Wanted:
    """Return the version that a person names. Raises Invalid."""
    if text == LATEST:
        return "latest"
    if text == BEST:
        return "best"
    if text.isascii() and text.isdecimal():
        return int(text)
    raise Invalid(f"{text!r} is not a version", remedy="Give a version's number, `latest` or `best`.")


def find_version(client: Client, run: Run, wanted: Wanted) -> tuple[Version, BestVersion | None]:
    """Return a version of a run that is still kept; for `best` also over which sites it is the best.

    Raises NotFound for an unknown number, Gone for a version that is no longer kept, and Invalid for `best` if no
    version has been evaluated.
    """
    if wanted == "best":
        return _best(client, run)
    number = run.version.number if wanted == "latest" else wanted
    found = next((version for version in client.versions(run.id, number) if version.number == number), None)
    if found is None:
        raise NotFound(
            f"run {run.spec.name} has no version {number}",
            remedy=f"It has the versions 0 to {run.version.number}; `latest` and `best` are possible too.",
        )
    if found.retired_at is not None:
        kept = [version.number for version in client.versions(run.id) if version.retired_at is None]
        raise Gone(
            f"version {number} of run {run.spec.name} is no longer kept (the coordinator's setting keep_versions)",
            remedy=f"It keeps the versions {', '.join(map(str, kept))}.",
        )
    return found, None


def _best(client: Client, run: Run) -> tuple[Version, BestVersion]:
    measurements = list(client.measurements(run.id))
    best = best_version(measurements)
    if best is None:
        raise Invalid(
            f"no version of run {run.spec.name} has been evaluated, so none is the best",
            remedy="Give a version's number, or start a run with [evaluation] in its file (`sites = true`).",
        )
    versions = {version.number: version for version in client.versions(run.id)}
    if versions[best.number].retired_at is None:
        return versions[best.number], best
    next_best = best_version(measurements, {n for n, version in versions.items() if version.retired_at is None})
    raise Gone(
        f"the best version of run {run.spec.name}, {described(best)}, is no longer kept "
        "(the coordinator's setting keep_versions)",
        remedy=f"The best of those kept is {described(next_best)}." if next_best else "Name a version that is kept.",
    )


def export_version(
    client: Client,
    run: Run,
    out: Path,
    wanted: Wanted,
    progress: Callable[[int], None] = lambda _: None,
    like: Path | None = None,
    base: Path | None = None,
) -> tuple[int, BestVersion | None]:
    """Write a version to a new model folder, or to one file if `out` ends in `.safetensors` and `like` is None.

    Return the version's number, and the best version as `find_version` does. Other files of the folder `like` are
    copied; `base` is the folder of an external base.

    Raises Invalid for a folder that exists, and as `find_version` does.
    """
    version, best = find_version(client, run, wanted)
    number = version.number
    if out.suffix == ".safetensors" and like is None:
        export_file(client, run, out, number, progress, base)
    else:
        export_folder(client, run, out, number, progress, like, base)
    return number, best


def described(best: BestVersion) -> str:
    """Return a best version in words, with the sites at which it was compared with the others."""
    return f"{best.number} ({best.title} {best.value:.3f}) {best.where}".rstrip()


def find_start(client: Client, named: str) -> tuple[Run, Version, BestVersion | None]:
    """Return the run and version that `RUN[@VERSION]` names, as `find_version` does; the latest version if none is
    given."""
    name, at, version = named.rpartition("@")
    run = find_run(client, name if at else named)
    return run, *find_version(client, run, parse_version(version) if at else "latest")


def new_run(
    client: Client,
    given: Mapping[str, Any] | None,
    model: Path | None,
    start_from: str | None,
    changes: Iterable[str] = (),
    progress_of: Callable[[ModelFolder], Callable[[int], None]] = lambda _: lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    without: str | None = None,
) -> tuple[RunSpec, str]:
    """Return the spec of a run with a note of its start: the bytes of a model folder that were sent, or a version.

    Without `given`, the settings are those of the run that `start_from` names, with `KEY=VALUE` changes. The site
    `without` takes no part, and the run starts from a version without its influence. Raises Invalid, and as
    `find_start` does.
    """
    if without is not None and start_from is None:
        raise Invalid("--without is for a run that starts from another", remedy="Give --from RUN too.")
    if (model is None) == (start_from is None):
        raise Invalid(
            "a run starts either from a model folder or from a version of another run",
            remedy='Give --model FOLDER or --from RUN[@VERSION]; in Python, model="FOLDER" or start_from="RUN".',
        )
    if start_from is not None:
        run, version, best = find_start(client, start_from)
        settings = changed(run.spec.settings, changes, note) if given is None else given
        words = f"the best version, {described(best)}," if best else f"version {version.number}"
        if without is not None:
            sites = list(client.sites())
            without = only("site", without, sites, lambda site: site.id, lambda site: site.name).name
            clean = clean_start(client, run, version.number, without)
            settings = settings_without(settings, without, [site.name for site in sites if not site.withdrawn_at])
            run, (version, _) = clean.run, find_version(client, clean.run, clean.number)
            words = f"version {version.number}, {version.digest},"
            if clean.first:
                words += f" before the first merged update of {without}, {clean.first.digest},"
        start = {"model": run.spec.model, "version": version.digest}
        return RunSpec.model_validate({**settings, **start}), f"starts from {words} of {run.spec.name}"
    if given is None or model is None:
        remedy = "Give it: `tessera run create run.toml`; in Python a mapping is possible too."
        raise Invalid("a run from a model folder needs a run file", remedy=remedy)
    folder = ModelFolder.open(model)
    uploaded = upload_model(client, folder, progress_of(folder))
    spec = RunSpec.model_validate({**given, "model": uploaded.model, "version": uploaded.version})
    return spec, f"sent {size(uploaded.sent_bytes)}; the weights have {size(folder.model.stored_bytes)}"


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
    """Return the site's first update that was merged into a run's versions, up to version `until`. Raises Invalid if
    no round of the run made one of these versions."""
    rounds = {round_.version: round_ for round_ in client.rounds(run.id) if round_.version is not None}
    if not rounds.keys() >= set(range(1, until + 1)):
        raise Invalid(
            f"run {run.spec.name} was merged again from another, whose updates its versions contain",
            remedy=f"Merge that one again without {site} too: `tessera run show {run.id}` names it in its note.",
        )
    merged = (
        MergedUpdate(version, task.update)
        for version, round_ in rounds.items()
        if version <= until
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


def settings_without(settings: Mapping[str, Any], site: str, sites: Iterable[str]) -> dict[str, Any]:
    """Return a run's settings without a site: its cohort's other sites take part, or else all other `sites`. Raises
    Invalid if the run needs it or no other is left."""
    cohort = Cohort.model_validate(settings.get("cohort") or {}).without([site], sites)
    if site in ((settings.get("secure_sums") or {}).get("helpers") or ()):
        raise Invalid(f"{site} is a helper of the run's secure sums", remedy="Name another in secure_sums.helpers.")
    return {**settings, "cohort": cohort.model_dump(mode="json", exclude_unset=True)}

"""Previews of a run, and the notes to read before it starts."""

from collections.abc import Iterator

from tessera.shared.api.runs import Preview, RunSpec
from tessera.shared.client.client import Client
from tessera.shared.problems import Problem


def preview_notes(found: Preview) -> Iterator[str]:
    """Yield remarks and warnings to read before the run is started."""
    yield from found.remarks_on_sites
    if found.eligible < found.quorum:
        after = f"; {found.awaiting_approval} more once their sites approve it" if found.awaiting_approval else ""
        yield f"warning: {found.eligible} would take part now, fewer than the quorum of {found.quorum}{after}"
    yield from (f"{one.worker} never sends: {'; '.join(one.never_sends)}" for one in found.workers if one.never_sends)
    left = [f"{one.worker} {one.evaluations_left}" for one in found.workers if one.evaluations_left is not None]
    if left:
        yield f"evaluations left for this run: {', '.join(left)}"
    yield from (f"warning: {warning}" for warning in found.warnings)


def previewed(client: Client, spec: RunSpec) -> Preview | None:
    """Return a run's preview; None if that fails, which does not prevent the run's start."""
    try:
        return client.preview_run(spec)
    except Problem:
        return None

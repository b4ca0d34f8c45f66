"""What `tessera run preview` and `run create` tell of who would take part."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from tessera.shared.api.runs import Preview, RoundWorkload, RunSpec, WorkerPreview
from tessera.shared.cli.render import output
from tessera.shared.client.client import Client
from tessera.shared.problems import Problem


def preview_table(found: Preview) -> Table:
    columns = ("worker", "takes part", "fetches", "trains", "sends, at most", "because")
    return output.table(columns, map(_row, found.workers))


def _row(prospect: WorkerPreview) -> tuple[object, ...]:
    asked, said = prospect.workload, (*prospect.ineligibilities, *prospect.warnings)
    because = "; ".join(f"{one.rule}: {one.detail}" for one in said)
    willing = "yes, but" if prospect.warnings else "yes"
    takes_part = "no" if prospect.ineligibilities else willing if asked else "not in the first round"
    return (prospect.worker, takes_part, *_parts(asked), because or None)


def _parts(asked: RoundWorkload | None) -> tuple[str | None, str | None, str | None]:
    if asked is None:
        return None, None, None
    return (
        f"{asked.fetch_blocks} blocks, {output.size(asked.fetch_bytes)}",
        f"{asked.train_blocks} blocks, {output.size(asked.train_bytes)}",
        f"{asked.upload_blocks} blocks, {output.size(asked.upload_bytes)}",
    )


def preview_notes(found: Preview) -> Iterator[str]:
    """Yield what a person should know before the run is started."""
    if found.missing_sites:
        yield f"nobody was ever heard of from {', '.join(found.missing_sites)}"
    if found.eligible < found.quorum:
        after = (
            f"; {found.awaiting_approval} more once their sites have approved it" if found.awaiting_approval else ""
        )
        yield f"warning: {found.eligible} would take part now, fewer than the quorum of {found.quorum}{after}"
    yield from (f"warning: {warning}" for warning in found.warnings)


def warn_of_few(client: Client, spec: RunSpec) -> None:
    """Say if too few would take part. A coordinator that cannot tell is no reason not to start the run."""
    try:
        found = client.preview_run(spec)
    except Problem:
        return
    for sentence in preview_notes(found):
        output.note(sentence)

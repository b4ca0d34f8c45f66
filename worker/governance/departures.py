"""A readable report of everything that left a site, when and to whom: a page (HTML) or a table (CSV) from its audit.

Texts in the audit come from the coordinator and from people: each is escaped, and stays a text in a spreadsheet too.
"""

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import date, datetime
from html import escape
from io import StringIO

from pydantic import JsonValue

from tessera.shared.units import size
from tessera.worker.state.audit import BLOCK_NAMES, Action, SiteAuditEntry

KINDS: Mapping[Action, str] = {
    "update.leave": "update", "figures.leave": "figures", "sums.open": "sum of masks", "sums.agree": "signature",
    "sums.abandon": "signature",
}  # fmt: skip
"""The kinds of departures, by the action that records them."""

COUNTED: Mapping[Action, Action] = {"update.leave": "update.count", "figures.leave": "figures.count"}

FORMULA = ("=", "+", "-", "@")


@dataclass(frozen=True)
class Departure:
    """One row of the report."""

    date: str
    worker: str
    sent: str
    study: str
    run: str
    round: int | None
    asked_by: str
    approved_by: str
    dataset: str
    examples: int | None
    blocks: str
    bytes: int
    epsilon: float | None
    figures: str
    counted: str
    """The coordinator's confirmation: yes, no, or empty for kinds that it never confirms."""


TITLES = (
    "Date (UTC)", "Worker", "Sent", "Study", "Run", "Round", "Asked by", "Approved by", "Data set", "Examples",
    "Blocks", "Bytes", "Epsilon", "Figures", "Confirmed",
)  # fmt: skip
NUMBERS = {"round", "examples", "bytes", "epsilon"}


def departures(entries: Sequence[SiteAuditEntry], since: date | None, until: date | None) -> list[Departure]:
    """Return the departures from one day to another, both included, oldest first."""
    asked: dict[str | None, str] = {}
    approved: dict[str | None, str] = {}
    released: dict[JsonValue, str] = {}
    confirmed = {(entry.action, entry.task, entry.token) for entry in entries if entry.action in COUNTED.values()}
    found = []
    for entry in entries:
        detail = entry.detail
        if entry.action == "task.start":
            asked[entry.task] = str(detail.get("orchestrator") or "not named")
        elif entry.action == "run.approve":
            approved[entry.run] = f"{detail.get('by')} ({entry.at:%Y-%m-%d})"
        elif entry.action == "run.decline":
            approved.pop(entry.run, None)
        elif entry.action == "update.release":
            released[detail.get("update")] = f"released by {detail.get('by')}"
        elif entry.action in KINDS and (since or date.min) <= entry.at.date() <= (until or date.max):
            by = [approved.get(entry.run, ""), released.get(detail.get("update"), "")]
            found.append(_departure(entry, asked.get(entry.task, ""), "; ".join(filter(None, by)), confirmed))
    return found


def _departure(
    entry: SiteAuditEntry, asked: str, approved: str, confirmed: Collection[tuple[object, ...]]
) -> Departure:
    detail = entry.detail
    counted = COUNTED.get(entry.action)
    return Departure(
        date=f"{entry.at:%Y-%m-%d %H:%M:%S}",
        worker=entry.worker,
        sent=KINDS[entry.action],
        study=entry.run_name or "",
        run=entry.run or "",
        round=entry.round,
        asked_by=asked,
        approved_by=approved or "no approval asked",
        dataset=str(detail.get("dataset") or ""),
        examples=_whole(detail.get("examples")),
        blocks=_blocks(detail) + _withheld(detail),
        bytes=_whole(detail.get("bytes")) or 0,
        epsilon=_number(detail.get("epsilon")),
        figures=_figures(detail),
        counted="" if counted is None else "yes" if (counted, entry.task, entry.token) in confirmed else "no",
    )


def _blocks(detail: Mapping[str, JsonValue]) -> str:
    """Return the number of the blocks, and their names."""
    count = detail.get("blocks")
    return "" if count is None else f"{count}: {detail.get('sent')}"


def _withheld(detail: Mapping[str, JsonValue]) -> str:
    """Return the numbers of rows of extra arrays that were over too few examples."""
    rows = detail.get("withheld")
    return (
        f"; rows withheld: {', '.join(f'{count} of {name}' for name, count in rows.items())}"
        if isinstance(rows, dict)
        else ""
    )


def _figures(detail: Mapping[str, JsonValue]) -> str:
    """Return figures with their values."""
    figures = detail.get("figures")
    if not isinstance(figures, dict):
        return ""
    said = [f"{name} {value:g}" for name, value in figures.items() if isinstance(value, int | float)]
    counts = {"class_counts": "counts by class", "subgroup_counts": "a confusion matrix and binned scores"}
    if isinstance(of := detail.get("class_counts"), dict) and "absolute" in of:
        counts = {"class_counts": "sums of targets and of errors", "subgroup_counts": "the same by subgroup"}
    return ", ".join([*said, *(words for name, words in counts.items() if detail.get(name))])


def _whole(value: JsonValue) -> int | None:
    return value if isinstance(value, int) else None


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def totals(found: Iterable[Departure]) -> list[tuple[str, str, int, int, int, float | None]]:
    """Return by study and data set: the numbers of updates and of other messages, the bytes, and the last update's
    epsilon."""
    rows: dict[tuple[str, str], tuple[int, int, int, float | None]] = {}
    for one in found:
        updates, others, nbytes, epsilon = rows.get((one.study, one.dataset), (0, 0, 0, None))
        is_update = one.sent == "update"
        # An evaluation's is its own; an update's is the run's so far.
        last = one.epsilon if is_update and one.epsilon is not None else epsilon
        rows[one.study, one.dataset] = (updates + is_update, others + (not is_update), nbytes + one.bytes, last)
    return [(study, dataset, *row) for (study, dataset), row in sorted(rows.items())]


def block_names(entries: Iterable[SiteAuditEntry]) -> dict[str, list[str]]:
    """Return the names of the blocks that left, by study and their description."""
    named = {
        str(entry.detail["names"]): entry.detail[BLOCK_NAMES] for entry in entries if BLOCK_NAMES in entry.detail
    }
    found: dict[str, list[str]] = {}
    for entry in entries:
        names = named.get(str(entry.detail.get("names")))
        if entry.action == "update.leave" and isinstance(names, list):
            found[f"{entry.run_name}, {_blocks(entry.detail)}"] = [str(name) for name in names]
    return found


def as_csv(found: Iterable[Departure]) -> str:
    """Return the rows as CSV. A spreadsheet takes no text for a formula."""
    out = StringIO()
    writer = csv.writer(out)
    writer.writerow(field.name for field in fields(Departure))
    for one in found:
        writer.writerow(_cell(value) for value in astuple(one))
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, str):
        text = _plain(value)
        return f"'{text}" if text.startswith(FORMULA) else text
    return value


def _plain(text: str) -> str:
    """Return a text without control characters, such as those that reverse the direction of writing."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2rem;color:#111;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem}table{border-collapse:collapse;width:100%}thead{background:#eee}
th,td{border-bottom:1px solid #bbb;padding:.25rem .5rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}
th.n,td.n{text-align:right;white-space:nowrap}code{overflow-wrap:anywhere}@page{size:A4 landscape;margin:12mm}
@media print{body{margin:0;font-size:9px}thead{display:table-header-group}tr{break-inside:avoid}}
"""

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>What left the site</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{style}</style></head><body><h1>What left the site</h1>
<p>Audit of {site}, {period}. Made at {made_at:%Y-%m-%d %H:%M} UTC from an intact audit, whose last digest is
<code>{head}</code>.</p>
<p>The audit has each row from before its first byte left. Claims and heartbeats, which carry no result, are not
listed.</p>
<h2>Totals</h2>{totals}<h2>Departures ({count})</h2>{rows}<h2>Names of the blocks</h2>{names}</body></html>
"""


def as_html(
    found: Sequence[Departure], names: Mapping[str, Sequence[str]], about: Mapping[str, str], made_at: datetime
) -> str:
    """Return the report as one page without scripts or links. `about` has the `site`, the `period` and the `head`,
    which is the last digest of the audit."""
    columns = [field.name for field in fields(Departure)]
    rows = [[_shown(name, value) for name, value in zip(columns, astuple(one), strict=True)] for one in found]
    sums = [
        (study, dataset, str(updates), str(others), size(nbytes), "" if epsilon is None else f"{epsilon:.3g}")
        for study, dataset, updates, others, nbytes, epsilon in totals(found)
    ]
    summed = _table(("Study", "Data set", "Updates", "Other messages", "Bytes", "Epsilon"), sums, {2, 3, 4, 5})
    listed = (f"<h3>{_text(which)}</h3><p>{_text(', '.join(each))}</p>" for which, each in names.items())
    return PAGE.format(
        style=STYLE,
        **{name: _text(value) for name, value in about.items()},
        made_at=made_at,
        totals="".join(summed),
        count=len(found),
        rows="".join(_table(TITLES, rows, {place for place, name in enumerate(columns) if name in NUMBERS})),
        names="".join(listed) or "<p>None left.</p>",
    )


def _shown(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "bytes" and isinstance(value, int):
        return size(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> Iterator[str]:
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (" class='n'" if place in numbers else "" for place in range(len(row)))
        return "".join(f"<{tag}{kind}>{_text(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    yield f"<table><thead><tr>{cells('th', titles)}</tr></thead><tbody>"
    yield from (f"<tr>{cells('td', row)}</tr>" for row in rows)
    yield "</tbody></table>"


def _text(text: str) -> str:
    return escape(_plain(text))

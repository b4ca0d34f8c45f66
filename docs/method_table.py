"""The tables of the figures: a short one in docs/which-method.md, and all in docs/method-table.md; and of the modes
of cohorts with which methods and settings go, as their classes declare.

`python -m docs.method_table` writes the latter into docs/which-method.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from tessera.examples.processes import ROOT
from tessera.shared.aggregation.robust import Guard, Mean
from tessera.shared.aggregation.server_optimizer import AdaptiveOptimizer, Momentum, NoOptimizer
from tessera.shared.api.secure_sums import SecureSums
from tessera.shared.methods.base import MODES
from tessera.shared.methods.registry import methods
from tessera.shared.run_settings import ClientPrivacy, Privacy
from tessera.shared.schema import Compatibility
from tessera.shared.updates.codecs.pipeline import STAGES
from tessera.simulation.comparison.statistics import interval

PAGE, DETAILS = ROOT / "docs" / "which-method.md", ROOT / "docs" / "method-table.md"
BEGIN = "<!-- made by `make bench-methods` from benchmarks/methods/table.json: do not edit -->\n"
END = "<!-- end of what is made -->\n"
BASELINE = "fedavg"
BEGIN_MODES = "<!-- made by `python -m docs.method_table` from the classes' declarations: do not edit -->\n"
COLUMNS = f"""\
- **sites**: the mean score of the sites on their held-out examples, in percent, and its standard deviation
  over seeds. A method with models of the sites' own is measured by these.
- **to `{BASELINE}`**: the mean difference by seed; in brackets if its 95 % t-interval includes 0, which shows none.
- **worst**: the score of the worst site. **new**: of the shared model on examples of no site.
- **up**, **down**: kB of a site and round, without the first round, which fetches the model.
- **CPU**: processor time of a simulation, as a multiple of `{BASELINE}`'s. **MB**: peak memory above the imports'.
- **epsilon**: [differential privacy](privacy.md) for each example, by noise at the sites, with delta 0.001."""

Cell = Mapping[str, Any]
Cells = Mapping[str, Cell]


def brief(cell: Cell) -> str:
    """Return a cell's score, or why there is none, for a line of progress."""
    if "refused" in cell:
        return f"refused: {cell['refused']}"
    return f"{_score(cell)}, worst site {_percent(cell['worst'])}"


def short(found: Mapping[str, Any]) -> str:
    """Return a row for each method with its scores on all tasks."""
    tasks = {name: entry["cells"] for name, entry in found["tasks"].items()}
    rows = []
    for name in dict.fromkeys(row for entry in found["tasks"].values() for row in entry["rows"]):
        scores = [_bold(entry, name) for entry in found["tasks"].values()]
        cells = next((each for each in tasks.values() if "score" in each.get(name, {})), None)
        if cells:
            rows.append([_title(cells[name], name), *scores, *_shares(cells, name)])
    return _table(["method", *tasks, "upload", "CPU time"], rows)


def details(found: Mapping[str, Any]) -> str:
    """Return the page of all figures."""
    return "\n\n".join(_paragraphs(found)) + "\n"


def write(found: Mapping[str, Any]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{short(found)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    DETAILS.write_text(details(found), encoding="utf-8")


# ---------------------------------------------------------------- the table of modes


def modes() -> str:
    """Return a row for each method and for each setting of a kind, with the modes of cohorts that it goes with."""
    rows = [
        [name, *(_compatible(method.coordinator.declared(mode)) for mode in MODES)]
        for name, method in sorted(methods().items())
    ]
    kinds: dict[str, Any] = {
        "`robust`: mean": Mean,
        "`robust`: all others": Guard,
        "`server_optimizer`: none": NoOptimizer,
        "`server_optimizer`: sgd": Momentum,
        "`server_optimizer`: adam, yogi, adagrad": AdaptiveOptimizer,
        **{f"`codec`: {name}": stage for name, stage in sorted(STAGES.items())},
        "`privacy`: each unit": Privacy,
        "`client_privacy`": ClientPrivacy,
        "`secure_sums`": SecureSums,
    }
    rows += [
        [name, *(_compatible(getattr(kind, mode)) if hasattr(kind, mode) else "" for mode in MODES)]
        for name, kind in kinds.items()
    ]
    return _table(["method or setting", *(mode.replace("_", " ") for mode in MODES)], rows, "---")


def _compatible(declared: Compatibility) -> str:
    if not declared.fault:
        return "yes"
    return f"with {declared.settings}" if declared.settings else f"no: {declared.fault}"


def write_modes() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN_MODES)
    PAGE.write_text(f"{before}{BEGIN_MODES}\n{modes()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


# ---------------------------------------------------------------- the page of all figures


def _paragraphs(found: Mapping[str, Any]) -> Iterator[str]:
    budget, machine = found["budget"], found["machine"]
    yield "# All methods in one table"
    yield BEGIN.strip()
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    yield (
        f"By `tessera simulate`, {machine['at'][:10]}, with {packages}, Python {machine['python']}, on "
        f"{machine['cores']} cores ({machine['processor']}). [Which method](which-method.md) has the short table."
    )
    yield (
        f"Every row has {budget['rounds']} rounds of one epoch in batches of {budget['batch']}, with AdamW unless it "
        f"says SGD, and {len(budget['seeds'])} seeds, each with data, examples held out and order of batches of its "
        "own. All rows of a task start from one pre-trained model. One learning rate for each kind of training is "
        "chosen, with its plainest method, on other data. Models are small and runs short: the tables show what a "
        "method costs, and large differences."
    )
    yield COLUMNS
    for name, entry in found["tasks"].items():
        cells = entry["cells"]
        yield f"## {name.capitalize()}"
        yield f"{entry['about'][0].upper()}{entry['about'][1:]}."
        rows = [_row(cells, name) for name in entry["rows"] if "score" in cells.get(name, {})]
        yield _table(["method", "sites", f"to `{BASELINE}`", "worst", "new", "up", "down", "CPU", "MB"], rows)
        yield "Learning rates: " + "; ".join(_rate(kind, known) for kind, known in entry["rates"].items()) + "."
        yield from _refusals(cells)
        if missing := [name for name in entry["rows"] if name not in cells]:
            yield f"Not measured yet: {'; '.join(missing)}."


def _row(cells: Cells, name: str) -> list[str]:
    cell, base = cells[name], cells.get(BASELINE)
    new = [score for score in cell["new"] if score is not None]
    return [
        _title(cell, name),
        _score(cell),
        _difference(cells, name),
        _percent(cell["worst"]),
        _percent(new) if new else "",
        *(f"{cell[way] / 1000:.3g}" for way in ("up_bytes", "down_bytes")),
        f"{cell['processor_seconds'] / base['processor_seconds']:.2g}" if base else "",
        f"{cell['peak_bytes'] / 1e6:.0f}",
    ]


def _rate(kind: str, known: Mapping[str, Any]) -> str:
    tried = list(known["tried"])
    chosen = f"{known['chosen']:g}"
    edge = ", at the edge" if chosen in tried[:1] + tried[-1:] and len(tried) > 1 else ""
    return f"{kind} {chosen} (of {', '.join(tried)}{edge})" if tried else f"{kind} refused"


def _refusals(cells: Cells) -> Iterator[str]:
    """Yield the reasons why methods cannot do the task, each with its methods."""
    reasons: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if "refused" in cell:
            # Without the remedies.
            reason = re.split(r"; |: (?=[a-z])", cell["refused"], maxsplit=1)[0]
            reasons.setdefault(reason, []).append(name)
    if reasons:
        yield "Refused:"
        yield "\n".join(f"- {'; '.join(names)}: {reason}" for reason, names in reasons.items())


# ---------------------------------------------------------------- cells


def _title(cell: Cell, name: str) -> str:
    return f"{name}, epsilon {cell['epsilon']:g}".replace(", private", "") if cell["epsilon"] else name


def _percent(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.1f}"


def _score(cell: Cell) -> str:
    values = cell["score"]
    return f"{_percent(values)}±{100 * stdev(values):.1f}" if len(values) > 1 else _percent(values)


def _gain(cells: Cells, name: str) -> tuple[float, bool] | None:
    """Return the mean difference from the baseline, and whether its interval excludes 0."""
    base = cells.get(BASELINE, {})
    if name == BASELINE or "score" not in base or len(base["score"]) < 2:
        return None
    by_seed = [one - other for one, other in zip(cells[name]["score"], base["score"], strict=True)]
    low, high = interval(by_seed)
    return fmean(by_seed), not low <= 0 <= high


def _difference(cells: Cells, name: str) -> str:
    gain = _gain(cells, name)
    if gain is None:
        return ""
    return f"{100 * gain[0]:+.1f}" if gain[1] else f"({100 * gain[0]:+.1f})"


def _bold(entry: Mapping[str, Any], name: str) -> str:
    cells = entry["cells"]
    cell = cells.get(name, {})
    if "score" not in cell:
        return "?" if name in entry["rows"] and name not in cells else ""
    gain = _gain(cells, name)
    return f"**{_percent(cell['score'])}**" if gain and gain[1] else _percent(cell["score"])


def _shares(cells: Cells, name: str) -> list[str]:
    """Return the bytes up and the processor time, as shares of the baseline's."""
    base = cells.get(BASELINE)
    if not base:
        return ["", ""]
    parts = [cells[name][figure] / base[figure] for figure in ("up_bytes", "processor_seconds")]
    return [f"{parts[0]:.2g}", f"{parts[1]:.2g}"]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], align: str = "--:") -> str:
    lines = [columns, ["---", *[align] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    write_modes()

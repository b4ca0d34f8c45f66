"""`tessera compare`: simulations beside each other, paired by seed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.shared.problems import Invalid
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson, Reach
from tessera.simulation.checkpoint import shortened
from tessera.simulation.comparison.folders import SEEDS, SimulationComparison
from tessera.simulation.comparison.statistics import MOST_FLIPPED

app = typer.Typer(add_completion=False)


class Form(StrEnum):
    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    LATEX = "latex"


COLUMNS = ("at the end", "simulation", "mean", "deviation", "difference", "95 % interval", "p")
FEW_SEEDS = 5
"""Below it, an interval says little."""
TEX = str.maketrans(
    {one: f"\\{one}" for one in "&%$#_{}"}
    | {one: f"${one}$" for one in "<>|"}
    | {"±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)
"""The characters of cells that LaTeX would read otherwise."""


@app.command(name="compare")
def command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER FOLDER...", help="Output folders of `tessera simulate`.")
    ],
    reach: Reach = None,
    margin: Annotated[
        list[str] | None,
        typer.Option(
            "--margin",
            metavar="FIGURE=SIZE",
            help="Test whether this figure is equal within a size, as in accuracy=0.01; may be repeated.",
        ),
    ] = None,
    form: Annotated[
        Form, typer.Option("--format", help="A table for a terminal, for a Markdown page, or for LaTeX (booktabs).")
    ] = Form.TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Compare simulations with the first one, on the seeds that all of them have.

    A difference is the mean over the seeds, with its 95 % t-interval and the p-value of an exact sign-flip test,
    adjusted by Holm where several simulations are compared with the first.
    """
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise Invalid("a comparison needs two different folders or more", remedy="Name each output folder once.")
    comparison = SimulationComparison.of(folders, reach or (), dict(map(_margin, margin or ())))
    for name, seeds in comparison.left_out():
        output.note(f"{name}: not in all folders, and left out: {_seeds(seeds)}")
    for remark in comparison.remarks():
        output.note(remark)
    if as_json:
        output.print_json(_document(comparison))
        return
    console = output.out()
    columns, rows = _columns(comparison), [list(map(str, row)) for row in _rows(comparison)]
    if form != Form.TERMINAL:
        text = (_markdown if form == Form.MARKDOWN else _latex)(columns, rows)
        console.print(f"{text}\n{_conclusion(comparison)}", soft_wrap=True, markup=False)
        return
    names = [str(folder) for folder in folders]
    differ = [(pointer, *map(shortened, values)) for pointer, values in comparison.settings().items()]
    console.print(output.table(("settings that differ", *names), differ))
    console.print()
    console.print(output.table(columns, rows, right=columns[2:]))
    console.print()
    console.print(_conclusion(comparison), soft_wrap=True, markup=False)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _margin(given: str) -> tuple[str, float]:
    name, _, size = given.rpartition("=")
    try:
        value = float(size)
    except ValueError:
        value = 0.0
    if not (name and 0 < value < inf):
        raise Invalid(f"--margin: {given!r} is not FIGURE=SIZE", remedy="Give as in `--margin accuracy=0.01`.")
    return name, value


def _columns(comparison: SimulationComparison) -> list[str]:
    """Return the names of the columns: without those that no cell would fill."""
    holm = ["p (Holm)"] if len(comparison.folders) > 2 else []
    return [*COLUMNS, *holm, *(["equal within"] if comparison.margins else [])]


def _rows(comparison: SimulationComparison) -> Iterator[list[str]]:
    for name, by_folder in comparison.figures().items():
        shown = name.replace("_", " ")
        for folder, figure in by_folder.items():
            deviation = "" if figure.deviation is None else f"{figure.deviation:.4f}"
            difference = "" if figure.difference is None else f"{figure.difference:+.4f}"
            ends = "" if figure.low is None else f"{figure.low:+.4f} to {figure.high:+.4f}"
            row = [shown, folder, figure.shown, deviation, difference, ends, _p(figure.p)]
            if len(comparison.folders) > 2:
                row.append(_p(figure.holm_p))
            if comparison.margins:
                within = comparison.margins.get(name)
                row.append("" if figure.equivalence_p is None else f"±{within:g}: p {_p(figure.equivalence_p)}")
            yield row
            shown = ""


def _p(value: float | None) -> str:
    return "" if value is None else "<0.0001" if value < 0.0001 else f"{value:.4f}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", "---", *["---:"] * (len(columns) - 2)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"


def _latex(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that needs the package booktabs."""
    head, *lines = (" & ".join(cell.replace("\\", "/").translate(TEX) for cell in line) for line in (columns, *rows))
    body = [r"\toprule", rf"{head} \\", r"\midrule", *(rf"{line} \\" for line in lines), r"\bottomrule"]
    places = "ll" + "r" * (len(columns) - 2)
    return "\n".join([rf"\begin{{tabular}}{{{places}}}", *body, r"\end{tabular}", ""])


def _conclusion(comparison: SimulationComparison) -> str:
    """Return the basis of the table, and the consequences of few seeds."""
    first, seeds = next(iter(comparison.folders)), _seeds(comparison.seeds)
    rests = f"A difference is a simulation's figure less that of {first}, the mean over {seeds}."
    if len(comparison.seeds) == 1:
        return f"{rests} One seed shows no difference: repeat all simulations with `--seeds {SEEDS}`."
    seeds_ = len(comparison.seeds)
    few = "" if seeds_ >= FEW_SEEDS else f" With fewer than {FEW_SEEDS} seeds it is rough."
    least = 2 / 2**seeds_
    low = f" With {seeds_} seeds no p is below {least:.4g}." if least > 0.05 else ""
    many = f" Of more than {MOST_FLIPPED} seeds p is not computed." if seeds_ > MOST_FLIPPED else ""
    equal = " A difference is equal within a size if its p is below 0.05." if comparison.margins else ""
    return f"{rests} Where an interval includes 0, the seeds do not show a difference.{few}{low}{many}{equal}"


def _document(comparison: SimulationComparison) -> dict[str, Any]:
    return {
        "folders": list(comparison.folders),
        "seeds": list(comparison.seeds),
        "settings": comparison.settings(),
        "margins": comparison.margins,
        "remarks": list(comparison.remarks()),
        "figures": {
            name: {folder: asdict(figure) for folder, figure in by_folder.items()}
            for name, by_folder in comparison.figures().items()
        },
    }

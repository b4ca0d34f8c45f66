"""`tessera compare`: simulations beside each other, paired by seed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.shared.problems import Invalid
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson, Reach
from tessera.simulation.checkpoint import shortened
from tessera.simulation.comparison import Figure, SimulationComparison

app = typer.Typer(add_completion=False)

COLUMNS = ("at the end", "simulation", "mean", "deviation", "difference", "95 % interval")
FEW_SEEDS = 5
"""Below it, an interval says little."""


@app.command(name="compare")
def command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER FOLDER...", help="Output folders of `tessera simulate`.")
    ],
    reach: Reach = None,
    as_json: AsJson = False,
) -> None:
    """Compare simulations with the first one, on the seeds that all of them have.

    A difference is the mean over the seeds, with its 95 % t-interval.
    """
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise Invalid("a comparison needs two different folders or more", remedy="Name each output folder once.")
    comparison = SimulationComparison.of(folders, reach or ())
    for name, seeds in comparison.left_out():
        output.note(f"{name}: not in all folders, and left out: {_seeds(seeds)}")
    for remark in comparison.remarks():
        output.note(remark)
    if as_json:
        output.print_json(_document(comparison))
        return
    console = output.out()
    names = [str(folder) for folder in folders]
    differ = [(pointer, *map(shortened, values)) for pointer, values in comparison.settings().items()]
    console.print(output.table(("settings that differ", *names), differ))
    console.print()
    console.print(output.table(COLUMNS, _rows(comparison), right=COLUMNS[2:]))
    console.print()
    console.print(_conclusion(comparison), soft_wrap=True, markup=False)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _rows(comparison: SimulationComparison) -> Iterator[tuple[object, ...]]:
    for name, by_folder in comparison.figures().items():
        shown = name.replace("_", " ")
        for folder, figure in by_folder.items():
            yield shown, folder, figure.shown, *_optional(figure)
            shown = ""


def _optional(figure: Figure) -> tuple[str | None, str | None, str | None]:
    deviation = None if figure.deviation is None else f"{figure.deviation:.4f}"
    difference = None if figure.difference is None else f"{figure.difference:+.4f}"
    ends = None if figure.low is None else f"{figure.low:+.4f} to {figure.high:+.4f}"
    return deviation, difference, ends


def _conclusion(comparison: SimulationComparison) -> str:
    """Return the basis of the table, and the consequences of few seeds."""
    first, seeds = next(iter(comparison.folders)), _seeds(comparison.seeds)
    rests = f"A difference is a simulation's figure less that of {first}, the mean over {seeds}."
    if len(comparison.seeds) == 1:
        return f"{rests} One seed shows no difference: repeat both simulations with `--seeds 0,1,2,3,4`."
    few = "" if len(comparison.seeds) >= FEW_SEEDS else f" With fewer than {FEW_SEEDS} seeds it is rough."
    return f"{rests} Where an interval includes 0, the seeds do not show a difference.{few}"


def _document(comparison: SimulationComparison) -> dict[str, Any]:
    return {
        "folders": list(comparison.folders),
        "seeds": list(comparison.seeds),
        "settings": comparison.settings(),
        "remarks": list(comparison.remarks()),
        "figures": {
            name: {folder: asdict(figure) for folder, figure in by_folder.items()}
            for name, by_folder in comparison.figures().items()
        },
    }

"""The reports on a rehearsal as a table, and the forecast of its run."""

from collections.abc import Sequence

from rich.markup import escape

from tessera.shared.api.runs import Run
from tessera.shared.rounds.run_forecast import RunForecast
from tessera.shared.terminal import output


def show_rehearsal(run: Run, found: RunForecast, further: Sequence[str] = (), *, as_json: bool) -> None:
    """Print the workers' reports, the forecast, and the faults that the run would have, with `further` ones."""
    faults = [*found.faults, *further]
    if as_json:
        output.print_json({"run": run.id, "state": run.state, "forecast": found, "faults": faults})
        return
    console, right = output.out(), found.columns[3:]
    console.print(output.table(found.columns, [one.cells for one in found.workers], right=right))
    console.print()
    console.print(output.table(("", ""), list(found.facts)))
    if faults:
        console.print("\n[bold]what would go wrong[/]")
    for sentence in faults:
        console.print(escape(f"- {sentence}"), soft_wrap=True)

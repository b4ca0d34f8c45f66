"""The reports on a rehearsal, or on an attack, as a table, and what follows from them."""

from collections.abc import Sequence

from rich.markup import escape

from tessera.shared.api.runs import Run
from tessera.shared.metrics.membership import AttackResult
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


def show_attack(run: Run, found: AttackResult, further: Sequence[str] = (), *, as_json: bool) -> None:
    """Print the figures of a membership inference attack, and the reasons of sites without any."""
    sentences = [*found.sentences, *further]
    if as_json:
        output.print_json({"run": run.id, "state": run.state, "attack": found.as_json(), "sentences": sentences})
        return
    console = output.out()
    console.print(output.table(found.columns, found.rows, right=found.columns[1:]))
    for sentence in sentences:
        console.print(escape(f"- {sentence}"), soft_wrap=True)

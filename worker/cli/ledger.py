"""`tessera worker ledger`: what runs have spent of each data set's privacy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.cli.output import AsJson, complain, out, print_json, table
from worker.ledger import Entry, LedgerError, epsilon_of
from worker.policy import Allowance
from worker.settings import Settings, SettingsError, allowances_of, ledger_of, read_settings

BAD_SETTINGS = 2


def ledger(
    config: Annotated[Path, typer.Option("--config", help="The worker's settings, as TOML.")], as_json: AsJson = False
) -> None:
    """Show what runs have spent of each data set's privacy, and what the site allows.

    Exit code 0: all is well, 1: a ledger cannot be read, relied on or added up here, 2: bad settings.
    """
    try:
        settings = read_settings(config)
        shown = {name: _spending(settings, name) for name in settings.datasets}
    except SettingsError as fault:
        complain(str(fault))
        raise typer.Exit(BAD_SETTINGS) from fault
    except LedgerError as fault:
        complain(f"{fault}; compare it with a copy before anything more is spent")
        raise typer.Exit(1) from fault
    except OSError as fault:
        complain(f"{fault.filename} cannot be read: {fault.strerror}; only the worker's own user may read a ledger")
        raise typer.Exit(1) from fault
    except ImportError as fault:
        complain(f"what was spent cannot be added up here ({fault}): install tessera[privacy]")
        raise typer.Exit(1) from fault
    if as_json:
        print_json(shown)
        return
    columns = ("data set", "run", "rounds", "tasks", "epsilon", "at most", "delta")
    out().print(table(columns, _rows(shown), right=columns[2:]))


def _spending(settings: Settings, dataset: str) -> dict[str, Any]:
    """What a data set's ledger comes to: as a whole at the budget's delta, and run by run at theirs."""
    entries = ledger_of(settings).read(dataset)
    allowance: Allowance | None = allowances_of(settings).get(dataset)
    runs: dict[str, list[Entry]] = {}
    for entry in entries:
        runs.setdefault(entry.run, []).append(entry)
    # Without a budget there is no delta of its own: the runs' strictest.
    delta = allowance.delta if allowance else min((entry.target.delta for entry in entries), default=None)
    return {
        "epsilon": epsilon_of(entries, delta) if delta else 0.0,
        "delta": delta,
        "budget": allowance.epsilon if allowance else None,
        "runs": [_of_run(spent) for spent in runs.values()],
    }


def _of_run(entries: list[Entry]) -> dict[str, Any]:
    first = entries[0]
    return {
        "run": first.run,
        "name": first.run_name,
        "rounds": len({entry.round for entry in entries}),
        "tasks": len({(entry.task, entry.token) for entry in entries}),
        "epsilon": epsilon_of(entries, first.target.delta),
        "target": first.target.epsilon,
        "delta": first.target.delta,
    }


def _rows(shown: dict[str, dict[str, Any]]) -> Iterable[tuple[object, ...]]:
    for dataset, of in shown.items():
        for run in of["runs"]:
            spent = f"{run['epsilon']:.3f}"
            yield dataset, run["name"], run["rounds"], run["tasks"], spent, f"{run['target']:g}", f"{run['delta']:g}"
        delta, budget = (None if value is None else f"{value:g}" for value in (of["delta"], of["budget"]))
        yield dataset, "all runs", None, None, f"{of['epsilon']:.3f}", budget, delta

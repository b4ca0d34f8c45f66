"""`tessera worker ledger` and `adopt`: what runs have spent of each data set's privacy, and records without a key."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import JsonValue

from tessera.shared.cli.render.output import AsJson, complain, note, print_json, show, table
from tessera.worker.governance.policy import Allowance
from tessera.worker.privacy.cost import epsilon_of, least_budget_of
from tessera.worker.settings import SettingsError, WorkerSettings, read_settings
from tessera.worker.state.audit import LEDGER_HEAD
from tessera.worker.state.hash_chain import ChainError
from tessera.worker.state.privacy_ledger import LedgerEntry, LedgerError, exact_in, noisy_in
from tessera.worker.stores import audit_of, ledger_of

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
    columns = ("data set", "run", "rounds", "tasks", "epsilon", "at most", "delta")
    show(shown, table(columns, _rows(shown), right=columns[2:]), as_json=as_json)


def adopt(
    config: Annotated[Path, typer.Option("--config", help="The worker's settings, as TOML.")], as_json: AsJson = False
) -> None:
    """Take audit and ledgers as they are: from before there was a key, under a key that was lost, cut off or gone.

    Compare them with a copy first. What a ledger lost counts as unbounded from then on. Stop the worker meanwhile.

    Exit code 0: they can be relied on from now on, 1: they cannot, 2: bad settings.
    """
    try:
        settings = read_settings(config)
        audit, ledger = audit_of(settings), ledger_of(settings)
    except SettingsError as fault:
        complain(str(fault))
        raise typer.Exit(BAD_SETTINGS) from fault
    try:
        adopted = audit.adopt()
        ledger.expect(audit.ledger_heads(audit.check()))
        heads = {name: ledger.adopt(name) for name in settings.datasets}
        told: dict[str, JsonValue] = {name: head.model_dump() for name, head in heads.items() if head}
        # A removed data set's, or another worker's: no head of theirs is expected, yet tasks read them.
        others = [name for name in ledger.besides(settings.datasets) if ledger.by_name.adopt(name)]
        if told or others:
            detail: dict[str, JsonValue] = {LEDGER_HEAD: told, "others": [*others]}
            audit.record("chain.adopt", None, **detail)
    except (ChainError, OSError) as fault:
        complain(str(fault))
        raise typer.Exit(1) from fault
    if as_json:
        print_json({"audit": adopted is not None, "ledgers": sorted({*told, *others})})
        return
    taken = [*(["the audit"] if adopted else []), *(f"the ledger of {name}" for name in sorted({*told, *others}))]
    note(f"taken as they are: {', '.join(taken)}" if taken else "all were in order, and nothing was changed")


def _spending(settings: WorkerSettings, dataset: str) -> dict[str, Any]:
    """Return what a data set's ledger comes to: as a whole the least budget that admits it, and run by run their
    epsilon."""
    entries = ledger_of(settings).read(dataset)
    allowance: Allowance | None = settings.allowances.get(dataset)
    runs: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        runs.setdefault(entry.run, []).append(entry)
    # Without a budget there is no delta of its own: the runs' strictest.
    delta = (
        allowance.delta if allowance else min((entry.target.delta for entry in entries if entry.target), default=None)
    )
    return {
        "epsilon": least_budget_of(noisy_in(entries), delta) if delta else 0.0,
        "delta": delta,
        "budget": allowance.epsilon if allowance else None,
        "exact": _exact(entries),
        "runs": [_of_run(spent) for spent in runs.values()],
    }


def _exact(entries: Iterable[LedgerEntry]) -> dict[str, str]:
    """Since when each exact use goes on, of which epsilon says nothing."""
    since: dict[str, str] = {}
    for entry, use in exact_in(entries):
        since.setdefault(use, entry.at.isoformat())
    return since


def _of_run(entries: list[LedgerEntry]) -> dict[str, Any]:
    first = entries[0]
    target = next((entry.target for entry in entries if entry.target), None)
    noisy = [entry for entry in entries if entry.target]
    return {
        "run": first.run,
        "name": first.run_name,
        "rounds": len({entry.round for entry in noisy}),
        "tasks": len({(entry.task, entry.token) for entry in noisy}),
        "epsilon": epsilon_of(noisy_in(noisy), target.delta) if target else 0.0,
        "target": target.epsilon if target else None,
        "delta": target.delta if target else None,
        "exact": _exact(entries),
    }


def _rows(shown: dict[str, dict[str, Any]]) -> Iterable[tuple[object, ...]]:
    for dataset, of in shown.items():
        for run in of["runs"]:
            target, delta = _short(run["target"]), _short(run["delta"])
            yield dataset, run["name"] or "-", run["rounds"], run["tasks"], _epsilon(run), target, delta
        yield dataset, "all runs", None, None, _epsilon(of), _short(of["budget"]), _short(of["delta"])


def _epsilon(of: dict[str, Any]) -> str:
    """Return what noise covers; and since when there is what it does not."""
    uses = ", ".join(f"{use} unbounded since {since[:10]}" for use, since in of["exact"].items())
    return "; ".join(filter(None, (uses, f"{of['epsilon']:.3f}" if of["epsilon"] or not uses else "")))


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"

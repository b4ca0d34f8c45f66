"""`tessera worker ledger` and `adopt`: the privacy that runs have spent, and recovery of audit and ledgers."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from pydantic import JsonValue

from tessera.shared.problems import Problem
from tessera.shared.run_settings import Unit, with_meaning
from tessera.shared.terminal.output import AsJson, note, print_json, show, table
from tessera.shared.version import install_line
from tessera.worker.cli.exits import BAD_SETTINGS, ConfigFile, exits, fail
from tessera.worker.faults.rolled_back import adopt_restored_run, adopt_rolled_back
from tessera.worker.governance.policy import Allowance
from tessera.worker.privacy.cost import epsilon_of, least_budget_of
from tessera.worker.settings import SettingsError, WorkerSettings, read_settings
from tessera.worker.state.audit import LEDGER_HEAD
from tessera.worker.state.database import StateError
from tessera.worker.state.privacy_ledger import LedgerEntry, noisy_in, of_training, unbounded_in, unit_of
from tessera.worker.stores import audit_of, ledger_of

ALL = "all data sets"
"""The name of the sum over the ledgers: no data set's, since a label has no spaces."""


def ledger(config: ConfigFile, as_json: AsJson = False) -> None:
    """Show the privacy that runs have spent of each data set, and the site's budgets.

    Exit code 0: all is well, 1: a ledger is unreadable or not intact, or the extra `privacy` is missing, 2: invalid
    settings.
    """
    try:
        with exits({BAD_SETTINGS: (SettingsError,)}):
            settings = read_settings(config)
            shown = _spending_by_dataset(settings)
    except StateError as fault:
        fail(f"{fault}; compare it with a copy before any task spends more", 1)
    except OSError as fault:
        fail(f"{fault.filename} cannot be read: {fault.strerror}; only the worker's own user may read a ledger", 1)
    except ImportError as fault:
        fail(f"the spending cannot be computed here ({fault}): {install_line('privacy')}", 1)
    columns = ("data set", "run", "rounds", "tasks", "unit", "epsilon", "at most", "delta")
    right = [name for name in columns[2:] if name != "unit"]
    show(shown, table(columns, _rows(shown), right=right), as_json=as_json)


def adopt(
    config: ConfigFile,
    run: Annotated[
        str, typer.Option(metavar="NAME", help="A run whose coordinator was restored: go on from its earlier round.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Accept audit and ledgers as they are: under a lost key, cut off or missing.

    Stop the worker, and compare the files with a copy first. The lost spending of a ledger counts as unbounded. After
    `state-rolled-back`, the ledgers are charged for the tasks that the coordinator names and the audit lacks.

    Exit code 0: both are reliable from now on, 1: they are not, 2: invalid settings.
    """
    with exits({BAD_SETTINGS: (SettingsError,), 1: (StateError, OSError, Problem, ValueError)}):
        settings = read_settings(config)
        if run:
            run_id = adopt_restored_run(settings, run)
            note(f"run {run_id} may go on from any round") if not as_json else print_json({"run": run_id})
            return
        audit, ledger = audit_of(settings), ledger_of(settings)
        adopted = audit.adopt()
        ledger.expect(audit.ledger_heads(audit.read()))
        heads = {name: ledger.adopt(name) for name in settings.datasets}
        # Tasks read the ledgers of removed data sets and of other workers too.
        others = [name for name in ledger.besides(settings.datasets) if ledger.by_name.adopt(name)]
        heads |= {name: ledger.adopt(name) for name in ledger.lost(settings.datasets)}
        lost: dict[str, JsonValue] = {name: head.model_dump() for name, head in heads.items() if head}
        if lost or others:
            detail: dict[str, JsonValue] = {LEDGER_HEAD: lost, "others": [*others]}
            audit.record("chain.adopt", None, **detail)
        charged = adopt_rolled_back(settings, audit, ledger)
    names = sorted({*lost, *others})
    if as_json:
        print_json({"audit": adopted is not None, "ledgers": names, "charged": charged or {}})
        return
    accepted = [*(["the audit"] if adopted else []), *(f"the ledger of {name}" for name in names)]
    if charged is not None:
        accepted += [f"the older state, with {n} lost uses of {name} charged" for name, n in charged.items()] or [
            "the older state, which lacks no use of the data"
        ]
    note(f"accepted as they are: {', '.join(accepted)}" if accepted else "all were intact, and nothing was changed")


def _spending_by_dataset(settings: WorkerSettings) -> dict[str, dict[str, Any]]:
    """Return the spending of each data set and, under a budget of all together, their common spending."""
    ledger, total = ledger_of(settings), settings.policy.max_total_privacy
    entries = {name: ledger.read(name) for name in settings.datasets}
    shown = {name: _spending(entries[name], settings.allowances.get(name)) for name in settings.datasets}
    if total and entries:
        name, own = next(iter(entries.items()))
        shown[ALL] = {**_spending([*own, *ledger.elsewhere(name)], total), "runs": []}
    return shown


def _spending(entries: Sequence[LedgerEntry], allowance: Allowance | None) -> dict[str, Any]:
    """Return the least budget that admits all runs, and the epsilon of each run."""
    runs: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        runs.setdefault(entry.run, []).append(entry)
    # Without a budget, the strictest of the runs' deltas.
    deltas = [allowance.delta] if allowance else [entry.target.delta for entry in entries if entry.target]
    delta = min(deltas, default=None)
    unit = allowance.unit if allowance else unit_of(entries)
    return {
        "unit": unit,
        "epsilon": least_budget_of(noisy_in(entries, unit), delta) if delta else 0.0,
        "delta": delta,
        "budget": allowance.epsilon if allowance else None,
        "exact": _unbounded(entries, unit),
        "runs": [_of_run(spent) for spent in runs.values()],
    }


def _unbounded(entries: Iterable[LedgerEntry], unit: Unit) -> dict[str, str]:
    """Return the time of the first entry of each use that no epsilon of this unit covers."""
    since: dict[str, str] = {}
    for entry, use in unbounded_in(entries, unit):
        since.setdefault(use, entry.at.isoformat())
    return since


def _of_run(entries: list[LedgerEntry]) -> dict[str, Any]:
    noisy = [entry for entry in of_training(entries) if entry.target]
    evaluated = [entry for entry in entries if entry.target and entry not in noisy]
    target, unit = noisy[0].target if noisy else None, unit_of(noisy)
    return {
        "run": entries[0].run,
        "name": entries[0].run_name,
        "rounds": len({entry.round for entry in noisy}),
        "tasks": len({(entry.task, entry.token) for entry in noisy}),
        "unit": unit,
        "epsilon": epsilon_of(noisy_in(noisy, unit), target.delta) if target else 0.0,
        "figures": _of_figures(evaluated),
        "target": target.epsilon if target else None,
        "delta": target.delta if target else None,
        "exact": _unbounded(entries, unit),
    }


def _of_figures(evaluated: Sequence[LedgerEntry]) -> float:
    """Return the epsilon of evaluations, each with the same delta, as the strictest states it."""
    delta = min((entry.target.delta for entry in evaluated if entry.target), default=None)
    return epsilon_of(noisy_in(evaluated), delta) if delta else 0.0


def _rows(shown: dict[str, dict[str, Any]]) -> Iterable[tuple[object, ...]]:
    for dataset, spending in shown.items():
        for run in spending["runs"]:
            yield dataset, run["name"] or "-", run["rounds"], run["tasks"], *_limits(run, run["target"])
        yield dataset, "all runs", None, None, *_limits(spending, spending["budget"])


def _limits(spent: dict[str, Any], most: float | None) -> tuple[str | None, ...]:
    """Return the unit, its epsilon with the uses that it does not cover, the limit, and delta."""
    uses = ", ".join(f"{use} unbounded since {since[:10]}" for use, since in spent["exact"].items())
    epsilon = with_meaning(spent["epsilon"], f"{spent['epsilon']:.3f}") if spent["epsilon"] or not uses else ""
    if figures := spent.get("figures"):
        uses = "; ".join(filter(None, (uses, f"figures {figures:.3f}")))
    limit = None if most is None else with_meaning(most, f"{most:g}")
    delta = None if spent["delta"] is None else f"{spent['delta']:g}"
    return spent["unit"], "; ".join(filter(None, (uses, epsilon))), limit, delta

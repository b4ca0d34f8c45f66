"""A person's decisions at a site: `tessera worker inbox`, `approve`, `decline`, `airlock`, `release`, `withhold`."""

import getpass
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tessera.shared.cli.connection import RunNamed
from tessera.shared.methods.base import EXTRA
from tessera.shared.run_settings import with_meaning
from tessera.shared.terminal.output import AsJson, note, out, print_json, table
from tessera.shared.units import ago, size
from tessera.worker.cli.exits import BAD_SETTINGS, ConfigFile, Errors, exits
from tessera.worker.governance.airlock import Airlock, AirlockError, Summary
from tessera.worker.governance.approvals import ApprovalDecision, Request
from tessera.worker.settings import SettingsError, read_settings
from tessera.worker.state.database import StateError
from tessera.worker.stores import airlock_of, audit_of, inbox_of

NAME_CHARACTERS = 100

ERRORS: Errors = {BAD_SETTINGS: (SettingsError,), 1: (AirlockError, StateError, OSError)}

Decider = Annotated[
    str,
    typer.Option("--as", metavar="NAME", help="Who decides, as the audit records it; this machine's user if unset."),
]
HeldNamed = Annotated[str | None, typer.Argument(metavar="ID", help="The update's id, or the beginning of it.")]


# ---------------------------------------------------------------- runs


def inbox(config: ConfigFile, as_json: AsJson = False) -> None:
    """Show the runs that need this site's approval, a description of each, and the decisions."""
    with exits(ERRORS):
        requests = inbox_of(read_settings(config)).requests()
    now = datetime.now(UTC)
    if as_json:
        print_json({"runs": [{**r.model_dump(mode="json"), "standing": r.standing(now)} for r in requests]})
        return
    if not requests:
        note("no run has asked for approval")
    for request in requests:
        console = out()
        console.print(f"{request.run_name} ({request.run}): {_standing(request, now)}", markup=False)
        asked = f"asked {ago(request.asked_at)} by worker {request.worker}, on the terms {request.shown_terms}"
        console.print(f"  {asked}", markup=False)
        console.print(f"  {request.summary}", markup=False, soft_wrap=True)


def _standing(request: Request, now: datetime) -> str:
    decision, standing = request.decision, request.standing(now)
    if decision is None:
        return standing
    until = f" until {decision.until:%Y-%m-%d}" if decision.until and standing == "approved" else ""
    reason = f": {decision.reason}" if decision.reason else ""
    return f"{standing}{until}, by {decision.by} {ago(decision.at)}{reason}"


def approve(
    config: ConfigFile,
    run: RunNamed,
    terms: Annotated[
        str,
        typer.Option(metavar="DIGEST", help="The terms to approve, or their beginning, if the run asks for several."),
    ] = "",
    until: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The last day of the approval, in UTC.")
    ] = None,
    name: Decider = "",
    as_json: AsJson = False,
) -> None:
    """Let a run use this site's data on the terms of its request. Other terms need another approval."""
    # The whole of that day.
    ends = until.replace(hour=23, minute=59, second=59, tzinfo=UTC) if until else None
    decision = ApprovalDecision(approved=True, by=_decider(name), at=datetime.now(UTC), until=ends)
    _decide(config, run, decision, terms, as_json=as_json)


def decline(
    config: ConfigFile,
    run: RunNamed,
    reason: Annotated[str, typer.Option(help="The reason, which is reported to the coordinator.")],
    name: Decider = "",
    as_json: AsJson = False,
) -> None:
    """Refuse all tasks of a run, and report the reason to the coordinator."""
    decision = ApprovalDecision(approved=False, by=_decider(name), at=datetime.now(UTC), reason=reason)
    _decide(config, run, decision, as_json=as_json)


def _decide(config: Path, run: str, decision: ApprovalDecision, terms: str = "", *, as_json: bool) -> None:
    with exits(ERRORS):
        settings = read_settings(config)
        box, audit = inbox_of(settings), audit_of(settings)
        requests = [box.find_one(run, terms)] if decision.approved else box.find(run)
        until = decision.until.isoformat() if decision.until else None
        # The audit comes first, so that no decision takes effect without its entry.
        for request in requests:
            about = {"by": decision.by, "until": until, "reason": decision.reason, "terms": request.terms}
            audit.record_of_run(
                "run.approve" if decision.approved else "run.decline", request.run, request.run_name, **about
            )
        decided = box.decide(requests, decision)
        if not decision.approved:
            _withhold_of(airlock_of(settings), {request.run for request in requests}, decision)
    if as_json:
        print_json({"runs": [request.model_dump(mode="json") for request in decided]})
        return
    for request in decided:
        shown = f"{request.run_name} ({request.run}), terms {request.shown_terms}"
        out().print(f"{shown}: {_standing(request, decision.at)}", markup=False)
    note("the worker applies it with its next claim, within half a minute")


def _withhold_of(place: Airlock, runs: Collection[str], decision: ApprovalDecision) -> None:
    """Withhold the undecided updates of runs that a person declines."""
    for held in place.held():
        if held.run in runs:
            # Another person's decision on the update stands.
            with suppress(AirlockError):
                place.decide(held.id, "withhold", decision.by, f"declined: {decision.reason}")


# ---------------------------------------------------------------- updates


def airlock(config: ConfigFile, as_json: AsJson = False) -> None:
    """Show the updates that wait for release, and the contents of each."""
    with exits(ERRORS):
        settings = read_settings(config)
        place = airlock_of(settings)
        waiting = place.held()
    if as_json:
        print_json({"updates": [{**s.model_dump(mode="json"), "file": str(place.path(s))} for s in waiting]})
        return
    if not settings.policy.airlock:
        note("policy.airlock is off: updates leave as soon as they are finished")
    rows = [
        (
            held.id,
            held.run_name,
            held.round,
            ago(held.held_at),
            len(held.blocks),
            size(held.nbytes),
            f"{held.norm:.4g}",
            None if held.epsilon is None else with_meaning(held.epsilon, f"{held.epsilon:.3f}"),
            held.unit,
            None if held.delta is None else f"{held.delta:g}",
            held.update[:19],
        )
        for held in waiting
    ]
    columns = ("id", "run", "round", "held", "blocks", "bytes", "norm", "epsilon", "unit", "delta", "digest")
    out().print(table(columns, rows, right=("round", "blocks", "bytes", "norm", "epsilon", "delta")))
    for held in waiting:
        note(f"{held.id}: {place.path(held)}")
        if decision := place.decision(held):
            note(f"{held.id}: {decision.verdict} decided by {decision.by}; the worker acts when it has the task")
        if arrays := [name for name in held.blocks if name.startswith(EXTRA)]:
            few = ", ".join(f"{count} of {name}" for name, count in held.withheld.items())
            withheld = f"; rows withheld over too few examples: {few}" if few else ""
            note(f"{held.id}: among its blocks are the arrays {', '.join(arrays)}{withheld}")
        if not held.covers_choice:
            note(f"{held.id}: epsilon does not cover what the choice of blocks reveals")


def release(
    config: ConfigFile,
    update: HeldNamed = None,
    everything: Annotated[bool, typer.Option("--all", help="Release all updates that wait now.")] = False,
    name: Decider = "",
    as_json: AsJson = False,
) -> None:
    """Let an update leave the site."""
    if everything == (update is not None):
        raise typer.BadParameter("give the id of an update, or --all", param_hint="'ID'")
    with exits(ERRORS):
        place = airlock_of(read_settings(config))
        undecided = (held for held in place.held() if place.decision(held) is None)
        named = [held.id for held in undecided] if everything else [update or ""]
        decided = [place.decide(each, "release", _decider(name)) for each in named]
    _print_decided(decided, "released", as_json=as_json)


def withhold(
    config: ConfigFile,
    update: Annotated[str, typer.Argument(metavar="ID", help="The update's id, or the beginning of it.")],
    reason: Annotated[str, typer.Option(help="The reason, which is reported to the coordinator.")] = "",
    name: Decider = "",
    as_json: AsJson = False,
) -> None:
    """Keep an update at the site for good; its task fails with the code `withheld-by-site`."""
    with exits(ERRORS):
        decided = [airlock_of(read_settings(config)).decide(update, "withhold", _decider(name), reason)]
    _print_decided(decided, "withheld", as_json=as_json)


def _print_decided(decided: list[Summary], verdict: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"updates": [{"id": held.id, "update": held.update, "verdict": verdict} for held in decided]})
        return
    for held in decided:
        out().print(f"{held.id} of {held.run_name}, round {held.round}: {verdict}", markup=False)
    if not decided:
        note("no update waits")


def _decider(name: str) -> str:
    """Return the name of the person who decides, with this machine's user."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    if not name:
        return user
    if len(name) > NAME_CHARACTERS or not name.isprintable() or not name.strip():
        raise typer.BadParameter(f"give a name of 1 to {NAME_CHARACTERS} printable characters", param_hint="'--as'")
    return f"{name.strip()} (user {user})"


COMMANDS = (inbox, approve, decline, airlock, release, withhold)

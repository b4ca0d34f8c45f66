"""Look-up of runs and tokens by id, by the beginning of an id, or by name."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from tessera.shared.api.admin import Site, Token
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.near_names import nearest
from tessera.shared.problems import Fault, Invalid, NotFound
from tessera.shared.units import ago

T = TypeVar("T")


def find_run(client: Client, named: str) -> Run:
    """Return the run with this id, or the only run with this name or id prefix."""

    def describe(run: Run) -> str:
        at = f"version {run.version.number} of {run.spec.rounds}"
        return f"{run.spec.name}, {run.state}, {at}, created {ago(run.created_at)}"

    try:
        return client.run(named)
    except NotFound:
        return only("run", named, client.runs(), lambda run: run.id, lambda run: run.spec.name, describe)


def find_site(client: Client, named: str) -> Site:
    """Return the site with this name or id, or the only one whose id begins with it."""
    return only("site", named, client.sites(), lambda site: site.id, lambda site: site.name)


def find_token(client: Client, named: str) -> Token:
    """Return the token with this id, or the only valid token with this name or id prefix."""
    tokens = list(client.tokens())
    if exact := [token for token in tokens if token.id == named]:
        return exact[0]
    live = [token for token in tokens if token.revoked_at is None]
    return only("token", named, live, lambda token: token.id, lambda token: token.name)


def only(
    kind: str,
    named: str,
    among: Iterable[T],
    id_of: Callable[[T], str],
    name_of: Callable[[T], str],
    describe: Callable[[T], str] | None = None,
) -> T:
    """Return the only item whose name is `named` or whose id begins with it.

    Raises NotFound if there is none, and Invalid that lists the matches if there are several.
    """
    items = list(among)
    found = [item for item in items if named and (name_of(item) == named or id_of(item).startswith(named))]
    if not found:
        near = nearest(named, sorted({name_of(item) for item in items}))
        suggestion = f"; did you mean {near!r}?" if near else ""
        raise NotFound(
            f"there is no {kind} {named!r}{suggestion}", remedy=f"List the {kind}s: `tessera {_LISTS[kind]}`."
        )
    if len(found) > 1:
        faults = [Fault(pointer=id_of(item), detail=(describe or name_of)(item)) for item in found]
        detail = f"{named!r} could be any of {len(found)} {kind}s"
        raise Invalid(detail, errors=faults, remedy="Give the id, or as much of it as is unique.")
    return found[0]


_LISTS = {"run": "run list", "token": "admin token list", "site": "admin sites"}

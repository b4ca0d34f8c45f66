"""Tessera's environment variables. A misspelt one would silently leave its default in force."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from tessera.shared.near_names import MISSPELT, nearest
from tessera.shared.problems import Invalid

PREFIX = "TESSERA_"
COMMANDS = frozenset(
    ("URL", "TOKEN", "TOKEN_FILE", "CA_BUNDLE", "CLIENT_CERT", "CLIENT_KEY", "PLAIN_HTTP", "METHODS"),
)
"""Variables of commands and notebooks, without the prefix. A coordinator's or a worker's shell may hold them too."""

OTHERS = ("WORKER_", "TEST_")
"""Prefixes of variables that workers check themselves, and of the tests' own."""


def unknown(environment: Iterable[str], settings: Collection[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Yield each variable that is neither a command's nor one of `settings`, and the variable that it misspells.

    That is None for a variable that resembles no known one: an operator may have variables of their own.
    """
    known = COMMANDS | {setting.upper() for setting in settings}
    for variable in sorted(environment):
        name = variable.upper().removeprefix(PREFIX).partition("__")[0]
        if not variable.upper().startswith(PREFIX) or name in known or name.startswith(OTHERS):
            continue
        meant = nearest(name, known, MISSPELT)
        yield variable, meant and PREFIX + meant


def refuse_misspelt(environment: Mapping[str, str], settings: Collection[str] = ()) -> None:
    """Raise Invalid for variables that misspell one of `settings` or a command's variable. It holds no values."""
    found = [
        f"{name} is no setting; did you mean {meant}?" for name, meant in unknown(environment, settings) if meant
    ]
    if found:
        raise Invalid(
            " ".join(found), remedy="Correct it, or give a variable of your own a name that resembles no setting."
        )

"""The page of commands is made of the commands."""

from __future__ import annotations

import re

from tessera.shared.cli.main import SUMMARIES
from tessera.shared.cli.reference.commands import document

# They run until they are told to stop, and log; or tell of their work as they do it; or write TOML.
WITHOUT_JSON = {
    "coordinator serve", "coordinator conduct", "coordinator migrate", "worker run", "data init", "demo", "regional",
}  # fmt: skip


def sections() -> dict[str, str]:
    """Return the section of each command that does something, by the command's words."""
    parts = re.split(r"^#{2,4} `tessera (.+)`\n", document(), flags=re.MULTILINE)[1:]
    return {name: text for name, text in zip(parts[::2], parts[1::2], strict=True) if "COMMAND [ARGS]" not in text}


def test_every_command_group_is_on_the_page() -> None:
    assert {name.split()[0] for name in sections()} == set(SUMMARIES)


def test_every_command_that_tells_something_tells_it_as_json() -> None:
    assert {name for name, text in sections().items() if "`--json`" not in text} == WITHOUT_JSON


def test_every_command_and_option_says_what_it_is_for() -> None:
    for name, text in sections().items():
        assert text.strip().startswith(tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")), name
        assert re.findall(r"^\* `[^`]*`(?:$|:  \[)", text, re.MULTILINE) == [], name


def test_every_exit_code_that_a_command_names_is_in_the_table() -> None:
    table = set(re.findall(r"^\| (\d+) \|", document(), re.MULTILINE))
    told = [re.findall(r"(?:Exit codes?|,) (\d+):? ", text.partition("Exit code")[1] + text.partition("Exit code")[2])
            for text in sections().values()]  # fmt: skip
    named = {code for codes in told for code in codes}
    assert len(named) > 3
    assert named <= table

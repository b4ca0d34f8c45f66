"""The options of a data set that are proposed, each with its reason."""

import json
import re
from dataclasses import dataclass, field

from tessera.worker.data.load_report import LoadReport
from tessera.worker.errors import DataError

SAMPLE = 64
"""Number of images and of rows to look at."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass
class Proposal:
    """Options in the order in which they are written, each with its reason, and warnings about the data."""

    options: dict[str, object] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, option: str, value: object, reason: str) -> None:
        self.options[option] = value
        self.reasons[option] = reason

    def warn_of(self, report: LoadReport) -> None:
        """Add what people are warned of, as if examples are held out: a proposal does that."""
        self.warnings += report.sentences(held_out=True)

    def toml(self, name: str) -> str:
        """Return the table, with the reasons as comments. Raises DataError for a name that is not allowed."""
        if not NAME.fullmatch(name):
            raise DataError(f"--name: {name!r} is not made of letters, digits, dashes and underscores")
        lines = [f"[datasets.{name}]"]
        for option, value in self.options.items():
            # A string, a number, a truth value or a list of strings is written alike in JSON and in TOML.
            lines += [f"# {_one_line(self.reasons[option])}", f"{option} = {json.dumps(value, ensure_ascii=False)}"]
        return "\n".join(lines) + "\n"


def _one_line(sentence: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in sentence)


def refuse(found: str, **options: str | None) -> None:
    """Raise DataError if an option was given that data like these do not have."""
    if given := [f"--{option}" for option, value in options.items() if value is not None]:
        raise DataError(f"{found}: leave out {' and '.join(given)}")

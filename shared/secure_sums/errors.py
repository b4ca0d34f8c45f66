"""The error of everything that secure aggregation refuses."""

from typing import Literal

Rule = Literal[
    "committee",
    "already-agreed",
    "duplicate-site",
    "malformed",
    "noise",
    "not-in-roster",
    "not-own-round",
    "quorum",
    "run",
    "scales",
    "seeds",
    "signature",
    "too-few-signatures",
    "too-many-senders",
    "terms-differ",
    "values",
]


class SumRefused(ValueError):
    """A refusal of a secure sum, with the name of the rule."""

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail

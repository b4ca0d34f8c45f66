"""What an examination finds: one line for each thing that was looked at, with what to do where it is not well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, "warn", detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, "fail", detail, remedy)


def examined(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield the findings of each check. One that breaks is a finding too: an examination goes on to its end."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as fault:  # noqa: BLE001  (what is not well may be anything)
            reason = str(fault).splitlines()[0] if str(fault) else ""
            yield fail(name, f"could not be looked at: {type(fault).__name__}: {reason[:300]}", "See what it names.")

"""The page of every problem, made from the classes that are raised: `tessera docs problems`."""

from tessera.shared.client.transport import IntermediaryFault, NotUnderstood, Untrusted
from tessera.shared.problems import OF_WORKERS, PROBLEMS, Problem, WorkerFailed

PREAMBLE = """\
# Problems

The `type` of a refusal leads to the same text at its coordinator, without a token: `/problems/<code>`.
"""

_OF_CLIENTS: tuple[type[Problem], ...] = (NotUnderstood, IntermediaryFault, Untrusted)
KINDS = {kind.code: kind for kind in (*PROBLEMS.values(), *_OF_CLIENTS)}
"""All kinds of problem by code, with those that only a client raises."""


REPEATED = " Tessera's own client repeats the request by itself."


def reasons(kind: type[Problem]) -> dict[str, str]:
    """Return the remedies by the code of a worker; empty for a problem of the coordinator."""
    return dict(sorted(OF_WORKERS.items())) if kind is WorkerFailed else {}


def document() -> str:
    """Return the page, with a line break at its end."""
    return "\n".join([PREAMBLE, *(_section(kind) for _, kind in sorted(KINDS.items()))])


def _section(kind: type[Problem]) -> str:
    causes = "".join(f"- {cause}\n" for cause in kind.causes)
    table = "".join(f"| `{code}` | {remedy} |\n" for code, remedy in reasons(kind).items())
    return (
        f"## {kind.code}\n\n**{kind.title}** (HTTP {kind.status}). {kind.meaning} Likely causes:\n\n{causes}\n"
        f"Remedy: {kind.remedy}{REPEATED if kind.retryable else ''}\n"
        + (f"\n| code | remedy |\n|---|---|\n{table}" if table else "")
    )

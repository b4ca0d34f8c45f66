"""The page of every key of a run's file, made from the models that check it: `tessera docs run-keys`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel

from tessera.shared.aggregation.robust import Robust
from tessera.shared.aggregation.server_optimizer import ServerOptimizer
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, RunSpec
from tessera.shared.api.secure_sums import SecureSums
from tessera.shared.cli.run_keys import Key, keys_of
from tessera.shared.client.run_file import UPLOADED
from tessera.shared.diagnostics import toml
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import Match
from tessera.shared.run_settings import ClientPrivacy, Privacy, Training

PREAMBLE = """\
# Keys of a run's file

Made from the models that check the file ([runs.md](runs.md)). A default of `none` cannot be written in the file:
leave the key out.
"""

TABLES: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("cohort", Cohort, "The participants and time limits of a round; [glossary.md](glossary.md) defines the terms."),
    ("training", Training, "Local training at each worker, the same for all methods ([runs.md](runs.md#training))."),
    ("evaluation", Evaluation, "[evaluation.md](evaluation.md) describes who measures, and what leaves a site."),
    (
        "privacy",
        Privacy,
        "Differential privacy of each worker's updates ([privacy.md](privacy.md)). Without the table there is none.",
    ),
    (
        "client_privacy",
        ClientPrivacy,
        "Noise for [whole sites](privacy-sites.md), with normalization = cohort; by the sites in secure sums.",
    ),
    (
        "secure_sums",
        SecureSums,
        "Secure aggregation: the coordinator learns sums over sites alone ([secure-sums.md](secure-sums.md)).",
    ),
)

UNIONS: tuple[tuple[str, str, Any, str], ...] = (
    (
        "server_optimizer",
        "kind",
        ServerOptimizer,
        "The step that the coordinator takes along the merged update ([methods.md](methods.md)).",
    ),
    ("robust", "rule", Robust, "The rule that merges updates ([robustness.md](robustness.md))."),
)


BLOCKS = """
## Blocks

The tables of a list such as `private` ([runs.md](runs.md#blocks)).

"""


def document() -> str:
    """Return the page, with a line break at its end."""
    inner = {*(name for name, *_ in TABLES), *(name for name, *_ in UNIONS), *UPLOADED}
    top = [key for key in keys_of(RunSpec) if key.name.partition(".")[0] not in {*inner, "method"}]
    parts = [PREAMBLE, "\n## Top of the file\n\n", *key_table(top)]
    parts += ["\n## `[method]`\n\n", *key_table(keys_of(MethodSpec))]
    for name, model, said in TABLES:
        parts += [f"\n## `[{name}]`\n\n{said}\n\n", *key_table(keys_of(model))]
    for name, tag, union, said in UNIONS:
        parts += [f"\n## `[{name}]`\n\n{said} The key `{tag}` chooses, and decides which other keys there are.\n\n"]
        parts += _members(tag, union)
    parts += [
        "\n## Settings of each method\n\n",
        "In the table `[method.settings]`. [methods.md](methods.md) describes the methods.\n",
    ]
    for name, method in sorted(methods().items()):
        parts += [f"\n### `{name}`\n\n{method.source[:1].upper()}{method.source[1:]}.\n\n"]
        parts += key_table(keys_of(method.settings))
        if method.training:
            required = " and ".join(f"`training.{key} = {toml(value)}`" for key, value in method.training.items())
            parts.append(f"\nIt requires {required}.\n")
    parts += [BLOCKS, *key_table(keys_of(Match))]
    return "".join(parts)


def _members(tag: str, union: Any) -> Iterator[str]:
    """Yield a row for each key of each member of a tagged union; one without keys has a row of its own."""
    yield f"| `{tag}` | key | type | default | meaning |\n|---|---|---|---|---|\n"
    for model in get_args(get_args(union)[0]):
        chosen = toml(model.model_fields[tag].default)
        own = [key for key in keys_of(model) if key.name != tag]
        for key in own:
            yield f"| `{chosen}` {_row(key)}"
        if not own:
            yield f"| `{chosen}` | | | | {(model.__doc__ or '').strip().partition('.')[0]} |\n"


def key_table(keys: Iterable[Key]) -> Iterator[str]:
    """Yield the rows of a table of keys, or a sentence if there are none."""
    rows = [_row(key) for key in keys]
    yield "| key | type | default | meaning |\n|---|---|---|---|\n" if rows else "It has no settings.\n"
    yield from rows


def _row(key: Key) -> str:
    default = "required" if key.required else "none" if key.default is None else f"`{key.default}`"
    return f"| `{key.name}` | {key.kind} | {default} | {key.meaning.replace('|', chr(92) + '|')} |\n"

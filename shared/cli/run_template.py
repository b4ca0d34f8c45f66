"""A run's file for one method, with the meaning, type and default of every key: `tessera run init`."""

from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap
from typing import Any, get_args

from pydantic import BaseModel

from tessera.shared.aggregation.robust import Robust
from tessera.shared.aggregation.server_optimizer import ServerOptimizer
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, RunSpec
from tessera.shared.cli.run_keys import Key, keys_of
from tessera.shared.client.run_file import UPLOADED
from tessera.shared.diagnostics import toml
from tessera.shared.methods.base import Method
from tessera.shared.methods.registry import methods
from tessera.shared.problems import Invalid
from tessera.shared.run_settings import Privacy, Training

WIDTH = 100

HEAD = """\
# A run of {method}: {source}.
#
# Make a model folder, look at who would take part, and start the run:
#   tessera model init model --config CONFIG --head HEAD
#   tessera run preview FILE --model model
#   tessera run create FILE --model model
#
# A line such as `# seed = 0` shows a default: remove its `#` to change it. Every key is in `tessera docs run-keys`.
"""

APART = (
    *UPLOADED,
    "method",
    "cohort",
    "training",
    "privacy",
    "client_privacy",
    "evaluation",
    "describe",
    "membership_attack",
    "rehearsal",
    "server_optimizer",
    "robust",
)
"""Keys of a run that are tables of the file, or not in it."""

PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}
"""Examples of the settings without defaults, in a table that is commented out."""


Stated = Mapping[str, tuple[Any, str]]
"""Keys of the file that a paper states: the value, and where it stands."""


def template(method: Method[Any], dataset: str = "data", *, paper: bool = False) -> str:
    """Return the file's content, a valid run that evaluates at its sites.

    With `paper` it has the values that the method's paper states, each with its source. Raises Invalid if the method
    declares none.
    """
    if paper and not method.paper:
        having = ", ".join(name for name, one in methods().items() if one.paper)
        raise Invalid(f"--paper: {method.name} declares no settings of its paper", remedy=f"These do: {having}.")
    stated = method.paper if paper else {}
    head = [_comment(f"Settings below a line with a source are the paper's. It leaves open: {method.unstated}."), ""]
    return "\n".join((*_top(method, dataset, stated, head * paper), *_tables(method, stated), *_unions())) + "\n"


def _top(method: Method[Any], dataset: str, stated: Stated, more: Iterable[str]) -> Iterator[str]:
    yield HEAD.format(method=method.name, source=method.source)
    yield from more
    keys = [key for key in keys_of(RunSpec) if key.name.partition(".")[0] not in APART]
    yield from _keys(keys, {"name": method.name, "dataset": dataset, "rounds": 10}, stated=stated)
    yield f"[method]\nname = {toml(method.name)}\n"


def _tables(method: Method[Any], stated: Stated) -> Iterator[str]:
    yield from _table("method.settings", method.settings, "The method's own settings.", {}, stated)
    yield from _table("cohort", Cohort, "Who takes part in a round, and for how long it waits.", {}, stated)
    yield from _table("training", Training, "Local training at each worker.", method.training, stated)
    said = "Each site measures every version on the examples that it holds out of its data."
    yield from _table("evaluation", Evaluation, said, {"sites": True}, stated)
    yield _comment("Differential privacy of each worker's updates; values of required keys are examples.")
    yield "# [privacy]"
    yield from _keys(keys_of(Privacy), examples=PRIVATE)
    yield _comment(
        "The table client_privacy, for each site as a whole, needs other settings too: see `tessera docs privacy`."
    )
    yield ""


def _table(name: str, model: type[BaseModel], said: str, values: Mapping[str, Any], stated: Stated) -> Iterator[str]:
    keys = list(keys_of(model))
    if keys:
        yield _comment(said)
        yield f"[{name}]"
        own = {key.removeprefix(f"{name}."): one for key, one in stated.items() if key.startswith(f"{name}.")}
        yield from _keys(keys, values, stated=own)


def _unions() -> Iterator[str]:
    for name, tag, union in (("server_optimizer", "kind", ServerOptimizer), ("robust", "rule", Robust)):
        field = RunSpec.model_fields[name]
        choices = ", ".join(member.model_fields[tag].default for member in get_args(get_args(union)[0]))
        yield _comment(
            f"{_sentence(field.description or '')} ({choices}). `tessera docs run-keys` has the keys of each."
        )
        yield f"# [{name}]\n# {tag} = {toml(getattr(field.default, tag))}\n"


def _keys(
    keys: Iterable[Key],
    values: Mapping[str, Any] | None = None,
    examples: Mapping[str, Any] | None = None,
    stated: Stated | None = None,
) -> Iterator[str]:
    """Yield each key below its meaning: with its value if it has one, else with its default behind a `#`.

    Values that a paper states go before others, with their source.
    """
    examples, stated = examples or {}, stated or {}
    values = {**(values or {}), **{name: value for name, (value, _) in stated.items()}}
    for key in keys:
        yield _comment(f"{_sentence(key.meaning)} ({key.kind}).".replace("`", ""))
        if key.name in stated:
            yield _comment(f"Source: {stated[key.name][1]}.")
        if key.name in values:
            yield f"{key.name} = {toml(values[key.name])}\n"
        else:
            shown = toml(examples[key.name]) if key.name in examples else key.default or ""
            yield f"# {key.name} = {shown}".rstrip() + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in wrap(text, WIDTH - 2))

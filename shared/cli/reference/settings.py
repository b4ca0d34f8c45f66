"""The pages of the settings of a coordinator, of a worker and of data sets, made from the models that check them:
`tessera docs operating/settings`, `tessera docs worker-keys`, `tessera docs data-keys`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, get_args

from pydantic import BaseModel

from tessera.shared.cli.main import installed, what_is_missing
from tessera.shared.cli.reference.run_settings import key_table
from tessera.shared.cli.run_keys import keys_of

COORDINATOR = """\
# Settings of the coordinator

Set each one as an environment variable. Print the settings in effect, and the source of each:

```sh
tessera coordinator config show
```

A variable that misspells a setting is refused (`TESSERA_PROT is no setting; did you mean TESSERA_PORT?`). Other
unknown variables `TESSERA_...` are your own: a starting coordinator logs them as `coordinator.variable_ignored`.

STATE is `$XDG_STATE_HOME/tessera/coordinator`, or `~/.local/state/tessera/coordinator`. The coordinator creates this
folder, and in other places only the last folder of a path: the folder of a database has to exist, so that a misspelt
path begins no new database. `TESSERA_METHODS=/opt/our-methods` names folders, separated as in `PATH`, with one
method in each file ([writing-a-method.md](../writing-a-method.md)): set it for the coordinator and for each worker.
"""

SECTIONS = {
    "database_url": "Database and blobs",
    "host": "Address and TLS ([tls.md](tls.md))",
    "admin_token_file": "Sign-in ([access.md](access.md))",
    "webhook_url": "Notices ([notices.md](notices.md))",
    "lease_seconds": "Rounds and tasks",
    "inline_bytes": "Requests ([limits.md](limits.md))",
    "enrolments_per_minute": "Sites and workers",
    "disk_reserve_bytes": "Disk and memory",
    "keep_updates_seconds": "Retention ([backups.md](backups.md#remove-old-data))",
}
"""The setting that begins each section."""

WORKER = """\
# Keys of a worker's settings

Made from the models that check `worker.toml`; [worker-settings.md](worker-settings.md) explains the keys that need
more than a line. A variable `TESSERA_WORKER_STATE_DIR` overrides `state_dir`. A default of `none` cannot be written
in the file: leave the key out.
"""

DATA = """\
# Keys of a data set

The options of each kind, beside the keys of every data set in `tessera docs worker-keys`. [data.md](data.md) explains
them.
"""


def coordinator() -> str:
    """Return the page of the coordinator's settings."""
    return "".join([COORDINATOR, *_of_command("coordinator", _variables)])


def worker() -> str:
    """Return the page of the keys of a worker's settings."""
    return "".join([WORKER, *_of_command("worker", _tables)])


def data() -> str:
    """Return the page of the options of each kind of data set."""
    return "".join([DATA, *_of_command("data", _kinds)])


def _of_command(name: str, written: Callable[[Any], Iterator[str]]) -> Iterator[str]:
    """Yield the settings of a command's module, or a sentence about the extra that it lacks."""
    entry = installed()[name]
    try:
        module = import_module(entry.module)
    except ModuleNotFoundError as fault:
        yield f"\n{what_is_missing(entry, fault)}\n"
    else:
        yield from written(module)


def _variables(module: Any) -> Iterator[str]:
    for name, field in module.CoordinatorSettings.model_fields.items():
        if name in SECTIONS:
            yield f"\n## {SECTIONS[name]}\n\n| setting | default | meaning |\n|---|---|---|\n"
        default = field.get_default(call_default_factory=True)
        shown = "none" if default is None else f"`{str(default).replace(str(module.data_dir()), 'STATE')}`"
        yield f"| `TESSERA_{name.upper()}` | {shown} | {field.description} |\n"


def _kinds(module: Any) -> Iterator[str]:
    for name, adapter in sorted(module.registry.adapters().items()):
        yield from (f'\n## `kind = "{name}"`\n\n', *key_table(keys_of(adapter.options)))


def _tables(module: Any) -> Iterator[str]:
    """Yield the keys of a worker's settings, then of each table in them."""
    found: dict[type[BaseModel], list[str]] = {}
    _collect(module.WorkerSettings, "", found)
    for table, names in found.items():
        # The policy has a table of its own.
        keys = [key for key in keys_of(table) if not key.name.startswith("policy.")]
        title = ", ".join(f"`[{name}]`" for name in names if name) or "Top of the file"
        yield from (f"\n## {title}\n\n", *key_table(keys))


def _collect(model: type[BaseModel], above: str, found: dict[type[BaseModel], list[str]]) -> None:
    """Add a model, and the models of the tables in it that `keys_of` does not show, by name."""
    found.setdefault(model, []).append(above)
    for name, field in model.model_fields.items():
        path = f"{above}.{name}".lstrip(".")
        # docs/partitions.md has the keys of each scheme.
        for inner in _models(field.annotation) if name != "part" else ():
            if inner is not field.annotation:
                _collect(inner, f"{path}.NAME" if "dict" in str(field.annotation) else path, found)
            elif name == "policy":
                _collect(inner, path, found)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)

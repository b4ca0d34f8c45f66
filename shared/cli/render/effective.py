"""How `config show` tells settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from tessera.shared.cli.render import output
from tessera.shared.diagnostics.settings_origin import Setting


def tell_settings(settings: Iterable[Setting], *, as_json: bool) -> None:
    listed = list(settings)
    if as_json:
        output.print_json({"settings": [asdict(setting) for setting in listed]})
        return
    rows = [(one.name, "none" if one.value is None else one.value, one.origin) for one in listed]
    output.out().print(output.table(("setting", "value", "from"), rows))

"""Federated learning of transformers over REST.

    import tessera

    session = tessera.connect("https://tessera.example", token)
    run = session.start("run.toml", model="model")
    run.watch()
    run.table()
    run.export("trained", version="best")

The names below are imported on first use, so that `import tessera` costs nothing. The parts of the program are
`coordinator`, `worker` and what both share: their folders lie beside this one, which links to them, so that the wheel
installs one name and type checkers and editors find each file.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.session import Comparison, Run, Session, connect
    from tessera.shared.problems import Problem

__all__ = ["Comparison", "Problem", "Run", "Session", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    return getattr(import_module("tessera.shared.problems" if name == "Problem" else "tessera.session"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

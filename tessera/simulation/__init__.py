"""A whole federation in one process: the same methods, plans, codecs and merging as over HTTP, bit for bit.

    result = simulate({"method": {"name": "fedavg"}, "rounds": 3}, model, {"north": data, "south": more})
    result.versions[-1].digest, result.scores()[3]["accuracy"]

The names below are imported on first use: to read a simulation's file or to compare results needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.simulation.conditions import Conditions
    from tessera.simulation.engine import Stalled
    from tessera.simulation.federation import Weights, simulate
    from tessera.simulation.result import Result
    from tessera.simulation.virtual_sites import VirtualSite

__all__ = ["Conditions", "Result", "Stalled", "VirtualSite", "Weights", "simulate"]

_MODULES = {"Conditions": "conditions", "Result": "result", "Stalled": "engine", "VirtualSite": "virtual_sites"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'federation')}"), name)

"""A whole federation in one process: the same methods, plans, codecs and merging as over HTTP, bit for bit.

Imports `data`, `failures`, `governance`, `inventory`, `model`, `ranks`, `settings`, `state`, `task` and `training`.

    result = simulate({"method": {"name": "fedavg"}, "rounds": 3}, model, {"north": data, "south": more})
    result.versions[-1].digest, result.scores()[3]["accuracy"]
"""

from tessera.worker.simulation.conditions import Conditions
from tessera.worker.simulation.result import Result
from tessera.worker.simulation.round_loop import Stalled
from tessera.worker.simulation.simulate import Weights, simulate
from tessera.worker.simulation.virtual_sites import VirtualSite

__all__ = ["Conditions", "Result", "Stalled", "VirtualSite", "Weights", "simulate"]

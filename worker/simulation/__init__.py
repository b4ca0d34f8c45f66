"""A whole federation in one process: the same methods, plans, codecs and merging as over HTTP, bit for bit.

result = simulate({"method": {"name": "fedavg"}, "rounds": 3}, model, {"north": data, "south": more})
result.versions[-1].digest, result.scores()[3]["accuracy"]
"""

from __future__ import annotations

from worker.simulation.conditions import Conditions
from worker.simulation.result import Result
from worker.simulation.running import Weights, simulate
from worker.simulation.simulation import Stalled
from worker.simulation.sites import Site

__all__ = ["Conditions", "Result", "Site", "Stalled", "Weights", "simulate"]

"""One run of the study in a process, the limits of FedAvg and FedNova, and the file of results."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from common.files import written_whole
from evidence.convex import papers
from evidence.convex.problem import Problem
from evidence.convex.study import ARMS, PREFIX, Arm, install, rounded, run, scenarios
from tessera.shared.methods.registry import methods

SHARES = {"1": 1.0, "1/4": 0.25, "1/16": 0.0625, "1/64": 0.015625}
"""Learning rates of the limits, as shares of the study's."""
SETTLED = 1e-3
"""The largest relative change of a distance in a round, over the share of the rate, at which a limit is read."""

Key = tuple[str, str, int]
"""An arm, a scenario and a seed."""


def begin() -> None:
    """Prepare a process for runs: one thread, and a log of warnings alone."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)


def one(problem: Problem, arm: Arm, scenario: str, rounds: int) -> dict[str, Any]:
    """Run one method under one scenario, and return its figures."""
    chosen = scenarios(problem, rounds)[scenario]
    install(methods(), chosen.steps(problem) if chosen.by_time else None)
    try:
        return run(problem, arm, chosen, rounds).figures()
    finally:
        for name in [name for name in methods() if name.startswith(PREFIX)]:
            del methods()[name]


def limit(problem: Problem, paper: type[papers.FedAvg], share: float) -> float:
    """Return the distance, in %, at which a method's equations stay with a share of the learning rate, if all sites
    take part and train for a time."""
    slow = replace(problem, rate=share * problem.rate)
    method = paper(slow, scenarios(problem)["by time"].steps(problem), {})
    least = problem.minima["examples"]
    head, last = least, -1.0
    while True:
        head = method.round(head, problem.sites)
        distance = float(100 * np.linalg.norm(head - least) / np.linalg.norm(least))
        if abs(distance - last) <= SETTLED * share * distance:
            return distance
        last = distance


def limits(problems: Mapping[int, Problem]) -> dict[str, dict[str, list[float]]]:
    """Return the limits of FedAvg and FedNova, by the share of the rate, for each seed."""
    return {
        name: {
            shown: [rounded(limit(problem, paper, share)) for problem in problems.values()]
            for shown, share in SHARES.items()
        }
        for name, paper in {"fedavg": papers.FedAvg, "fednova": papers.FedNova}.items()
    }


# ---------------------------------------------------------------- results


def key_of(key: Key) -> str:
    return " | ".join(map(str, key))


def read(file: Path) -> tuple[dict[str, Any], dict[Key, dict[str, Any]], dict[str, Any]]:
    """Return the settings, the runs and the limits of a file of results; empty ones if there is none."""
    if not file.exists():
        return {}, {}, {}
    document = json.loads(file.read_bytes())
    found = {}
    for name, figures in document["runs"].items():
        arm, scenario, seed = name.split(" | ")
        found[arm, scenario, int(seed)] = figures
    return document["settings"], found, document["limits"]


def write(file: Path, settings: Mapping[str, Any], found: Mapping[Key, Any], limited: Mapping[str, Any]) -> None:
    """Write results, a line for each run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    runs = ",\n".join(f"{json.dumps(key_of(key))}: {json.dumps(figures)}" for key, figures in found.items())
    parts = f'"settings": {json.dumps(settings)},\n"limits": {json.dumps(limited)},\n"runs": {{\n{runs}\n}}'
    with written_whole(file) as out:
        out.write(f"{{\n{parts}\n}}\n".encode())


def ordered(found: Mapping[Key, Any], names: Sequence[str]) -> dict[Key, Any]:
    """Return the runs in the order of scenarios, methods and seeds."""
    arms = [arm.name for arm in ARMS]
    return dict(sorted(found.items(), key=lambda each: (names.index(each[0][1]), arms.index(each[0][0]), each[0][2])))

"""One run of the frontier, through the product's simulation, and the figures that it leaves."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from math import isinf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from common.names import EPSILON
from evidence.federations import LORA, SOURCES
from evidence.federations import start as made
from evidence.frontier.study import HEAD_FACTOR, Arm, Job, Study
from evidence.pool import Figures
from evidence.sources.packages import digest_of
from evidence.sources.phrases import WORDINGS, Encoded, Indices, split
from evidence.sources.prepare import MODEL, PHRASES
from tessera.simulation import Conditions, Result, Stalled, simulate

DIVERGED = "diverged:"
"""The start of a task's failure that is a result of its learning rate."""
ROUNDED = 5


def inputs(prepared: Path) -> dict[str, str]:
    """Return the SHA-256 of the prepared files that results depend on. Raises FileNotFoundError."""
    files = (Path(PHRASES), Path(MODEL) / "config.json", Path(MODEL) / "model.safetensors")
    return {str(file): digest_of(prepared / file) for file in files}


def machine(device: str) -> dict[str, str]:
    """Return what the runs' times depend on."""
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else "none"
    return {
        "gpu": gpu,
        "cores": str(os.cpu_count()),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@lru_cache(maxsize=1)
def _phrases(prepared: Path) -> Encoded:
    return Encoded.load(prepared / PHRASES)


def start(study: Study, arm: Arm, seed: int, prepared: Path, models: Path) -> Path:
    """Return the model folder that an arm starts from, made if it is absent. All arms of a seed have one head."""
    return made(SOURCES["phrases"], prepared, seed, f"{LORA}{study.rank}" if arm.adapters else "plain", {}, models)


def spec_of(study: Study, job: Job) -> dict[str, Any]:
    """Return the run's spec, as `tessera run create` takes it."""
    arm = study.arm(job.arm)
    sites = len(WORDINGS) * study.sites_per_wording
    spec = {
        "name": "frontier",
        "seed": job.seed,
        "rounds": study.rounds,
        "method": {"name": arm.method, "settings": dict(arm.settings)},
        "training": {
            "steps": study.steps,
            "batch_size": study.batch_size,
            "optimizer": "adamw",
            "learning_rate": job.rate,
            "rates": {"head": HEAD_FACTOR},
        },
        # A round without the update of a site ends the run, so that no failure is taken for a result.
        "cohort": {"quorum": sites, "max_attempts": 1},
        "evaluation": {"dataset": "test", "sites": False, "every": half(study)},
        # The fastest: nothing travels here.
        "codec": "raw",
    }
    if not isinf(job.epsilon):
        budget = {"epsilon": job.epsilon, "delta": study.delta, "clip_norm": study.clip_norm}
        spec["privacy"] = {**budget, **arm.privacy}
    return spec


def half(study: Study) -> int:
    """Return the rounds of a run that chooses a learning rate. Its noise is that of a whole run."""
    return max(1, study.rounds // 2)


def run(study: Study, job: Job, prepared: Path, models: Path, device: str) -> Figures:
    """Run a job. Return its figures: the scores are from 0 to 1, and 0 for a run that diverged.

    Raises Stalled if a round failed for another reason, and the exceptions of `simulate`.
    """
    began = monotonic()
    phrases = _phrases(prepared)
    parts = split(phrases, job.seed, study.sites_per_wording, study.examples)
    measured = parts.validation if job.tunes else parts.test
    outcomes: list[Any] = []
    figures = {**_described(job), **_majority(phrases, measured), "machine": machine(device)}
    try:
        result = simulate(
            spec_of(study, job),
            start(study, study.arm(job.arm), job.seed, prepared, models),
            {site: phrases.dataset(rows) for site, rows in parts.sites.items()},
            test=phrases.dataset(measured),
            conditions=Conditions(device=device, threads=1, loaded=len(parts.sites)),
            until=half(study) if job.tunes else None,
            watch=outcomes.append,
        )
    except Stalled:
        problems = [task.problem for task in outcomes[-1].round.tasks if task.problem] if outcomes else []
        if not problems or not all(problem.detail.startswith(DIVERGED) for problem in problems):
            raise
        return {**figures, "macro_f1": 0.0, "accuracy": 0.0, "diverged": problems[0].detail}
    return {**figures, **_measured(result, len(parts.sites)), "seconds": round(monotonic() - began, 1)}


def _described(job: Job) -> Figures:
    # JSON has no infinity.
    return {
        "arm": job.arm,
        "epsilon": None if isinf(job.epsilon) else job.epsilon,
        "seed": job.seed,
        "rate": job.rate,
    }


def _majority(phrases: Encoded, rows: Indices) -> Figures:
    """Return the size of the measured part, and the scores of an answer that is always its most frequent class."""
    counts = np.bincount(phrases.labels[rows])
    share = float(counts.max() / len(rows))
    f1 = 2 * share / (1 + share) / int((counts > 0).sum())
    return {"examples": len(rows), "majority_accuracy": round(share, ROUNDED), "majority_f1": round(f1, ROUNDED)}


def _measured(result: Result, sites: int) -> Figures:
    last, rounds = result.versions[-1], len(result.versions) - 1
    scores = {str(number): scores for number, scores in result.scores().items()}
    spent = [task.metrics.get(EPSILON, 0.0) for each in result.rounds for task in each.tasks]
    return {
        **scores[str(last.number)],
        "versions": scores,
        # Of one site; all sites have as many examples.
        "spent": max(spent, default=0.0),
        "upload_bytes": round(sum(each.upload_bytes for each in result.outcomes) / sites / rounds),
        "picks": {name: value for name, value in last.scalars.items() if name.startswith("picks.")},
        "digest": last.digest,
    }

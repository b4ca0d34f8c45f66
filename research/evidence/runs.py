"""One run of a table, through the product's simulation, and the figures that it leaves."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from math import isnan
from pathlib import Path
from statistics import fmean
from time import monotonic, process_time
from typing import Any

import numpy as np
import torch

from common.names import DISAGREEMENT, FROZEN_FROM, MOVEMENT
from common.pooled import pooled
from evidence.federations import Federation, Source, source, start
from evidence.jobs import Job, rounds_of, setup_of, whole_rounds
from evidence.plan import SITES, Arm, Away, Plan, Setting, Table
from evidence.pool import Figures
from evidence.scores import ROUNDED, Part, at_sites, majority, measured, zero_shot
from evidence.selections import selections
from tessera.shared.api.tasks import TaskView
from tessera.shared.model.blocks import layers_of
from tessera.simulation import Conditions, Result, Stalled, simulate
from tessera.worker.data.dataset import Dataset

DIVERGED = "diverged:"
"""The start of a task's failure that is a result of its learning rate."""
VALIDATION = "validation"
POLICY = {"min_evaluation_examples": 1}
"""Of the sites, which hold back few examples."""
SIGNALS = (MOVEMENT, DISAGREEMENT, FROZEN_FROM)
BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Instructions, as Linux names them, with which a processor multiplies in bfloat16; the best first."""
ALL_SITES = "all"
"""The name of the one site of centralised training."""


def machine(device: str) -> str:
    """Return what a run's time depends on, and what its bits depend on."""
    gpu = f"{torch.cuda.get_device_name()}, " if device.startswith("cuda") else ""
    about = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    return f"{gpu}{_processor()}{about}"


@cache
def code() -> str:
    """Return the commit of this checkout, with `-dirty` if files differ; of a copy, SOURCE_COMMIT names it."""
    if named := os.environ.get("SOURCE_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def repeat_bits(device: str) -> None:
    """Let torch compute the same bits in each run on one machine, which a GPU does only if asked."""
    if device.startswith("cuda"):
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # torch warns that its backward pass may differ nevertheless.
        torch.backends.cuda.enable_cudnn_sdp(False)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # One name stands for processors of several generations, which round in different ways.
    flags = about.get("flags", "").split()
    able = next((flag for flag in BFLOAT16 if flag in flags), torch.backends.cpu.get_cpu_capability().lower())
    return f"{about['model name']} with {able}, " if "model name" in about else ""


def spec_of(plan: Plan, job: Job, sites: int) -> dict[str, Any]:
    """Return the run's spec, as `tessera run create` takes it, for a federation of some sites."""
    table = plan.tables[job.table]
    arm, setting = table.arm(job.arm), table.setting(job.setting)
    most = min(sites, setting.sites_a_round or table.sites_a_round or sites)
    # A round without the update of a site ends the run, so that no failure is taken for a result.
    least, attempts = min(most, sites - absent(setting.away, sites)), 1
    if setting.dropout:
        least, attempts = 1, 3
    spec: dict[str, Any] = {
        "name": "evidence",
        "seed": job.seed,
        "rounds": whole_rounds(plan, job),
        "method": {"name": arm.method, "settings": method_settings(arm, setting, job.seed)},
        "training": {
            **table.training,
            **plan.grids[arm.grid].training,
            **arm.training,
            "learning_rate": job.rate,
        },
        "cohort": {"size": most, "quorum": least, "max_attempts": attempts},
        # The fastest: nothing travels here. The bytes are those of float32.
        "codec": "raw",
    }
    if arm.server_optimizer is not None:
        spec["server_optimizer"] = arm.server_optimizer
    if arm.personal:
        spec["evaluation"] = {"sites": True}
    return spec


def absent(away: Away | None, sites: int) -> int:
    """Return how many of the sites miss rounds."""
    return max(1, round(away.share * sites)) if away and sites > 1 else 0


def missed(away: Away | None, sites: Sequence[str], seed: int) -> dict[str, tuple[int, ...]]:
    """Return the rounds that each absent site misses, by site. The seed draws these sites, the same for all arms."""
    if not (count := absent(away, len(sites))) or away is None:
        return {}
    drawn = np.random.default_rng((seed, 3)).choice(sorted(sites), count, replace=False)
    return {str(site): tuple(range(away.first, away.last + 1)) for site in drawn}


def method_settings(arm: Arm, setting: Setting, seed: int) -> dict[str, Any]:
    """Return the settings of an arm's method in a setting of its table."""
    seeded = {} if arm.seeded is None else {arm.seeded: seed}
    return {**arm.settings, **setting.settings, **seeded}


def run(plan: Plan, job: Job, prepared: Path, out: Path, device: str) -> Figures:
    """Run a job. Return its figures, which on one machine are the same bits each time, but for its seconds.

    `out` is for models and for what the run writes meanwhile. Raises Stalled if a round failed for another reason
    than a learning rate that is too large, NotPrepared, and the exceptions of `simulate`.
    """
    began = monotonic(), process_time()
    repeat_bits(device)
    table = plan.tables[job.table]
    arm, setting, kind = table.arm(job.arm), table.setting(job.setting), source(table.federation)
    options = {**table.options, **setting.federation}
    federation = kind.federation(prepared, job.seed, options)
    tunes = job.seed == plan.protocol.tuning_seed
    figures = {**described(plan, job), "inputs": inputs_of(kind, prepared), "machine": machine(device)}
    figures["code"] = code()
    parts = _parts(federation)
    figures["majority"] = [{"part": name, **majority(data)} for name, data in parts.items()]
    scratch = out / "scratch" / job.name.replace("/", "--")
    # Of a run that was killed.
    shutil.rmtree(scratch, ignore_errors=True)
    outcomes: list[Any] = []
    try:
        sites = federation.tuning() if tunes else federation.sites
        trained = {ALL_SITES: pooled([sites[name] for name in sorted(sites)])} if arm.central else sites
        model = start(kind, prepared, job.seed, arm.model, options, out / "models" / table.federation)
        before = {name: zero_shot(model, data, device) for name, data in parts.items()}
        figures["zero_shot"] = [{"part": name, **scores} for name, scores in before.items() if scores]
        result = simulate(
            spec_of(plan, job, len(trained)),
            model,
            trained,
            conditions=Conditions(
                policy=POLICY,
                device=device,
                threads=1,
                loaded=len(trained),
                keep_versions="all",
                dropout=0.0 if arm.central else setting.dropout,
                away=missed(setting.away, list(trained), job.seed),
            ),
            out=scratch,
            until=rounds_of(plan, job),
            watch=outcomes.append,
        )
        # Where sites may fall silent, a round goes on without one that failed.
        if diverged := divergence(job, [task for each in result.rounds for task in each.tasks]):
            return {**figures, "diverged": diverged, "score": 0.0, **_since(began)}
        rows = scores_of(plan, job, federation, result, model, device)
    except Stalled:
        if not (diverged := divergence(job, outcomes[-1].round.tasks if outcomes else ())):
            raise
        return {**figures, "diverged": diverged, "score": 0.0, **_since(began)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = {**figures, **_moved(result), **_chosen(arm, result), "scores": rows}
    found["absent"] = sorted(missed(setting.away, list(trained), job.seed))
    found |= {"signals": _signals(result), "digest": result.versions[-1].digest}
    whole = plan.final_count(table, rounds_of(plan, job), table.part)
    found["score"] = final_score(table, rows, plan.protocol.tuning_versions if tunes else whole)
    return {**found, **_since(began)}


def divergence(job: Job, tasks: Iterable[TaskView]) -> str | None:
    """Return why a task diverged, a result of its learning rate; None without a task that failed.

    Raises ValueError if a task failed, or its update was rejected, for another reason.
    """
    faults = [task for task in tasks if task.problem is not None and task.state in ("failed", "rejected")]
    details = [task.problem.detail for task in faults if task.problem is not None]
    if others := [text for text in details if not text.startswith(DIVERGED)]:
        raise ValueError(f"{job.name}: a task failed: {others[0]}")
    return details[0][:200] if details else None


def _since(began: tuple[float, float]) -> dict[str, float]:
    """Return what a run took, on the clock and of a core. A busy machine makes the first one long."""
    return {"seconds": round(monotonic() - began[0], 1), "cpu_seconds": round(process_time() - began[1], 1)}


def inputs_of(kind: Source, prepared: Path) -> str:
    """Return the first 12 digits of each prepared file's SHA-256, with its name. Raises NotPrepared."""
    return ", ".join(f"{name} {digest[:12]}" for name, digest in kind.inputs(prepared).items())


def described(plan: Plan, job: Job) -> Figures:
    """Return the identity of a job's figures."""
    return {
        "table": job.table,
        "setting": job.setting,
        "arm": job.arm,
        "seed": job.seed,
        "rate": job.rate,
        "setup": setup_of(plan, job),
    }


def _parts(federation: Federation) -> dict[str, Dataset]:
    """Return the test parts by name. That of the sites has the examples of all of them."""
    return {
        **federation.tests,
        SITES: pooled([data.held_out for data in federation.sites.values() if data.held_out]),
    }


def _moved(result: Result) -> dict[str, Any]:
    """Return what all sites together sent and fetched in each round, and how often each layer was picked.

    What they fetched to measure a version counts for none. Where sites measure, few versions are left to fetch for
    training, so that the fetched bytes of such arms are not comparable with those of others.
    """
    last, sent, fetched = result.versions[-1], [0], [0]
    for each in result.outcomes:
        sent[-1] += each.upload_bytes
        fetched[-1] += each.download_bytes - each.evaluation_bytes
        # The bytes of an abandoned attempt are those of the round that is repeated.
        if each.round.version is not None:
            sent.append(0)
            fetched.append(0)
    return {
        "upload_bytes": sent[:-1],
        "download_bytes": fetched[:-1],
        "picks": [
            {"layer": name, "count": value} for name, value in last.scalars.items() if name.startswith("picks.")
        ],
    }


def _chosen(arm: Arm, result: Result) -> dict[str, Any]:
    """Return how the sites' selections of layers change and overlap; nothing for an arm that selects none."""
    if arm.method != "safl" or arm.central:
        return {}
    found = asdict(selections(result.rounds, layers_of(result.model.blocks)))
    return {"selections": {name: round(value, ROUNDED) for name, value in found.items() if not isnan(value)}}


def _signals(result: Result) -> list[dict[str, Any]]:
    """Return what the method measured of a warm-up, and the first version without it, version by version."""
    return [
        {"name": name, "version": version.number, "value": value}
        for version in result.versions
        for name, value in version.scalars.items()
        if name in SIGNALS
    ]


# ---------------------------------------------------------------- scores


def scores_of(
    plan: Plan, job: Job, federation: Federation, result: Result, model: Path, device: str
) -> list[dict[str, Any]]:
    """Return the rows of a run's scores: of the validation for the tuning seed, otherwise of all test parts.

    Personal arms are scored by their sites alone. For other arms each site scores the run's one model.
    """
    table, last = plan.tables[job.table], result.versions[-1].number
    arm, tunes = table.arm(job.arm), job.seed == plan.protocol.tuning_seed
    every = range(last + 1)
    final = every[-(plan.protocol.tuning_versions if tunes else plan.protocol.final_versions) :]
    of_table = final if tunes else every[-plan.final_count(table, last, table.part) :]
    if arm.personal:
        rows = at_sites(result, final if tunes else every, VALIDATION if tunes else SITES)
        # A site that is away measures nothing.
        needed = final if tunes or table.setting(job.setting).away else every
        if len([row for row in rows if row["version"] in needed]) < len(federation.sites) * len(needed):
            raise ValueError(f"{job.name}: a site did not measure a version: look at the measurements of the run")
        return rows
    size = table.curve_examples
    if tunes:
        whole = Part(VALIDATION, pooled(list(federation.validation.values())), final, (), size)
        return measured(result, model, [whole], device)
    # A curve on every part would take as long as the training.
    parts = [
        Part(name, data, of_table, every, size) if name == table.part else Part(name, data, final, (), size)
        for name, data in federation.tests.items()
    ]
    of_sites = every if table.part == SITES else final
    parts += [
        Part(SITES, data.held_out, of_sites, (), size, site)
        for site, data in federation.sites.items()
        if data.held_out is not None
    ]
    return measured(result, model, parts, device)


def final_score(table: Table, rows: Sequence[Mapping[str, Any]], versions: int) -> float:
    """Return the mean score over the last versions, from 0 to 1: on the validation if there is one, otherwise on the
    table's part. Sites count by their examples for the validation, and alike otherwise."""
    parts = {row["part"] for row in rows}
    part = next(name for name in (VALIDATION, table.part, SITES) if name in parts)
    found = [row for row in rows if row["part"] == part and not row["curve"]]
    last = sorted({row["version"] for row in found})[-versions:]
    return fmean(_score(table, part, [row for row in found if row["version"] == version]) for version in last)


def _score(table: Table, part: str, rows: Sequence[Mapping[str, Any]]) -> float:
    weights = [row["examples"] if part == VALIDATION else 1 for row in rows]
    return fmean([row[table.score] for row in rows], weights)

"""Figures of finished runs, in the folder of results and in the repository, which has a Parquet file for each table.

A row holds the digest of the settings that its figures depend on (`setup`), so that runs of an older plan are not
taken for runs of this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import written_whole
from evidence.jobs import Job, setup_of
from evidence.plan import Plan
from evidence.results_folder import keep, kept

SAVED = Path(__file__).with_name("results")
REPEATED = "http.json"
"""The results of runs that were repeated over HTTP."""

Figures = Mapping[str, Any]
Found = Mapping[Job, Figures]

SCORES = (
    ("part", pa.string()),
    ("site", pa.string()),
    ("version", pa.int32()),
    ("curve", pa.bool_()),
    ("examples", pa.int32()),
    ("accuracy", pa.float64()),
    ("macro_f1", pa.float64()),
)
BASELINE = tuple(field for field in SCORES if field[0] in ("part", "examples", "accuracy", "macro_f1"))
SCHEMA = pa.schema(
    [
        ("table", pa.string()),
        ("setting", pa.string()),
        ("arm", pa.string()),
        ("seed", pa.int32()),
        ("rate", pa.float64()),
        ("setup", pa.string()),
        ("inputs", pa.string()),
        ("machine", pa.string()),
        ("code", pa.string()),
        ("seconds", pa.float64()),
        ("cpu_seconds", pa.float64()),
        ("score", pa.float64()),
        ("diverged", pa.string()),
        ("digest", pa.string()),
        ("upload_bytes", pa.list_(pa.int64())),
        ("download_bytes", pa.list_(pa.int64())),
        ("picks", pa.list_(pa.struct([("layer", pa.string()), ("count", pa.float64())]))),
        ("selections", pa.struct([(name, pa.float64()) for name in ("turnover", "overlap", "chance", "union")])),
        ("signals", pa.list_(pa.struct([("name", pa.string()), ("version", pa.int32()), ("value", pa.float64())]))),
        ("absent", pa.list_(pa.string())),
        ("majority", pa.list_(pa.struct(BASELINE))),
        ("zero_shot", pa.list_(pa.struct(BASELINE))),
        ("scores", pa.list_(pa.struct(SCORES))),
    ]
)
"""A row for each run."""


class OtherInputs(ValueError):
    """Runs on other prepared data or models than those at hand."""


def job_of(figures: Figures) -> Job:
    """Return the run that left these figures."""
    return Job(*(figures[name] for name in ("table", "setting", "arm", "seed", "rate")))


def finished(out: Path, plan: Plan) -> dict[Job, dict[str, Any]]:
    """Return the figures of the folder's runs that are of this plan."""
    return of_plan(plan, kept(out))


def of_plan(plan: Plan, found: Iterator[dict[str, Any]]) -> dict[Job, dict[str, Any]]:
    """Return the figures that are of this plan: with an arm and a setting that it has, and the same settings."""
    known = {}
    for figures in found:
        job, table = job_of(figures), plan.tables.get(figures["table"])
        is_known = (
            table is not None
            and job.arm in {arm.name for arm in table.arms}
            and job.setting in {setting.name for setting in table.settings}
        )
        if is_known and figures["setup"] == setup_of(plan, job):
            known[job] = figures
    return known


def check_inputs(found: Found, table: str, inputs: str) -> None:
    """Raise OtherInputs if a table has runs on other prepared files than these."""
    others = {figures["inputs"] for job, figures in found.items() if job.table == table} - {inputs}
    if others:
        raise OtherInputs(
            f"{table} has runs on other files: {'; '.join(sorted(others))}. Here are {inputs}. Prepare the same "
            "ones, or name another folder with --out"
        )


# ---------------------------------------------------------------- the repository's results


def save(out: Path, plan: Plan, saved: Path = SAVED) -> list[Path]:
    """Write a Parquet file for each table with finished runs of this plan. Return the files."""
    written = []
    found = finished(out, plan)
    for table in plan.tables:
        of_table = [figures for job, figures in found.items() if job.table == table]
        if not of_table:
            continue
        of_table.sort(key=lambda each: (each["setting"], each["arm"], each["seed"], each["rate"]))
        filled = [{name: each.get(name) for name in SCHEMA.names} for each in of_table]
        saved.mkdir(parents=True, exist_ok=True)
        written.append(saved / f"{table}.parquet")
        with written_whole(written[-1]) as file:
            pq.write_table(pa.Table.from_pylist(filled, schema=SCHEMA), file, compression="zstd")
    return written


def loaded(saved: Path = SAVED) -> Iterator[dict[str, Any]]:
    """Yield the figures of each run in the repository, without what is missing."""
    for file in sorted(saved.glob("*.parquet")):
        for figures in pq.read_table(file).to_pylist():
            yield {name: value for name, value in figures.items() if value is not None}


def begin_with_saved(out: Path, plan: Plan, saved: Path = SAVED) -> None:
    """Write the repository's runs of this plan into the folder, but for those that it has."""
    has = finished(out, plan)
    for job, figures in of_plan(plan, loaded(saved)).items():
        if job not in has:
            keep(out, job.name, figures)


def save_repeated(repeated: Sequence[Figures], saved: Path = SAVED) -> None:
    """Write the results of runs that were repeated over HTTP."""
    with written_whole(saved / REPEATED) as file:
        file.write(json.dumps(repeated, indent=1, sort_keys=True).encode() + b"\n")


def repeated(plan: Plan, saved: Path = SAVED) -> list[dict[str, Any]]:
    """Return the results of this plan's runs that were repeated over HTTP."""
    file = saved / REPEATED
    return list(of_plan(plan, iter(json.loads(file.read_bytes()))).values()) if file.exists() else []

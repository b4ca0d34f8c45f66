"""Which blocks drift, before and after a freeze: `python -m benchmarks.evidence.client_drift`.

The federation, the learning rate and the warm-up of F-t, for half of its rounds. Three arms of a seed are one run
until the freeze; then one trains on as before, one freezes queries and keys, and one freezes values. The fourth
trains all blocks at sites that are alike. The method measures the sites' steps, role by role. After a run, attention
on some phrases is compared with that at the freeze.

Each finished run is one JSON file in the output folder. Repeat the command to continue.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch

from benchmarks.document import write_block
from benchmarks.evidence import pool
from benchmarks.evidence.federations import UNSEEN, source, start
from benchmarks.evidence.plan import Job, Plan
from benchmarks.evidence.plan import read as read_plan
from benchmarks.evidence.pool import Figures
from benchmarks.evidence.runs import POLICY, code, inputs_of, machine, method_settings, spec_of
from benchmarks.evidence.scores import MASK
from benchmarks.evidence.sources.prepare import OUT as PREPARED
from benchmarks.evidence.statistics import shown_interval, shown_spread
from benchmarks.methods.measured_drift import DISAGREEMENT, MOVEMENT, NOISE
from tessera.shared.model.blocks import Role
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.dataset import LABELS
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import load
from tessera.worker.model.build import write_block as write_values
from tessera.worker.simulation import Conditions, Result, simulate
from tessera.worker.state.atomic_files import written_whole

COMMAND = "python -m benchmarks.evidence.client_drift"
SAVED = Path(__file__).parent / "results" / "client_drift.json"
OUT = Path("bench-output/client-drift")
RUNS = "runs"
TABLE = "F-t"
ALL, ALIKE = "fedavg", "fedavg, alike"
ARMS = {
    ALL: ("fedavg", "alpha-0.1"),
    "fedfrozen": ("fedfrozen", "alpha-0.1"),
    "values-frozen": ("values-frozen", "alpha-0.1"),
    ALIKE: ("fedavg", "alpha-1000"),
}
"""Arms and settings of the table, by name. Those of `fedavg` never freeze."""
MEASURES = {"movement": MOVEMENT, "disagreement": DISAGREEMENT, "noise": NOISE}
ROUNDED = 6
"""Decimals of the saved figures."""


@dataclass(frozen=True)
class Study:
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    rounds: int = 40
    warmup: int = 16
    learning_rate: float = 3e-4
    """The rate that these arms chose in the table."""
    probes: int = 64
    """Phrases, of categories that no site has, on which attention is compared."""
    every: int = 4
    """Rounds from one measurement to the next."""

    @property
    def measured(self) -> list[int]:
        """The rounds in which the method measures."""
        return list(range(self.every, self.rounds + 1, self.every))


@dataclass(frozen=True)
class OneRun:
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.replace(', ', '-')}-{self.seed}"


Results = Mapping[str, Sequence[Figures]]
"""By arm, the figures of each seed: `movement`, `disagreement` and `noise` by role, of each measured round, and 0
where nothing trained; `attention` by version, of each layer."""


# ---------------------------------------------------------------- runs


def run(plan: Plan, study: Study, one: OneRun, prepared: Path, out: Path) -> Figures:
    """Run an arm with a seed. Raises NotPrepared, Stalled, and the exceptions of `simulate`."""
    named, setting_name = ARMS[one.arm]
    table = plan.tables[TABLE]
    arm, setting, kind = table.arm(named), table.setting(setting_name), source(table.federation)
    options = {**table.options, **setting.federation}
    federation = kind.federation(prepared, one.seed, options)
    model = start(kind, prepared, one.seed, arm.model, options, out / "models")
    # A run without a freeze is a warm-up to its end.
    warmup = study.warmup if arm.method == "fedfrozen" else study.rounds
    settings = {**method_settings(arm, setting, one.seed), "warmup_rounds": warmup, "every": study.every}
    spec = spec_of(plan, Job(TABLE, setting_name, named, one.seed, study.learning_rate), len(federation.sites))
    spec |= {"rounds": study.rounds, "method": {"name": "measured-drift", "settings": settings}}
    scratch = out / "scratch" / one.name
    shutil.rmtree(scratch, ignore_errors=True)
    conditions = Conditions(policy=POLICY, threads=1, loaded=len(federation.sites), keep_versions="all")
    try:
        result = simulate(spec, model, federation.sites, conditions=conditions, out=scratch)
        unseen = federation.tests[UNSEEN].tensors
        probes = {name: each[: study.probes] for name, each in unseen.items() if name != LABELS}
        attention = attention_moved(result, model, probes, [0, *study.measured], study.warmup)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = {name: by_role(result, prefix, study.measured) for name, prefix in MEASURES.items()}
    return {**found, "attention": attention, "machine": machine("cpu"), "code": code()}


def by_role(result: Result, prefix: str, rounds: Sequence[int]) -> dict[str, list[float]]:
    """Return a measure by role, of each of the rounds; 0 where no block of the role trained."""
    versions = [result.versions[number].scalars for number in rounds]
    roles = dict.fromkeys(name for scalars in versions for name in scalars if name.startswith(prefix))
    return {
        name.removeprefix(prefix): [round(scalars.get(name, 0.0), ROUNDED) for scalars in versions] for name in roles
    }


def attention_moved(
    result: Result, start: Path, probes: Mapping[str, torch.Tensor], versions: Sequence[int], reference: int
) -> dict[str, list[float]]:
    """Return by version and layer how far attention is from that of the reference version."""
    folder = ModelFolder.open(start)
    model, blocks = load(folder), folder.model.blocks
    # Other implementations do not return their attention.
    model.set_attn_implementation("eager")
    model.train(mode=False)
    tensors = named_tensors(model)

    def attention_of(number: int) -> Sequence[torch.Tensor]:
        values = result.arrays(number)
        for block in blocks:
            write_values(tensors, block, values[block.name])
        with torch.inference_mode():
            found: Sequence[torch.Tensor] = model(**probes, output_attentions=True).attentions
        return found

    first = attention_of(reference)
    return {
        str(number): [
            round(distance(one, was, probes[MASK]), ROUNDED)
            for one, was in zip(attention_of(number), first, strict=True)
        ]
        for number in versions
    }


def distance(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the Frobenius norm of a difference of attention matrices, [texts, heads, queries, keys], over that of
    the second ones. Padding, by the mask [texts, tokens], counts for nothing."""
    there = mask.float()
    valid = there[:, None, :, None] * there[:, None, None, :]
    return float(((one - other) * valid).norm() / (other * valid).norm())


# ---------------------------------------------------------------- finished runs


def finished(out: Path, study: Study, inputs: str) -> Results:
    """Return the figures of every finished run in the folder that is of this study and these inputs."""
    found: dict[str, list[Figures]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        for seed in study.seeds:
            if (figures := _read(out, OneRun(arm, seed), _about(study, inputs))) is not None:
                found[arm].append(figures)
    return found


def _about(study: Study, inputs: str) -> dict[str, Any]:
    return {"study": json.loads(json.dumps(asdict(study))), "inputs": inputs}


def keep(out: Path, study: Study, inputs: str, one: OneRun, figures: Figures) -> None:
    """Write the figures of a run, whole or not at all."""
    file = out / RUNS / f"{one.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file, durable=False) as opened:
        opened.write(json.dumps({**_about(study, inputs), **figures}, sort_keys=True).encode())


def _read(out: Path, one: OneRun, about: Mapping[str, Any]) -> Figures | None:
    file = out / RUNS / f"{one.name}.json"
    if not file.exists():
        return None
    figures: Figures = json.loads(file.read_bytes())
    return figures if all(figures.pop(name) == value for name, value in about.items()) else None


def work(plan: Plan, study: Study, prepared: Path, out: Path, processes: int) -> dict[OneRun, str]:
    """Run what is not finished, several runs at the same time. Return the reason of each that failed."""
    inputs = inputs_of(source(plan.tables[TABLE].federation), prepared)
    # All arms of a seed one after another: those that run at the same time are then of one seed.
    wanted = [OneRun(arm, seed) for seed in study.seeds for arm in ARMS]

    def left(begun: Collection[OneRun]) -> Iterator[OneRun]:
        return (one for one in wanted if one not in begun and _read(out, one, _about(study, inputs)) is None)

    def task(one: OneRun) -> tuple[Any, ...]:
        return run, plan, study, one, prepared, out

    def end(one: OneRun, figures: Figures) -> None:
        keep(out, study, inputs, one, figures)
        print(one.name, file=sys.stderr, flush=True)

    return pool.work(left, task, end, processes)


# ---------------------------------------------------------------- the report


def lines(study: Study, results: Results) -> Iterator[str]:
    """Yield the report in Markdown, line by line."""
    before = sum(number <= study.warmup for number in study.measured)
    early, late = f"rounds 1 to {study.warmup}", f"rounds {study.warmup + 1} to {study.rounds}"

    def means(arm: str, role: str, measure: str, *, after: bool, over: str = "") -> list[float]:
        """Return the mean of each seed over the rounds before or after the freeze, of a measure or a ratio."""
        part = slice(before, None) if after else slice(before)
        found = [fmean(figures[measure][role][part]) for figures in results[arm]]
        others = [fmean(figures[over][role][part]) for figures in results[arm]] if over else [1.0] * len(found)
        return [value / other if other else 0.0 for value, other in zip(found, others, strict=True)]

    def cell(values: Sequence[float], factor: float = 1.0) -> str:
        return shown_spread([factor * value for value in values], 2) if any(values) else "frozen"

    roles = [role for role in get_args(Role) if role in results[ALL][0]["movement"]]
    yield (
        f"{len(study.seeds)} seeds, {study.rounds} rounds, of which one in {study.every} is measured, and a freeze "
        f"after {study.warmup}. Means over rounds, ± standard deviation over seeds; differences are paired, with "
        "95 % t-intervals."
    )
    yield "\nDisagreement: rms distance of a site's step from the mean step, in percent of the blocks' length:\n"
    others = [arm for arm in results if arm != ALL]
    columns = ["role", f"{early}, {ALL}", *(f"{late}, {arm}" for arm in results)]
    yield from _header([*columns, *(f"{arm} less {ALL}, in percent of it" for arm in others)])
    for role in roles:
        base = means(ALL, role, "disagreement", after=True)
        cells = [cell(means(ALL, role, "disagreement", after=False), 100)]
        cells += [cell(means(arm, role, "disagreement", after=True), 100) for arm in results]
        for arm in others:
            other = means(arm, role, "disagreement", after=True)
            less = [100 * (value / was - 1) for value, was in zip(other, base, strict=True)]
            cells.append(shown_interval(less, 2) if any(other) else "")
        yield f"| {role} | {' | '.join(cells)} |"
    yield (
        "\nAgreement: length of the mean step, over that to expect from as much disagreement if the sites' steps had "
        "independent directions. It is 1 where they have:\n"
    )
    yield from _header(["role", *(f"{early}, {arm}" for arm in (ALL, ALIKE)), *(f"{late}, {arm}" for arm in results)])
    for role in roles:
        cells = [cell(means(arm, role, "movement", after=False, over="noise")) for arm in (ALL, ALIKE)]
        cells += [cell(means(arm, role, "movement", after=True, over="noise")) for arm in results]
        yield f"| {role} | {' | '.join(cells)} |"
    versions = [0, *study.measured]
    yield "\nDistance of attention from that at the freeze, in percent of its length, mean over layers:\n"
    yield from _header(["arm", *(f"version {number}" for number in versions), f"the last one, less {ALL}"])
    for arm, each in results.items():
        moved = [[100 * fmean(figures["attention"][str(number)]) for figures in each] for number in versions]
        last = [100 * fmean(figures["attention"][str(versions[-1])]) for figures in results[ALL]]
        less = [value - other for value, other in zip(moved[-1], last, strict=True)]
        cells = [arm, *(shown_spread(values) for values in moved), "" if arm == ALL else shown_interval(less)]
        yield f"| {' | '.join(cells)} |"
    layers = range(len(results[ALL][0]["attention"]["0"]))
    yield "\nThe same in the last version, by layer:\n"
    yield from _header(["arm", *(f"layer {number + 1}" for number in layers)])
    for arm, each in results.items():
        by_layer = [[100 * figures["attention"][str(versions[-1])][layer] for figures in each] for layer in layers]
        yield f"| {arm} | {' | '.join(shown_spread(values) for values in by_layer)} |"
    on = sorted({f"{run['machine']}, by the code of {run['code']}" for each in results.values() for run in each})
    yield f"\nOn {'; '.join(on)}."


def _header(cells: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    yield f"|{'---|' * len(cells)}"


def read(file: Path = SAVED) -> tuple[Study, Results]:
    """Return the repository's study with its results."""
    saved = json.loads(file.read_bytes())
    return Study(**{**saved["study"], "seeds": tuple(saved["study"]["seeds"])}), saved["arms"]


def write(file: Path, study: Study, inputs: str, results: Results) -> None:
    """Save the results of a study, which are all of its runs."""
    file.write_text(json.dumps({**_about(study, inputs), "arms": results}) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of prepared models and data")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of results")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--report", action="store_true", help="print the repository's results, and run nothing")
    does.add_argument("--save", action="store_true", help="write the results to the repository and its document")
    given = parser.parse_args(arguments)
    if given.report:
        print("\n".join(lines(*read())))
        return 0
    study, plan = Study(), read_plan()
    if failed := work(plan, study, given.prepared, given.out, given.processes):
        print(f"{len(failed)} runs failed: {', '.join(one.name for one in failed)}", file=sys.stderr)
        return 1
    inputs = inputs_of(source(plan.tables[TABLE].federation), given.prepared)
    results = finished(given.out, study, inputs)
    if given.save:
        write(SAVED, study, inputs, results)
        write_block(COMMAND, lines(study, results))
    print("\n".join(lines(study, results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which blocks drift, before and after a freeze: `python -m benchmarks.evidence.drift`.

The federation, the learning rate and the warm-up of F-t, for half of its rounds. The arms of a seed are one run until
the freeze; then one trains on as before, one freezes queries and keys, and one freezes values. In each round the
method measures the sites' steps, role by role. After the run, attention on some phrases is compared with that at the
freeze: with frozen queries and keys only their inputs can change it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.document import write_block
from benchmarks.evidence.federations import UNSEEN, source, start
from benchmarks.evidence.plan import Job, Plan
from benchmarks.evidence.plan import read as read_plan
from benchmarks.evidence.pool import begin
from benchmarks.evidence.runs import POLICY, code, inputs_of, machine, method_settings, spec_of
from benchmarks.evidence.scores import MASK
from benchmarks.evidence.sources.prepare import OUT as PREPARED
from benchmarks.evidence.statistics import shown_interval, shown_spread
from benchmarks.methods.measured_drift import DISAGREEMENT, MOVEMENT
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.dataset import LABELS
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import load
from tessera.worker.model.build import write_block as write_values
from tessera.worker.simulation import Conditions, Result, simulate

COMMAND = "python -m benchmarks.evidence.drift"
SAVED = Path(__file__).parent / "results" / "drift.json"
OUT = Path("bench-output/drift")
TABLE, SETTING = "F-t", "alpha-0.1"
ALL = "fedavg"
ARMS = (ALL, "fedfrozen", "values-frozen")
"""Arms of the table. The first one never freezes."""
ROUNDED = 6
"""Decimals of the saved figures."""


@dataclass(frozen=True)
class Study:
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    rounds: int = 40
    warmup: int = 16
    learning_rate: float = 3e-4
    """That each of these arms chose in the table."""
    probes: int = 64
    """Phrases, of categories that no site has, on which attention is compared."""
    every: int = 4
    """Rounds from one comparison to the next."""


@dataclass(frozen=True)
class Figures:
    movement: Mapping[str, Sequence[float]]
    """By role and round: the length of the sites' mean step over that of the role's blocks; 0 where none trained."""
    disagreement: Mapping[str, Sequence[float]]
    """Likewise, the rms over sites of a step less the mean step."""
    attention: Mapping[str, float]
    """By version: the distance of the attention matrices from those at the freeze, over their length, mean of the
    layers."""


Results = Mapping[str, Sequence[Figures]]
"""By arm, the figures of each seed."""


# ---------------------------------------------------------------- runs


def run(plan: Plan, study: Study, arm: str, seed: int, prepared: Path, out: Path) -> Figures:
    """Run an arm with a seed. Raises NotPrepared, Stalled, and the exceptions of `simulate`."""
    table, setting = plan.tables[TABLE], plan.tables[TABLE].setting(SETTING)
    kind, options = source(table.federation), {**table.options, **setting.federation}
    federation = kind.federation(prepared, seed, options)
    model = start(kind, prepared, seed, table.arm(arm).model, options, out / "models")
    sites = federation.sites
    # Without a freeze, the warm-up lasts for the whole run.
    settings = method_settings(table.arm(arm), setting, seed)
    settings |= {"warmup_rounds": study.rounds if arm == ALL else study.warmup}
    spec = spec_of(plan, Job(TABLE, SETTING, arm, seed, study.learning_rate), len(sites))
    spec |= {"rounds": study.rounds, "method": {"name": "measured-drift", "settings": settings}}
    scratch = out / f"{arm}-{seed}"
    shutil.rmtree(scratch, ignore_errors=True)
    conditions = Conditions(policy=POLICY, threads=1, loaded=len(sites), keep_versions="all")
    try:
        result = simulate(spec, model, sites, conditions=conditions, out=scratch)
        unseen = federation.tests[UNSEEN].tensors
        probes = {name: each[: study.probes] for name, each in unseen.items() if name != LABELS}
        versions = range(0, study.rounds + 1, study.every)
        attention = attention_moved(result, model, probes, versions, study.warmup)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Figures(by_role(result, MOVEMENT), by_role(result, DISAGREEMENT), attention)


def by_role(result: Result, prefix: str) -> dict[str, list[float]]:
    """Return a measurement by role and round; 0 where no block of the role trained."""
    roles = {name: None for version in result.versions for name in version.scalars if name.startswith(prefix)}
    return {
        name.removeprefix(prefix): [round(each.scalars.get(name, 0.0), ROUNDED) for each in result.versions[1:]]
        for name in roles
    }


def attention_moved(
    result: Result, start: Path, probes: Mapping[str, torch.Tensor], versions: Sequence[int], reference: int
) -> dict[str, float]:
    """Return by version how far attention is from that of the reference version: of each layer the Frobenius norm of
    the difference over that of the reference, and of these the mean. Padding counts for nothing."""
    folder = ModelFolder.open(start)
    model, blocks = load(folder), folder.model.blocks
    # Other implementations do not return their attention.
    model.set_attn_implementation("eager")
    model.train(mode=False)
    tensors, there = named_tensors(model), probes[MASK].bool()
    valid = (there[:, None, :, None] & there[:, None, None, :]).float()  # [probes, heads, queries, keys]

    def attention_of(number: int) -> list[torch.Tensor]:
        values = result.arrays(number)
        for block in blocks:
            write_values(tensors, block, values[block.name])
        with torch.inference_mode():
            found = model(**probes, output_attentions=True).attentions
        return [each * valid for each in found]

    first = attention_of(reference)
    moved = {}
    for number in versions:
        pairs = zip(attention_of(number), first, strict=True)
        moved[str(number)] = round(fmean(float((one - was).norm() / was.norm()) for one, was in pairs), ROUNDED)
    return moved


# ---------------------------------------------------------------- saved results


def write(file: Path, study: Study, inputs: str, results: Results) -> None:
    """Save the results of a study, with the machine and the code that computed them."""
    about = {"study": asdict(study), "inputs": inputs, "machine": machine("cpu"), "code": code()}
    arms = {arm: [asdict(figures) for figures in each] for arm, each in results.items()}
    file.write_text(json.dumps({**about, "arms": arms}, allow_nan=False) + "\n", encoding="utf-8")


def read(file: Path = SAVED) -> tuple[Study, Results, str]:
    """Return a saved study with its results, and what computed them."""
    saved = json.loads(file.read_bytes())
    study = Study(**{**saved["study"], "seeds": tuple(saved["study"]["seeds"])})
    results = {arm: [Figures(**figures) for figures in each] for arm, each in saved["arms"].items()}
    return study, results, f"{saved['machine']}, by the code of {saved['code']}"


# ---------------------------------------------------------------- the report


def lines(study: Study, results: Results, computed_on: str) -> Iterator[str]:
    """Yield the report in Markdown, line by line."""
    yield (
        f"{len(study.seeds)} seeds, {study.rounds} rounds, a freeze after {study.warmup} of them. Lengths are in "
        "percent of the length of the role's own blocks, means over rounds. Means ± standard deviation over seeds; "
        "differences are paired, with 95 % t-intervals."
    )
    yield "\nHow far a site's step is from the mean step of the round:\n"
    yield from _of_roles(study, results, "disagreement")
    yield "\nHow long the mean step is:\n"
    yield from _of_roles(study, results, "movement")
    yield "\nHow far attention is from that at the freeze, in percent:\n"
    versions = list(results[ALL][0].attention)
    yield f"| arm | {' | '.join(f'version {number}' for number in versions)} | the last one, less {ALL} |"
    yield f"|---|{'---|' * (len(versions) + 1)}"
    for arm, each in results.items():
        moved = [[100 * figures.attention[number] for figures in each] for number in versions]
        less = [100 * other.attention[versions[-1]] for other in results[ALL]]
        gained = "" if arm == ALL else shown_interval([a - b for a, b in zip(moved[-1], less, strict=True)])
        yield f"| {arm} | {' | '.join(map(shown_spread, moved))} | {gained} |"
    yield f"\nOn {computed_on}."


def _of_roles(study: Study, results: Results, name: str) -> Iterator[str]:
    """Yield a row for each role: the rounds before the freeze, those after it by arm, and differences of arms."""
    after = f"rounds {study.warmup + 1} to {study.rounds}"
    others = [arm for arm in results if arm != ALL]
    columns = (f"rounds 1 to {study.warmup}", *(f"{after}, {arm}" for arm in results))
    yield f"| role | {' | '.join((*columns, *(f'{arm} less {ALL}' for arm in others)))} |"
    yield f"|{'---|' * (1 + len(columns) + len(others))}"
    for role in getattr(results[ALL][0], name):
        curves = {arm: [getattr(figures, name)[role] for figures in each] for arm, each in results.items()}
        before = [100 * fmean(curve[: study.warmup]) for curve in curves[ALL]]
        means = {arm: [100 * fmean(curve[study.warmup :]) for curve in each] for arm, each in curves.items()}
        less = [[a - b for a, b in zip(means[arm], means[ALL], strict=True)] for arm in others]
        cells = [shown_spread(each, 2) if any(each) else "frozen" for each in (before, *means.values())]
        cells += [shown_interval(each, 3) if any(means[arm]) else "" for arm, each in zip(others, less, strict=True)]
        yield f"| {role} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of prepared models and data")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the runs' versions, which are removed")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--report", action="store_true", help="print the repository's results, and run nothing")
    does.add_argument("--save", action="store_true", help="write the results to the repository and its document")
    given = parser.parse_args(arguments)
    if given.report:
        print("\n".join(lines(*read())))
        return
    study, plan, computed_on = Study(), read_plan(), f"{machine('cpu')}, by the code of {code()}"
    inputs = inputs_of(source(plan.tables[TABLE].federation), given.prepared)
    with ProcessPoolExecutor(given.processes, get_context("spawn"), begin) as pool:
        # All arms of a seed one after another, so that runs at the same time are of one seed.
        runs = {
            (arm, seed): pool.submit(run, plan, study, arm, seed, given.prepared, given.out)
            for seed in study.seeds
            for arm in ARMS
        }
        results = {arm: [runs[arm, seed].result() for seed in study.seeds] for arm in ARMS}
    if given.save:
        write(SAVED, study, inputs, results)
        write_block(COMMAND, lines(study, results, computed_on))
    print("\n".join(lines(study, results, computed_on)))


if __name__ == "__main__":
    main()

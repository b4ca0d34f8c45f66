"""One run of the study, through the product's simulation, and the figures that it leaves."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.names import LABELS
from evidence.federations import UNSEEN, source, start
from evidence.jobs import Job
from evidence.plan import Plan
from evidence.pool import Figures
from evidence.runs import POLICY, code, machine, spec_of
from evidence.scores import MASK
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation import Conditions, Result, simulate
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import load
from tessera.worker.model.build import write_block as write_values

TABLE = "F-t"
ALL, EQUAL = "fedavg", "fedavg, equal labels"
ARMS = {
    ALL: ("fedavg", "alpha-0.1"),
    "fedfrozen": ("fedfrozen", "alpha-0.1"),
    "values-frozen": ("values-frozen", "alpha-0.1"),
    EQUAL: ("fedavg", "alpha-1000"),
}
"""Arms and settings of the table, by name. Those of `fedavg` never freeze."""
MEASURES = {"movement": "drift.movement.", "disagreement": "drift.disagreement.", "noise": "drift.noise."}
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
        return f"{self.arm.replace(', ', '-').replace(' ', '-')}-{self.seed}"


Results = Mapping[str, Sequence[Figures]]
"""By arm, the figures of each seed: `movement`, `disagreement` and `noise` by role, of each measured round, and 0
where nothing trained; `attention` by version, of each layer."""


def run(plan: Plan, study: Study, one: OneRun, prepared: Path, out: Path) -> Figures:
    """Run an arm with a seed. Raises NotPrepared, Stalled, and the exceptions of `simulate`."""
    named, setting_name = ARMS[one.arm]
    table = plan.tables[TABLE]
    arm, setting, kind = table.arm(named), table.setting(setting_name), source(table.federation)
    options = {**table.options, **setting.federation}
    federation = kind.federation(prepared, one.seed, options)
    model = start(kind, prepared, one.seed, arm.model, options, out / "models")
    spec = spec_of(plan, Job(TABLE, setting_name, named, one.seed, study.learning_rate), len(federation.sites))
    spec |= {"rounds": study.rounds, "signals": {"drift": True, "every": study.every}}
    if arm.method == "fedfrozen":
        spec["method"]["settings"] |= {"warmup_rounds": study.warmup}
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

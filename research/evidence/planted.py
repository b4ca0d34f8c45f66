"""Whether SAFL picks the layers that can help: `python -m evidence.planted`.

A small transformer learns to name the word after a marker. Then two of its six layers, drawn by the seed, are muted:
their last norm keeps a twentieth of its gain and adds a constant, in which the words are lost for all that follows.
Within these rounds only those two layers can restore the model. So there is a right answer, and "picks the right
layers" is a figure. Arms of a seed share the model, the data and the run's seed.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from math import isnan
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import structlog
import torch
from pydantic import JsonValue
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from common.document import table_head, table_row, write_block
from evidence.runs import code, machine
from evidence.selections import Selections, selections
from evidence.statistics import shown_interval, shown_spread
from tessera.shared.metrics.selections import choices_of
from tessera.shared.model.blocks import layers_of
from tessera.simulation import Conditions, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import instantiate

COMMAND = "python -m evidence.planted"
SAVED = Path(__file__).parent / "results" / "planted.json"

CLASSES, FIRST_TOKEN, MARKER, WORDS = 8, 1, 2, 3
"""The label of an example is the word after the marker; other words are drawn from the same ones and as many more."""
LENGTH = 10
LAYERS = 6
CONFIG: dict[str, JsonValue] = {
    "model_type": "bert", "vocab_size": WORDS + 2 * CLASSES, "hidden_size": 32, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": LENGTH, "num_labels": CLASSES,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
LEARNT = 0.97
GAIN = 0.05

MARKED = {"where": "ids", "ids": [MARKER]}
"""The first token reads, and is the sink itself; of the others the marker is the task's."""
ARMS: Mapping[str, Mapping[str, Any]] = {
    "oracle": {"score": "fixed"},
    "random": {"score": "random"},
    "first": {"score": "first"},
    "last": {"score": "last"},
    "attention": {},
    "attention, sink-corrected": {"score": "sink-corrected", "tokens": MARKED},
    "attention, explore 0.5": {"explore": 0.5},
    "attention, pick_every 3": {"pick_every": 3},
    "attention, vote": {"chooser": "vote"},
    "gradient-norm": {"score": "gradient-norm"},
    "gradient-norm, pick_every 6": {"score": "gradient-norm", "pick_every": 6},
    "fisher": {"score": "fisher"},
}


@dataclass(frozen=True)
class Study:
    seeds: int = 5
    sites: int = 3
    examples: int = 96
    """Of each site."""
    test: int = 400
    rounds: int = 8
    steps: int = 6
    learning_rate: float = 0.005
    pretraining: int = 600
    """The most steps; it ends when the model has learnt the task."""


QUICK = Study(seeds=1, sites=2, examples=16, test=64, rounds=2, steps=1, pretraining=2)


@dataclass(frozen=True)
class Figures:
    planted: float
    """The share of the picks that are planted layers."""
    accuracies: tuple[float, ...]
    """Of each version, from the damaged model on."""
    selected: Selections
    upload_bytes: float
    """Of one site in one round."""


Result = tuple[float, dict[str, Figures]]
"""Of a seed: the accuracy before the damage, and the figures of each arm."""


# ---------------------------------------------------------------- the task


def examples(count: int, seed: int, skew: float | None = None) -> Dataset:
    """Return examples of the task; with `skew` their labels are drawn by a Dirichlet distribution of that
    concentration."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(WORDS, WORDS + 2 * CLASSES, (count, LENGTH))
    labels = rng.choice(CLASSES, count, p=None if skew is None else rng.dirichlet([skew] * CLASSES))
    marked = rng.integers(1, LENGTH - 1, count)
    ids[:, 0] = FIRST_TOKEN
    ids[range(count), marked] = MARKER
    ids[range(count), marked + 1] = WORDS + labels
    return Dataset({"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)})


def accuracy(model: PreTrainedModel, data: Dataset) -> float:
    model.train(False)
    with torch.no_grad():
        found = model(input_ids=data.tensors["input_ids"]).logits.argmax(1)
    return float((found == data.tensors["labels"]).double().mean())


def pretrained(study: Study, seed: int) -> PreTrainedModel:
    """Return a model that has learnt the task, as far as the study's steps allow."""
    model = instantiate(CONFIG, "text-classification", seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    check = examples(500, seed + 1000)
    for step in range(study.pretraining):
        batch = examples(64, 10_000 * (seed + 1) + step).tensors
        loss = cross_entropy(model.train()(input_ids=batch["input_ids"]).logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 49 and accuracy(model, check) >= LEARNT:
            break
    return model


def muted(model: PreTrainedModel, layers: Sequence[int], seed: int) -> None:
    """Mute layers: the last norm of each keeps `GAIN` of its gain and adds a random constant."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        norm = model.get_submodule(f"bert.encoder.layer.{layer}.output.LayerNorm")
        with torch.no_grad():
            norm.get_parameter("weight").mul_(GAIN)
            norm.get_parameter("bias").normal_(generator=generator)


def planted_of(seed: int) -> list[int]:
    """Return the two layers that a seed plants."""
    return sorted(np.random.default_rng(seed).choice(LAYERS, 2, replace=False).tolist())


# ---------------------------------------------------------------- runs


def run(study: Study, settings: Mapping[str, Any], start: Weights, seed: int) -> Figures:
    planted = {f"bert.encoder.layer.{layer}" for layer in planted_of(seed)}
    chosen = {"layers": 2, "profile_batches": 1, **settings}
    if chosen.get("score") == "fixed":
        chosen = {**settings, "fixed": sorted(planted)}
    spec = {
        "name": "planted",
        "seed": seed,
        # A common choice begins with a round in which nothing trains.
        "rounds": study.rounds + (chosen.get("chooser", "worker") != "worker"),
        "method": {"name": "safl", "settings": chosen},
        "training": {"steps": study.steps, "batch_size": 16, "learning_rate": study.learning_rate},
        "evaluation": {"sites": False},
        "codec": "raw",
    }
    sites = {f"site-{i}": examples(study.examples, 100 * seed + i, skew=1.0) for i in range(study.sites)}
    test = examples(study.test, 100 * seed + 99)
    result = simulate(spec, start, sites, test=test, conditions=Conditions(threads=1))
    rounds = choices_of(result.rounds)
    picks = [name for choices in rounds for chosen in choices.values() for name in chosen]
    scores = result.scores()
    return Figures(
        planted=fmean(name in planted for name in picks),
        accuracies=tuple(scores[number]["accuracy"] for number in sorted(scores))[-study.rounds - 1 :],
        selected=selections(result.rounds, layers_of(start.model.blocks)),
        upload_bytes=sum(outcome.upload_bytes for outcome in result.outcomes) / study.sites / study.rounds,
    )


def start_of(study: Study, seed: int) -> tuple[Weights, float]:
    """Return a seed's damaged model, and the accuracy that it had before."""
    model = pretrained(study, seed)
    before = accuracy(model, examples(study.test, 100 * seed + 99))
    muted(model, planted_of(seed), seed)
    return Weights.of(model, CONFIG, "text-classification"), before


def of_seed(study: Study, seed: int) -> Result:
    """Run each arm on a seed's damaged model."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    start, before = start_of(study, seed)
    return before, {arm: run(study, settings, start, seed) for arm, settings in ARMS.items()}


# ---------------------------------------------------------------- saved results


def write(file: Path, study: Study, results: Sequence[Result]) -> None:
    """Save the results of a study, with the machine and the code that computed them."""
    seeds = [
        {"before": before, "arms": {arm: asdict(figures) for arm, figures in arms.items()}}
        for before, arms in results
    ]
    document = {"study": asdict(study), "machine": machine("cpu"), "code": code(), "seeds": seeds}
    file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read(file: Path = SAVED) -> tuple[Study, list[Result], str]:
    """Return a saved study with its results, and what computed them."""
    document = json.loads(file.read_bytes())

    def figures_of(saved: Mapping[str, Any]) -> Figures:
        accuracies, selected = tuple(saved["accuracies"]), Selections(**saved["selected"])
        return Figures(**{**saved, "accuracies": accuracies, "selected": selected})

    results = [
        (seed["before"], {arm: figures_of(saved) for arm, saved in seed["arms"].items()})
        for seed in document["seeds"]
    ]
    return Study(**document["study"]), results, f"{document['machine']}, by the code of {document['code']}"


# ---------------------------------------------------------------- the report


def lines(study: Study, results: Sequence[Result], computed_on: str) -> Iterator[str]:
    """Yield the report in Markdown, line by line."""
    before = [accuracy for accuracy, _ in results]
    found = {arm: [figures[arm] for _, figures in results] for arm in results[0][1]}
    damaged = [figures.accuracies[0] for figures in found["oracle"]]
    yield (
        f"{study.seeds} seeds, {study.sites} sites, 2 of {LAYERS} layers planted; chance of a pick is 33 %, of an "
        f"answer {100 / CLASSES:.1f} %. Accuracy before the damage {_percent(before)}, after it "
        f"{_percent(damaged)}. Means ± standard deviation over seeds; differences are paired, with 95 % "
        "t-intervals."
    )
    columns = ("arm", "picks planted %", "accuracy %", "less random", "turnover", "overlap (chance)", "kB up")
    yield ""
    yield from table_head(columns)
    for arm, each in found.items():
        ends = [100 * figures.accuracies[-1] for figures in each]
        less = [end - 100 * other.accuracies[-1] for end, other in zip(ends, found["random"], strict=True)]
        chosen = [figures.selected for figures in each]
        overlap = f"{_mean(one.overlap for one in chosen):.2f} ({_mean(one.chance for one in chosen):.2f})"
        cells = [
            arm,
            _percent([figures.planted for figures in each]),
            shown_spread(ends),
            "" if arm == "random" else shown_interval(less),
            f"{_mean(one.turnover for one in chosen):.2f}",
            overlap,
            f"{fmean(figures.upload_bytes for figures in each) / 1e3:.0f}",
        ]
        yield table_row(cells)
    yield "\nAccuracy by round of training, in %, means over seeds:\n"
    yield from table_head(["arm", *map(str, range(study.rounds + 1))])
    for arm, each in found.items():
        means = [fmean(column) for column in zip(*(figures.accuracies for figures in each), strict=True)]
        yield table_row([arm, *(f"{100 * mean:.0f}" for mean in means)])
    yield f"\nOn {computed_on}."


def _mean(values: Iterator[float]) -> float:
    found = [value for value in values if not isnan(value)]
    return fmean(found) if found else float("nan")


def _percent(values: Sequence[float]) -> str:
    return shown_spread([100 * value for value in values])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny study, whose figures mean nothing")
    parser.add_argument("--seeds", type=int, default=Study.seeds)
    parser.add_argument("--processes", type=int, default=1, help="seeds that run at the same time")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--report", action="store_true", help="print the repository's results, and run nothing")
    does.add_argument("--save", action="store_true", help="write the results to the repository and its document")
    given = parser.parse_args(arguments)
    study = QUICK if given.quick else Study(seeds=given.seeds)
    if given.save and study != Study():
        parser.error("--save is for the whole study: leave --quick and --seeds out")
    computed_on = f"{machine('cpu')}, by the code of {code()}"
    if given.report:
        study, results, computed_on = read()
    elif given.processes > 1:
        with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
            results = list(pool.map(of_seed, [study] * study.seeds, range(study.seeds)))
    else:
        results = [of_seed(study, seed) for seed in range(study.seeds)]
    if given.save:
        write(SAVED, study, results)
        write_block(COMMAND, lines(study, results, computed_on))
    for line in lines(study, results, computed_on):
        print(line)


if __name__ == "__main__":
    main()

"""Whether the models are worth a federation: `python -m evidence.gate`.

Each task's model is fine-tuned on the examples of all sites together and compared with a plain baseline on the same
examples. A federated table is read only if its model is at least MARGIN points better here: a federation cannot be
expected to do what training in one place does not do.

Prints a table, and writes the figures to `evidence/results/gate.json`, where finished ones are kept: a
second call computes what is missing. Learning rates are the same for every seed (`RATES`). `--rate` scores another
one on the validation part of seed 0, which is in no table. A baseline's penalty is chosen on the validation part of
its seed. Test examples choose nothing.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from torch import nn
from transformers import AutoModelForSequenceClassification

from common.document import write_block
from evidence.sources import emoji, fashion, lit, phrases, vit
from evidence.sources.prepare import CACHE, EMOJI, FASHION, MODEL, OUT, PHRASES
from evidence.sources.sites import Indices
from evidence.sources.training import Budget, predicted, train
from tessera.worker.data.dataset import Dataset

MARGIN = 3.0
"""Points by which a model must beat the baseline."""
TUNING_SEED = 0
ZERO_SHOT = "lit, zero-shot"
"""The dual encoder as prepared, for information: it decides nothing."""
RATES = {"vit4": 3e-4, "vit6": 3e-4, "vit12": 3e-4, "minilm": 3e-4, "lit": 1e-4}
"""Of `minilm`, the rate that the frontier's study chose for all layers without privacy, on its seed 0."""
STEPS = {"fashion": 750, "phrases": 375, "emoji": 75}
"""Steps of BATCH examples: three passes over 8,000 items, four over 3,000 phrases, five over 470 drawings."""
BATCH = 32
BASELINES: Mapping[str, Sequence[float]] = {"pixels": (0.01, 0.03, 0.1, 0.3), "tf-idf": (3.0, 10.0, 30.0, 100.0)}
"""The inverse penalties that each logistic regression tries."""
MOST_ITERATIONS = 500
FASHION_SITES, FASHION_ALPHA = 8, 0.5
PHRASE_SITES, PHRASE_EXAMPLES = 4, 250
"""Sites of each wording, and phrases of each site: 3,000 in all, where the tables train on some 2,250."""
COMMAND = "python -m evidence.gate"
JSON = Path(__file__).with_name("results") / "gate.json"
"""Of the repository: docs/evidence.md has its tables."""

Matrix = Any
"""A matrix of examples and features, dense or sparse."""
Features = Callable[[Sequence[Indices]], Sequence[Matrix]]
"""A function from places of examples to their features. What it fits, it fits on the first of them."""


@dataclass(frozen=True)
class Task:
    """The examples of all sites together, as baselines and models read them. `labels` has one for every example."""

    name: str
    baseline: str
    train: Indices
    validation: Indices
    test: Indices
    labels: Indices
    features: Features
    dataset: Callable[[Indices], Dataset]
    criterion: str
    """The score that decides: `accuracy` or `macro_f1`."""


@dataclass(frozen=True)
class Score:
    """A model's scores on a part of a task, from 0 to 1."""

    task: str
    model: str
    seed: int
    part: str
    """`test`, or `validation` for seed 0."""
    examples: int
    accuracy: float
    macro_f1: float
    criterion: str
    setting: float
    """The learning rate or the inverse penalty; 0 without training."""
    cpu_seconds: float

    @property
    def points(self) -> float:
        """The score that decides, from 0 to 100."""
        return 100 * (self.macro_f1 if self.criterion == "macro_f1" else self.accuracy)


# ---------------------------------------------------------------- tasks


def of_fashion(prepared: Path, side: int, seed: int) -> Task:
    """Return the items of eight sites, and the official test items. `side` is that of the model's images."""
    items = fashion.Fashion.load(prepared / FASHION)
    sites = fashion.split(items, seed, FASHION_SITES, FASHION_ALPHA).values()
    return Task(
        "fashion",
        "pixels",
        np.concatenate([site.train for site in sites]),
        np.concatenate([site.validation for site in sites]),
        items.test,
        items.labels,
        lambda parts: [items.pixels[rows].reshape(len(rows), -1) / 255 for rows in parts],
        lambda rows: items.dataset(rows, side),
        "accuracy",
    )


def of_phrases(prepared: Path, texts: Sequence[str], seed: int) -> Task:
    """Return the phrases of twelve sites, and those of unseen categories. `texts` are those of all phrases."""
    encoded = phrases.Encoded.load(prepared / PHRASES)
    if len(texts) != len(encoded.labels):
        raise ValueError(f"{len(texts)} texts for {len(encoded.labels)} prepared phrases: prepare them again")
    parts = phrases.split(encoded, seed, PHRASE_SITES, PHRASE_EXAMPLES)

    def features(of_parts: Sequence[Indices]) -> Sequence[Matrix]:
        words = [[texts[row] for row in rows] for rows in of_parts]
        counted = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True).fit(words[0])
        return [counted.transform(each) for each in words]

    return Task(
        "phrases",
        "tf-idf",
        np.concatenate(list(parts.sites.values())),
        parts.validation,
        parts.test,
        encoded.labels,
        features,
        encoded.dataset,
        "macro_f1",
    )


def of_emoji(prepared: Path, seed: int) -> Task:
    """Return the drawings of twelve sites, and other drawings for the tests."""
    drawings = emoji.Emoji.load(prepared / EMOJI)
    # All sites together have the same drawings under each shift.
    sites = list(emoji.split(drawings, seed, "label").values())
    return Task(
        "emoji",
        "pixels",
        np.concatenate([site.parts.train for site in sites]),
        sites[0].parts.validation,
        sites[0].parts.test,
        drawings.labels[drawings.concepts],
        lambda parts: [drawings.pixels[rows].reshape(len(rows), -1) / 255 for rows in parts],
        drawings.dataset,
        "accuracy",
    )


# ---------------------------------------------------------------- models


def baseline(task: Task, seed: int) -> Score:
    """Return the score of a logistic regression, whose penalty the validation part chooses."""
    began = process_time()
    train_on, validation, test = task.features([task.train, task.validation, task.test])
    of_train, of_validation = task.labels[task.train], task.labels[task.validation]
    with warnings.catch_warnings():
        # The validation part decides, also between fits that stopped early.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = {
            penalty: LogisticRegression(C=penalty, max_iter=MOST_ITERATIONS).fit(train_on, of_train)
            for penalty in BASELINES[task.baseline]
        }
    guesses = {penalty: model.predict(validation) for penalty, model in fitted.items()}
    best = max(fitted, key=lambda penalty: _scores(of_validation, guesses[penalty])[task.criterion])
    part = "validation" if seed == TUNING_SEED else "test"
    found = guesses[best] if seed == TUNING_SEED else fitted[best].predict(test)
    return scored(task, task.baseline, seed, part, found, best, process_time() - began)


def fine_tuned(task: Task, name: str, model: nn.Module, seed: int, rate: float, steps: int) -> Score:
    """Train a classifier of transformers in place and return its score; with no steps, as it is."""
    began = process_time()
    torch.manual_seed(seed)
    if steps:
        train(model, task.dataset(task.train), Budget(steps, BATCH, rate), seed)
    part = "validation" if seed == TUNING_SEED else "test"
    rows = task.validation if seed == TUNING_SEED else task.test
    found = predicted(model, task.dataset(rows))
    return scored(task, name, seed, part, found, rate if steps else 0.0, process_time() - began)


def scored(task: Task, model: str, seed: int, part: str, found: Indices, setting: float, cpu_seconds: float) -> Score:
    """Return the score of the classes `found` for a part of a task."""
    right = task.labels[task.validation if part == "validation" else task.test]
    scores = _scores(right, found)
    return Score(
        task.name, model, seed, part, len(right), **scores, criterion=task.criterion, setting=setting,
        cpu_seconds=round(cpu_seconds, 1),
    )  # fmt: skip


def _scores(right: Indices, found: Indices) -> dict[str, float]:
    f1 = f1_score(right, found, average="macro", zero_division=0)
    return {"accuracy": round(float((found == right).mean()), 5), "macro_f1": round(float(f1), 5)}


def minilm(prepared: Path) -> nn.Module:
    """Return a classifier of phrases on MiniLM, float32, whose head starts from zeros and whose embeddings stay."""
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        prepared / MODEL, num_labels=phrases.CHAPTERS, dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        weight.requires_grad_(".embeddings." not in name)
        if name.startswith("classifier."):
            nn.init.zeros_(weight)
    return model


# ---------------------------------------------------------------- the gate


def scores_of(
    prepared: Path, cache: Path, task: str, models: Sequence[str], seed: int, rate: float | None
) -> Mapping[str, Callable[[], Score]]:
    """Return a function for each score of a task and seed, by the model's name. `rate` replaces that in RATES."""
    steps = STEPS[task]
    if task == "fashion":

        def of_shape(name: str) -> Score:
            model = vit.classifier(prepared / name, fashion.CLASSES)
            found = of_fashion(prepared, vit.SHAPES[name].side, seed)
            return fine_tuned(found, name, model, seed, rate or RATES[name], steps)

        return {
            "pixels": lambda: baseline(of_fashion(prepared, fashion.SIDE, seed), seed),
            **{name: partial(of_shape, name) for name in models},
        }
    if task == "phrases":
        found = of_phrases(prepared, [phrase.text for phrase in phrases.read(cache)], seed)
        return {
            "tf-idf": lambda: baseline(found, seed),
            "minilm": lambda: fine_tuned(found, "minilm", minilm(prepared), seed, rate or RATES["minilm"], steps),
        }
    drawings = of_emoji(prepared, seed)

    def of_lit(name: str, trained: int) -> Score:
        model = lit.LitClassifier.load(prepared / lit.LIT.name)
        return fine_tuned(drawings, name, model, seed, rate or RATES["lit"], trained)

    return {
        "pixels": lambda: baseline(drawings, seed),
        ZERO_SHOT: lambda: of_lit(ZERO_SHOT, 0),
        "lit": lambda: of_lit("lit", steps),
    }


def missing(prepared: Path, task: str, models: Sequence[str]) -> str | None:
    """Return what a task lacks in the prepared folder, and the command that makes it; None if all is there."""
    needs = {"fashion": [FASHION, *models], "phrases": [PHRASES, MODEL], "emoji": [EMOJI, lit.LIT.name]}[task]
    if not (absent := [name for name in needs if not (prepared / name).exists()]):
        return None
    options = {"phrases": "--only text", "fashion": f"--only fashion --models {' '.join(models)}"}
    return (
        f"not prepared: {prepared} has no {', '.join(absent)}; run `python -m evidence.sources.prepare "
        f"{options.get(task, '--only emoji')}`"
    )


def read(file: Path) -> list[Score]:
    """Return the saved scores."""
    return [Score(**each) for each in json.loads(file.read_bytes())["scores"]] if file.exists() else []


def add(file: Path, score: Score) -> None:
    """Add a score to the saved ones: those of another process stay."""
    found = sorted([*read(file), score], key=lambda each: (each.task, each.model, each.seed, each.setting))
    document = {"margin": MARGIN, "torch": torch.__version__, "scores": [asdict(each) for each in found]}
    new = file.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def lines(scores: Sequence[Score]) -> list[str]:
    """Return the tables of the test scores and of the verdicts, in Markdown."""
    tested = [score for score in scores if score.part == "test"]
    found = [
        "| task | model | seeds | test examples | accuracy | macro F1 | rate or 1/penalty | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Score]] = defaultdict(list)
    for score in tested:
        groups[score.task, score.model].append(score)
    for (task, model), of_model in groups.items():
        seeds = ", ".join(str(score.seed) for score in of_model)
        settings = ", ".join(f"{setting:g}" for setting in sorted({score.setting for score in of_model}))
        accuracy = 100 * mean(score.accuracy for score in of_model)
        f1 = 100 * mean(score.macro_f1 for score in of_model)
        examples = "/".join(str(count) for count in sorted({score.examples for score in of_model}))
        seconds = mean(score.cpu_seconds for score in of_model)
        found.append(
            f"| {task} | {model} | {seeds} | {examples} | {accuracy:.1f} | {f1:.1f} | {settings} | {seconds:.0f} |"
        )
    found.append("")
    for (task, model), of_model in groups.items():
        if model not in (*BASELINES, ZERO_SHOT):
            found.append(verdict(task, model, of_model, [score for score in tested if score.task == task]))
    return found


def verdict(task: str, model: str, of_model: Sequence[Score], of_task: Sequence[Score]) -> str:
    """Return whether a model passes: its mean difference to the baseline, paired by seed, is MARGIN or more."""
    differences = gains(of_model, of_task)
    if not differences:
        return f"- {task}, {model}: no baseline of its seeds"
    found = mean(differences)
    passes = "passes" if found >= MARGIN else f"does not pass: its table is void (margin {MARGIN:g})"
    return (
        f"- {task}, {model}: {found:+.1f} points of {of_model[0].criterion} over {len(differences)} "
        f"seed{'s' * (len(differences) > 1)}: {passes}"
    )


def gains(of_model: Sequence[Score], of_task: Sequence[Score]) -> list[float]:
    """Return a model's points above the plain baseline, for each seed that both have."""
    plain = {score.seed: score.points for score in of_task if score.model in BASELINES}
    return [score.points - plain[score.seed] for score in of_model if score.seed in plain]


def _gains_of(gate: tuple[str, str], scores: Sequence[Score] | None) -> list[float]:
    task, model = gate
    scores = read(JSON) if scores is None else scores
    of_task = [score for score in scores if (score.task, score.part) == (task, "test")]
    return gains([score for score in of_task if score.model == model], of_task)


def decided(gate: tuple[str, str], scores: Sequence[Score] | None = None) -> bool:
    """Return whether a model was compared with a plain baseline. `scores` are by default the saved ones."""
    return bool(_gains_of(gate, scores))


def shut(gate: tuple[str, str] | None, scores: Sequence[Score] | None = None) -> str | None:
    """Return why no federated row of a task and a model may be read; None if one may.

    `scores` are by default the saved ones.
    """
    if gate is None:
        return None
    model, found = gate[1], _gains_of(gate, scores)
    if not found:
        return f"`{model}` was not compared with a plain baseline: run `python -m evidence.gate`"
    if mean(found) < MARGIN:
        above = f"{mean(found):.1f} points above a plain baseline, less than {MARGIN:g}"
        return f"`{model}`, trained in one place, is {above}"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="evidence.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(STEPS), help="one task")
    parser.add_argument("--models", nargs="+", choices=list(vit.SHAPES), default=["vit4"], help="those of `fashion`")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="the seeds of the splits and the training")
    parser.add_argument("--rate", type=float, help="score this learning rate, on the validation part of seed 0")
    parser.add_argument("--prepared", type=Path, default=OUT)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--json", type=Path, default=JSON)
    given = parser.parse_args(arguments)
    seeds = [TUNING_SEED] if given.rate else given.seeds
    tasks = (given.only,) if given.only else tuple(STEPS)
    if reason := next(filter(None, (missing(given.prepared, task, given.models) for task in tasks)), None):
        parser.exit(2, f"{reason}\n")
    for task in tasks:
        for seed in seeds:
            wanted = scores_of(given.prepared, given.cache, task, given.models, seed, given.rate)
            for name, score in wanted.items():
                done = [each for each in read(given.json) if (each.task, each.model, each.seed) == (task, name, seed)]
                if not done or (given.rate and name not in BASELINES and given.rate not in [d.setting for d in done]):
                    found = score()
                    add(given.json, found)
                    print(f"{task}, {name}, seed {seed}: {found.points:.1f} on the {found.part} part", flush=True)
    print("\n".join(lines(read(given.json))))
    if given.json == JSON:
        write_block(COMMAND, lines(read(JSON)))


if __name__ == "__main__":
    main()

"""Attacks on the updates of a site, by what a round sends, with and without privacy: `python -m attacks`.

Each attack gets the version, the settings of the run, and the bytes of an update that the product's own worker made
and uploaded. Data are made from a seed, and models from configs: no figure depends on a download.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import structlog
import torch

from attacks import canaries, closed_form, prompts, spans
from attacks.membership import membership
from attacks.site import FULL, ONE_STEP, PROMPTS, SCOPES, VALUE, WORDS, Release, Scope, Version, release
from attacks.subjects import CLASSES, pair_model, pairs, text_model, texts
from common.arrays import Array
from common.figures import OUT, Results
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Privacy
from tessera.worker.data.dataset import Dataset

EPSILONS = (None, 8.0, 1.0)
"""The claims; None is training without privacy."""
DELTA = 1e-5
CONFIDENCE = 0.95
CI_CONFIDENCE = 0.999
FAST = {**ONE_STEP, "learning_rate": 100.0}
"""The largest learning rate that a run may have, which lifts small gradients above the rounding of weights."""
SINGLE_TEXTS = {**ONE_STEP, "batch_size": 1, "epochs": 3, "learning_rate": 0.05}
ADAMW = {**ONE_STEP, "steps": 10, "epochs": None, "optimizer": "adamw", "learning_rate": 1e-3}
SHARES = (0.55, 0.25, 0.15, 0.05)
"""The shares of the labels that are counted."""
CHOSEN_STD = 0.3
"""The standard deviation of weights that a coordinator chooses, or that training leads to; a new BERT has 0.02."""
INDEPENDENT = 1e-3
"""The least share of the largest singular value that counts as a direction of its own."""
OWN_EXAMPLES = 8
NARROW = {"hidden_size": 32, "intermediate_size": 64}
AUDIT_SEEDS = (0, 1, 2, 3, 4)

Figure = Callable[[Release, Dataset], float | None]


@dataclass(frozen=True)
class Sizes:
    """How much is computed."""

    scopes: Sequence[Scope]
    epsilons: Sequence[float | None]
    trials: int
    canaries: int
    one_word: int
    pool: int
    models: int
    seeds: Sequence[int]


WHOLE = Sizes(SCOPES, EPSILONS, trials=3, canaries=300, one_word=2000, pool=120, models=8, seeds=AUDIT_SEEDS)
QUICK = Sizes(
    (FULL, VALUE, PROMPTS), EPSILONS[:2], trials=1, canaries=40, one_word=200, pool=20, models=3, seeds=(0,)
)


@dataclass(frozen=True)
class Attack:
    """A row of the table: an attack's figure on one scope and claim; None where it does not apply."""

    name: str
    unit: str
    run: Callable[[Scope, float | None], float | None]
    chance: float | None = None


# ---------------------------------------------------------------- recovery from few examples


@cache
def sent_names(name: str) -> tuple[str, ...]:
    """Return the names of the blocks that a scope sends, found by a release."""
    (scope,) = (each for each in SCOPES if each.name == name)
    version = pair_model(0) if scope is PROMPTS else text_model(0, **NARROW)
    return tuple(release(version, (pairs if scope is PROMPTS else texts)(0, 1), scope).steps)


def sent_blocks(version: Version, name: str) -> list[Block]:
    """Return the blocks of a version that a scope sends."""
    return [version.model.by_name[block] for block in sent_names(name)]


def privacy_of(epsilon: float | None, version: Version, scope: Scope) -> Privacy | None:
    """Return the privacy of a claim, with the clip norm that suits an attacker: the length of the shortest gradient
    among some examples of its own. A larger norm would add noise, and a smaller one would cut gradients too."""
    if epsilon is None:
        return None
    own = (pairs if scope is PROMPTS else texts)(12345, OWN_EXAMPLES)
    gradients = canaries.gradients_of(version, own, sent_blocks(version, scope.name))
    return Privacy(epsilon=epsilon, delta=DELTA, clip_norm=float(np.linalg.norm(gradients, axis=1).min()))


@dataclass(frozen=True)
class Recovery:
    """An attack on the update of a few examples."""

    examples: int
    of_text: Figure
    of_pairs: Figure | None = None
    craft: Callable[[Version], Version] = lambda version: version
    craft_pairs: Callable[[Version], Version] = lambda version: version
    std: float = 0.02
    rare: bool = False
    """True if one example alone has the last class."""
    training: Mapping[str, Any] = field(default_factory=lambda: FAST)

    def data(self, scope: Scope, seed: int) -> Dataset:
        made = (pairs if scope is PROMPTS else texts)(seed, self.examples, SHARES if self.examples > 1 else ())
        if self.rare:
            labels = made.tensors["labels"].clamp(max=CLASSES - 2)
            labels[seed % self.examples] = CLASSES - 1
            made.tensors["labels"] = labels
        return made

    def run(self, trials: int, scope: Scope, epsilon: float | None) -> float | None:
        """Return the mean figure over trials, each with another model, data and noise."""
        figure = self.of_pairs if scope is PROMPTS else self.of_text
        if figure is None:
            return None
        found = []
        for seed in range(trials):
            if scope is PROMPTS:
                version = self.craft_pairs(pair_model(seed))
            else:
                version = self.craft(text_model(seed, initializer_range=self.std))
            data, privacy = self.data(scope, seed), privacy_of(epsilon, version, scope)
            value = figure(release(version, data, scope, privacy=privacy, training=self.training, seed=seed), data)
            if value is None:
                return None
            found.append(value)
        return fmean(found)


def recoveries(trials: int) -> list[Attack]:
    def row(name: str, unit: str, attack: Recovery, chance: Callable[[Dataset], float] | float) -> Attack:
        if callable(chance):
            chance = fmean(chance(attack.data(FULL, seed)) for seed in range(trials))
        return Attack(name, unit, partial(attack.run, trials), chance)

    in_place, of_place = spans.words_in_place, spans.words_in_place_by_chance
    counts = Recovery(32, closed_form.label_counts, prompts.label_counts)
    crafted = replace(counts, craft=closed_form.for_label_counts, craft_pairs=prompts.for_label_counts)
    by_class = closed_form.label_counts_by_chance
    rare = Recovery(32, closed_form.rare_feature, craft=closed_form.for_one_example, rare=True)
    chosen = Recovery(4, in_place, std=CHOSEN_STD)
    return [
        row("words of 8 texts", "share", Recovery(8, closed_form.words), closed_form.words_by_chance),
        row("words in place, 1 text", "share", Recovery(1, in_place), of_place),
        row("words in place, 1 text, chosen weights", "share", replace(chosen, examples=1), of_place),
        row("words in place, 4 texts", "share", Recovery(4, in_place), of_place),
        row("words in place, 4 texts, chosen weights", "share", chosen, of_place),
        row("the same, 3 epochs of single texts", "share", replace(chosen, training=SINGLE_TEXTS), of_place),
        row("the same, 10 steps of AdamW", "share", replace(chosen, training=ADAMW), of_place),
        row("labels of 32 examples", "share", counts, by_class),
        row("labels of 32 examples, crafted version", "share", crafted, by_class),
        row("feature of 1 example", "cosine", Recovery(1, closed_form.feature, prompts.feature), 0.0),
        row("feature of 1 in 32, crafted version", "cosine", rare, 0.0),
    ]


# ---------------------------------------------------------------- members and canaries


def canary_audits(sizes: Sizes) -> Attack:
    """Return the audit with random examples as canaries."""
    prepared = cache(partial(canaries_of, sizes.canaries))

    def bound(scope: Scope, epsilon: float | None) -> float:
        version, data, gradients = prepared(scope.name)
        # Every gradient is clipped, so that each canary moves the sum by all that the guarantee allows.
        clip_norm = float(np.linalg.norm(gradients, axis=1).min()) / 2
        privacy = None if epsilon is None else Privacy(epsilon=epsilon, delta=canaries.DELTA, clip_norm=clip_norm)
        guesses = canaries.planned_guesses(data.examples, canaries.noise_of(privacy), canaries.DELTA, CONFIDENCE)
        evidence = partial(canaries.by_gradients, gradients)
        return canaries.audit(version, data, scope, privacy, guesses, 0, evidence, FAST).bound(CONFIDENCE)

    return Attack("canary audit", f"epsilon, {CONFIDENCE:.0%}", bound)


def canaries_of(most: int, name: str) -> tuple[Version, Dataset, Array]:
    """Return a version, the canaries for a scope, at most `most`, and their gradients.

    Few values distinguish few canaries. There are as many as have gradients in directions of their own, which an
    auditor knows from the version.
    """
    (scope,) = (each for each in SCOPES if each.name == name)
    version = pair_model(0) if scope is PROMPTS else text_model(0, **NARROW)
    data = (pairs if scope is PROMPTS else texts)(0, most)
    gradients = canaries.gradients_of(version, data, sent_blocks(version, name))
    weights = np.linalg.svd(gradients, compute_uv=False)
    count = int((weights > INDEPENDENT * weights[0]).sum())
    return version, data.rows(torch.arange(count)), gradients[:count]


def membership_attacks(sizes: Sizes) -> list[Attack]:
    known: dict[tuple[str, float | None], tuple[float, float]] = {}

    def both(scope: Scope, epsilon: float | None) -> tuple[float, float]:
        if (scope.name, epsilon) not in known:
            version = pair_model(0) if scope is PROMPTS else text_model(0, **NARROW)
            pool = (pairs if scope is PROMPTS else texts)(1, sizes.pool)
            privacy = privacy_of(epsilon, version, scope)
            found = membership(version, pool, scope, privacy, sizes.models, seed=1)
            known[scope.name, epsilon] = found.threshold, found.shadows
        return known[scope.name, epsilon]

    return [
        Attack("membership, loss threshold", "AUC", lambda *about: both(*about)[0], 0.5),
        Attack("membership, shadow models", "AUC", lambda *about: both(*about)[1], 0.5),
    ]


def strongest_audit(count: int, epsilon: float | None, seed: int, confidence: float) -> canaries.Audit:
    """Run the audit with canaries of one word each, with the guesses that promise the most at this confidence."""
    version, data = canaries.one_word_canaries(count, seed)
    privacy = one_word_privacy(epsilon)
    guesses = canaries.planned_guesses(count, canaries.noise_of(privacy), canaries.DELTA, confidence)
    return canaries.audit(version, data, WORDS, privacy, guesses, seed, canaries.by_rows, FAST)


def one_word_privacy(epsilon: float | None) -> Privacy | None:
    """Return the privacy of a claim for canaries of one word each."""
    # Far below the length of any gradient, which the normalization of small embeddings makes long.
    return None if epsilon is None else Privacy(epsilon=epsilon, delta=canaries.DELTA, clip_norm=1e-3)


# ---------------------------------------------------------------- the tables


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few scopes and small sizes: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sizes = QUICK if given.quick else WHOLE
    results = Results("attacks", "what an update reveals, by what is sent and at which epsilon")
    attacks = [canary_audits(sizes), *membership_attacks(sizes), *recoveries(sizes.trials)]
    lines = _table(results, sizes, attacks)
    lines += _strongest(results, sizes)
    print("\n" + "\n".join(lines))
    print(f"\nwritten to {results.write(given.out)}")


def _table(results: Results, sizes: Sizes, attacks: Sequence[Attack]) -> list[str]:
    """Run the attacks. Return a Markdown table: each cell has a figure for each claim."""
    claims = " / ".join("none" if epsilon is None else f"{epsilon:g}" for epsilon in sizes.epsilons)
    lines = [
        f"Each cell: without privacy, then at epsilon ({claims}); `-` where the attack does not apply.\n",
        "| attack | unit | chance | " + " | ".join(scope.name for scope in sizes.scopes) + " |",
        "|---|---|---|" + "---|" * len(sizes.scopes),
    ]
    for attack in attacks:
        cells = []
        for scope in sizes.scopes:
            figures = []
            for epsilon in sizes.epsilons:
                figure = attack.run(scope, epsilon)
                if figure is None:
                    break
                figures.append(figure)
                results.add(
                    attack=attack.name,
                    sent=scope.name,
                    epsilon="none" if epsilon is None else epsilon,
                    unit=attack.unit,
                    figure=figure,
                    chance=attack.chance,
                )
            cells.append(" / ".join(f"{figure:.2f}" for figure in figures) or "-")
        chance = "" if attack.chance is None else f"{attack.chance:.2f}"
        lines.append(f"| {attack.name} | {attack.unit} | {chance} | " + " | ".join(cells) + " |")
    return lines


def _strongest(results: Results, sizes: Sizes) -> list[str]:
    """Run the audit with canaries of one word each. Return a Markdown table."""
    seeds = ", ".join(map(str, sizes.seeds))
    lines = [
        f"\n{sizes.one_word} canaries of one word each, delta {canaries.DELTA:g}, one step; seeds {seeds}.\n",
        "| claim | confidence | right of guessed | lower bound of epsilon | promised by the noise |",
        "|---|---|---|---|---|",
    ]
    for epsilon in sizes.epsilons:
        for confidence in (CONFIDENCE, CI_CONFIDENCE):
            found = [strongest_audit(sizes.one_word, epsilon, seed, confidence) for seed in sizes.seeds]
            bounds = [audit.bound(confidence) for audit in found]
            for seed, audit, bound in zip(sizes.seeds, found, bounds, strict=True):
                results.add(
                    attack="canary audit, one word each",
                    epsilon="none" if epsilon is None else epsilon,
                    confidence=confidence,
                    seed=seed,
                    canaries=audit.canaries,
                    guesses=audit.guesses,
                    right=audit.right,
                    bound=bound,
                )
            right = ", ".join(f"{audit.right} of {audit.guesses}" for audit in found)
            shown = ", ".join(f"{bound:.2f}" for bound in bounds)
            noise, claim = canaries.noise_of(one_word_privacy(epsilon)), "none" if epsilon is None else f"{epsilon:g}"
            about = (sizes.one_word, found[0].guesses, noise, canaries.DELTA, confidence)
            promised = f"{canaries.promised_bound(*about):.2f}" if noise else ""
            lines.append(f"| {claim} | {confidence:.1%} | {right} | {shown} | {promised} |")
    return lines


if __name__ == "__main__":
    main()

"""The federations that tables name: sites with their examples, tests, and models to start from, all by seed."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import load_file, save_file

from common.modeling import init
from evidence.sources import emoji, fashion, lit, vit
from evidence.sources.cached import INPUTS
from evidence.sources.packages import digest_of
from evidence.sources.phrases import CHAPTERS, WORDINGS, Encoded, Indices, split
from evidence.sources.prepare import EMOJI, FASHION, MODEL, PHRASES
from evidence.strict import Frozen
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.schemes import dirichlet

PREPARE = "python -m evidence.sources.prepare"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


class NotPrepared(ValueError):
    """A federation without data, or without code."""


@dataclass(frozen=True)
class Federation:
    """A seed's data. No example is in two of its parts."""

    sites: Mapping[str, Dataset]
    """What each site trains on; its `held_out` examples are its own test."""
    validation: Mapping[str, Dataset]
    """What each site holds back for choices of settings."""
    tests: Mapping[str, Dataset]
    """The central test parts by name. Their examples are in random order."""

    def tuning(self) -> Mapping[str, Dataset]:
        """Return the sites with their validation in place of their test examples."""
        return {name: replace(data, held_out=self.validation[name]) for name, data in self.sites.items()}


@dataclass(frozen=True)
class Source:
    """A kind of federation, whose options are a table's."""

    files: tuple[str, ...]
    """The prepared files on which results depend."""
    command: str
    """What prepares them."""
    federation: Callable[[Path, int, Mapping[str, Any]], Federation]
    """A function of the prepared folder, the seed and the options."""
    model: Callable[[Path, int, str, Mapping[str, Any], Path], None]
    """A function that writes the model folder of a seed, of the prepared folder, the seed, the model's name, the
    options and the folder to write."""

    def inputs(self, prepared: Path) -> dict[str, str]:
        """Return the SHA-256 of each prepared file. Raises NotPrepared."""
        if missing := [name for name in self.files if not (prepared / name).is_file()]:
            raise NotPrepared(f"not prepared: {prepared} has no {', '.join(missing)}; run `{self.command}`")
        return {name: digest_of(prepared / name) for name in self.files}


def source(name: str) -> Source:
    """Return the federation that a table names. Raises NotPrepared."""
    if name not in SOURCES:
        raise NotPrepared(
            f"not prepared: no federation is called {name}; there are {', '.join(sorted(SOURCES))}. Add it to "
            "evidence/federations.py once its source is in evidence/sources, or leave its "
            "table out with --tables"
        )
    return SOURCES[name]


def start(kind: Source, prepared: Path, seed: int, model: str, options: Mapping[str, Any], models: Path) -> Path:
    """Return the model folder of a seed, which all arms with these options share, and make it if it is absent.

    Several processes may make it at the same time: the first one stays.
    """
    made_of = json.dumps([dict(options), kind.inputs(prepared)], sort_keys=True).encode()
    folder = models / f"{model}-{seed}-{hashlib.sha256(made_of).hexdigest()[:12]}"
    if not folder.exists():
        models.mkdir(parents=True, exist_ok=True)
        quiet = redirect_stdout(StringIO()), redirect_stderr(StringIO())
        with tempfile.TemporaryDirectory(dir=models) as name, quiet[0], quiet[1]:
            made = Path(name) / "model"
            kind.model(prepared, seed, model, options, made)
            with suppress(OSError):
                made.rename(folder)
    return folder


# ---------------------------------------------------------------- clinical phrases


class PhrasesOptions(Frozen):
    """Clinical phrases at sites of one wording each, which differ in their chapters."""

    sites_per_wording: int = Field(ge=1)
    examples_per_wording: int = Field(ge=1)
    """Of all sites of a wording together, with what they hold back."""
    alpha: float = Field(gt=0)
    """Of the Dirichlet distribution that divides each chapter among the sites of a wording."""
    validation_share: float = Field(gt=0, lt=0.5)
    test_share: float = Field(gt=0, lt=0.5)
    """Shares of each site's phrases."""
    site_validation: int = Field(default=1, ge=1)
    site_tests: int = Field(default=1, ge=1)
    """The least phrases of a site's validation and test. Those that its shares lack are others of its wording, and of
    its chapters in proportion."""
    unseen_tests: Annotated[int, Field(ge=1)] | Literal["all"]
    """Phrases of categories of which no site has any."""
    seen_tests: int = Field(ge=1)
    """Other phrases of categories of which some site has one."""


UNSEEN, SEEN = "unseen", "seen"
LORA = "lora-"
"""The start of a model's name that ends with the adapters' rank, or with the rank and `-all` for all matrices."""
LEAST_SITE = 8
"""Phrases of a site, so that it has some to train on, to validate and to test."""


def _phrases(prepared: Path, seed: int, options: Mapping[str, Any]) -> Federation:
    """Draw a seed's phrases. Raises ValueError if there are too few."""
    given, phrases = PhrasesOptions.model_validate(options), _encoded(prepared)
    parts = split(phrases, seed, 1, given.examples_per_wording)
    sites: dict[str, tuple[Indices, Indices, Indices]] = {}
    for wording in WORDINGS:
        rows = parts.sites[f"{wording}-1"]
        divided = dirichlet(phrases.labels[rows], given.sites_per_wording, given.alpha, seed)
        for number, places in enumerate(_levelled(divided)):
            sites[f"{wording}-{number + 1}"] = _held_back(rows[places], seed, given)
    known = np.isin(phrases.categories, phrases.categories[_all(sites, 0)])
    others = np.setdiff1d(np.flatnonzero(known), np.concatenate([_all(sites, place) for place in range(3)]))
    random = np.random.default_rng((seed, 4))
    for name, (train, validation, test) in sites.items():
        alike = others[phrases.wordings[others] == WORDINGS.index(name.rpartition("-")[0])]
        site = np.concatenate((train, validation, test))
        lacking = [max(0, given.site_validation - len(validation)), max(0, given.site_tests - len(test))]
        more = _like(phrases.labels, alike, site, sum(lacking), random)
        first, second = np.split(more, lacking[:1])
        sites[name] = train, np.append(validation, first), np.append(test, second)
        others = np.setdiff1d(others, more)
    random = np.random.default_rng((seed, 1))
    tests = {
        UNSEEN: _drawn(
            parts.test, len(parts.test) if given.unseen_tests == "all" else given.unseen_tests, random, "unseen"
        ),
        SEEN: _drawn(others, given.seen_tests, random, "seen"),
    }
    return Federation(
        {name: replace(phrases.dataset(a), held_out=phrases.dataset(c)) for name, (a, _, c) in sites.items()},
        {name: phrases.dataset(b) for name, (_, b, _) in sites.items()},
        {name: phrases.dataset(rows) for name, rows in tests.items()},
    )


@lru_cache(maxsize=1)
def _encoded(prepared: Path) -> Encoded:
    return Encoded.load(prepared / PHRASES)


def _all(sites: Mapping[str, tuple[Indices, Indices, Indices]], place: int) -> Indices:
    return np.concatenate([each[place] for each in sites.values()])


def _levelled(sites: list[Indices]) -> list[Indices]:
    """Return the sites, of which those that are too small get the last examples of the largest ones."""
    sites = list(sites)
    while min(map(len, sites)) < LEAST_SITE:
        small, large = (sites.index(each(sites, key=len)) for each in (min, max))
        sites[small], sites[large] = np.append(sites[small], sites[large][-1]), sites[large][:-1]
    return sites


def _held_back(rows: Indices, seed: int, options: PhrasesOptions) -> tuple[Indices, Indices, Indices]:
    """Divide a site's rows into those to train on, to validate and to test."""
    rows = np.random.default_rng((seed, 2)).permutation(rows)
    validation, test = (max(1, round(share * len(rows))) for share in (options.validation_share, options.test_share))
    return rows[validation + test :], rows[:validation], rows[validation : validation + test]


def _like(labels: Indices, rows: Indices, site: Indices, count: int, random: np.random.Generator) -> Indices:
    """Draw some of the rows, whose classes are in proportions of a site's."""
    shares = np.bincount(labels[site], minlength=CHAPTERS) / np.bincount(labels[rows], minlength=CHAPTERS).clip(1)
    weights = shares[labels[rows]]
    count = min(count, int(np.count_nonzero(weights)))
    return random.choice(rows, count, replace=False, p=weights / weights.sum()) if count > 0 else rows[:0]


def _drawn(rows: Indices, count: int, random: np.random.Generator, name: str) -> Indices:
    if len(rows) < count:
        raise ValueError(f"only {len(rows)} examples are {name}, fewer than {count}: lower their number")
    return random.permutation(rows)[:count]


def _phrases_model(prepared: Path, seed: int, model: str, options: Mapping[str, Any], folder: Path) -> None:
    del options
    adapters: dict[str, Any] = {}
    if model.startswith(LORA):
        rank, _, everywhere = model.removeprefix(LORA).partition("-")
        adapters = {"lora_rank": int(rank)}
        adapters |= {"lora_roles": "query,key,value,output,mlp"} if everywhere == "all" else {}
    elif model != "plain":
        raise ValueError(f"no model of the phrases is called {model}: use plain, {LORA}RANK or {LORA}RANK-all")
    init(
        folder,
        config=str(prepared / MODEL),
        head="text-classification",
        seed=seed,
        labels=str(CHAPTERS),
        dtype="float32",
        **adapters,
    )


# ---------------------------------------------------------------- photographs of clothes


class FashionOptions(Frozen):
    """Items of Fashion-MNIST at sites that differ in their classes."""

    model: str
    """A prepared vision model, without the classifier that it was adapted with."""
    sites: int = Field(ge=1)
    alpha: float = Field(gt=0)
    examples: int = Field(ge=1)
    """That each site trains on."""
    held_out: int = Field(ge=1)
    """Of each site, for choices of settings, and as many for its own test."""
    tests: int = Field(ge=1)
    """Of the official test part."""


def _fashion(prepared: Path, seed: int, options: Mapping[str, Any]) -> Federation:
    given, items = FashionOptions.model_validate(options), _items(prepared)
    side = vit.SHAPES[given.model].side
    parts = fashion.split(items, seed, given.sites, given.alpha, given.examples, given.held_out)
    return Federation(
        {
            name: replace(items.dataset(part.train, side), held_out=items.dataset(part.test, side))
            for name, part in parts.items()
        },
        {name: items.dataset(part.validation, side) for name, part in parts.items()},
        {"test": items.dataset(_drawn(items.test, given.tests, np.random.default_rng((seed, 1)), "test"), side)},
    )


@lru_cache(maxsize=1)
def _items(prepared: Path) -> fashion.Fashion:
    return fashion.Fashion.load(prepared / FASHION)


def _fashion_model(prepared: Path, seed: int, model: str, options: Mapping[str, Any], folder: Path) -> None:
    """Write a model with a new classifier. Raises NotPrepared."""
    del model
    base = prepared / FashionOptions.model_validate(options).model
    if not (base / WEIGHTS).is_file():
        raise NotPrepared(f"not prepared: {base}; run `{PREPARE} --only fashion --models {base.name}`")
    backbone = {name: each for name, each in load_file(base / WEIGHTS).items() if not name.startswith("classifier.")}
    with tempfile.TemporaryDirectory(dir=folder.parent) as headless:
        shutil.copy(base / CONFIG, headless)
        save_file(backbone, Path(headless) / WEIGHTS, {"format": "pt"})
        init(
            folder,
            config=headless,
            head="image-classification",
            seed=seed,
            labels=fashion.CLASSES,
            dtype="float32",
        )


# ---------------------------------------------------------------- emoji


class EmojiOptions(Frozen):
    """Drawings of emoji at sites that differ in their vendor, in their classes, or in both."""

    sites_per_vendor: int = Field(ge=1)
    shift: emoji.Shift
    alpha: float = Field(gt=0)
    prompts: int = Field(ge=2)
    """Tokens of the vision prompts."""
    caption: str
    """The words whose embeddings the text prompts start from."""
    tests: int = Field(ge=1)
    """Drawings of each site's test and validation, drawn with the site's weights from its vendors'."""


DEEP = "deep-"
"""The start of a model's name that ends with the number of layers with prompts of their own."""
TEXT_PROMPTS = "text-prompts"
"""The name of the model without vision prompts, which cost it half of what it knows if they do not train."""


def _emoji(prepared: Path, seed: int, options: Mapping[str, Any]) -> Federation:
    given, drawings = EmojiOptions.model_validate(options), _drawings(prepared)
    tokens = torch.from_numpy(np.load(prepared / lit.LIT.name / lit.CLASS_TOKENS))
    # Without the padding that all captions have.
    tokens = tokens[:, : int((tokens != 0).sum(dim=1).max())]
    common = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    random = np.random.default_rng((seed, 1))

    def of(rows: Indices) -> Dataset:
        return replace(drawings.dataset(rows), common=common)

    def weighted(rows: Indices, weights: NDArray[np.float64]) -> Dataset:
        # Evenly spaced points on the sum of the weights: each drawing occurs as often as its weight says, up to one.
        points = (np.arange(given.tests) + random.random()) / given.tests
        return of(rows[np.searchsorted(np.cumsum(weights), points).clip(max=len(rows) - 1)])

    sites, validation = {}, {}
    for name, site in emoji.split(drawings, seed, given.shift, given.sites_per_vendor, given.alpha).items():
        sites[name] = replace(of(site.parts.train), held_out=weighted(site.parts.test, site.test_weights))
        validation[name] = weighted(site.parts.validation, site.validation_weights)
    return Federation(sites, validation, {})


@lru_cache(maxsize=1)
def _drawings(prepared: Path) -> emoji.Emoji:
    return emoji.Emoji.load(prepared / EMOJI)


def _emoji_model(prepared: Path, seed: int, model: str, options: Mapping[str, Any], folder: Path) -> None:
    given, depth = EmojiOptions.model_validate(options), 1
    if model.startswith(DEEP):
        depth = int(model.removeprefix(DEEP))
    elif model not in ("plain", TEXT_PROMPTS):
        raise ValueError(f"no model of the emoji is called {model}: use plain, {TEXT_PROMPTS} or {DEEP}LAYERS")
    init(
        folder,
        config=str(prepared / lit.LIT.name),
        head="contrastive",
        seed=seed,
        dtype="float32",
        vision_prompts=0 if model == TEXT_PROMPTS else given.prompts,
        text_prompt_from=given.caption,
        prompt_depth=depth,
    )


SOURCES: Mapping[str, Source] = {
    "phrases": Source(
        (PHRASES, f"{MODEL}/{CONFIG}", f"{MODEL}/{WEIGHTS}"), f"{PREPARE} --only text", _phrases, _phrases_model
    ),
    # Models that were trained here differ by rounding from machine to machine. What they were made of does not.
    "fashion": Source((FASHION,), f"{PREPARE} --only fashion", _fashion, _fashion_model),
    "emoji": Source((EMOJI, f"{lit.LIT.name}/{INPUTS}"), f"{PREPARE} --only emoji", _emoji, _emoji_model),
}

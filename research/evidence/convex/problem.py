"""Two problems of known minimum: the head of a transformer on frozen features, at sites that differ.

The loss is logistic regression with weight decay. `phrases` has the [CLS] features that MiniLM computes for clinical
phrases; `images` has those of a small random vision transformer for random images, and needs no prepared files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import AutoModel, PreTrainedModel

from common.arrays import Array
from evidence.sources.phrases import CHAPTERS, WORDINGS, Encoded
from evidence.sources.prepare import MODEL, PHRASES
from tessera.shared.model.spec import Head
from tessera.simulation import Weights
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import instantiate

HEAD = ("classifier.weight", "classifier.bias")
STEP_SECONDS = (4.0, 1.0, 2.0)
"""Seconds of a local step at the first site, the second, the third, and again from the first."""
SKEW = 0.3
"""Of the Dirichlet distribution from which each site of `phrases` draws the shares of its chapters."""
EXACT = 1e-11
"""The largest element of the gradient at a minimum."""
PIECE = 256
KINDS = ("weight", "bias")


@dataclass(frozen=True)
class Problem:
    """A head's problem. By site: features with a constant 1, float64 [examples, width + 1], and one-hot labels,
    float64 [examples, classes]."""

    start: Weights
    data: Mapping[str, Dataset]
    features: Mapping[str, Array]
    labels: Mapping[str, Array]
    rate: float
    """The learning rate of full batches."""
    decay: float
    max_examples: int
    """The run's cap, fixed for all rounds: a site of more examples weighs as one of this number."""
    minima: dict[str, Array] = field(init=False)
    """The head at which each objective is least."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "minima", {name: self.minimum(weights) for name, weights in self.objectives.items()})

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        config: Mapping[str, Any],
        head: Head,
        data: Mapping[str, Dataset],
        **settings: Any,
    ) -> Problem:
        """Return the problem of a model's head. The features are the inputs of its module `classifier`."""
        classes = int(model.config.num_labels or 0)
        features, labels = {}, {}
        for name, dataset in data.items():
            (batch,) = dataset.batches(None, None)
            inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
            found = _inputs_of(model, model.get_submodule("classifier"), inputs).double().numpy()
            features[name] = np.concatenate([found, np.ones((len(found), 1))], axis=1)
            labels[name] = np.eye(classes)[batch["labels"].numpy()]
        return cls(Weights.of(model, config, head), data, features, labels, **settings)

    @property
    def sites(self) -> list[str]:
        return list(self.data)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a head: classes, width + 1."""
        site = self.sites[0]
        return self.labels[site].shape[1], self.features[site].shape[1]

    @property
    def step_seconds(self) -> dict[str, float]:
        """The seconds of a local step at each site, in the clock of the study."""
        return dict(zip(self.sites, cycle(STEP_SECONDS), strict=False))

    @property
    def objectives(self) -> dict[str, dict[str, float]]:
        """The weights of the sites' losses in the objective that a method minimises."""
        sizes = {site: float(min(len(labels), self.max_examples)) for site, labels in self.labels.items()}
        return {"equal": dict.fromkeys(self.sites, 1.0), "examples": sizes}

    def head(self, blocks: Mapping[str, Array]) -> Array:
        """Return the head as one matrix, float64 [classes, width + 1]."""
        weight, bias = (blocks[name].astype(np.float64) for name in HEAD)
        return np.concatenate([weight, bias[:, None]], axis=1)

    def probabilities(self, site: str, head: Array) -> Array:
        """Return the probabilities of a site's examples, [examples, classes]."""
        logits = self.features[site] @ head.T
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: Array = raised / raised.sum(axis=1, keepdims=True)
        return shares

    def gradient(self, site: str, head: Array) -> Array:
        """Return the gradient of the site's mean loss with weight decay, in the shape of a head."""
        wrong = self.probabilities(site, head) - self.labels[site]
        slope: Array = wrong.T @ self.features[site] / len(wrong) + self.decay * head
        return slope

    def curved(self, site: str, shares: Array, direction: Array) -> Array:
        """Return the Hessian of the site's loss times a direction. `shares` are the probabilities at the head."""
        along = self.features[site] @ direction.T
        turned = shares * (along - (shares * along).sum(axis=1, keepdims=True))
        found: Array = turned.T @ self.features[site] / len(turned) + self.decay * direction
        return found

    def minimum(self, weights: Mapping[str, float]) -> Array:
        """Return the head at which the weighted mean of the sites' losses is least, to rounding.

        Newton's method; its equations are solved by conjugate gradients.
        """
        whole = sum(weights.values())
        parts = {site: weight / whole for site, weight in weights.items()}
        head = np.zeros(self.shape)
        for _ in range(50):
            slope = np.sum([part * self.gradient(site, head) for site, part in parts.items()], axis=0)
            if np.abs(slope).max() < EXACT:
                return head
            head = head - self._solved(parts, head, slope)
        raise ArithmeticError(f"Newton's method left a gradient of {np.abs(slope).max():.1e}: the loss is not convex")

    def _solved(self, parts: Mapping[str, float], head: Array, slope: Array) -> Array:
        """Return the direction whose product with the Hessian is `slope`, to a part in 1e8."""
        shares = {site: self.probabilities(site, head) for site in parts}
        found, left = np.zeros_like(slope), slope.copy()
        direction, size = left.copy(), float((left**2).sum())
        least = 1e-16 * size
        while size > least:
            bent = np.sum([p * self.curved(site, shares[site], direction) for site, p in parts.items()], axis=0)
            length = size / float((direction * bent).sum())
            found, left = found + length * direction, left - length * bent
            size, before = float((left**2).sum()), size
            direction = left + size / before * direction
        return found


def _inputs_of(model: PreTrainedModel, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the input of one of the model's modules for a batch."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        handle.remove()
    return seen[0]


# ---------------------------------------------------------------- images

IMAGE_SIZES = {"east": 8, "north": 16, "south": 40, "west": 80}
CLASSES = 3
VIT: Mapping[str, Any] = {
    "model_type": "vit", "image_size": 4, "patch_size": 2, "num_channels": 1, "hidden_size": 8,
    "num_labels": CLASSES, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def images(seed: int = 0) -> Problem:
    """Return the small problem: 8 to 80 random images at four sites."""
    model = instantiate(VIT, "image-classification", seed=seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # As it is initialised, every image has nearly the same features.
        for name, parameter in model.base_model.named_parameters():
            if "layernorm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) / 2)
    data = {name: _random_images(name, seed) for name in IMAGE_SIZES}
    return Problem.of(model, VIT, "image-classification", data, rate=0.2, decay=0.3, max_examples=60)


def _random_images(site: str, seed: int) -> Dataset:
    """Return images and labels, of which most are of one class that differs from its neighbours'."""
    place = list(IMAGE_SIZES).index(site)
    random = torch.Generator().manual_seed(100 * seed + place)
    count = IMAGE_SIZES[site]
    pixels = torch.randn(count, 1, 4, 4, generator=random) + torch.randn(1, 1, 4, 4, generator=random) / 2
    own = torch.rand(count, generator=random) < 0.7
    labels = torch.where(own, place % CLASSES, torch.randint(0, CLASSES, (count,), generator=random))
    return Dataset({"pixel_values": pixels, "labels": labels})


# ---------------------------------------------------------------- phrases

PHRASE_SIZES = (10, 20, 40, 80, 160)


def phrases(prepared: Path, seed: int = 0, sizes: tuple[int, ...] = PHRASE_SIZES) -> Problem:
    """Return the problem of MiniLM's frozen features: phrases of five sites, one wording each.

    `prepared` is the folder of `evidence.sources.prepare`. The model's embedding table has the features of
    the phrases, so that a token stands for a phrase and a step does not compute MiniLM again.
    """
    encoded = Encoded.load(prepared / PHRASES)
    wordings = list(WORDINGS)
    names = [f"{wordings[place % len(wordings)]}-{size}" for place, size in enumerate(sizes)]
    rows = _drawn(encoded, dict(zip(names, sizes, strict=True)), seed)
    whole = AutoModel.from_pretrained(prepared / MODEL, dtype=torch.float32).eval()
    model, config = one_token_model(whole, encoded.tokens[np.concatenate(list(rows.values()))], seed)
    data, begin = {}, 0
    for name, of_site in rows.items():
        places = torch.arange(begin, begin + len(of_site))[:, None]
        labels = torch.from_numpy(encoded.labels[of_site])
        data[name] = Dataset({"input_ids": places, "attention_mask": torch.ones_like(places), "labels": labels})
        begin += len(of_site)
    return Problem.of(model, config, "text-classification", data, rate=0.25, decay=0.2, max_examples=max(sizes) // 2)


def _drawn(encoded: Encoded, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Return each site's rows: of one wording, in shares of chapters that differ from site to site."""
    random = np.random.default_rng(seed)
    free = np.ones(len(encoded.labels), dtype=bool)
    found = {}
    for place, (name, size) in enumerate(sizes.items()):
        shares = random.dirichlet(np.full(CHAPTERS, SKEW))
        rows = np.flatnonzero(free & (encoded.wordings == place % len(WORDINGS)))
        counts = np.bincount(encoded.labels[rows], minlength=CHAPTERS)
        # A small share of each chapter, so that there are enough rows to draw from.
        weights = ((shares + 1e-3) / np.maximum(counts, 1))[encoded.labels[rows]]
        found[name] = np.sort(random.choice(rows, size, replace=False, p=weights / weights.sum()))
        free[found[name]] = False
    return found


def one_token_model(whole: PreTrainedModel, tokens: Array, seed: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a classifier that computes for token i what a BERT and a new head compute for row i of `tokens`, int64
    [rows, width], and its config. The pooler of the BERT must be the identity.

    Its one layer adds zero, so that the last layer norm, which is the BERT's, reads the embedding as it is.
    """
    last = f"encoder.layer.{whole.config.num_hidden_layers - 1}.output.LayerNorm"
    features = []
    for start in range(0, len(tokens), PIECE):
        piece = torch.from_numpy(tokens[start : start + PIECE])
        batch = {"input_ids": piece, "attention_mask": (piece != 0).long()}
        read = _inputs_of(whole, whole.get_submodule(last), batch)[:, 0]
        # Before its weights, of which some are zero.
        features.append(layer_norm(read, read.shape[-1:], eps=whole.config.layer_norm_eps))
    table = torch.cat(features)
    config = {
        "model_type": "bert", "vocab_size": len(table), "hidden_size": table.shape[1], "num_hidden_layers": 1,
        "num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 1, "type_vocab_size": 1,
        "num_labels": CHAPTERS, "layer_norm_eps": whole.config.layer_norm_eps, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0,
    }  # fmt: skip
    model = instantiate(config, "text-classification", seed=seed)
    parameters, layer = dict(model.named_parameters()), "bert.encoder.layer.0"
    dense = [
        f"{path}.{kind}" for path in (f"{layer}.attention.output.dense", f"{layer}.output.dense") for kind in KINDS
    ]
    embeddings = [f"bert.embeddings.{kind}_embeddings.weight" for kind in ("position", "token_type")]
    with torch.no_grad():
        for name in (*dense, *embeddings, "bert.pooler.dense.bias"):
            parameters[name].zero_()
        for kind in KINDS:
            parameters[f"{layer}.output.LayerNorm.{kind}"].copy_(whole.get_parameter(f"{last}.{kind}"))
        parameters["bert.embeddings.word_embeddings.weight"].copy_(table)
        parameters["bert.pooler.dense.weight"].copy_(torch.eye(table.shape[1]))
    return model, config

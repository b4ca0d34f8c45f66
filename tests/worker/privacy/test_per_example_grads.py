"""The gradients of single examples: each way gives what batches of one give, or is not taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.shared.model.selectors import Selector, all_but, roles
from tessera.shared.model.spec import Head
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward, losses
from tessera.worker.privacy.factors import Factors
from tessera.worker.privacy.per_example_grads import (
    BatchedGradients,
    HookedGradients,
    OneByOne,
    PerExample,
    agree,
    as_rows,
    fastest,
    isolate_examples,
    tensor_norms,
)
from tessera.worker.training.freeze import Freeze
from tests.support.tasks import VIT

TEXT = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
BERT = {"model_type": "bert", **TEXT, "num_labels": 3}
DISTILBERT = {
    "model_type": "distilbert", "vocab_size": 30, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
    "max_position_embeddings": 12, "num_labels": 3,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 30, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LLAMA = {"model_type": "llama", **TEXT, "num_key_value_heads": 1}
T5 = {
    "model_type": "t5", "vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 2,
}  # fmt: skip
EXAMPLES = 5


def data(head: Head) -> dict[str, Tensor]:
    """Five examples; texts are of different lengths, so that a mean over all tokens is no mean over examples."""
    noise = torch.Generator().manual_seed(3)
    classes = torch.randint(0, 3, (EXAMPLES,), generator=noise)
    if head == "image-classification":
        return {"pixel_values": torch.randn(EXAMPLES, 1, 8, 8, generator=noise), "labels": classes}
    words = torch.randint(3, 30, (EXAMPLES, 8), generator=noise)
    mask = (torch.arange(8) < torch.tensor([[8], [5], [3], [7], [8]])).long()
    labels = (words % 3 if head == "token-classification" else words).masked_fill(mask == 0, -100)
    labels = classes if head == "text-classification" else labels
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


class Case:
    """A model, what trains of it, its losses, and some data."""

    def __init__(self, config: Mapping[str, Any], head: Head, train: Selector | None = None) -> None:
        self.model = instantiate(dict(config), head, seed=1).train()
        table = block_table(self.model)
        self.freeze = Freeze(self.model, train.resolve(table) if train else table)
        self.parameters = self.freeze.parameters
        self.batch = data(head)
        self.loss = lambda batch: forward(self.model, head, batch).loss
        self.losses = lambda batch: losses(forward(self.model, head, batch), head, batch["labels"])

    def alone(self) -> list[Tensor]:
        """The gradients of batches of one, by plain `backward`."""
        rows = []
        for row in range(EXAMPLES):
            self.model.zero_grad()
            self.loss({name: tensor[row : row + 1] for name, tensor in self.batch.items()}).backward()
            rows.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters])
        self.model.zero_grad()
        return [torch.stack(each) for each in zip(*rows, strict=True)]

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that may be factors, as in a private step."""
        return [each for each in self.parameters if each.ndim == 2 and not self.freeze.in_part(each)]

    @contextmanager
    def fastest(self, *, factored: bool = False) -> Iterator[PerExample]:
        sample = {name: tensor[:2] for name, tensor in self.batch.items()}
        matrices = self.matrices() if factored else []
        way = fastest(self.model, self.loss, self.losses, self.parameters, {}, sample, factored=matrices)
        yield way
        way.close()


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest gradient."""
    largest = max(float(each.abs().max()) for each in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


@pytest.mark.parametrize("factored", [False, True], ids=["whole", "factored"])
@pytest.mark.parametrize(
    ("way", "config", "head", "train"),
    [
        ("opacus", VIT, "image-classification", None),
        ("opacus", VIT, "image-classification", roles("value", "head")),
        (
            "opacus",
            {**VIT, "attention_probs_dropout_prob": 0.0, "num_labels": EXAMPLES},
            "image-classification",
            None,
        ),
        ("opacus", BERT, "text-classification", None),  # its position table is looked up once for a whole batch
        pytest.param(
            "opacus", BERT, "token-classification", all_but("embedding", "query", "key"), marks=pytest.mark.long
        ),
        ("opacus", DISTILBERT, "text-classification", None),  # the same, and it takes no position_ids
        ("opacus", GPT2, "causal-lm", None),  # Conv1D, tied embeddings, position table
        ("opacus", GPT2, "causal-lm", roles("value")),  # slices of a fused matrix
        ("opacus", LLAMA, "causal-lm", None),  # RMSNorm that is not torch's, grouped queries
        ("one by one", {"model_type": "bert", **TEXT}, "masked-lm", None),  # a bias beside the tied decoder
        ("one by one", T5, "seq2seq-lm", None),  # relative positions have no row for each example
    ],
)
def test_each_examples_gradient_is_that_of_a_batch_of_one(
    way: str, config: dict[str, Any], head: Head, train: Selector | None, *, factored: bool
) -> None:
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    without_dropout |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0, "dropout_rate": 0.0}
    without_dropout |= {"attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    known = {key: value for key, value in without_dropout.items() if config["model_type"] != "llama"}
    case = Case({**known, **config}, head, train)
    expected = case.alone()
    with case.fastest(factored=factored) as chosen:
        assert chosen.name == way
        found = chosen(case.batch)
        assert error(as_rows(found), expected) < 1e-6
        # What is clipped and added up is what is compared above.
        assert torch.allclose(tensor_norms(found), tensor_norms(expected), rtol=1e-4, atol=1e-6)
        # GPT-2's value blocks are slices, and T5 and masked language models take their examples one by one.
        possible = factored and way == "opacus" and any(each.shape != (16, 16) for each in case.matrices())
        assert any(isinstance(each, Factors) for each in found) == possible


def test_the_factors_of_layers_that_share_a_tensor_are_multiplied_out() -> None:
    case = Case({**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, "causal-lm")
    with case.fastest(factored=True) as chosen:
        found = dict(zip(case.parameters, chosen(case.batch), strict=True))
    assert isinstance(found[case.model.transformer.wte.weight], Tensor)
    assert isinstance(found[case.model.transformer.wpe.weight], Factors)


def test_the_batched_gradient_function_is_right_too() -> None:
    case = Case({**VIT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "image-classification")
    batched = BatchedGradients(case.model, case.loss, case.parameters, {})
    assert error(batched(case.batch), case.alone()) < 1e-6


def test_dropout_is_drawn_for_each_example_by_itself() -> None:
    case = Case({**VIT, "hidden_dropout_prob": 0.5}, "image-classification")
    twice = {name: tensor[[0, 0]] for name, tensor in case.batch.items()}
    first, second = BatchedGradients(case.model, case.loss, case.parameters, {})(twice)[0]
    assert not torch.equal(first, second)


def test_a_layer_that_opacus_runs_twice_may_not_drop_out() -> None:
    # The class token and the positions of a ViT belong to a module that also drops out.
    case = Case({**VIT, "hidden_dropout_prob": 0.5}, "image-classification")
    with pytest.raises(NotImplementedError, match="dropout within"):
        HookedGradients(case.model, case.losses, case.parameters)
    with case.fastest() as chosen:
        assert chosen.name == "vmap"


def test_neither_dropout_nor_statistics_of_batches_mix_examples() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.5)
    )
    isolate_examples(model, list(model.parameters()))
    assert [module.training for module in model] == [True, False, False, False]


@pytest.mark.parametrize("factored", [False, True], ids=["whole", "factored"])
def test_choosing_and_closing_leave_no_trace_in_the_model(*, factored: bool) -> None:
    case = Case(VIT, "image-classification")
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in case.model.named_modules()}
    with case.fastest(factored=factored) as chosen:
        chosen(case.batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())
    assert {name: set(vars(module)) for name, module in case.model.named_modules()} == attributes
    assert all(not vars(parameter) and parameter.grad is None for parameter in case.model.parameters())
    assert all(not module._forward_hooks and not module._backward_hooks for module in case.model.modules())
    assert all(module.training for module in case.model.modules())


# ---------------------------------------------------------------- what Opacus would get wrong without a sound


class Prompted(nn.Module):
    """A bare-bones CLIP with a text prompt: classes are texts [classes, width], and the first axis of what goes
    through the text side counts classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.texts = nn.Parameter(torch.randn(classes, 4), requires_grad=False)
        self.prompt = nn.Linear(4, 4)
        self.image = nn.Linear(6, 4)

    def logits(self, pixels: Tensor) -> Tensor:
        return self.image(pixels) @ self.prompt(self.texts).T


@pytest.mark.parametrize("factored", [False, True], ids=["whole", "factored"])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_an_axis_that_counts_classes_is_told_from_one_that_counts_examples(classes: int, *, factored: bool) -> None:
    model = Prompted(classes)
    noise = torch.Generator().manual_seed(1)
    batch = {"pixels": torch.randn(classes, 6, generator=noise), "labels": torch.arange(classes)}
    each = partial(nn.functional.cross_entropy, reduction="none")
    loss = lambda b: nn.functional.cross_entropy(model.logits(b["pixels"]), b["labels"])  # noqa: E731
    parameters = [*model.prompt.parameters(), *model.image.parameters()]
    # As many examples as classes: the shapes fit, and the sums are right.
    matrices = [model.prompt.weight, model.image.weight] if factored else []
    hooked = HookedGradients(
        model, lambda b: each(model.logits(b["pixels"]), b["labels"]), parameters, factored=matrices
    )
    false = as_rows(hooked(batch))
    hooked.close()
    true = OneByOne(loss, parameters, {})(batch)
    assert [one.shape for one in false] == [one.shape for one in true]
    assert torch.allclose(false[0].sum(0), true[0].sum(0), atol=1e-5)
    assert error(false, true) > 0.1
    sample = {name: tensor[:2] for name, tensor in batch.items()}
    losses_of = lambda b: each(model.logits(b["pixels"]), b["labels"])  # noqa: E731
    way = fastest(model, loss, losses_of, parameters, {}, sample, factored=matrices)
    assert way.name == "vmap"
    assert error(as_rows(way(batch)), true) < 1e-6


def test_a_term_that_is_zero_where_training_starts_is_not_overlooked() -> None:
    # The distance to the start has no gradient at the start, and Opacus never sees it: there they agree.
    case = Case({**VIT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "image-classification")
    start = [parameter.detach().clone() for parameter in case.parameters]

    def proximal(batch: Mapping[str, Tensor]) -> Tensor:
        return sum(((p - s).square().sum() for p, s in zip(case.parameters, start, strict=True)), case.loss(batch))

    true = OneByOne(proximal, case.parameters, {})(case.batch)
    hooked = HookedGradients(case.model, case.losses, case.parameters)
    assert agree(as_rows(hooked(case.batch)), true)
    hooked.close()
    sample = {name: tensor[:2] for name, tensor in case.batch.items()}
    assert fastest(case.model, proximal, case.losses, case.parameters, {}, sample).name != "opacus"


class Leaky(nn.Module):
    """Uses a layer's tensor past the layer, where no hook sees it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def logits(self, pixels: Tensor) -> Tensor:
        return self.layer(pixels) + nn.functional.linear(pixels, self.layer.weight).square()


@pytest.mark.parametrize("factored", [False, True], ids=["whole", "factored"])
def test_a_tensor_that_is_used_outside_its_layer_is_noticed_at_every_step(*, factored: bool) -> None:
    model = Leaky()
    each = partial(nn.functional.cross_entropy, reduction="none")
    matrices = [model.layer.weight] if factored else []
    parameters = list(model.parameters())
    hooked = HookedGradients(model, lambda b: each(model.logits(b["x"]), b["labels"]), parameters, factored=matrices)
    with pytest.raises(NotImplementedError, match="do not add up"):
        hooked({"x": torch.ones(2, 6), "labels": torch.tensor([0, 1])})


def test_a_models_own_loss_is_a_mean_over_the_tokens_of_all_examples() -> None:
    # Hence what each example adds to it depends on how long the others are, which no clipping bounds.
    case = Case(GPT2, "causal-lm")
    case.model.eval()
    alone = [case.loss({n: t[row : row + 1] for n, t in case.batch.items()}) for row in range(EXAMPLES)]
    assert case.losses(case.batch).detach() == pytest.approx(torch.stack(alone).detach(), rel=1e-5)
    assert float(case.loss(case.batch).detach()) != pytest.approx(float(torch.stack(alone).detach().mean()), rel=1e-3)


@pytest.mark.parametrize("factored", [False, True], ids=["whole", "factored"])
def test_a_word_that_is_the_padding_has_no_gradient_as_by_autograd(*, factored: bool) -> None:
    """The synthetic examples of texts consist of it, by which the way is chosen."""
    case = Case(BERT, "text-classification")
    case.batch["input_ids"] = torch.full_like(case.batch["input_ids"], BERT["pad_token_id"])
    case.batch["attention_mask"] = torch.ones_like(case.batch["input_ids"])
    isolate_examples(case.model, case.parameters)
    expected = case.alone()
    with case.fastest(factored=factored) as way:
        assert way.name == "opacus"
        assert error(as_rows(way(case.batch)), expected) < 1e-5


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-15, 1e-30, 1e20, 3e30])
@pytest.mark.parametrize("count", [1, 255, 256, 1000, 70_000])
def test_norms_are_never_less_than_the_exact_ones_and_hardly_more(scale: float, count: int) -> None:
    dice = torch.Generator().manual_seed(count)
    rows = torch.randn(4, count, generator=dice) * scale
    rows[1] = 0.0
    rows[2, 1:] *= 1e-6
    exact = torch.linalg.vector_norm(rows.double(), dim=1)
    (found,) = tensor_norms([rows])
    assert bool((found >= exact * (1 - 1e-15)).all())
    assert bool((found <= exact * (1 + 2.0**-15)).all())


@pytest.mark.parametrize("count", [256, 1000, 70_000])
def test_no_row_s_norm_depends_on_other_rows(count: int) -> None:
    """Otherwise one example would change how all others are clipped."""
    rows = torch.randn(40, count, generator=torch.Generator().manual_seed(count))
    rows[3], rows[7, 0], rows[9, 0], rows[11] = 0.0, torch.inf, torch.nan, 1e-20
    rows[13, 5] = 1e25
    (together,) = tensor_norms([rows])
    alone = torch.stack([tensor_norms([row[None]])[0, 0] for row in rows])
    (fewer,) = tensor_norms([rows[10:]])
    assert bool(((together == alone) | (together.isnan() & alone.isnan())).all())
    assert bool((together[10:] == fewer).all())


class Labels(nn.Module):
    """A table looked up once for each example, and one layer at two places."""

    def __init__(self, *, at_two_places: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24)
        self.layer = nn.Linear(24, 3)
        if at_two_places:
            self.block = nn.Sequential(self.layer)

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.layer(self.table(batch["label"]))
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.losses(batch).sum()


def lookups(size: int) -> dict[str, Tensor]:
    return {"label": torch.arange(size) % 4, "labels": torch.arange(size) % 3}


def test_a_table_looked_up_once_for_each_example_stays_factors() -> None:
    model = Labels(at_two_places=False)
    parameters = list(model.parameters())
    matrices = [model.table.weight, model.layer.weight]
    way = fastest(model, model.loss, model.losses, parameters, {}, lookups(2), factored=matrices)
    found = way(lookups(7))
    assert (way.name, isinstance(found[0], Factors)) == ("opacus", True)
    assert agree(as_rows(found), OneByOne(model.loss, parameters, {})(lookups(7)))


def test_a_model_that_holds_a_layer_at_two_places_keeps_its_parameters() -> None:
    model = Labels(at_two_places=True)
    parameters = list(model.parameters())
    fastest(model, model.loss, None, parameters, {}, lookups(2))(lookups(7))
    assert model.layer.weight is parameters[1]


def test_an_example_does_not_decide_how_others_are_computed() -> None:
    """Tokens that cancel out leave float32's roundings in a batch's gradient, which alone must pass the check too."""
    torch.manual_seed(0)
    layer, tokens, width = nn.Linear(64, 64, bias=False), 8, 64
    each = lambda batch: (layer(batch["x"]) * batch["r"]).sum((1, 2))  # noqa: E731
    hooked = HookedGradients(layer, each, list(layer.parameters()), factored=list(layer.parameters()))
    left, right = torch.randn(1, tokens, width), torch.randn(1, tokens, width)
    for share in (2.0**-10, 2.0**-18):
        x, r = torch.cat([left, left * (1 + share)], 1), torch.cat([right, -right], 1) * 1e3
        (found,) = hooked({"x": x, "r": r})
        assert isinstance(found, Factors)
        exact = float((r.double().mT @ x.double()).norm())
        assert exact * (1 - 1e-12) <= float(found.norms()) <= exact * 1.1
    hooked.close()

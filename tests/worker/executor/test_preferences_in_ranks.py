"""Preferences train as a plain loop does on the same pairs, whose reference is the run's first version in each round:
in one process, in pieces of a batch, and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from tessera.shared.methods.base import REFERENCE, Plan
from tessera.shared.model.spec import Lora
from tessera.shared.run_settings import Training
from tessera.simulation import Result, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.stages.load import preferring
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block, write_block
from tessera.worker.model.forward import Preference, forward
from tessera.worker.training.context import LocalTaskContext
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.worker.executor.test_equal_results import Case, distance, divided, model_of

LLAMA = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
LORA = Lora(rank=2, alpha=4)
DORA = Lora(rank=2, alpha=4, dora=True)
RATE, STEPS, ROUNDS, BETA = 0.5, 2, 3, 0.4
PAIRS = (("100 mg", "a day"), ("a day, doctor", "no"), ("the dose of aspirin", "what"), ("yes", "no, thank you, no"),
         ("thank you", "the dose is 100 mg a day"))  # fmt: skip
Weight = Mapping[str, np.ndarray]


def pairs(folder: Path, answers: Sequence[tuple[str, str]] = PAIRS) -> Dataset:
    """Pairs whose answers have different numbers of tokens."""
    asked = {"role": "user", "content": "what?"}
    rows = [
        {
            name: [asked, {"role": "assistant", "content": text}]
            for name, text in zip(("chosen", "rejected"), each, strict=True)
        }
        for each in answers
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load("chat", {
        "file": str(folder / "pairs.jsonl"), "tokenizer": str(chat_tokenizer(folder / "tokenizer", CHATML)),
        "max_length": 64,
    })  # fmt: skip


def moved(start: Weights) -> Weights:
    """A start whose adapters are not zero, as an earlier run leaves them."""
    dice = np.random.default_rng(5)
    drawn = {
        name: values + dice.normal(0, 0.2, values.shape).astype(np.float32) if "lora_" in name else values
        for name, values in start.values.items()
    }
    return replace(start, values=drawn)


def built(weights: Weights) -> PreTrainedModel:
    model = instantiate(weights.model.config, "causal-lm", lora=weights.model.lora)
    tensors = named_tensors(model)
    for block in block_table(model):
        write_block(tensors, block, weights.values[block.name])
    return model.train()


def log_likelihood(model: PreTrainedModel, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    """The sum over the tokens of a text's answers, by itself and without padding."""
    ids, marks = ids[mask == 1], answers[mask == 1]
    found = model(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1)
    return found[torch.arange(len(ids) - 1), ids[1:]][marks[1:] == 1].sum()


def margins(model: PreTrainedModel, reference: PreTrainedModel, dataset: Dataset) -> Tensor:
    """How much more a model prefers each chosen answer than its reference does, [pairs]."""
    every = [dataset.tensors[name] for name in ("input_ids", "attention_mask", "answer_mask")]
    found = []
    for pair in zip(*every, strict=True):
        worse, better = (
            log_likelihood(model, *each) - log_likelihood(reference, *each).detach()
            for each in zip(*pair, strict=True)
        )
        found.append(better - worse)
    return torch.stack(found)


def trained(
    model: PreTrainedModel, reference: PreTrainedModel, dataset: Dataset, steps: int = STEPS, beta: float = BETA
) -> list[float]:
    """Train a model's adapters by steps over all pairs. Return each step's loss."""
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = -logsigmoid(beta * margins(model, reference, dataset)).mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, each in model.named_parameters():
                if "lora_" in name:
                    each.sub_(RATE * each.grad)
    return losses


def values_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    tensors = named_tensors(model)
    return {block.name: read_block(tensors, block) for block in block_table(model)}


@dataclass(frozen=True)
class FromWeights(Case):
    """A run that starts from these weights, and measures each version on the pairs."""

    start: Weights = field(default_factory=lambda: model_of(LLAMA, "causal-lm", LORA))
    pairs: Dataset | None = None

    def run(self) -> Result:
        training = {"batch_size": None, "optimizer": "sgd", "steps": STEPS, "learning_rate": RATE,
                    "weight_decay": 0.0, "loss": "dpo", "dpo_beta": BETA, **self.training}  # fmt: skip
        spec = {"method": {"name": self.method, "settings": self.settings}, "rounds": ROUNDS, "codec": "raw",
                "cohort": {"max_attempts": 1}, "training": training, **self.spec}  # fmt: skip
        assert self.pairs
        # As many as a site measures at least.
        test = self.pairs.rows(torch.arange(self.pairs.examples).repeat(4))
        return simulate(spec, self.start, {"a": self.pairs}, test=test)


@pytest.mark.parametrize(
    ("ranks", "pieces", "zero", "lora"),
    [
        (1, {}, True, LORA),
        (1, {"micro_batch": 2}, False, LORA),
        (1, {}, False, DORA),
        (2, {"micro_batch": 2}, True, LORA),
        (2, {}, False, LORA),
    ],
    ids=["whole", "in pieces, from adapters", "from dora", "ranks in pieces", "ranks, from adapters"],
)
def test_preferences_train_as_in_a_plain_loop(
    tmp_path: Path,
    executor: ProcessExecutor,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    pieces: dict[str, Any],
    zero: bool,
    lora: Lora,
) -> None:
    dataset, start = pairs(tmp_path), model_of(LLAMA, "causal-lm", lora)
    start = start if zero else moved(start)
    if ranks == 2:
        # Ranks keep the size of a run's pieces, and simulated runs have one name.
        executor.close()
    case = FromWeights("fedavg", pairs=dataset, start=start)
    result = divided(case, executor if ranks == 2 else None, monkeypatch, **pieces)
    model = built(start)
    # The rounds of one site are one loop, with the same reference.
    losses = trained(model, built(start), dataset, STEPS * ROUNDS)
    expected = values_of(model)
    assert distance(result.arrays(), expected) < 1e-5 * distance(expected, start.values)
    # The head and the base are the first version's, and the loss of the last step is the smallest.
    assert {name for name, values in expected.items() if (values != start.values[name]).any()} == {
        name for name in expected if "lora_" in name
    }
    assert losses[-1] < losses[0] == pytest.approx(np.log(2))
    last, scores = margins(model, built(start), dataset), result.scores()[ROUNDS]
    assert scores.keys() == {"loss", "accuracy", "calibration_error"}
    assert scores["accuracy"] == pytest.approx((last > 0).double().mean().item(), abs=5e-4)
    assert scores["loss"] == pytest.approx(-logsigmoid(BETA * last).mean().item(), abs=5e-4)


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["lora", "dora"])
def test_losses_and_gradients_are_those_of_a_plain_loop_in_float64(tmp_path: Path, lora: Lora) -> None:
    dataset = pairs(tmp_path)
    weights = model_of(LLAMA, "causal-lm", lora)
    first, later = built(weights).double(), built(moved(weights)).double()
    loss = -logsigmoid(BETA * margins(later, first, dataset)).mean()
    loss.backward()
    named = dict(later.named_parameters())
    expected = {name: each.grad for name, each in named.items() if "lora_" in name}
    later.zero_grad()
    reference = {name: each.detach() for name, each in first.named_parameters() if "lora_" in name}
    preference = Preference(beta=BETA, reference=reference)
    output = forward(later, "text-classification", dataset.tensors, objective=preference)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss.item(), abs=1e-6)
    for name, each in expected.items():
        torch.testing.assert_close(named[name].grad, each, rtol=1e-6, atol=1e-9)
    # Of two equal rewards the first class is predicted: an answer that is not preferred counts as wrong.
    rewards = forward(first, "text-classification", dataset.tensors, objective=preference).logits
    assert rewards is not None
    assert not rewards.any()
    assert not rewards.argmax(dim=1).any()


def state_of(weights: Weights) -> dict[str, np.ndarray]:
    """The server state of a run that begins with these weights."""
    return {REFERENCE + name: values for name, values in weights.values.items() if "lora_" in name}


def context_of(weights: Weights, state: Weight) -> LocalTaskContext:
    model = built(weights)
    return LocalTaskContext(
        model, "causal-lm", Plan(), block_table(model), server_state=state, training=Training(loss="dpo")
    )


def test_a_reference_has_all_adapters_of_the_model_and_no_other_block() -> None:
    start = moved(model_of(LLAMA, "causal-lm", LORA))
    whole = state_of(start)
    found = preferring(context_of(start, whole), dora=False).preference
    assert found is not None
    assert {REFERENCE + name for name in found.reference} == whole.keys()
    base = next(name for name in start.values if "lora_" not in name)
    for odd in (dict(list(whole.items())[1:]), {**whole, REFERENCE + base: start.values[base]}):
        with pytest.raises(TaskFailure, match="the reference and the model have different adapters"):
            preferring(context_of(start, odd), dora=False)
    dora = model_of(LLAMA, "causal-lm", DORA)
    with pytest.raises(TaskFailure, match="lora_magnitude_vector"):
        preferring(context_of(dora, {}), dora=True)


def test_the_reference_has_no_dropout_and_draws_no_number(tmp_path: Path) -> None:
    dataset, start = pairs(tmp_path), model_of({**LLAMA, "attention_dropout": 0.5}, "causal-lm", LORA)
    model = built(moved(start))
    texts = {name: dataset.tensors[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
    torch.manual_seed(1)
    model(**texts)
    alone = torch.get_rng_state()
    first = {name: each.detach() for name, each in built(start).named_parameters() if "lora_" in name}
    torch.manual_seed(1)
    forward(model, "text-classification", dataset.tensors, objective=Preference(reference=first))
    assert torch.equal(torch.get_rng_state(), alone)
    assert model.training
    assert all(module.training for module in model.modules())
    # The reference of a pass with dropout is the one of a pass without.
    same = {name: each.detach().clone() for name, each in model.named_parameters() if "lora_" in name}
    rewards = [
        Preference(beta=1.0, reference=same).rewards(each, dataset.tensors)
        for each in (model, built(moved(start)).eval())
    ]
    assert rewards[0].any()
    assert not rewards[1].any()

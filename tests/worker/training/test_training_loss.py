"""The training loss of a run's settings: the same for every method, refused where the model's own is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo, UnsupportedRun, WorkerHalf
from tessera.shared.methods.registry import methods, worker_half
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.model.spec import Head, Model
from tessera.shared.problems import Invalid
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.model.forward import IGNORED, forward, losses, objective_of
from tessera.worker.simulation import Weights, simulate
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.evaluate import evaluate
from tessera.worker.training.input_mismatch import require_own_loss
from tests.worker.training.test_micro_batch import BERT, CASES, CLIP, LLAMA

CPU = torch.device("cpu")
T5 = {
    "model_type": "t5", "vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 2, "dropout_rate": 0.0,
}  # fmt: skip
LABELLED = ("classes", "labels of tokens", "continuations")


def context_of(config: dict[str, object], head: Head, **training: Any) -> LocalTaskContext:
    model = instantiate(config, head, seed=1)
    table = block_table(model)
    return LocalTaskContext(model, head, Plan(), table, objective=objective_of(Training.model_validate(training)))


def scored(context: LocalTaskContext, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The log-probabilities [labels, classes] of the labels that count, and these labels."""
    logits = forward(context.model, context.head, batch).logits
    assert logits is not None
    labels = batch["labels"]
    if context.head == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != IGNORED
    return log_softmax(logits[counted], -1), labels[counted]


@pytest.mark.parametrize("case", LABELLED)
def test_smoothing_gives_a_share_of_each_label_to_all_classes_evenly(case: str) -> None:
    config, head, data = CASES[case]
    context = context_of(config, head, label_smoothing=0.2)
    chances, labels = scored(context, data.tensors)
    own = chances.gather(1, labels[:, None]).mean()
    expected = -(0.8 * own + 0.2 * chances.mean())
    assert context.forward(data.tensors).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    # Neither evaluations nor scores of layers change.
    plain = context_of(config, head)
    assert context._loss(data.tensors) == plain.forward(data.tensors).loss
    found = [evaluate(each.model, head, Batches(data, 4, CPU), lambda: None) for each in (context, plain)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("config", "head"), [(T5, "seq2seq-lm"), (BERT, "masked-lm")])
def test_every_model_of_tokens_is_smoothed(config: dict[str, object], head: Head) -> None:
    batch = CASES["labels of tokens"][2].tensors
    context = context_of(config, head, label_smoothing=0.2)
    chances, labels = scored(context, batch)
    expected = -(0.8 * chances.gather(1, labels[:, None]).mean() + 0.2 * chances.mean())
    assert context.forward(batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)


WITH_TERMS = sorted(name for name, each in methods().items() if each.worker.loss is not WorkerHalf.loss)


@pytest.mark.parametrize("method", WITH_TERMS)
def test_methods_add_their_terms_to_the_training_loss(method: str) -> None:
    config, head, data = CASES["classes"]
    losses_of, terms = [], []
    for training in ({}, {"label_smoothing": 0.3}):
        context = context_of(config, head, **training)
        context.vault = {f"previous/{block.name}": context.read(block) + 0.1 for block in context.blocks}
        half = worker_half(MethodSpec(name=method), RunInfo(tuple(context.blocks), rounds=1))
        half.setup(context)
        half.on_phase_start(context, Phase(EVERYTHING, name="own"))
        with torch.no_grad():
            for parameter in context.model.parameters():
                parameter.add_(torch.sign(parameter), alpha=0.05)
        losses_of.append(float(context.forward(data.tensors).loss.detach()))
        terms.append(float(half.loss(context, data.tensors).detach()) - losses_of[-1])
    assert terms[1] == pytest.approx(terms[0], rel=1e-3)
    assert terms[0] > 1e-4
    assert abs(losses_of[1] - losses_of[0]) > 1e-3


def test_each_example_of_a_private_task_has_the_loss_that_it_has_alone() -> None:
    for case in LABELLED:
        config, head, data = CASES[case]
        context = context_of(config, head, label_smoothing=0.2)
        found = losses(context.forward(data.tensors), head, data.tensors["labels"], context.objective)
        for row, loss in enumerate(found):
            alone = {name: tensor[row : row + 1] for name, tensor in data.tensors.items()}
            if (alone["labels"] != IGNORED).any():
                assert loss.item() == pytest.approx(context.forward(alone).loss.item(), rel=1e-5)


# ---------------------------------------------------------------- what is refused


def start_of(config: dict[str, object], head: Head) -> Weights:
    model = instantiate(config, head, seed=1)
    blocks, tensors = block_table(model), named_tensors(model)
    document = Model(config=config, head=head, blocks=blocks)
    return Weights(document, {block.name: read_block(tensors, block) for block in blocks})


def spec_of(**training: Any) -> dict[str, Any]:
    plain = {"optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "batch_size": 64}
    return {"name": "losses", "method": {"name": "fedavg"}, "rounds": 1, "training": {**plain, **training}}


@pytest.mark.parametrize(
    ("config", "head"),
    [
        (CLIP, "contrastive"),
        ({**BERT, "num_labels": 1}, "text-classification"),
        ({**BERT, "problem_type": "multi_label_classification"}, "text-classification"),
    ],
)
def test_smoothing_is_refused_at_a_run_s_creation_where_labels_are_no_classes(
    config: dict[str, object], head: Head
) -> None:
    with pytest.raises(Invalid, match="cannot be trained with these settings") as raised:
        simulate(spec_of(label_smoothing=0.1), start_of(config, head), {"a": CASES["classes"][2]})
    (fault,) = raised.value.errors
    assert fault.pointer == "/training/label_smoothing"
    assert "leave it out, or make a model of another head" in fault.detail


@pytest.mark.parametrize(
    ("config", "head", "labels"),
    [
        # The loss of a mixture of experts has a term for their balance.
        (
            {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "output_router_logits": True},
            "causal-lm",
            None,
        ),
        # transformers takes the labels of this data set for several at once.
        (BERT, "text-classification", torch.ones(11, 3)),
    ],
)
def test_smoothing_is_refused_before_data_are_read_if_the_model_s_own_loss_is_another(
    config: dict[str, object], head: Head, labels: Tensor | None
) -> None:
    data = CASES["continuations"][2]
    data = data if labels is None else Dataset({**data.tensors, "labels": labels})
    require_own_loss(context_of(config, head), data)
    with pytest.raises(UnsupportedRun, match=r"is not the cross entropy .*: leave training\.label_smoothing out"):
        require_own_loss(context_of(config, head, label_smoothing=0.1), data)


@pytest.mark.parametrize("case", LABELLED)
def test_models_with_a_plain_cross_entropy_are_accepted(case: str) -> None:
    config, head, data = CASES[case]
    require_own_loss(context_of(config, head, label_smoothing=0.1), data)


# ---------------------------------------------------------------- a run


def test_a_run_minimizes_the_smoothed_loss() -> None:
    config, head, data = CASES["classes"]
    start = start_of(config, head)
    result = simulate(spec_of(label_smoothing=0.2), start, {"a": data})
    context = context_of(config, head, label_smoothing=0.2)
    context.model.train()
    context.forward(data.tensors).loss.backward()
    moved = result.arrays()
    for name, parameter in context.model.named_parameters():
        step = torch.zeros(()) if parameter.grad is None else 0.5 * parameter.grad
        assert torch.allclose(torch.from_numpy(moved[name]), parameter - step, rtol=1e-5, atol=1e-6), name

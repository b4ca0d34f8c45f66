"""The training loss of a run's settings: the same for every method, refused where the model's own is another."""

from __future__ import annotations

from typing import Any

import numpy as np
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
from tessera.simulation import Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.model.forward import IGNORED, forward, losses, objective_of
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.evaluate import evaluate
from tessera.worker.training.input_mismatch import require_own_loss
from tests.support.tasks import Subject
from tests.worker.training.test_micro_batch import BERT, CASES, CLIP, LLAMA

CPU = torch.device("cpu")
T5 = {
    "model_type": "t5", "vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 2, "dropout_rate": 0.0,
}  # fmt: skip
LABELLED = ("classes", "labels of tokens", "continuations")


def context_of(config: dict[str, object], head: Head, *, private: bool = False, **training: Any) -> LocalTaskContext:
    model = instantiate(config, head, seed=1)
    table = block_table(model)
    document = Model(config=config, head=head, blocks=table)
    objective = objective_of(Training.model_validate(training), document, CPU, private=private)
    return LocalTaskContext(model, head, Plan(), table, objective=objective)


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


# FedPGP needs prompts, and tests of its own have its term.
WITH_TERMS = sorted(
    name for name, each in methods().items() if each.worker.loss is not WorkerHalf.loss and name != "fedpgp"
)


@pytest.mark.parametrize("method", WITH_TERMS)
def test_methods_add_their_terms_to_the_training_loss(method: str) -> None:
    config, head, data = CASES["classes"]
    losses_of, terms = [], []
    for training in ({}, {"label_smoothing": 0.3}):
        context = context_of(config, head, **training)
        context.vault = {f"previous/{block.name}": context.read(block) + 0.1 for block in context.blocks}
        width = next(block.shape[1] for block in context.blocks if block.role == "head" and len(block.shape) == 2)
        context.server_state = {"prototypes": np.ones((3, width), np.float32)}
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


@pytest.mark.parametrize("case", ["classes", "labels of tokens"])
def test_labels_count_by_the_weights_of_their_classes_over_the_batch_s_sum(case: str) -> None:
    config, head, data = CASES[case]
    weights = torch.tensor([0.2, 1.0, 5.0])
    context = context_of(config, head, class_weights=weights.tolist())
    chances, labels = scored(context, data.tensors)
    each = -chances.gather(1, labels[:, None]).squeeze(1)
    expected = (weights[labels] * each).sum() / weights[labels].sum()
    assert context.forward(data.tensors).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_weights_by_name_follow_the_classes_of_the_model_and_others_weigh_one() -> None:
    _, head, data = CASES["classes"]
    config = {**BERT, "num_labels": 3, "id2label": {"0": "cat", "2": "dog", "1": "hen"}}
    found = [context_of(config, head, class_weights=given) for given in ({"dog": 4.0}, [1.0, 1.0, 4.0])]
    assert found[0].forward(data.tensors).loss == found[1].forward(data.tensors).loss


@pytest.mark.parametrize("training", [{"label_smoothing": 0.2}, {"class_weights": [0.3, 1.0, 1.7]}])
def test_each_example_of_a_private_task_has_the_loss_that_it_has_alone(training: dict[str, Any]) -> None:
    for case in LABELLED[: 2 if "class_weights" in training else 3]:
        config, head, data = CASES[case]
        context = context_of(config, head, private=True, **training)
        found = losses(context.forward(data.tensors), head, data.tensors["labels"], context.objective)
        for row, loss in enumerate(found):
            alone = {name: tensor[row : row + 1] for name, tensor in data.tensors.items()}
            if (alone["labels"] != IGNORED).any():
                assert loss.item() == pytest.approx(context.forward(alone).loss.item(), rel=1e-5)


def test_the_weights_of_a_private_task_are_divided_by_their_mean_and_not_by_the_batch_s() -> None:
    config, head, data = CASES["classes"]
    # Of mean 2.
    context = context_of(config, head, private=True, class_weights=[1.0, 1.0, 4.0])
    found = losses(context.forward(data.tensors), head, data.tensors["labels"], context.objective)
    plain = losses(context.forward(data.tensors), head, data.tensors["labels"])
    expected = plain * torch.tensor([0.5, 0.5, 2.0])[data.tensors["labels"]]
    assert torch.allclose(found, expected, rtol=1e-5)


# ---------------------------------------------------------------- what is refused


def start_of(subject: Subject) -> Weights:
    document, tensors = subject.document(), named_tensors(subject.model())
    return Weights(document, {block.name: read_block(tensors, block) for block in document.blocks})


def subject(config: dict[str, object], head: Head) -> Subject:
    return Subject(config, head, lambda: CASES["classes"][2])


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
        simulate(spec_of(label_smoothing=0.1), start_of(subject(config, head)), {"a": CASES["classes"][2]})
    (fault,) = raised.value.errors
    assert fault.pointer == "/training/label_smoothing"
    assert "leave it out, or make a model of another head" in fault.detail


NAMED = {**BERT, "id2label": {"0": "cat", "1": "dog", "2": "hen"}}


@pytest.mark.parametrize(
    ("config", "head", "weights", "said"),
    [
        (BERT, "text-classification", [1, 2], "has 2 weights, and the model has 3 classes: give one for each"),
        (BERT, "text-classification", {"cat": 2}, "names 0 of 3: give a list of 3 weights"),
        (
            NAMED,
            "text-classification",
            {"cats": 2},
            "names 'cats', which is no class of the model; did you mean `cat`?",
        ),
        (CLIP, "contrastive", [1, 2], "labels of this clip for contrastive are no classes: leave it out"),
        (LLAMA, "causal-lm", [1, 2], "labels of this llama for causal-lm are no classes: leave it out"),
    ],
)
def test_weights_that_are_not_the_model_s_classes_are_refused_at_a_run_s_creation(
    config: dict[str, object], head: Head, weights: object, said: str
) -> None:
    with pytest.raises(Invalid) as raised:
        simulate(spec_of(class_weights=weights), start_of(subject(config, head)), {"a": CASES["classes"][2]})
    (fault,) = raised.value.errors
    assert fault.pointer == "/training/class_weights"
    assert said in fault.detail


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
    with pytest.raises(UnsupportedRun, match=r"is not the cross entropy .*: leave training\.label_smoothing and"):
        require_own_loss(context_of(config, head, label_smoothing=0.1), data)


@pytest.mark.parametrize("case", LABELLED)
def test_models_with_a_plain_cross_entropy_are_accepted(case: str) -> None:
    config, head, data = CASES[case]
    require_own_loss(context_of(config, head, label_smoothing=0.1), data)


# ---------------------------------------------------------------- a run


@pytest.mark.parametrize("training", [{"label_smoothing": 0.2}, {"class_weights": [0.2, 1.0, 5.0]}])
def test_a_run_minimizes_the_training_loss(training: dict[str, Any]) -> None:
    config, head, data = CASES["classes"]
    start = start_of(subject(config, head))
    result = simulate(spec_of(**training), start, {"a": data})
    context = context_of(config, head, **training)
    context.model.train()
    context.forward(data.tensors).loss.backward()
    moved = result.arrays()
    for name, parameter in context.model.named_parameters():
        step = torch.zeros(()) if parameter.grad is None else 0.5 * parameter.grad
        assert torch.allclose(torch.from_numpy(moved[name]), parameter - step, rtol=1e-5, atol=1e-6), name

"""A rank group trains as one process does: the same batches, the same denominators, the same steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.api.tasks import Task
from tessera.shared.model.dataset_schema import MULTI_LABEL, REGRESSION
from tessera.shared.model.spec import Head, Lora, Model
from tessera.shared.tensors.lazy import to_array
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.simulation import Result, Stalled, Weights, simulate, virtual_workers
from tessera.worker.compute import Compute, MicroBatch
from tessera.worker.data.dataset import Dataset, Padding
from tessera.worker.data.groups import Subgroups
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.group import next_seed
from tessera.worker.governance.policy import Policy
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.model.forward import IGNORED
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Check, Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.tasks import MOBILEVIT, VIT, images
from tests.worker.executor.conftest import InMemory

CPU = torch.device("cpu")
EXAMPLES = 33
"""With batches of 8, the last of the five batches of a pass has one example, and none for the second rank."""

BERT = {
    "model_type": "bert", "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 8, "num_labels": 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SEVERAL = {**BERT, "problem_type": MULTI_LABEL}
ENTITIES = {**BERT, "id2label": {"0": "O", "1": "B-drug", "2": "I-drug"}}
NUMBER = {**BERT, "num_labels": 1, "problem_type": REGRESSION, "target_mean": 50.0, "target_deviation": 4.0}
BERT_DECODER = {**BERT, "is_decoder": True}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def texts(count: int) -> Dataset:
    """Texts with one to seven labels each, of which the seventh has none at all."""
    dice = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 20, (count, 8), generator=dice)
    counted = torch.arange(8) <= 1 + torch.arange(count)[:, None] % 7
    counted[6] = False
    return Dataset({"input_ids": tokens, "labels": tokens.where(counted, torch.tensor(IGNORED))})


def tagged(count: int) -> Dataset:
    """Texts with a class for each token."""
    tokens = texts(count).tensors["input_ids"]
    return Dataset({"input_ids": tokens, "labels": tokens % 3})


def numbers(labels: int, count: int) -> Dataset:
    """Texts with several labels each, or with a target of about 50."""
    tokens = texts(count).tensors["input_ids"]
    found = (tokens[:, :labels] % 2).float() if labels else 50 + 2.0 * (tokens[:, 0] - 9)
    return Dataset({"input_ids": tokens, "labels": found})


def notes(count: int) -> Dataset:
    """Texts of one to seven tokens, and one of none, that are packed into rows of eight."""
    padding = Padding(8, {"input_ids": 0, "labels": IGNORED})
    return replace(texts(count), padding=padding, pack=True)


def unbounded(count: int) -> Dataset:
    """Images, in the last of which a value is infinite."""
    found = images(count)
    found.tensors["pixel_values"][-1] = torch.inf
    return found


def large(count: int) -> Dataset:
    """Images of 32 by 32 pixels."""
    found = images(count)
    return replace(found, tensors={**found.tensors, "pixel_values": found.tensors["pixel_values"].repeat(1, 1, 4, 4)})


def grouped(count: int) -> Dataset:
    """Images of patients with one to eight of them."""
    return replace(images(count), groups=[f"{math.isqrt(2 * number)}".encode() for number in range(count)])


def model_of(config: dict[str, Any], head: Head, lora: Lora | None = None) -> Weights:
    model = instantiate(config, head, seed=1, lora=lora)
    blocks, tensors = block_table(model), named_tensors(model)
    described = Model(config=config, head=head, blocks=blocks, lora=lora)
    return Weights(described, {block.name: read_block(tensors, block) for block in blocks})


GROUP_LEVEL = {
    "epsilon": 3.0, "delta": 1e-2, "clip_norm": 1.0, "selection": "noisy", "unit": "group", "max_per_group": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: VIT)
    head: Head = "image-classification"
    lora: Lora | None = None
    data: Callable[[int], Dataset] | None = None
    sites: int = 1
    examples: int = EXAMPLES
    measured: int = 0
    """The number of examples on which versions are evaluated centrally."""
    rounds: int = 1
    training: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Result:
        data = self.data or (texts if self.head == "causal-lm" else images)
        training = {"batch_size": 8, "learning_rate": 0.05, "optimizer": "sgd", "steps": 6, **self.training}
        method = {"name": self.method, "settings": self.settings}
        # What fails once fails each time.
        given = {"codec": "raw", "cohort": {"max_attempts": 1}, **self.spec}
        spec = {"method": method, "rounds": self.rounds, "training": training, **given}
        sites = {f"site-{number}": data(self.examples - 5 * number) for number in range(self.sites)}
        test = data(self.measured) if self.measured else None
        return simulate(spec, model_of(self.config, self.head, self.lora), sites, test=test)


CASES = {
    "full": Case("fedavg", training={"max_gradient_norm": 1.0}),
    "slices": Case("fedfrozen", {"warmup_rounds": 0, "scope": "v_only"}, GPT2, "causal-lm"),
    "lora": Case("lora", lora=Lora(rank=2, alpha=4), training={"optimizer": "adamw", "learning_rate": 1e-3}),
    "scaffold": Case("scaffold", sites=2, rounds=2, training={"steps": 5}),
    "packed texts": Case("fedavg", config=GPT2, head="causal-lm", data=notes),
}
FURTHER = {
    "several labels": Case("fedavg", config=SEVERAL, head="text-classification", data=partial(numbers, 3)),
    "targets": Case("fedavg", config=NUMBER, head="text-classification", data=partial(numbers, 0)),
    "fewer examples than ranks": Case("fedavg", training={"batch_size": 1}),
    "a term without examples": Case("fedprox", {"mu": 2.0}, GPT2, "causal-lm"),
    "a batch of one text without labels": Case(
        "fedavg", config=GPT2, head="causal-lm", training={"batch_size": 1, "steps": EXAMPLES}
    ),
    "features": Case("moon", rounds=2),
    "two phases": Case("ditto", rounds=2),
    "noise": Case("fedavg", spec={"privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0}}),
    "noise for several labels": Case(
        "fedavg",
        config=SEVERAL,
        head="text-classification",
        data=partial(numbers, 3),
        spec={"privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0}},
    ),
    "noise for groups": Case("fedavg", data=grouped, spec={"privacy": {**GROUP_LEVEL, "selection": "refused"}}),
    "a noisy choice by groups": Case("safl", {"share": 0.5}, data=grouped, spec={"privacy": GROUP_LEVEL}),
    "noise without batch statistics": Case(
        "fedavg",
        config=MOBILEVIT,
        data=large,
        examples=9,
        training={"steps": 2},
        spec={"privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0}},
    ),
    "a noisy choice": Case(
        "safl",
        {"share": 0.5},
        spec={"privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0, "selection": "noisy"}},
    ),
    "selected layers": Case("safl", {"share": 0.5}),
    "selected by gradients": Case("safl", {"share": 0.5, "score": "fisher"}),
}


def divided(
    case: Case,
    executor: ProcessExecutor | None,
    monkeypatch: pytest.MonkeyPatch,
    runner: Callable[..., TaskRunner] = TaskRunner,
    **setup: Any,
) -> Result:
    """The case's run, whose workers train on the devices of `executor`; None is one process."""

    def made(**given: Any) -> TaskRunner:
        direct = replace(given["executor"], setup=TrainingSetup(CPU, **setup))
        return runner(**{**given, "executor": InMemory(executor, direct) if executor else direct})

    with monkeypatch.context() as patch:
        patch.setattr(virtual_workers, "TaskRunner", made)
        return case.run()


def distance(one: Mapping[str, np.ndarray], two: Mapping[str, np.ndarray]) -> float:
    """The l2 norm of the difference of two models. Of single blocks it would say nothing: the gradient of a key's
    bias is zero but for rounding."""
    return math.sqrt(sum(float(np.square(one[name] - two[name], dtype=np.float64).sum()) for name in one))


def compare(case: Case, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch, **setup: Any) -> None:
    one, two = case.run(), divided(case, executor, monkeypatch, **setup)
    assert all(task.state == "merged" for made in two.rounds for task in made.tasks)
    start = model_of(case.config, case.head, case.lora).values
    assert distance(one.arrays(), two.arrays()) < 1e-5 * distance(one.arrays(), start)
    for mine, theirs in zip(one.rounds, two.rounds, strict=True):
        for alone, together in zip(mine.tasks, theirs.tasks, strict=True):
            assert together.metrics == pytest.approx(alone.metrics, rel=1e-2)


def test_no_two_ranks_and_phases_have_the_same_randomness() -> None:
    seeds = set()
    for rank in range(1, 9):
        seed = 7
        for _ in range(4):
            seed = next_seed(seed, rank)
            seeds.add(seed)
    assert len(seeds) == 8 * 4
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(
    name: str, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(CASES[name], executor, monkeypatch)


def test_two_ranks_send_the_arrays_of_one_process(executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("fedproto", {"lam": 5.0}, examples=90, rounds=2, spec={"codec": LOSSLESS})
    results = case.run(), divided(case, executor, monkeypatch)
    one, two = (to_array(result.state().server_state["prototypes"]) for result in results)
    assert one.any(axis=1).all()
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "scaffold", "noise"])
def test_one_process_changes_no_bit_of_what_this_one_computes(
    name: str, alone: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {**CASES, **FURTHER}[name]
    here, there = case.run(), divided(case, alone, monkeypatch)
    assert {name: values.tobytes() for name, values in there.arrays().items()} == {
        name: values.tobytes() for name, values in here.arrays().items()
    }
    for mine, theirs in zip(here.rounds, there.rounds, strict=True):
        assert [task.metrics for task in mine.tasks] == [task.metrics for task in theirs.tasks]


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER)
def test_two_ranks_train_as_one_process_by_other_methods(
    name: str, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(FURTHER[name], executor, monkeypatch)


def test_each_rank_has_its_base_in_4_bits(executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    four = {"compute": Compute(base_bits=4)}
    case = CASES["lora"]
    whole, one = case.run(), divided(case, None, monkeypatch, **four)
    two = divided(case, executor, monkeypatch, **four)
    assert all(task.metrics["base_bits"] == 4.0 for made in two.rounds for task in made.tasks)
    assert distance(one.arrays(), two.arrays()) < 1e-3 * distance(one.arrays(), whole.arrays())


def test_a_group_builds_its_model_again_when_base_bits_change(
    executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES["lora"], training={"steps": 2})
    for compute, bits in ((Compute(), None), (Compute(base_bits=4), 4.0), (Compute(), None)):
        result = divided(case, executor, monkeypatch, compute=compute)
        assert [task.metrics.get("base_bits") for made in result.rounds for task in made.tasks] == [bits]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro_batch"),
    [("slices", 2), ("slices", "auto"), ("noise", "auto"), ("several labels", 2), ("targets", 2)],
)
def test_ranks_train_their_rows_in_pieces(
    name: str, micro_batch: MicroBatch, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks keep the size of a run's pieces, and simulated runs have one name.
    executor.close()
    compare({**CASES, **FURTHER}[name], executor, monkeypatch, micro_batch=micro_batch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "told"),
    [
        (Case("fedavg", data=unbounded), "no-finite-loss: the loss is nan"),
        (Case("fedavg", config=BERT_DECODER, head="causal-lm", data=notes), "packed-texts: .* see the others of its"),
    ],
    ids=["an infinite value", "packed texts"],
)
def test_a_failure_in_the_ranks_is_told_as_in_one_process(
    case: Case, told: str, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stalled, match=told):
        divided(case, executor, monkeypatch)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("moon", config=BERT, head="token-classification", data=tagged), "an example has several labels"),
        (Case("moon", training={"class_weights": [1.0, 2.0, 3.0]}), "classes have weights"),
        (Case("fedavg", config=MOBILEVIT), "the model has batch normalisation"),
    ],
    ids=["labels", "weights", "normalisation"],
)
def test_losses_that_do_not_add_up_over_ranks_are_refused(
    case: Case, reason: str, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stalled, match=f"unsuited: this worker divides batches among 2 devices, .*{reason}"):
        divided(case, executor, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("least", "counted"), [(1, 2), (EXAMPLES + 1, 0)])
def test_an_evaluation_that_the_site_refuses_is_not_counted(
    least: int, counted: int, tmp_path: Path, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = RunHistory(tmp_path, "worker")

    def runner(**given: Any) -> TaskRunner:
        return TaskRunner(**{**given, "policy": Policy(min_evaluation_examples=least), "history": history})

    divided(Case("fedavg", measured=EXAMPLES, training={"steps": 1}), executor, monkeypatch, runner)
    assert history.measured("test") == counted


class StoppingRunner(TaskRunner):
    """A runner whose worker is asked to stop after three steps."""

    def run(self, task: Task, check: Check, report: Report) -> None:
        def stopping() -> None:
            if report.step >= 3:
                raise Stopped

        super().run(task, stopping, report)


@pytest.mark.long
def test_ranks_round_the_sum_of_all_their_examples(
    executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounding(**given: Any) -> TaskRunner:
        return TaskRunner(**{**given, "policy": Policy(figures="rounded"), "full_precision": False})

    # An odd number of examples, of which the second rank has none in the last batch.
    case = Case("fedavg", measured=EXAMPLES + 1)
    one, two = divided(case, None, monkeypatch, rounding), divided(case, executor, monkeypatch, rounding)
    assert one.measurements[0].metrics == pytest.approx(two.measurements[0].metrics)
    assert set(one.measurements[0].metrics) == {"accuracy", "loss"}


@pytest.mark.long
def test_ranks_count_each_label_once_in_its_subgroup(
    executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counting(**given: Any) -> TaskRunner:
        return TaskRunner(**{**given, "policy": Policy(send_class_counts=True), "full_precision": False})

    def of_two(count: int) -> Dataset:
        return replace(images(count), subgroups={"half": Subgroups.of(("0",), [n % 2 for n in range(count)])})

    spec = {"evaluation": {"dataset": "test", "subgroups": "half"}}
    # An odd number, of which the second rank has none in the last batch.
    case = Case("fedavg", measured=121, data=of_two, spec=spec)
    one, two = (divided(case, each, monkeypatch, counting).measurements[0] for each in (None, executor))
    assert one.subgroup_counts == two.subgroup_counts
    assert {name: sum(each.labels) for name, each in two.subgroup_counts.items()} == {"0": 61, "other": 60}


@pytest.mark.long
def test_ranks_that_are_asked_to_stop_wait_for_the_next_task(
    executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(CASES["full"], executor, monkeypatch)
    groups = list(executor.folder.glob("*/store"))
    endless = Case("fedavg", examples=10_000, training={"batch_size": 1, "steps": 1_000_000})
    with pytest.raises(Stopped):
        divided(endless, executor, monkeypatch, runner=StoppingRunner)
    compare(CASES["full"], executor, monkeypatch)
    assert list(executor.folder.glob("*/store")) == groups


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case("fedavg", measured=EXAMPLES),
        Case("fedavg", measured=EXAMPLES, training={"batch_size": 1}),
        Case("fedavg", measured=EXAMPLES, config=GPT2, head="causal-lm"),
        Case("fedavg", measured=EXAMPLES, config=BERT, head="token-classification", data=tagged),
        Case("fedavg", measured=EXAMPLES, config=ENTITIES, head="token-classification", data=tagged),
        replace(FURTHER["several labels"], measured=EXAMPLES),
        replace(FURTHER["targets"], measured=EXAMPLES),
    ],
    ids=[
        *("images", "none for one rank", "a text without labels", "classes of tokens", "entities"),
        *("several labels", "targets"),
    ],
)
def test_ranks_that_divide_an_evaluation_find_what_one_process_finds(
    case: Case, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = case.run(), divided(case, executor, monkeypatch)
    alone, together = (dict(result.measurements[0].metrics) for result in (one, two))
    # Of three digits, the last may be rounded in another way.
    assert together == pytest.approx(alone, rel=0.01)
    counted = {"accuracy", "macro_f1", "micro_f1", "entity_f1", "entity_partial_f1"} & alone.keys()
    assert counted or "mae" in alone
    assert {name: together[name] for name in counted} == {name: alone[name] for name in counted}

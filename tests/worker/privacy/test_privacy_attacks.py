"""Attacks on what a private task sends, through the very trainer: each of them once told who is in the data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo, UnsupportedRun
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.attention_stats import TaskTokens
from tessera.shared.model.selectors import EVERYTHING, Selector, named
from tessera.shared.model.spec import Head
from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.run_settings import Privacy
from tessera.shared.tensors.lazy import Array
from tessera.simulation import Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import DataError
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients
from tessera.worker.privacy.known_examples import known_examples
from tessera.worker.privacy.per_example_grads import Batch, Gradients, HookedGradients, PerExample
from tessera.worker.privacy.private_task import PrivateTask
from tessera.worker.privacy.sampling import sampling
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.training.batches import Batches, ReadableBatches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tables import on_disk

DIGEST = f"sha256:{'0' * 64}"
TOKENS = 64
EXAMPLES = 16
BERT = {
    "model_type": "bert", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": TOKENS, "num_labels": 2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
WORDS = "bert.embeddings.word_embeddings.weight"
SUSPECT = torch.arange(64, 128)
"""The words that the example which is looked for has, and no other."""
PLACE = 7
OTHERS = torch.tensor([row for row in range(EXAMPLES) if row != PLACE])


def texts(*, present: bool) -> Dataset:
    """Sixteen texts, among them the suspect's or another in its place."""
    ids = torch.randint(2, 64, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))
    if present:
        ids[PLACE] = SUSPECT
    return Dataset({"input_ids": ids, "labels": torch.arange(EXAMPLES) % 2})


def version(row: float = 0.0, **config: Any) -> LocalTaskContext:
    """A model as a hostile coordinator makes it: `row` in the rows of the suspect's words."""
    model = instantiate({**BERT, **config}, "text-classification", seed=1)
    with torch.no_grad():
        model.get_submodule("bert.embeddings.word_embeddings").weight[64:] = row
    return LocalTaskContext(model, "text-classification", Plan(), block_table(model))


def train(
    folder: Path,
    context: LocalTaskContext,
    data: Dataset,
    key: str,
    epsilon: float,
    train: Selector = EVERYTHING,
    **more: Any,
) -> None:
    """One private step of SGD over all examples, which moves each weight by the noisy sum as it is."""
    given = {"batch_size": None, "optimizer": "sgd", "learning_rate": EXAMPLES, "weight_decay": 0.0, **more}
    training = Training.model_validate(given)
    privacy = Privacy(epsilon=epsilon, delta=1e-5, clip_norm=1.0)
    task = Task.model_validate({
        "id": "t", "token": 1, "kind": "train", "run": "r", "run_name": "demo", "round": 1, "rounds": 1, "seed": 0,
        "method": MethodSpec(name="fedavg"), "plan": Plan(), "dataset": "wards", "privacy": privacy, "codec": "raw",
        "training": training, "normalization": "participants", "model": DIGEST, "lease_seconds": 60.0,
        "version": VersionRef(number=0, digest=DIGEST),
    })  # fmt: skip
    half = worker_half(task.method, RunInfo(tuple(context.blocks), 1, training=training, privacy=privacy))
    half.setup(context)
    cpu, drawn = torch.device("cpu"), hashlib.sha256(key.encode()).digest()
    account = PrivacyAccount(task, privacy, EXAMPLES, Ledger(folder), None)
    private = PrivateTask(account, task, key=drawn)
    Trainer(half, context, training, TrainingSetup(cpu), lambda: None, private).train([Phase(train)], data, seed=0)


# ---------------------------------------------------------------- the last bits of the noise


@cache
def layers() -> Array:
    """What numpy multiplies 23 random bits by for a normal in float32: the widths of 256 layers (a ziggurat)."""
    edge, area = 3.6541528853610087963519472518, 0.0049286732339746519
    widths = [edge]
    while len(widths) < 255:
        height = np.exp(-(widths[-1] ** 2) / 2) + area / widths[-1]
        widths.append(float(np.sqrt(-2 * np.log(height))))
    bottom = area / np.exp(-(edge**2) / 2)
    return np.array([bottom, *widths], np.float64) / 2**23


def unlike_numpys_noise(values: Array, deviation: float) -> bool:
    """Whether there is a value near zero that numpy's float32 noise, which reaches few there, never has."""
    near = np.abs(values[np.abs(values) < deviation / 512]).astype(np.float32)
    scale, width = np.float32(deviation), layers().astype(np.float32)
    bits = np.rint(near[:, None] / (np.float64(scale) * width)).astype(np.int64)[..., None] + np.arange(-1, 2)
    reached = scale * (bits.astype(np.float32) * width[None, :, None])  # [values, layers, 3]
    return not bool((reached == near[:, None, None]).any(axis=(1, 2)).all())


def noise_on(folder: Path) -> float:
    (entry,) = Ledger(folder).read("wards")
    return float(entry.events[0].noise_multiplier)  # type: ignore[union-attr]


def sums(folder: Path, key: str, *, present: bool) -> Array:
    """The noisy sums of the suspect's rows as they leave."""
    context = version()
    train(folder, context, texts(present=present), key, 0.1, named([WORDS]))
    (words,) = (block for block in context.blocks if block.tensor == WORDS)
    return -context.read(words)[64:].ravel()


def test_last_bits_of_a_release_do_not_tell_whether_an_example_is_there(tmp_path: Path) -> None:
    found = dict.fromkeys((True, False), 0)
    for trial in range(20):
        for present in found:
            folder = tmp_path / f"{trial}-{present}"
            values = sums(folder, f"{trial} {present}", present=present)
            found[present] += unlike_numpys_noise(values, noise_on(folder))
    # Of 20, at epsilon 0.1 the attack can be right a little more often than it is wrong, but not always.
    assert abs(found[True] - found[False]) <= 5, found


@pytest.mark.parametrize("present", [True, False])
def test_every_value_that_leaves_is_a_multiple_of_a_grid_that_anybody_knows(tmp_path: Path, present: bool) -> None:
    values = sums(tmp_path, "a key", present=present)
    # A power of two, between a 1024th and a 2048th of the noise's standard deviation.
    steps = values.astype(np.float64) / 2.0 ** np.floor(np.log2(noise_on(tmp_path) / 1024))
    assert np.array_equal(steps, np.rint(steps))
    assert 1024 < np.std(steps) < 2048 * 1.1
    assert np.gcd.reduce(steps.astype(np.int64)) == 1


# ---------------------------------------------------------------- failures


FATAL = [
    pytest.param({"row": 3e38}, id="values that overflow"),
    pytest.param({"row": 0.0, "vocab_size": 127}, id="a word that the model lacks"),
]
WAYS = [pytest.param("fedavg", "opacus", id="opacus"), pytest.param("fedprox", "vmap", id="vmap")]


@pytest.mark.parametrize("fatal", FATAL)
@pytest.mark.parametrize("present", [True, False])
def test_a_private_task_does_not_fail_by_what_an_example_is(
    tmp_path: Path, fatal: dict[str, Any], present: bool
) -> None:
    context = version(**fatal)
    train(tmp_path, context, texts(present=present), "a key", 0.01, named(["*classifier*", "*attention*"]))
    assert all(np.isfinite(context.read(block)).all() for block in context.blocks)


@pytest.mark.parametrize("fatal", FATAL)
@pytest.mark.parametrize(("method", "way"), WAYS)
def test_an_example_that_fails_counts_as_zero_and_changes_nothing_of_the_others(
    fatal: dict[str, Any], method: str, way: str
) -> None:
    context, data = version(**fatal), texts(present=True)
    training = Training(batch_size=None)
    half = worker_half(MethodSpec(name=method), RunInfo(tuple(context.blocks), 1, training=training))
    half.setup(context)
    freeze = Freeze(context.model, named(["*classifier*", "*attention*"]).resolve(context.blocks))
    trainer = Trainer(half, context, training, TrainingSetup(torch.device("cpu")), lambda: None)
    noisy = NoisyGradients(
        trainer, freeze, data, Mechanism(sampling(EXAMPLES, None), 1.0, 1.0), NoiseSource(bytes(32))
    )
    assert noisy.method == way
    if "vocab_size" in fatal:
        # As if it had not been noticed.
        noisy._known()[:] = True
    whole = noisy.sums(torch.arange(EXAMPLES))
    alone, others = noisy.sums(torch.tensor([PLACE])), noisy.sums(OTHERS)
    noisy.close()
    assert [float(total.abs().max()) for total in alone] == [0.0] * len(alone)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(whole, others, strict=True))
    assert sum(float(total.square().sum()) for total in others) > 0


def test_examples_with_words_or_classes_that_the_model_lacks_are_told_before_they_are_computed() -> None:
    context, data = version(vocab_size=127), texts(present=True)
    data.tensors["labels"][2] = 2
    ids = data.tensors["input_ids"]
    others = {name: tensor for name, tensor in data.tensors.items() if name != "input_ids"}
    for each in (data, on_disk(others, ids.__getitem__, (TOKENS,), "input_ids", ids.dtype)):
        known = known_examples(context, each, each.placeholder(1))
        assert known.tolist() == [row not in (2, PLACE) for row in range(EXAMPLES)]


def test_gradients_that_cancel_each_other_out_are_no_reason_to_fail() -> None:
    # Two examples whose gradients are opposite: their sum is rounding alone.
    layer = nn.Linear(64, 1, bias=False)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    hooked = HookedGradients(
        layer, lambda batch: batch["sign"] * layer(batch["x"])[:, 0] / 3, list(layer.parameters())
    )
    (each,) = hooked({"x": x.repeat(2, 1), "sign": torch.tensor([1.0, -1.0 - 1e-7])})
    hooked.close()
    assert torch.allclose(each[0], -each[1])


def test_a_model_that_does_not_fit_the_data_set_is_refused_before_anything_is_paid_for(tmp_path: Path) -> None:
    context = version(max_position_embeddings=TOKENS - 1)
    with pytest.raises(UnsupportedRun, match="max_length, which the model must accept"):
        train(tmp_path, context, texts(present=False), "a key", 1.0)
    assert Ledger(tmp_path).read("wards") == ()


SMALL = {"vocab_size": 128, "d_model": 16, "num_labels": 2}
ENDED = [
    pytest.param({
        **SMALL, "model_type": model_type, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": TOKENS,
        "dropout": 0.0, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
    }, id=model_type)
    for model_type in ("bart", "mbart")
] + [
    pytest.param({
        **SMALL, "model_type": "t5", "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    }, id="t5")
]  # fmt: skip


@pytest.mark.parametrize("config", ENDED)
def test_a_classifier_that_answers_at_the_end_of_a_text_trains_privately(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model, data = instantiate(config, "text-classification", seed=1), texts(present=False)
    data.tensors["input_ids"][data.tensors["input_ids"] == 2] = 3
    data.tensors["input_ids"][:, -1] = config["eos_token_id"]
    context = LocalTaskContext(model, "text-classification", Plan(), block_table(model))
    before = {block.name: context.read(block).copy() for block in context.blocks}
    train(tmp_path, context, data, "a key", 1.0, named(["classi*"]))
    assert any(not np.array_equal(context.read(block), before[block.name]) for block in context.blocks)
    assert len(Ledger(tmp_path).read("wards")) == 1


@pytest.mark.parametrize("fatal", FATAL)
def test_an_example_whose_attention_cannot_be_measured_counts_as_zero(fatal: dict[str, Any]) -> None:
    context, data = version(**fatal), texts(present=True)
    context.placeholder = data.placeholder(1)
    profile = context.attention(Batches(data, 5, torch.device("cpu")), TaskTokens())
    (layer,) = profile.values()
    mass = np.nan_to_num(layer.mass)
    assert mass.shape == (EXAMPLES,)
    assert (mass[OTHERS] > 0).all()
    assert mass[PLACE] == 0
    # The others are as they are without it.
    context.placeholder = None
    (alone,) = context.attention(Batches(data.rows(OTHERS), 5, torch.device("cpu")), TaskTokens()).values()
    assert np.allclose(mass[OTHERS], alone.mass, rtol=1e-5)


class OnDisk:
    """Reads rows of a tensor, except one that cannot be read any more."""

    def __init__(self, rows: torch.Tensor, gone: int) -> None:
        self.rows, self.gone = rows, gone

    def __call__(self, places: Sequence[int]) -> torch.Tensor:
        if self.gone in places:
            raise DataError("the file is gone")
        return self.rows[list(places)]


def stored_but(data: Dataset, gone: int) -> Dataset:
    ids = data.tensors["input_ids"]
    return on_disk({"labels": data.tensors["labels"]}, OnDisk(ids, gone), (TOKENS,), "input_ids", ids.dtype)


def test_an_example_that_cannot_be_read_any_more_has_no_part_in_a_choice() -> None:
    context, data = version(), texts(present=True)
    context.placeholder = data.placeholder(1)
    batches = ReadableBatches(stored_but(data, PLACE), 5, torch.device("cpu"))
    (layer,) = context.attention(batches, TaskTokens()).values()
    assert (layer.mass[OTHERS] > 0).all()
    assert layer.mass[PLACE] == 0
    context.placeholder = None
    (alone,) = context.attention(Batches(data.rows(OTHERS), 5, torch.device("cpu")), TaskTokens()).values()
    assert np.allclose(layer.mass[OTHERS], alone.mass, rtol=1e-5)


def test_no_example_that_the_model_lacks_a_word_or_a_class_for_reaches_it() -> None:
    """On a GPU it would end the process. Only such an example has the word 63, in the choice and in training."""
    pytest.importorskip("opacus")
    config = {**BERT, "num_hidden_layers": 2, "vocab_size": 100}
    model = instantiate(config, "text-classification", seed=1)
    ids = torch.randint(2, 63, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = torch.arange(EXAMPLES) % 2
    for row, word, label in ((3, 100, 0), (7, 5, 2), (8, -1, 1), (EXAMPLES - 1, 5, -1)):
        ids[row, 0], ids[row, 1], labels[row] = word, 63, label
    ids[12, 1] = 62
    spec = {
        "method": {"name": "safl", "settings": {"layers": 1}}, "rounds": 1, "training": {"batch_size": 5, "steps": 2},
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0, "selection": "noisy"},
    }  # fmt: skip
    seen: list[int] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding) and module.num_embeddings == 100:
            seen.append(int(args[0].max()))

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        simulate(
            spec,
            Weights.of(model, config, "text-classification"),
            {"a": Dataset({"input_ids": ids, "labels": labels})},
        )
    finally:
        hook.remove()
    assert max(seen) == 62


@pytest.mark.parametrize("padding", [0, 1])
def test_a_model_with_too_few_positions_for_a_text_without_padding_is_refused_whatever_the_texts(
    tmp_path: Path, padding: int
) -> None:
    # It numbers the tokens that are no padding, up to 39 of them, and the example that is looked for has 64.
    few = {"model_type": "roberta", "pad_token_id": padding, "max_position_embeddings": 40 + padding}
    for present in (True, False):
        data = texts(present=present)
        data.tensors["input_ids"][OTHERS, 20:] = padding
        folder = tmp_path / str(present)
        model = instantiate({**BERT, **few, "eos_token_id": padding}, "text-classification", seed=1)
        context = LocalTaskContext(model, "text-classification", Plan(), block_table(model))
        with pytest.raises(UnsupportedRun, match="max_length, which the model must accept"):
            train(folder, context, data, "a key", 1.0)
        assert Ledger(folder).read("wards") == ()


def test_types_positions_and_boxes_that_the_model_lacks_are_found_too() -> None:
    config = {**BERT, "model_type": "layoutlm", "max_2d_position_embeddings": 100}
    model = instantiate(config, "text-classification", seed=1)
    context, data = LocalTaskContext(model, "text-classification", Plan(), block_table(model)), texts(present=False)
    more = {name: torch.zeros_like(data.tensors["input_ids"]) for name in ("token_type_ids", "position_ids")}
    data = replace(data, tensors={**data.tensors, **more, "bbox": torch.zeros(EXAMPLES, TOKENS, 4).long()})
    for row, (name, value) in enumerate([("token_type_ids", 2), ("position_ids", TOKENS), ("position_ids", -1)]):
        data.tensors[name][row, 0] = value
    for row, box in ((3, (0, 0, 0, 100)), (4, (5, 0, 4, 0)), (5, (5, 6, 5, 7))):
        data.tensors["bbox"][row, 0] = torch.tensor(box)
    known = known_examples(context, data, data.placeholder(1))
    assert known.tolist() == [row > 4 for row in range(EXAMPLES)]


@pytest.mark.parametrize(("head", "known"), [("token-classification", False), ("text-classification", True)])
def test_a_label_above_that_of_a_single_output_is_known_if_the_output_is_a_number(head: Head, known: bool) -> None:
    model, data = instantiate({**BERT, "num_labels": 1}, head, seed=1), texts(present=False)
    if head == "token-classification":
        data.tensors["labels"] = data.tensors["labels"][:, None].expand(-1, TOKENS)
    context = LocalTaskContext(model, head, Plan(), block_table(model))
    found = known_examples(context, data, data.placeholder(1))
    assert found.tolist() == [known or row % 2 == 0 for row in range(EXAMPLES)]


def test_an_example_that_cannot_be_read_any_more_fails_no_task(tmp_path: Path) -> None:
    context, data = version(), stored_but(texts(present=True), PLACE)
    assert known_examples(context, data, data.placeholder(1)).tolist() == [row != PLACE for row in range(EXAMPLES)]
    train(tmp_path, context, data, "a key", 0.01, named(["*classifier*"]))
    assert len(Ledger(tmp_path).read("wards")) == 1


@pytest.mark.parametrize("fault", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_a_batch_that_runs_out_of_memory_is_computed_one_by_one(fault: type[Exception]) -> None:
    context, data = version(), texts(present=True)
    training = Training(batch_size=None)
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), 1, training=training))
    half.setup(context)
    freeze = Freeze(context.model, named(["*classifier*"]).resolve(context.blocks))
    trainer = Trainer(half, context, training, TrainingSetup(torch.device("cpu")), lambda: None)
    mechanism = Mechanism(sampling(EXAMPLES, None), 1.0, 1.0)
    noisy = NoisyGradients(trainer, freeze, data, mechanism, NoiseSource(bytes(32)))
    rows = torch.arange(EXAMPLES)
    expected = noisy.sums(rows)
    noisy._method = Cramped(noisy._method, fault)
    found = noisy.sums(rows)
    noisy.close()
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True))


class Cramped(PerExample):
    """A method for gradients on a device that has room for one example."""

    name = "cramped"

    def __init__(self, method: PerExample, fault: type[Exception]) -> None:
        self._method, self._fault = method, fault

    def __call__(self, batch: Batch) -> Gradients:
        if len(batch["labels"]) > 1:
            raise self._fault
        return self._method(batch)

    def close(self) -> None:
        self._method.close()


# ---------------------------------------------------------------- how long it takes


def test_dropout_is_off_so_that_what_an_example_adds_does_not_depend_on_its_place() -> None:
    rates = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    context, data = version(0.1, **rates), texts(present=True)
    training = Training(batch_size=None)
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), 1, training=training))
    context.model.train()
    freeze = Freeze(context.model, context.blocks)
    trainer = Trainer(half, context, training, TrainingSetup(torch.device("cpu")), lambda: None)
    noisy = NoisyGradients(
        trainer, freeze, data, Mechanism(sampling(EXAMPLES, None), 1.0, 1.0), NoiseSource(bytes(32))
    )
    first, second = (noisy.sums(torch.tensor([3])) for _ in range(2))
    noisy.close()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_neither_steps_nor_durations_of_a_private_task_are_told() -> None:
    report = Report(hides=True)
    report.begin("fetching", total_bytes=100)
    report.download_bytes = 40
    fetched = report.progress()
    assert (fetched.bytes, fetched.total_bytes, fetched.phase_seconds) == (40, 100, {})
    report.begin("training")
    began, told = list(report.began), report.progress()
    assert told.activity == "training (private: no progress)"
    # The first step's time would show how long a choice of blocks took.
    report.begin("training", steps=10)
    assert report.began == began
    for _ in range(10):
        report.advance()
        report.loss = 0.5
        assert report.progress() == told
    assert told.model_dump(exclude_defaults=True).keys() == {"phase", "activity"}

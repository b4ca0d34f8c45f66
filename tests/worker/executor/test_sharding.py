"""A group that divides a model's parameters among its ranks trains as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tessera.shared.methods.base import MethodSpec, Plan, RunInfo, UnsupportedRun
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.run_settings import Training
from tessera.simulation import Stalled
from tessera.worker.compute import Compute
from tessera.worker.data.dataset import Dataset
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.inventory import devices_of
from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.training.ranks import require_shardable
from tests.worker.executor.test_equal_results import (
    BERT,
    CASES,
    EXAMPLES,
    GPT2,
    Case,
    compare,
    divided,
    tagged,
    texts,
)

SHARD = Compute(shard=True)
BART = {
    "model_type": "bart", "vocab_size": 20, "d_model": 16, "num_labels": 3, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "max_position_embeddings": 8, "dropout": 0.0, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def ended(count: int) -> Dataset:
    """Texts with a class, which end with BART's end-of-text token."""
    tokens = 3 + texts(count).tensors["input_ids"] % 17
    tokens[:, -1] = 2
    return Dataset({"input_ids": tokens, "labels": torch.arange(count) % 3})


def with_an_unknown_token(count: int) -> Dataset:
    """Texts, of which one has a token that the model lacks."""
    found = texts(count)
    found.tensors["input_ids"][-1, 0] = 99
    return found


TRAINED = {
    "full": CASES["full"],
    "lora": CASES["lora"],
    "texts, some without labels": Case("fedavg", config=GPT2, head="causal-lm"),
    "recomputed": Case("fedavg", rounds=2, training={"gradient_checkpointing": True, "steps": 10}),
    "a rank without rows": Case("fedavg", training={"batch_size": 1}),
    "measured": Case("fedavg", measured=EXAMPLES, config=BERT, head="token-classification", data=tagged),
    "texts that need an end, and a rank without rows": Case(
        "fedavg", config=BART, head="text-classification", data=ended, measured=7, training={"batch_size": 1}
    ),
}
REFUSED = {
    "trains slices of tensors": CASES["slices"],
    "steps of its own .*after_backward": CASES["scaffold"],
    "differential privacy": Case("fedavg", spec={"privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0}}),
    "keep_moments is true": Case("fedavg", training={"optimizer": "adamw", "keep_moments": True}),
    "precision is float16": Case("fedavg", training={"precision": "float16"}),
    "skips layers at random .encoder_layerdrop": Case(
        "fedavg", config={**BART, "encoder_layerdrop": 0.5}, head="text-classification", data=ended
    ),
}


@pytest.mark.parametrize("name", ["full", "lora"])
def test_two_ranks_with_half_a_model_each_train_as_one_process(
    name: str, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(TRAINED[name], executor, monkeypatch, compute=SHARD)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TRAINED if name not in CASES])
def test_two_ranks_with_half_a_model_each_train_other_runs_as_one_process(
    name: str, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(TRAINED[name], executor, monkeypatch, compute=SHARD)


@pytest.mark.parametrize("reason", REFUSED)
def test_a_run_whose_model_cannot_be_divided_is_refused_before_it_is_fetched(
    reason: str, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stalled, match=f"unsuited: .*compute.shard.*{reason}"):
        divided(REFUSED[reason], executor, monkeypatch, compute=SHARD)


def test_a_model_with_a_parameter_of_a_single_number_is_refused() -> None:
    scale = Block(tensor="logit_scale", role="other", shape=(), dtype="F32")
    half = worker_half(MethodSpec(name="fedavg"), RunInfo((scale,), rounds=1))
    model = Model(config=GPT2, head="causal-lm", blocks=(scale,))
    with pytest.raises(UnsupportedRun, match=r"parameters of a single number \(logit_scale\)"):
        require_shardable(half, Plan(), model, Training(), private=False)


@pytest.mark.long
def test_an_example_that_one_rank_cannot_compute_fails_the_task_with_its_reason(
    executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("fedavg", config=GPT2, head="causal-lm", data=with_an_unknown_token)
    with pytest.raises(Stalled, match="input-mismatch: the data set has tokens or labels that the model lacks"):
        divided(case, executor, monkeypatch, compute=SHARD)


def test_each_rank_keeps_half_of_the_parameters(
    fresh_executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case("fedavg", config=GPT2, head="causal-lm", training={"steps": 1})
    divided(case, fresh_executor, monkeypatch, compute=SHARD)
    fresh_executor.close()
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if "model-sharded" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["bytes"] == pytest.approx(line["model_bytes"] / 2, rel=0.01)


@pytest.mark.parametrize("beside", [{"compile": True}, {"base_bits": 4}])
def test_shard_is_refused_beside_settings_that_need_whole_parameters(beside: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="shard works with neither compile nor base_bits"):
        Compute.model_validate({"shard": True, **beside})


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "set devices, or remove shard"),
        ({"devices": 2, "micro_batch": 4}, "remove micro_batch"),
        ({"devices": ["cpu"]}, "cpu is one: remove it"),
    ],
)
def test_shard_is_refused_on_one_device_and_for_batches_in_pieces(
    settings: dict[str, object], error: str, tmp_path: Path
) -> None:
    given: dict[str, object] = {
        "url": "http://127.0.0.1",
        "token": "t",
        "name": "w",
        "state_dir": tmp_path,
        "datasets": {"digits": {"kind": "digits"}},
    }
    with pytest.raises((ValidationError, SettingsError), match=error):
        devices_of(WorkerSettings.model_validate({**given, **settings, "compute": {"shard": True}}))

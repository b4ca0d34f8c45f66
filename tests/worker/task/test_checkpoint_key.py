"""What has to be equal for a task to resume: everything that its training depends on, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.model.selectors import roles
from tessera.worker.data.content import digests_of
from tessera.worker.data.dataset import Dataset, RawTexts
from tessera.worker.data.registry import load
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.checkpoints import Checkpoints
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.state.vault import Vault
from tessera.worker.task.environment import TaskEnvironment
from tessera.worker.task.resumption import SETTINGS, checkpoint_of, key_of
from tessera.worker.training.setup import TrainingSetup
from tests.support.task_document import task_of
from tests.support.tasks import images

PRIVACY = {"epsilon": 3.0, "delta": 1e-5, "clip_norm": 1.0}


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


def task(**more: Any) -> Task:
    given = {"rounds": 4, "training": {"batch_size": 8}, "model": digest("a")}
    return task_of(**{**given, "version": {"number": 0, "digest": digest("b")}, **more})


@pytest.fixture
def env(tmp_path: Path) -> TaskEnvironment:
    # No task runs, so nothing asks a coordinator.
    setup, cache = TrainingSetup(torch.device("cpu")), Cache(tmp_path / "cache", 1 << 20)
    made = TaskEnvironment(cast("Any", None), {}, Direct({}, setup), Vault(tmp_path / "vault"), cache, tmp_path)
    made.contents.update({"wards": "one", "clinics": "two"})
    return made


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "run": ("run", {"run": "s"}),
    "round": ("round", {"round": 2}),
    "task": ("task", {"id": "u"}),
    "model": ("model", {"model": digest("c")}),
    "version": ("base", {"version": {"number": 0, "digest": digest("c")}}),
    "plan": ("plan", {"plan": Plan(train=roles("head"))}),
    "a plan's numbers": ("plan", {"plan": Plan(scalars={"layers": 2.0})}),
    "a plan's steps": ("plan", {"plan": Plan(steps=3)}),
    "training": ("settings", {"training": {"batch_size": 9}}),
    "method": ("settings", {"method": MethodSpec(name="fedprox")}),
    "a method's settings": ("settings", {"method": MethodSpec(name="fedavg", settings={"x": 1})}),
    "privacy": ("settings", {"privacy": PRIVACY}),
    "codec": ("settings", {"codec": "zstd"}),
    "seed": ("settings", {"seed": 1}),
    "rounds": ("settings", {"rounds": 5}),
    "data set": ("data", {"dataset": "clinics"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_task_is_a_change_of_the_key(env: TaskEnvironment, change: str) -> None:
    part, more = CHANGES[change]
    one, other = key_of(env, task()), key_of(env, task(**more))
    assert [name for name, value in one if value != getattr(other, name)] == [part]
    assert one.digest != other.digest


def test_every_field_of_a_task_is_in_the_key_or_has_no_effect_on_training() -> None:
    named = {"run", "round", "id", "model", "version", "plan", "dataset"}
    of_the_lease = {"token", "lease_seconds", "orchestrator", "receipt", "audit_head", "run_name", "study"}
    of_the_lease |= {"inline_bytes", "inline_blobs"}
    of_evaluations = {"kind", "held_out", "ignore", "subgroups", "max_new_tokens", "describe"}
    # Masks and a sum's noise come after training.
    of_the_upload = {"stream_bytes", "secure_sums", "sums", "client_privacy", "keep_updates", "parent"}
    assert set(Task.model_fields) == SETTINGS | named | of_the_lease | of_evaluations | of_the_upload


def test_a_new_lease_of_the_task_has_the_same_key(env: TaskEnvironment) -> None:
    again = task(token=7, lease_seconds=5.0, orchestrator="another", inline_bytes=9)
    assert key_of(env, again).digest == key_of(env, task()).digest


def test_other_data_another_device_and_other_libraries_are_another_key(
    env: TaskEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = key_of(env, task())
    on_gpu = replace(env, executor=Direct({}, TrainingSetup(torch.device("cuda"))))
    assert key_of(on_gpu, task()) == one.model_copy(update={"device": "cuda"})
    env.contents["wards"] = "changed"
    assert key_of(env, task()).data != one.data
    monkeypatch.setattr("tessera.worker.task.resumption.VERSION", "9.9")
    assert key_of(env, task()).libraries != one.libraries


def test_no_checkpoint_is_written_where_the_settings_say_none(env: TaskEnvironment, tmp_path: Path) -> None:
    with_folder = replace(env, checkpoints=Checkpoints(tmp_path / "vault"), ledger=Ledger(tmp_path / "ledger"))
    assert checkpoint_of(with_folder, task()) is None
    assert checkpoint_of(replace(with_folder, checkpoint_seconds=600.0), task()) is not None


def contents(data: Dataset) -> str:
    return digests_of(data).content


def test_the_contents_of_a_data_set_are_its_examples_their_order_and_their_labels() -> None:
    data = images()
    others = {
        "equal": images(),
        "fewer": images(23),
        "another order": data.rows(torch.arange(23, -1, -1)),
        "another label": Dataset({**data.tensors, "labels": data.tensors["labels"].clone().fill_(0)}),
        "another dtype": Dataset({**data.tensors, "pixel_values": data.tensors["pixel_values"].double()}),
        "common inputs": replace(data, common={"input_ids": torch.arange(3)}),
    }
    same = [name for name, other in others.items() if contents(other) == contents(data)]
    assert same == ["equal"]


def test_the_classes_of_words_are_part_of_the_contents() -> None:
    def tagged(tags: list[list[int]]) -> Dataset:
        raw = RawTexts([["a", "b"]], lambda data, *_: data, None, by_word=True, tags=tags)
        return Dataset({"labels": torch.zeros(1, dtype=torch.long)}, sources=[b"a b"], texts=raw)

    assert contents(tagged([[0, 1]])) == contents(tagged([[0, 1]])) != contents(tagged([[1, 0]]))


def test_the_settings_by_which_a_run_s_tokenizer_makes_rows_are_part_of_the_contents(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text('{"text": "the cat sat"}\n')

    def contents_with(**options: Any) -> str:
        given = {"file": str(file), "tokenizer": "run", "head": "causal-lm", "max_length": 8}
        return contents(load("text", {**given, **options}))

    kept = contents_with()
    assert contents_with() == kept
    assert kept not in {contents_with(max_length=4), contents_with(pack=True)}


def test_the_texts_of_classes_are_part_of_the_contents() -> None:
    def described(text: str) -> Dataset:
        raw = RawTexts([text], lambda data, *_: data, None, of_classes=True)
        return Dataset({"labels": torch.zeros(1, dtype=torch.long)}, texts=raw)

    assert contents(described("a cat")) == contents(described("a cat")) != contents(described("a photo of a cat"))

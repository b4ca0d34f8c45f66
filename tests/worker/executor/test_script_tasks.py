"""A script's side of its task, in this process: what trains, what stays as it is, and what is returned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config

import tessera.site
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training
from tessera.shared.updates.model_folder import ModelFolder
from tessera.site import SiteTask
from tessera.worker.cli.model import init
from tessera.worker.errors import TaskFailure
from tessera.worker.executor import script_result
from tessera.worker.executor.folder import write_document
from tessera.worker.executor.script import SECRET
from tessera.worker.executor.script_folder import BLOCKS, MODEL, RESULT, STOP, TASK, TASK_VARIABLE, ScriptTask
from tessera.worker.executor.script_result import read_progress, read_result
from tessera.worker.settings import DataSource, DataSources

EXAMPLES = 6
SIZES = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a task that trains and sends the values of a fused matrix, and the biases of the last norm."""
    GPT2Config(**SIZES, **DROPOUT).save_pretrained(tmp_path / "config")
    init(tmp_path / MODEL, str(tmp_path / "config"), "causal-lm", 1, pretrained=False)
    ids = torch.arange(EXAMPLES * 4).reshape(EXAMPLES, 4) % 11
    save_file({"input_ids": ids, "labels": ids.clone()}, tmp_path / "rows.safetensors")
    blocks = [block for block in ModelFolder.open(tmp_path / MODEL).model.blocks if trains(block)]
    assert any(block.part for block in blocks)
    give(tmp_path, blocks)
    return tmp_path


def trains(block: Block) -> bool:
    return block.role == "value" or block.name == "transformer.ln_f.bias"


def give(folder: Path, blocks: list[Block], **source: Any) -> None:
    names = tuple(block.name for block in blocks)
    given = {"kind": "arrays", "file": str(folder / "rows.safetensors"), **source}
    data = DataSource.model_validate(given)
    sources = DataSources(
        datasets={"d": data}, loaders=0, held_out_key_file=folder / "key", prepared=folder / "prepared"
    )
    task = ScriptTask(
        run="r", round=1, rounds=2, method="fedavg", dataset="d", examples=EXAMPLES, steps=2, seed=5 + (1 << 40),
        training=Training(), train=names, send=names, lora_rank=None, mapping=None, sources=sources,
        data=None if source else given,
    )  # fmt: skip
    write_document(folder / TASK, task)


def sent(folder: Path) -> list[Block]:
    return [block for block in ModelFolder.open(folder / MODEL).model.blocks if trains(block)]


def test_only_the_plans_rows_of_a_fused_matrix_train_and_leave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASK_VARIABLE, str(folder))
    task = tessera.site.task()
    assert (task.seed, task.examples, task.steps) == (5, EXAMPLES, 2)
    model = task.model()
    task.freeze(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.ln_f.bias",
    }
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    callback, control = task.callback(), SimpleNamespace(should_training_stop=False)
    callback.on_train_begin(None, None, control, model=model)
    optimizer = torch.optim.SGD(filter(lambda each: each.requires_grad, model.parameters()), 0.5, weight_decay=0.5)
    rows = task.dataset()
    assert len(rows) == EXAMPLES
    for step in (1, 2):
        batch = {name: torch.stack([rows[place][name] for place in range(EXAMPLES)]) for name in rows[0]}
        optimizer.zero_grad()
        model(**batch).loss.backward()
        fused = model.transformer.h[0].attn.c_attn.weight.grad
        assert not fused[:, :16].any()
        assert fused[:, 16:].any()
        optimizer.step()
        callback.on_optimizer_step(None, None, control)
        assert not control.should_training_stop
        callback.on_log(None, None, control, logs={"loss": 2.5})
        callback.on_step_end(None, SimpleNamespace(global_step=step, is_world_process_zero=True), control)
    assert control.should_training_stop
    callback.on_train_end(None, None, control)
    progress = read_progress(folder)
    assert progress is not None
    assert (progress.step, progress.loss) == (2, 2.5)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == trained
    for name in (name for name in trained if "c_attn" in name):
        assert torch.equal(before[name][..., :16], after[name][..., :16])
    task.submit(model, {"eval/loss": 1.5, "nan": float("nan"), "name": "text", "0th": 1.0})  # type: ignore[dict-item]
    arrays, figures = read_result(folder, sent(folder))
    assert figures == {"eval_loss": 1.5}
    assert arrays.keys() == {block.name for block in sent(folder)}
    value = next(name for name in arrays if "c_attn.weight" in name)
    assert np.array_equal(arrays[value], after["transformer.h.0.attn.c_attn.weight"][:, 16:].numpy())


def test_a_model_with_other_tensors_is_not_submitted(folder: Path) -> None:
    task = SiteTask(folder)
    model = task.model()
    with pytest.raises(ValueError, match=r"submit the model of task.model\(\), in its own dtypes"):
        task.submit(model.half())
    with pytest.raises(ValueError, match="missing from the model"):
        task.submit(torch.nn.Linear(2, 2))
    assert not list(folder.glob(f"{RESULT}*"))


def test_what_accelerate_wraps_is_submitted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = SiteTask(folder)
    model = task.model()
    monkeypatch.setenv("RANK", "1")
    task.submit(model)
    assert not (folder / RESULT).exists()
    monkeypatch.setenv("RANK", "0")
    task.submit(torch.nn.DataParallel(model))
    assert (folder / RESULT).exists()


def test_a_result_that_is_no_longer_wanted_ends_the_script(folder: Path) -> None:
    task = SiteTask(folder)
    model, control = task.model(), SimpleNamespace(should_training_stop=False)
    callback = task.callback()
    (folder / STOP).touch()
    callback.on_step_end(None, SimpleNamespace(global_step=1, is_world_process_zero=False), control)
    assert control.should_training_stop
    with pytest.raises(SystemExit, match="no longer wants"):
        task.submit(model)
    with pytest.raises(TaskFailure, match="its files are missing"):
        read_result(folder, sent(folder))


def test_held_out_rows_are_not_for_a_script(folder: Path) -> None:
    assert SiteTask(folder).data["kind"] == "arrays"
    give(folder, sent(folder), held_out=0.5)
    task = SiteTask(folder)
    with pytest.raises(RuntimeError, match=r"use task\.dataset\(\)"):
        task.data  # noqa: B018
    # Without the site's key, or with another file, others would train.
    with pytest.raises(RuntimeError, match="examples, and 6 at the worker's start"):
        task.dataset()


def test_a_script_that_no_worker_runs_is_told_how_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TASK_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=r"\[executor\] command = "):
        tessera.site.task()


LEAVES = """
import subprocess, sys
code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
child.wait()
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
"""


def test_a_script_leaves_no_process_behind_that_left_its_group() -> None:
    command = [sys.executable, "-m", "tessera.worker.executor.script_supervisor", str(os.getpid())]
    ended = subprocess.run([*command, sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, check=True)
    left = ended.stdout.split()
    assert len(left) == 2
    assert not any(psutil.pid_exists(int(each)) for each in left)


def test_the_checked_copy_of_a_result_is_out_of_the_scripts_folder(folder: Path) -> None:
    task = SiteTask(folder)
    task.submit(task.model())
    before = set(folder.rglob("*"))
    arrays, _ = read_result(folder, sent(folder))
    assert set(folder.rglob("*")) == before
    # Nor does it stay beside it; its values can still be read.
    assert not list(folder.parent.glob("*.safetensors"))
    assert all(np.isfinite(values).all() for values in arrays.values())


def test_a_result_that_grows_while_it_is_copied_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a process of a container, which the worker cannot end."""
    task = SiteTask(folder)
    task.submit(task.model())
    checked = script_result._opened

    def grown(path: Path, most: int) -> Any:
        file = checked(path, most)
        if path.name == BLOCKS:
            os.truncate(path, most + 1)
        return file

    monkeypatch.setattr(script_result, "_opened", grown)
    with pytest.raises(TaskFailure, match="its files are missing, too large"):
        read_result(folder, sent(folder))


def test_variables_with_secrets_do_not_reach_a_script() -> None:
    secret = ["TESSERA_WORKER_TOKEN", "HF_TOKEN", "PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "OPENAI_APIKEY",
              "SIGNING_KEYS", "AZURE_STORAGE_CONNECTION_STRING", "SMTP_PASS", "RESTIC_PASSPHRASE"]  # fmt: skip
    assert all(map(SECRET.search, secret))
    plain = ["PATH", "PWD", "OLDPWD", "HOME", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"]
    assert not any(map(SECRET.search, plain))

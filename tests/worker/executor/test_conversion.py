"""A rank converts published models for the agent, which has no torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tessera.shared.updates.base_folder import BaseFolder, ConvertedBlock
from tessera.worker.errors import TaskFailure
from tessera.worker.executor import executor as module
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.model.pretrained import plain_config, read_object
from tessera.worker.task.environment import TaskRun
from tessera.worker.training.progress import Report
from tests.worker.model.test_snapshot import JOINED, MIXTRAL, saved, wanted
from tests.worker.privacy.test_private_task import task as task_of

Bytes = dict[str, tuple[bytes, tuple[Path, ...]]]


def test_a_rank_converts_a_published_model_as_this_process_does(
    alone: ProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rank wakes the agent for each block and for a failure.
    monkeypatch.setattr(module, "LOOK_SECONDS", 3600.0)
    folder = saved(tmp_path / "snapshot", "mixtral", MIXTRAL, "causal-lm")
    blocks, convert = wanted(folder)
    run = TaskRun(cast("Any", None), task_of(), lambda: None, Report(), cast("Any", None))
    document: Any = SimpleNamespace(config=plain_config(read_object(folder / "config.json")), head="causal-lm")
    here, there = Bytes(), Bytes()

    def into(found: Bytes) -> Any:
        def take(made: ConvertedBlock) -> None:
            found[made.block.name] = bytes(made.data), made.sources

        return take

    convert(BaseFolder.open(folder), blocks.values(), into(here))
    alone.convert(run, document, BaseFolder.open(folder), blocks.values(), into(there))
    assert there == here
    assert here.keys() == JOINED
    document.config["hidden_size"] = 0
    with pytest.raises(TaskFailure) as refusal:
        alone.convert(run, document, BaseFolder.open(folder), blocks.values(), into(there))
    assert refusal.value.code == "no-base"

"""A tensor with several names does not leave under one of them if the site withholds another."""

from __future__ import annotations

from pathlib import Path

from tessera.worker.governance.policy import Policy
from tests.support.coordinator import LiveCoordinator
from tests.worker.task.test_packed_runs import LLAMA, worked


def test_a_tied_head_does_not_leave_under_the_name_of_the_embedding(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    config, policy = {**LLAMA, "tie_word_embeddings": True}, Policy(never_send=("lm_head*",))
    task, _ = worked(coordinator, tmp_path, config, own=True, policy=policy)
    assert task.problem is not None
    assert "never_send: these blocks never leave: lm_head.weight (model.embed_tokens.weight)" in task.problem.detail

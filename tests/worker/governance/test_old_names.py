"""What a worker of the version before wrote, and what its settings say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.run_settings import Training
from tessera.worker.governance.approvals import terms_digest
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.governance.run_history import RunHistory, RunSnapshot
from tessera.worker.settings import SettingsError, read_settings
from tests.support.task_document import task_of

DIGEST = "sha256:" + "0" * 64
OLD_TERMS = {
    "run_name": "demo", "model": DIGEST, "method": {"name": "fedavg", "settings": {}}, "dataset": "wards",
    "rounds": 3, "training": Training().model_dump(mode="json"), "privacy": None, "divide": "participants",
    "codec": "raw", "upload_budget": None, "upload_seconds": None, "orchestrator": None,
}  # fmt: skip


def task(normalization: str = "participants") -> Task:
    version = VersionRef(number=1, digest=DIGEST)
    return task_of(round=2, rounds=3, seed=5, version=version, normalization=normalization)


def test_an_approval_that_did_not_name_how_updates_are_merged_holds_no_more() -> None:
    digest = hashlib.sha256(
        json.dumps({**OLD_TERMS, "kind": "train"}, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    assert terms_digest(RunSnapshot.of(task())) != digest


def test_a_run_s_record_of_the_version_before_is_read_and_still_binds_the_run(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"terms": OLD_TERMS, "versions": {}, "handed": {}}))
    history = RunHistory(tmp_path, "w")
    history.check(RunSnapshot.of(task()), Policy())
    with pytest.raises(PolicyViolation, match="has changed its normalization"):
        history.check(RunSnapshot.of(task("cohort")), Policy())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_tries", "max_attempts"),
        ("min_measured", "min_evaluation_examples"),
        ("max_measurements", "max_evaluations"),
    ],
)
def test_an_old_key_of_the_policy_is_refused_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    file = tmp_path / "worker.toml"
    settings = f"""
        url = "https://tessera.example"
        token = "x"
        name = "w"
        state_dir = "{tmp_path}"
        [datasets.wards]
        kind = "arrays"
        [policy]
        """
    file.write_text(f"{settings}{old} = 5\n")
    with pytest.raises(SettingsError, match=rf"`\[policy\] {old}` is now `\[policy\] {new}`"):
        read_settings(file)
    file.write_text(f"{settings}{new} = 5\n")
    assert getattr(read_settings(file).policy, new) == 5
    monkeypatch.setenv(f"TESSERA_WORKER_POLICY__{old.upper()}", "5")
    with pytest.raises(SettingsError, match=rf"is now `\[policy\] {new}`"):
        read_settings(file)

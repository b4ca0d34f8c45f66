"""Workers with GPUs at their sites: what is said of them is well-formed, and their settings are settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.shared.client.transport import ANSWER_SECONDS
from tessera.worker.agent import ALIVE_FILE
from tessera.worker.faults.outage import MAX_WAIT_SECONDS
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import ALIVE_SECONDS


@pytest.fixture
def documents(deploy: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((deploy / "worker-gpu.kubernetes.yaml").read_text()))


@pytest.mark.parametrize("version", ["1.25", "1.34"])
def test_kubernetes_takes_every_document(documents: list[dict[str, Any]], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the extra `deploy`").validate
    assert [document["kind"] for document in documents] == [
        "ConfigMap",
        "PersistentVolumeClaim",
        "StatefulSet",
        "NetworkPolicy",
    ]
    for document in documents:
        validate(document, version, strict=True)


def test_the_settings_of_a_worker_in_a_cluster_are_read(documents: list[dict[str, Any]]) -> None:
    settings = WorkerSettings(**tomllib.loads(documents[0]["data"]["worker.toml"]))
    (container,) = documents[2]["spec"]["template"]["spec"]["containers"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(settings.state_dir) in mounted
    assert settings.token_file is not None
    assert str(settings.token_file.parent) in mounted


def test_a_worker_is_not_killed_while_it_loads_or_waits(documents: list[dict[str, Any]]) -> None:
    settings = WorkerSettings(**tomllib.loads(documents[0]["data"]["worker.toml"]))
    (container,) = documents[2]["spec"]["template"]["spec"]["containers"]
    started, lives = container["startupProbe"], container["livenessProbe"]
    alive = str(settings.state_dir / ALIVE_FILE)
    assert started["exec"]["command"] == ["test", "-e", alive]
    # The claim's volume keeps the file of an earlier process until this one removes it.
    assert started["initialDelaySeconds"] >= 60
    assert started["periodSeconds"] * started["failureThreshold"] >= 6 * 3600
    code = lives["exec"]["command"][-1]
    assert f"'{alive}'" in code
    assert int(code.rpartition(" > ")[2].rstrip(")")) > max(MAX_WAIT_SECONDS, ALIVE_SECONDS + ANSWER_SECONDS)


def test_data_loaders_get_shared_memory(deploy: Path, documents: list[dict[str, Any]]) -> None:
    worker = yaml.safe_load((deploy / "worker-gpu.compose.yaml").read_text())["services"]["worker"]
    pod = documents[2]["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    # As much as the container of the compose file has.
    assert worker["shm_size"] == "2g"
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_a_worker_is_confined_and_listens_to_nobody(deploy: Path, documents: list[dict[str, Any]]) -> None:
    worker = yaml.safe_load((deploy / "worker-gpu.compose.yaml").read_text())["services"]["worker"]
    assert worker["read_only"] is True
    assert worker["cap_drop"] == ["ALL"]
    assert "ports" not in worker
    pod = documents[2]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert "ports" not in pod["containers"][0]
    assert documents[3]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in documents[3]["spec"]

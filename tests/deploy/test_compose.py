"""The federation of deploy/compose.yaml: what its scripts do, and what its services may not. No engine starts it
here."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.coordinator.settings import CoordinatorSettings
from tessera.worker.settings import read_settings
from tests.support.processes import CoordinatorProcess

OURS = {"migrate", "coordinator", "conductor", "join", "north", "south", "west"}


@pytest.fixture(scope="module")
def services(deploy: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]
    return found


def test_no_service_has_any_right_that_it_does_not_need(services: dict[str, Any]) -> None:
    assert services.keys() == OURS | {"database"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].startswith("${TESSERA_USER:?"), name
        assert not {"privileged", "cap_add", "network_mode", "pid", "build"} & service.keys(), name


def test_every_service_that_stays_has_a_health_check_and_nobody_starts_before_what_it_needs(
    services: dict[str, Any],
) -> None:
    for name in services.keys() - {"migrate", "join"}:
        assert services[name]["healthcheck"]["test"], name
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            ends = services[needed]["restart"] == "no"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy"), name


def test_only_the_coordinator_is_reached_from_outside_and_only_from_this_machine(services: dict[str, Any]) -> None:
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "coordinator": ["127.0.0.1:8470:8470"]
    }
    with_workers = {name for name, service in services.items() if "outside" in service["networks"]}
    assert with_workers == {"coordinator", "north", "south", "west"}


def test_coordinator_and_conductor_share_a_folder_of_blobs(services: dict[str, Any]) -> None:
    for name in ("coordinator", "conductor"):
        assert services[name]["environment"]["TESSERA_BLOB_URL"] == "/data/blobs", name
        assert "./data/coordinator:/data" in services[name]["volumes"], name


def test_services_reach_each_other_without_a_proxy(services: dict[str, Any]) -> None:
    for name in OURS:
        for variable in ("NO_PROXY", "no_proxy"):
            direct = services[name]["environment"][variable].split(",")
            assert {"coordinator", "database", "localhost", "127.0.0.1"} <= set(direct), name


def test_nothing_secret_is_written_down(deploy: Path, services: dict[str, Any]) -> None:
    for name, service in services.items():
        environment = service.get("environment", {})
        secret = [key for key in environment if re.search("PASSWORD|SECRET|TOKEN|KEY", key) and "FILE" not in key]
        assert secret == [], name
        # A variable is shown to whoever may inspect a container, and a file of them too.
        assert "env_file" not in service, name
    for name in ("migrate", "coordinator", "conductor"):
        assert services[name]["environment"]["TESSERA_DATABASE_URL_FILE"] == "/run/secrets/database-url", name
        assert services[name]["secrets"] == ["database-url"], name
    assert {"secrets/", "data/", ".env"} <= set((deploy / ".gitignore").read_text().split())


def test_the_settings_of_all_are_settings(deploy: Path, services: dict[str, Any], tmp_path: Path) -> None:
    for name in ("coordinator", "conductor", "migrate"):
        ours = {key[8:].lower() for key in services[name]["environment"] if key.startswith("TESSERA_")}
        assert ours <= set(CoordinatorSettings.model_fields), name
    indices = set()
    for name in ("north", "south", "west"):
        with pytest.MonkeyPatch.context() as patch:
            for key, value in services[name]["environment"].items():
                # The container mounts this folder.
                patch.setenv(key, value.replace("/keys/", f"{tmp_path}/"))
            settings = read_settings(deploy / "worker.toml")
        part = settings.datasets["digits"].part
        assert (settings.name, part is not None and part.count) == (name, 3)
        indices.add(part.index if part else None)
    assert indices == {0, 1, 2}


def test_secrets_are_made_once_each_for_their_owner_alone(deploy: Path, tmp_path: Path) -> None:
    script = tmp_path / "secrets.sh"
    script.write_bytes((deploy / "secrets.sh").read_bytes())
    subprocess.run(["sh", script], check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert made.keys() == {"database-password", "database-url"}
    for path in (tmp_path / "secrets").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    assert re.fullmatch("[0-9a-f]{48}", made["database-password"])
    assert made["database-url"] == f"postgresql://tessera:{made['database-password']}@database/tessera\n"
    owner = (tmp_path / "secrets" / "database-password").stat()
    assert (tmp_path / ".env").read_text() == f"TESSERA_USER={owner.st_uid}:{owner.st_gid}\n"
    assert owner.st_uid != 0
    mounted = re.findall(r"\./(data/[\w/]+)", (deploy / "compose.yaml").read_text())
    assert [folder for folder in mounted if not (tmp_path / folder).is_dir()] == []
    subprocess.run(["sh", script], check=True)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made


def test_sites_are_added_once_and_each_gets_a_token_of_its_own(deploy: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    (tokens / "admin").mkdir(parents=True)
    (tmp_path / "tessera").write_text(f'#!/bin/sh\nexec {sys.executable} -m tessera.shared.cli "$@"\n')
    (tmp_path / "tessera").chmod(0o755)
    with CoordinatorProcess(tmp_path / "coordinator", admin_token_file=tokens / "admin" / "token") as coordinator:
        there = {**os.environ, "TOKENS": str(tokens), "TESSERA_URL": coordinator.url}
        there["PATH"] = f"{tmp_path}:{there['PATH']}"
        for _ in range(2):
            subprocess.run(["sh", deploy / "join.sh", "north", "south"], env=there, check=True)
        found = {name: (tokens / name / "token").read_text().strip() for name in ("north", "south")}
        admin = coordinator.client((tokens / "admin" / "token").read_text().strip())
        assert [site.name for site in admin.sites()] == ["north", "south"]
        assert len(set(found.values())) == 2
        for name in found:
            assert stat.S_IMODE((tokens / name / "token").stat().st_mode) == 0o600


def test_the_worker_s_settings_are_no_more_than_they_share(deploy: Path) -> None:
    assert tomllib.loads((deploy / "worker.toml").read_text()).keys() == {
        "url", "state_dir", "device", "threads", "datasets",
    }  # fmt: skip

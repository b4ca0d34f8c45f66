"""`tessera coordinator doctor`: what is well, what is not, and that looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.coordinator.dossier import signing_key
from tessera.coordinator.server.doctor import checks, insecure
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.diagnostics import Finding, examined
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator
from tests.support.provider import providing, settings


def findings(coordinator: LiveCoordinator) -> list[Finding]:
    return list(examined(checks(coordinator.services)))


@pytest.mark.both_databases
def test_a_coordinator_that_works_has_nothing_that_fails(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    before = list(admin.audit())
    blobs = admin.status().blobs
    found = findings(coordinator)
    assert [one for one in found if one.verdict == "fail"] == []
    names = {one.name for one in found}
    assert {"database", "schema", "write", "clock", "blobs", "staging", "disk", "address", "files", "memory"} <= names
    # Nothing of it stays.
    assert list(admin.audit()) == before
    assert admin.status().blobs == blobs
    assert [path for path in Path(coordinator.settings.blob_url).rglob("*") if path.is_file()] == []


def test_a_disk_below_its_reserve_fails(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, disk_reserve_bytes=1 << 52) as coordinator:
        (found,) = [one for one in findings(coordinator) if one.verdict == "fail"]
    assert "disk_reserve_bytes" in found.detail
    assert (found.name, found.remedy) == ("disk", "Free disk space, or add a disk.")


def unsafe(**given: Any) -> list[str]:
    return [found.detail for found in insecure(CoordinatorSettings(**given)) if found.verdict != "ok"]


def test_what_a_coordinator_makes_is_its_own_and_folders_that_others_may_look_into_are_named(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path) as coordinator:
        settings = coordinator.settings
    made = [Path(settings.blob_url), settings.staging_dir]
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700, 0o700]
    made[0].chmod(0o755)
    given = settings.model_dump(include={"blob_url", "staging_dir"})
    (warning,) = unsafe(**given)
    assert str(made[0]) in warning


def test_the_provider_of_people_is_asked_for_its_keys(tmp_path: Path) -> None:
    with providing() as provider, LiveCoordinator(tmp_path, **settings(provider)) as coordinator:
        look = dict(checks(coordinator.services))["provider"]
        assert [finding.verdict for finding in look()] == ["ok"]
        provider.about = {"issuer": "https://login.example"}
        (found,) = look()
        assert (found.verdict, found.detail) == ("fail", "it calls itself 'https://login.example'")


def test_a_notice_command_that_is_not_there_fails_without_a_test_notice(tmp_path: Path) -> None:
    about = {"public_url": "https://tessera.example"}
    for command, verdict in (("/no/such", "fail"), ("cat", "ok")):
        with LiveCoordinator(tmp_path / verdict, notice_command=[command], **about) as coordinator:
            assert [finding.verdict for finding in dict(checks(coordinator.services))["command"]()] == [verdict]


def test_a_signing_key_that_signs_nothing_fails(tmp_path: Path) -> None:
    key = signing_key.create(tmp_path / "key.pem")
    with LiveCoordinator(tmp_path / "live", signing_key=key.path) as coordinator:
        (found,) = dict(checks(coordinator.services))["signing key"]()
        assert (found.verdict, key.fingerprint in found.detail) == ("ok", True)
        key.path.write_text("no key")
        (found,) = dict(checks(coordinator.services))["signing key"]()
        assert (found.verdict, "cannot use its signing key" in found.detail) == ("fail", True)


def test_unsafe_settings_are_named(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("tessera_admin_x")
    file.chmod(0o644)
    # With blobs in a folder, half of its disk is the limit.
    assert unsafe() == []
    bucket = {"blob_url": "s3://bucket/prefix"}
    assert unsafe(**bucket) == ["a site may announce any number of bytes"]
    assert unsafe(**bucket, site_bytes_per_day=1 << 40) == []
    assert unsafe(signing_key=file) == [f"other users may read the key that signs dossiers in {file}"]
    assert unsafe(admin_token_file=file) == [f"other users may read the administrator's token in {file}"]
    assert unsafe(database_url="postgresql://t@db.example/t") == [
        "the database server is on another machine and is not verified"
    ]
    assert unsafe(database_url="postgresql://t@db.example/t?sslmode=verify-full") == []
    assert unsafe(database_url="postgresql://t@127.0.0.1/t") == []


def test_a_database_that_is_behind_fails_and_the_command_says_so(tmp_path: Path) -> None:
    settings = {
        "TESSERA_DATABASE_URL": f"sqlite:///{tmp_path}/t.db", "TESSERA_BLOB_URL": str(tmp_path / "blobs"),
        "TESSERA_STAGING_DIR": str(tmp_path / "staging"), "TESSERA_DISK_RESERVE_BYTES": "0", "TESSERA_PORT": "1",
    }  # fmt: skip
    said = tessera("coordinator", "doctor", "--json", **settings)
    assert said.returncode == 1, said.stderr
    found = {one["name"]: one for one in json.loads(said.stdout)["findings"]}
    assert (found["schema"]["verdict"], found["schema"]["remedy"]) == ("fail", "Run 'tessera coordinator migrate'.")
    assert tessera("coordinator", "migrate", **settings).returncode == 0
    assert tessera("coordinator", "doctor", **settings).returncode == 0

"""The locks and the bills of materials: whole, of one version each, and without an address."""

from __future__ import annotations

import json
import re
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release import licences, locks
from tests.support.paths import ROOT

NAMES = ("coordinator", "worker", "cuda", "signing")


def lock(name: str) -> locks.Lock:
    return locks.parsed(locks.lock_file(name).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_each_package_of_a_lock_has_hashes_and_the_version_of_the_constraints(name: str) -> None:
    pins = set(re.findall(r"^[a-z0-9][^\s;]*", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert lock(name).keys() <= pins
    for package in lock(name).values():
        assert re.fullmatch(r"\S+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n", package), package


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_names_no_address(name: str) -> None:
    assert "/" not in re.sub(r"^#.*", "", locks.lock_file(name).read_text())


@pytest.mark.parametrize("image", locks.IMAGES)
def test_a_lock_has_all_that_its_image_installs(image: str) -> None:
    """And nothing that another version of Tessera needed: else `make lock` was not run."""
    found = {canonicalize_name(name.partition("==")[0]): name.partition("==")[2] for name in lock(image)}
    for requirement in map(Requirement, requires("tessera-fl") or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in locks.IMAGES[image]):
            assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement


def test_both_builds_of_torch_are_in_the_worker_s_lock() -> None:
    (torch,) = (lines for name, lines in lock("worker").items() if name.startswith("torch=="))
    # The CPU build for CPython 3.11 on x86-64, of which the index knows nothing.
    assert "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b" in torch
    assert torch.count("sha256") > 10
    assert all(locks.CUDA.match(name) for name in lock("cuda"))
    assert not any(locks.CUDA.match(name) for name in lock("worker"))


def test_a_lock_without_a_hash_of_the_cpu_build_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "lock_file", lambda name: tmp_path / name)
    given = locks.parsed("numpy==2.0\ntorch==2.13.0 \\\n    --hash=sha256:" + "a" * 64 + "\n")
    with pytest.raises(SystemExit, match="no hash of its CPU build"):
        locks.with_cpu_build(given, tmp_path)
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"wheel")
    made = locks.with_cpu_build(given, tmp_path)["torch==2.13.0"]
    assert made.count("--hash") == 2
    # Once there, it stays without the wheel.
    (tmp_path / "worker").write_text(made)
    assert locks.with_cpu_build(given, None)["torch==2.13.0"] == made


def test_a_bill_is_valid_equal_each_time_and_of_the_image_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sbom = pytest.importorskip("release.sbom", reason="needs the extra `release`")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    made = sbom.bill(("coordinator",))
    assert made == sbom.bill(("coordinator",))
    components = {one["name"]: one for one in json.loads(made)["components"]}
    assert components["structlog"]["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    assert all(one["licenses"] for one in components.values())
    assert "colorama" not in components
    # As the standard demands; it is checked before each use.
    monkeypatch.setattr(sbom, "SchemaVersion", SimpleNamespace(V1_6=sbom.SchemaVersion.V1_2))
    with pytest.raises(SystemExit, match="is not valid"):
        sbom.bill(("coordinator",))


@pytest.mark.parametrize(
    ("metadata", "licence", "fault"),
    [
        ({"license_expression": "MIT AND (Apache-2.0 OR ISC)"}, "MIT AND (Apache-2.0 OR ISC)", None),
        ({"license": "MPL-2.0 AND MIT"}, "MPL-2.0 AND MIT", None),
        (
            {"license": "all of the text", "classifier": ["License :: OSI Approved :: BSD License"]},
            "BSD License",
            None,
        ),
        ({"license_expression": "GPL-3.0-only WITH GCC-exception-3.1"}, None, "GCC-exception-3.1, GPL-3.0-only"),
        ({"license": "LicenseRef-NVIDIA-Proprietary"}, None, "LicenseRef-NVIDIA-Proprietary"),
        ({}, "", "it states none"),
    ],
)
def test_a_licence_that_is_unknown_or_not_permitted_is_named(
    metadata: dict[str, Any], licence: str | None, fault: str | None
) -> None:
    stated = licences.stated({"name": "Some_Package", **metadata})
    assert licence in (None, stated)
    found = list(licences.faults({"some-package": stated}))
    assert found == ([] if fault is None else [f"some-package: {fault}. {licences.REMEDY}"])

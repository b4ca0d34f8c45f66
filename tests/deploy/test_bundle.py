"""The bundle of `make bundle`: the commands of docs/offline.md without a network, and bundles that are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.coordinator.dossier import signing_key
from tests.support.cli import environment, tessera
from tests.support.paths import ROOT
from tests.support.shell_blocks import blocks

PAGE = ROOT / "docs" / "offline.md"

FOLLOW = """
set -eu
ip link set lo up
cd "$BUNDLE"
{install}
cd "$HOME"
({serve}) > serve.log 2>&1 & trap 'kill $(jobs -p)' EXIT
until grep -q coordinator.serving serve.log; do kill -0 $!; sleep 0.2; done
({join}) > join.log 2>&1 & joining=$!
until grep -qoE '[A-Z]{{4}}-[A-Z]{{4}}' join.log; do kill -0 $joining; sleep 0.2; done
CODE=$(grep -oE '[A-Z]{{4}}-[A-Z]{{4}}' join.log | head -n 1)
{approve}
wait $joining
({work}) > work.log 2>&1 &
{run}
"""


def script(bundle: Path, key: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", bundle / "verify.py", key], capture_output=True, text=True, check=False
    )


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A signed folder with the script, and the signer's public key."""
    bundle = pytest.importorskip("release.bundle", reason="the extra `release` is not installed")
    key = signing_key.create(tmp_path / "key.pem")
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels/one.whl").write_bytes(b"one")
    (folder / "offline.md").write_text("page")
    shutil.copyfile(ROOT / "release/verify.py", folder / "verify.py")
    bundle.seal(folder, key)
    return folder, key.public_path


def test_a_bundle_verifies_with_tessera_and_without(small: tuple[Path, Path]) -> None:
    folder, key = small
    done = script(folder, key)
    assert (done.returncode, done.stdout) == (0, "5 files are as the key signed them\n"), done.stderr
    assert "5 files are as" in tessera("verify", str(folder), "--key", str(key)).stdout
    sums = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=False)
    assert sums.returncode == 0


def test_what_is_packed_does_not_depend_on_times_modes_and_the_folder(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    bundle = pytest.importorskip("release.bundle", reason="the extra `release` is not installed")
    other = tmp_path / "elsewhere" / small[0].name
    shutil.copytree(small[0], other)
    for path in (other, *other.rglob("*")):
        path.chmod(0o700)
        os.utime(path, (1, 1))
    assert bundle.pack(small[0]).read_bytes() == bundle.pack(other).read_bytes()


@pytest.mark.long
def test_the_documents_are_equal_bit_for_bit_each_time(tmp_path: Path) -> None:
    bundle = pytest.importorskip("release.bundle", reason="the extra `release` is not installed")
    made = []
    for name in ("one", "two"):
        bundle.site(tmp_path / name)
        files = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        made.append({path.relative_to(tmp_path / name).as_posix(): path.read_bytes() for path in files})
    assert len(made[0]) > 100
    assert made[0] == made[1]


def link(folder: Path) -> None:
    (folder / "wheels/one.whl").rename(folder.parent / "one.whl")
    (folder / "wheels/one.whl").symlink_to(folder.parent / "one.whl")


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda folder: (folder / "wheels/one.whl").write_bytes(b"two"), "wheels/one.whl"),
        (lambda folder: (folder / "wheels/one.whl").unlink(), "wheels/one.whl"),
        (lambda folder: (folder / "wheels/more.whl").write_bytes(b"more"), "wheels/more.whl"),
        (link, "wheels/one.whl"),
    ],
    ids=["changed", "missing", "added", "link"],
)
def test_a_bundle_with_a_wrong_file_is_refused(
    harm: Callable[[Path], None], named: str, small: tuple[Path, Path]
) -> None:
    folder, key = small
    harm(folder)
    done, other = script(folder, key), tessera("verify", str(folder), "--key", str(key))
    assert (done.returncode, other.returncode) == (1, 1)
    assert f"{named}: " in done.stdout
    assert "get another copy" in done.stderr
    assert named in other.stderr
    assert "another copy" in other.stderr


def test_no_other_file_of_the_bundle_is_executed(small: tuple[Path, Path]) -> None:
    folder, key = small
    (folder / "json.py").write_text("raise SystemExit(0)")
    done = script(folder, key)
    assert (done.returncode, done.stdout) == (1, "json.py: is not signed: it was added afterwards\n")
    line = [sys.executable, folder / "verify.py", key]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "python3 -I verify.py" in done.stderr


def test_a_wrong_key_is_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = small
    wrong = signing_key.create(tmp_path / "wrong.pem").public_path
    done, other = script(folder, wrong), tessera("verify", str(folder), "--key", str(wrong))
    assert (done.returncode, other.returncode) == (1, 1)
    for said in (done.stderr, other.stderr):
        assert "model.sig is no signature by" in said
        assert "another copy" in said


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_page_installs_and_trains_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="the extra `release` is not installed")
    apart = ["unshare", "--net"]
    if subprocess.run([*apart, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode:
        pytest.skip("a network namespace needs root, unshare and ip")
    more = ["--torch-cpu", os.environ["TORCH_CPU"]] if "TORCH_CPU" in os.environ else []
    make: list[str | Path] = [
        sys.executable,
        "-m",
        "release.bundle",
        "--key",
        tmp_path / "key.pem",
        "--out",
        tmp_path / "dist",
        *more,
    ]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (packed,) = (tmp_path / "dist").glob("*.tar")
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["tar", "-xf", packed], cwd=home, check=True)
    shutil.copyfile(tmp_path / "key.pem.pub", home / "signer.pub")
    names = ("install", "serve", "join", "approve", "work", "run")
    texts = dict(zip(names, (block.text for block in blocks(PAGE)), strict=True))
    texts["approve"] = texts["approve"].replace("CODE", '"$CODE"')
    settings = {
        name: value for name, value in environment().items() if not name.startswith(("PIP_", "PYTHON", "XDG_"))
    }
    settings |= {"HOME": str(home), "BUNDLE": str(home / packed.stem), "PIP_CONFIG_FILE": os.devnull}
    settings |= {"OMP_NUM_THREADS": "1"}
    followed = subprocess.run(
        [*apart, "bash", "-c", FOLLOW.format(**texts)],
        cwd=home,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(log.read_text()[-2000:] for log in home.glob("*.log"))
    assert followed.returncode == 0, followed.stdout + followed.stderr + logs
    assert "completed" in followed.stdout

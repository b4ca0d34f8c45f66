"""The coordinator's key for dossiers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_public_key,
)

from tessera.coordinator.dossier import signing_key
from tests.support.cli import environment, tessera


def test_a_key_is_created_once_for_its_owner_alone_and_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    first = tessera("coordinator", "signing-key", TESSERA_SIGNING_KEY=str(path))
    private = path.read_bytes()
    again = tessera("coordinator", "signing-key", TESSERA_SIGNING_KEY=str(path))
    assert (first.returncode, again.returncode, first.stdout) == (0, 0, again.stdout)
    assert path.read_bytes() == private
    assert path.stat().st_mode & 0o777 == 0o600
    public, fingerprint = first.stdout.splitlines()
    assert Path(public) == tmp_path / "key.pem.pub"
    assert load_pem_public_key(Path(public).read_bytes())
    assert fingerprint == signing_key.read(path).fingerprint
    assert sorted(one.name for one in tmp_path.iterdir()) == ["key.pem", "key.pem.pub"]


def test_a_second_key_leaves_the_first_one_s_public_key(tmp_path: Path) -> None:
    first = signing_key.create(tmp_path / "key.pem")
    signing_key.create(tmp_path / "key.new")
    assert first.public_path.read_bytes() == first.public


def test_by_default_the_key_is_beside_the_coordinator_s_data(tmp_path: Path) -> None:
    done = tessera("coordinator", "signing-key", "--json", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tessera" / "coordinator" / "signing-key.pem").is_file()


def test_processes_that_create_a_key_at_once_get_the_same(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tessera.coordinator.dossier import signing_key as s; sys.stdin.read(); "
        f"print(s.create(pathlib.Path({str(tmp_path / 'key.pem')!r})).fingerprint)"
    )
    command = [sys.executable, "-c", code]
    started = [
        subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for one in started:
        assert one.stdin
        one.stdin.close()
    told = set()
    for one in started:
        with one:
            assert one.stdout
            told.add(one.stdout.read())
    assert told == {f"{signing_key.read(tmp_path / 'key.pem').fingerprint}\n"}


@pytest.mark.parametrize("at", ["fsync", "link"])
def test_a_killed_process_leaves_no_other_key(tmp_path: Path, at: str) -> None:
    path = tmp_path / "key.pem"
    code = (
        "import os, pathlib, signal; from tessera.coordinator.dossier import signing_key as s; "
        f"os.{at} = lambda *_: os.kill(os.getpid(), signal.SIGKILL); s.create(pathlib.Path({str(path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), check=False)
    assert (done.returncode, path.exists(), len(list(tmp_path.iterdir()))) == (-signal.SIGKILL, False, 1)
    signing_key.create(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["key.pem", "key.pem.pub"]


@pytest.mark.parametrize("kind", ["curve", "encrypted", "text", "folder"])
def test_a_key_of_another_kind_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("key.pem" if kind != "folder" else "missing/key.pem")
    if kind != "folder":
        hiding = BestAvailableEncryption(b"x") if kind == "encrypted" else NoEncryption()
        key = generate_private_key(SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hiding)
        path.write_bytes(b"no key" if kind == "text" else key)
    before = path.read_bytes() if path.exists() else None
    done = tessera("coordinator", "signing-key", TESSERA_SIGNING_KEY=str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"TESSERA_SIGNING_KEY: {path} cannot be used" in done.stderr
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_key_is_not_named_as_its_public_key_is() -> None:
    done = tessera("coordinator", "signing-key", TESSERA_SIGNING_KEY="key.pub")
    assert (done.returncode, "must not end in .pub" in done.stderr) == (2, True)

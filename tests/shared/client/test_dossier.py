"""A run's dossier: fetched, verified without a coordinator, and every change of it found."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from safetensors.numpy import load

from tessera.coordinator.dossier import signing_key
from tessera.coordinator.dossier.archive import archive
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.client.dossier import fetch_dossier, unpacked, verify
from tessera.shared.client.export import export_folder
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Lora, Model
from tessera.shared.problems import DigestMismatch, Invalid
from tessera.shared.rounds.export import CRATE_FILE
from tessera.shared.tensors.hashing import digest_at
from tessera.shared.tensors.lazy import as_bytes, digest_of
from tessera.shared.updates.signatures import sign
from tests.support.cli import environment, tessera
from tests.support.coordinator import LiveCoordinator, refused, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()


@dataclass(frozen=True)
class Made:
    """A coordinator with two runs, and the dossier on a version of the first."""

    live: LiveCoordinator
    client: Client
    run: Run
    other: Run
    key: signing_key.SigningKey
    folder: Path
    options: dict[str, str]


def trained(live: LiveCoordinator, client: Client, name: str, seed: int) -> Run:
    """A run with one merged version."""
    worker = ScriptedWorker(live.client("site", f"{name}-site"))
    run = start_run(client, MODEL, values(MODEL, seed), name=name, rounds=1, cohort=Cohort(sites=(f"{name}-site",)))
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
    return client.run(run.id)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("dossier")
    key = signing_key.create(folder / "key.pem")
    with LiveCoordinator(folder / "live", signing_key=key.path) as live:
        client = live.client("orchestrator")
        run, other = (trained(live, client, name, seed) for seed, name in enumerate(("first", "second")))
        options = {"TESSERA_URL": live.url, "TESSERA_TOKEN": live.token("orchestrator")}
        done = tessera("run", "dossier", "first", str(folder / "out"), **options)
        assert done.returncode == 0, done.stderr
        assert key.fingerprint in done.stdout
        yield Made(live, client, run, other, key, folder / "out", options)


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Path:
    return shutil.copytree(made.folder, tmp_path / "copy")


def resigned(folder: Path, key: Path, *, crate: bool = True) -> None:
    """Sign a folder as it is now, with `crate` described as it is now."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    files.pop("model.sig")
    if crate:
        described = json.loads((folder / CRATE_FILE).read_bytes())
        kept = [one for one in described["@graph"] if one["@type"] != "File"]
        for name in files.keys() - {CRATE_FILE}:
            digest = digest_at(files[name]).removeprefix("sha256:")
            kept.append({"@id": name, "@type": "File", "sha256": digest})
        (folder / CRATE_FILE).write_text(json.dumps({**described, "@graph": kept}))
    sign("x", {name: digest_at(path) for name, path in files.items()}, key, folder / "model.sig")


# ---------------------------------------------------------------- what it holds


def test_a_dossier_has_the_model_as_an_export_has_it(made: Made, tmp_path: Path) -> None:
    export_folder(made.client, made.run, tmp_path / "model", 1, lambda _: None)
    exported = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert {path.name: path.read_bytes() for path in (made.folder / "model").iterdir()} == exported


def test_a_dossier_is_verified_with_its_own_key_or_with_one_that_was_received_otherwise(made: Made) -> None:
    own = tessera("verify", str(made.folder))
    assert (own.returncode, "compare its fingerprint" in own.stderr) == (0, True)
    assert made.key.fingerprint in own.stdout
    assert made.run.version.digest in own.stdout
    given = tessera("verify", str(made.folder), "--key", str(made.key.public_path), "--json")
    assert (given.returncode, given.stderr) == (0, "")
    assert json.loads(given.stdout)["version"] == made.run.version.digest


def test_an_auditor_verifies_a_dossier_without_tessera(made: Made) -> None:
    script = (
        "import sys, socket\n"
        "def refused(*_, **__): raise RuntimeError('a request')\n"
        "socket.socket.connect = socket.getaddrinfo = refused\n"
        "from model_signing import verifying\n"
        "config = verifying.Config().use_elliptic_key_verifier(public_key=sys.argv[2])\n"
        "config.verify(sys.argv[1], sys.argv[1] + '/model.sig')\n"
        "assert 'tessera' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, str(made.folder), str(made.key.public_path)]
    assert subprocess.run(command, check=False, cwd="/").returncode == 0
    tool = [sys.executable, "-m", "model_signing", "verify", "key", str(made.folder)]
    tool += ["--signature", str(made.folder / "model.sig"), "--public_key", str(made.key.public_path)]
    assert subprocess.run(tool, check=False, capture_output=True).returncode == 0


def test_programs_read_the_crate_and_the_software(made: Made) -> None:
    graph = json.loads((made.folder / "ro-crate-metadata.json").read_bytes())["@graph"]
    entities = {one["@id"]: one for one in graph}
    files = {path.relative_to(made.folder).as_posix(): path for path in made.folder.rglob("*") if path.is_file()}
    listed = {name: one for name, one in entities.items() if one["@type"] == "File"}
    assert {*listed, "model.sig", "ro-crate-metadata.json"} == {*files}
    assert {one["@id"] for one in entities["./"]["hasPart"]} == {*listed}
    for name, one in listed.items():
        assert (one["contentSize"], f"sha256:{one['sha256']}") == (
            str(files[name].stat().st_size),
            digest_at(files[name]),
        )
    assert entities["#run"]["identifier"] == made.run.id
    assert entities["./"]["identifier"] == made.run.version.digest == digest_at(made.folder / "version.json")
    software = json.loads((made.folder / "sbom.cdx.json").read_bytes())
    assert (software["bomFormat"], software["specVersion"]) == ("CycloneDX", "1.6")
    components = {one["name"]: one for one in software["components"]}
    assert components["sqlalchemy"]["purl"].startswith("pkg:pypi/sqlalchemy@")
    assert components["sqlalchemy"]["licenses"]
    assert "tessera-fl" not in components


def test_the_zip_has_its_documents_in_the_order_of_their_names_and_no_weights(made: Made) -> None:
    packed = made.client.dossier(made.run.id, 0)
    names = ZipFile(io.BytesIO(packed)).namelist()
    assert names == sorted(names)
    assert {*names} == {path.name for path in made.folder.iterdir()} - {"model"}
    assert unpacked(packed)["version.json"] == made.client.read_blob(made.run.spec.version)


def test_a_dossier_on_a_run_with_an_external_base_has_only_what_is_trained(made: Made, tmp_path: Path) -> None:
    adapter = Block(tensor="layer.0.mlp.lora_A.weight", role="adapter", layer=0, shape=(1, 4), dtype="F32")
    base = {
        block.name: digest_of(bytes(as_bytes(raw)))
        for block, raw in zip(MODEL.blocks, values(MODEL).values(), strict=True)
    }
    lora = {"lora": Lora(rank=1, alpha=1.0), "blocks": (*MODEL.blocks, adapter), "external": base}
    model = MODEL.model_copy(update=lora)
    start_run(made.client, model, {adapter.name: values(model)[adapter.name]}, name="based")
    done = tessera("run", "dossier", "based", str(tmp_path / "out"), **made.options)
    assert done.returncode == 0, done.stderr
    assert Model.read((tmp_path / "out" / "model" / "blocks.json").read_bytes()).external == base
    assert [*load((tmp_path / "out" / "model" / "model.safetensors").read_bytes())] == [adapter.tensor]
    assert tessera("verify", str(tmp_path / "out"), "--key", str(made.key.public_path)).returncode == 0


# ---------------------------------------------------------------- what is found


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda folder: flip(folder / "model" / "model.safetensors"), "model/model.safetensors"),
    "document": (lambda folder: flip(folder / "sbom.cdx.json"), "sbom.cdx.json"),
    "crate": (lambda folder: flip(folder / "ro-crate-metadata.json"), "ro-crate-metadata.json"),
    "removed": (lambda folder: (folder / "version.json").unlink(), "version.json"),
    "added": (lambda folder: (folder / "model" / "more.txt").write_text("x"), "model/more.txt"),
    "hidden": (lambda folder: (folder / ".gitignore").write_text("x"), ".gitignore"),
    "signature": (lambda folder: (folder / "model" / "model.sig").write_text("x"), "model/model.sig"),
    "empty folder": (lambda folder: (folder / "more").mkdir(), "more"),
    "link": (lambda folder: (folder / "more").symlink_to("/etc"), "more"),
    "own link": (
        lambda folder: [
            shutil.move(folder / "version.json", folder.parent / "moved"),
            (folder / "version.json").symlink_to(folder.parent / "moved"),
        ],
        "version.json",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_dossier_is_found_with_its_file(copied: Path, change: str) -> None:
    make, name = CHANGES[change]
    make(copied)
    done = tessera("verify", str(copied), "--json")
    assert done.returncode == 1
    assert name in [fault["pointer"] for fault in json.loads(done.stdout)["errors"]]
    assert "another copy" in done.stderr


def test_a_name_that_is_no_text_hides_no_file(made: Made, copied: Path) -> None:
    (copied / "a?").write_text("x")
    resigned(copied, made.key.path)
    assert tessera("verify", str(copied)).returncode == 0
    shutil.copy(copied / "a?", copied / os.fsdecode(b"a\xff"))
    assert tessera("verify", str(copied)).returncode == 1


def test_a_dossier_of_another_s_key_is_refused(made: Made, copied: Path, tmp_path: Path) -> None:
    other = signing_key.create(tmp_path / "other.pem")
    given = tessera("verify", str(copied), "--key", str(other.public_path))
    assert (given.returncode, "is no signature by other.pem.pub" in given.stderr) == (1, True)
    # Signed again as a whole, it is found only by who has the key from elsewhere.
    (copied / "signing-key.pub").write_bytes(other.public)
    (copied / "sbom.cdx.json").write_text("{}")
    resigned(copied, other.path)
    assert other.fingerprint in tessera("verify", str(copied)).stdout
    assert tessera("verify", str(copied), "--key", str(made.key.public_path)).returncode == 1


def test_the_signature_of_another_run_does_not_fit(made: Made, copied: Path) -> None:
    (copied / "model.sig").write_bytes(unpacked(made.client.dossier(made.other.id, 1))["model.sig"])
    with pytest.raises(DigestMismatch) as caught:
        verify(copied)
    assert "version.json" in {fault.pointer for fault in caught.value.errors}


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"dsseEnvelope": {"payload": "e30="}}', "\xff"])
def test_a_file_that_is_no_signature_is_refused(copied: Path, content: str) -> None:
    (copied / "model.sig").write_bytes(content.encode("latin-1"))
    with pytest.raises(DigestMismatch, match="is no signature"):
        verify(copied)


def test_weights_that_are_not_the_version_s_are_found_though_they_are_signed(made: Made, copied: Path) -> None:
    flip(copied / "model" / "model.safetensors")
    resigned(copied, made.key.path)
    with pytest.raises(DigestMismatch) as caught:
        verify(copied, made.key.public_path)
    assert [(fault.pointer, "head.weight" in fault.detail) for fault in caught.value.errors] == [
        ("model/model.safetensors", True)
    ]


def test_documents_that_contradict_each_other_are_found_though_they_are_signed(made: Made, copied: Path) -> None:
    (copied / "more.txt").write_text("not in the crate")
    crate = (copied / CRATE_FILE).read_text()
    (copied / CRATE_FILE).write_text(crate.replace(made.run.version.digest, made.run.spec.version))
    resigned(copied, made.key.path, crate=False)
    with pytest.raises(DigestMismatch) as caught:
        verify(copied)
    assert [fault.pointer for fault in caught.value.errors] == ["more.txt", "version.json"]


@pytest.mark.parametrize(("name", "content"), [
    ("versions.json", '[{"digest": "another"}]'), ("versions.json", "[]"), ("version.json", "{}"),
    ("model/blocks.json", "{}"), (CRATE_FILE, '{"@graph": 1}'),
])  # fmt: skip
def test_a_document_that_is_no_longer_readable_is_found_though_it_is_signed(
    made: Made, copied: Path, name: str, content: str
) -> None:
    (copied / name).write_text(content)
    resigned(copied, made.key.path, crate=name != CRATE_FILE)
    done = tessera("verify", str(copied))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr


def test_any_folder_that_was_signed_so_is_verified(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / ".gitattributes").write_text("b")
    tool = [sys.executable, "-m", "model_signing", "sign", "key", str(folder), "--no-ignore-git-paths"]
    tool += ["--signature", str(folder / "model.sig"), "--private_key", str(made.key.path)]
    assert subprocess.run(tool, check=False, capture_output=True).returncode == 0
    done = tessera("verify", str(folder), "--key", str(made.key.public_path))
    assert (done.returncode, "2 files are as" in done.stdout) == (0, True)
    os.mkfifo(tmp_path / "pipe")
    for missing in (None, tmp_path / "pipe"):
        with pytest.raises(Invalid, match="is missing, or no file"):
            verify(folder, missing)
    with pytest.raises(Invalid, match="is no public key"):
        verify(folder, folder / "a.txt")
    with pytest.raises(Invalid, match=r"has no model\.sig"):
        verify(tmp_path)


# ---------------------------------------------------------------- coordinators that cannot, or must not be trusted


def test_without_a_key_a_dossier_is_refused_with_the_command_that_makes_one(coordinator: LiveCoordinator) -> None:
    run = start_run(coordinator.client("orchestrator"), MODEL, values(MODEL))
    answer = coordinator.http("orchestrator").get(f"/v1/runs/{run.id}/versions/0/dossier")
    assert "tessera coordinator signing-key" in refused(answer, 409, "conflict").remedy


def test_without_the_library_a_coordinator_and_a_reader_get_the_command_that_installs_it(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.modules['model_signing'] = None; from tessera.shared.cli import main; main.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(made.folder)],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "[signing]" in done.stderr) == (2, True), done.stderr
    monkeypatch.setitem(sys.modules, "model_signing", None)
    answer = made.live.http("orchestrator").get(f"/v1/runs/{made.run.id}/versions/1/dossier")
    assert "pip install 'tessera-fl[signing]'" in refused(answer, 409, "conflict").remedy


def test_a_dossier_on_a_large_model_is_awaited_longer_than_other_answers(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> bytes:
        time.sleep(1.5)
        return archive(*given)

    monkeypatch.setattr("tessera.coordinator.api.dossier.archive", slow)
    token = made.live.token("orchestrator")
    with Client(made.live.url, token, patience_seconds=0, answer_seconds=1) as client:
        assert "model.sig" in unpacked(client.dossier(made.run.id, 1))


def packed_as(*files: tuple[str, bytes], compression: int = 0) -> bytes:
    packed = io.BytesIO()
    with ZipFile(packed, "w", compression) as opened:
        for name, raw in files:
            opened.writestr(name, raw)
    return packed.getvalue()


def overlapping() -> bytes:
    """Two entries whose bytes are the same."""
    raw = packed_as(("a", b"x" * 1000), ("b", b""))
    entry = raw.index(b"PK\x01\x02", raw.index(b"PK\x01\x02") + 4)
    first = raw[raw.index(b"PK\x01\x02") : entry]
    return raw[:entry] + first.replace(b"a", b"b")[:entry] + raw[raw.index(b"PK\x05\x06") :]


HOSTILE = {
    "parent": packed_as(("../out.txt", b"x")),
    "absolute": packed_as(("/etc/passwd", b"x")),
    "folder": packed_as(("model/model.safetensors", b"x")),
    "model": packed_as(("model", b"x")),
    "hidden": packed_as((".bashrc", b"x")),
    "case": packed_as(("a.txt", b"x"), ("A.txt", b"y")),
    "bomb": packed_as(("a.txt", bytes(1 << 20)), compression=ZIP_DEFLATED),
    "many": packed_as(*((f"{number}.txt", b"") for number in range(200))),
    "overlap": overlapping(),
    "damaged": packed_as(("a.txt", b"xxxx")).replace(b"xxxx", b"yyyy"),
    "text": b"no zip",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_zip_of_a_hostile_coordinator_is_refused(kind: str) -> None:
    with refusing("answer-not-understood", "sent no dossier"):
        unpacked(HOSTILE[kind])


KILLED = """
import os, pathlib, signal, sys
from tessera.shared.cli import main
from tessera.shared.client import dossier, export
def killed(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
at = sys.argv.pop(1)
owner, name = {"documents": (dossier, "unpacked"), "model": (dossier, "write_small_files"),
    "weights": (export, "Export"), "check": (dossier, "verify"), "rename": (pathlib.Path, "rename")}[at]
setattr(owner, name, killed)
main.main()
"""


@pytest.mark.parametrize(
    "at", ["weights", "rename", *(pytest.param(at, marks=pytest.mark.long) for at in ("documents", "model", "check"))]
)
def test_a_command_that_is_killed_leaves_no_dossier(made: Made, tmp_path: Path, at: str) -> None:
    command = [sys.executable, "-c", KILLED, at, "run", "dossier", "first", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment(**made.options), check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not os.path.lexists(tmp_path / "out")
    again = tessera("run", "dossier", "first", str(tmp_path / "out"), "--version", "0", **made.options)
    assert again.returncode == 0, again.stderr
    assert tessera("verify", str(tmp_path / "out")).returncode == 0


def test_a_dossier_that_does_not_verify_is_not_kept(made: Made, tmp_path: Path) -> None:
    honest = made.client.dossier
    made.client.dossier = lambda _, number: honest(made.other.id, number)  # type: ignore[method-assign]
    try:
        version = next(made.client.versions(made.run.id, 1))
        with refusing("answer-not-understood", "not as they were signed"):
            fetch_dossier(made.client, made.run, version, tmp_path / "out", lambda _: None)
    finally:
        made.client.dossier = honest  # type: ignore[method-assign]
    assert list(tmp_path.iterdir()) == []

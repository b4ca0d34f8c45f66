"""A run's dossier as a folder: fetched whole or not at all, and verified without a coordinator."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from tessera.shared.api.runs import Run
from tessera.shared.api.versions import Manifest, Version
from tessera.shared.client.client import Client
from tessera.shared.client.export import (
    Progress,
    fetch_stored,
    in_place_of,
    require_new_folder,
    write_small_files,
)
from tessera.shared.client.transport import NotUnderstood
from tessera.shared.json_limits import check_document
from tessera.shared.model.spec import BLOCKS_FILE, MAX_DOCUMENT_BYTES, WEIGHTS_FILE
from tessera.shared.problems import DigestMismatch, Fault, Invalid
from tessera.shared.rounds.export import CRATE_FILE, MODEL_FOLDER, ROOT_FILE, VERSION_FILE
from tessera.shared.schema import Digest
from tessera.shared.tensors.hashing import digest_at
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.model_folder import ModelFolder
from tessera.shared.updates.signatures import (
    FORGED,
    KEY_FILE,
    MAX_KEY_BYTES,
    SIGNATURE_FILE,
    fingerprint,
    require_library,
    signed_digests,
)

VERSIONS_FILE = "versions.json"
"""The document on each version up to that of the weights."""
GIVE_KEY = "Check that you may read the folder; --key names the signer's public key (PEM)."
MAX_FILES = 100
ENTRY = b"PK\x01\x02"
"""The signature of an entry in a zip's directory."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True)
class VerifiedFolder:
    """A folder whose files are the signed ones."""

    fingerprint: Digest
    """Of the public key."""
    files: int
    version: Digest | None
    """The version whose weights it has; None if it is no dossier."""


def fetch_dossier(client: Client, run: Run, version: Version, out: Path, progress: Progress) -> VerifiedFolder:
    """Write the dossier on a version to a new folder. Raises Invalid if `out` exists, and NotUnderstood for a dossier
    that does not verify."""
    require_library()
    require_new_folder(out)
    model = client.model(run.spec.model)
    with in_place_of(out) as partial:
        partial.mkdir()
        for name, raw in unpacked(client.dossier(run.id, version.number)).items():
            (partial / name).write_bytes(raw)
        write_small_files(client, model, partial / MODEL_FOLDER)
        with (partial / MODEL_FOLDER / WEIGHTS_FILE).open("wb") as file:
            fetch_stored(client, run, model, file, version.number, progress)
        try:
            found = verify(partial)
        except DigestMismatch as fault:
            raise NotUnderstood(f"the dossier does not verify: {fault.detail}", errors=fault.errors) from fault
        if found.version != version.digest:
            raise NotUnderstood(f"the coordinator sent the dossier on {found.version} in place of {version.digest}")
        partial.rename(out)
    return found


def unpacked(packed: bytes) -> dict[str, bytes]:
    """Return the files of a dossier's zip by name. Raises NotUnderstood for a name that leads out of a folder or
    comes twice, and for more files or bytes than a dossier has."""
    # Counted before the library makes an object of each entry.
    if packed.count(ENTRY) > MAX_FILES:
        raise NotUnderstood(f"the coordinator sent no dossier: it has more than {MAX_FILES} files")
    try:
        with ZipFile(io.BytesIO(packed)) as opened:
            _require_sound(opened.infolist(), len(packed))
            return {entry.filename: opened.read(entry) for entry in opened.infolist()}
    except (BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as fault:
        raise NotUnderstood(f"the coordinator sent no dossier: {str(fault)[:200]}") from fault


def _require_sound(entries: Sequence[ZipInfo], most_bytes: int) -> None:
    """Raise BadZipFile."""
    if wrong := [entry.filename for entry in entries if not _NAME.fullmatch(entry.filename)]:
        raise BadZipFile(f"{wrong[0]!r} is not the name of a document")
    # Some file systems do not distinguish the case of letters.
    if len({MODEL_FOLDER, *(entry.filename.lower() for entry in entries)}) <= len(entries):
        raise BadZipFile("it has a name twice")
    # Stored files are no larger than the zip, unless they overlap.
    stored = all(entry.compress_type == ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > most_bytes:
        raise BadZipFile("its files have more bytes than the zip")


def verify(folder: Path, key: Path | None = None) -> VerifiedFolder:
    """Check that a key signed every file of a folder, and that a dossier's weights are its version's. Without `key`,
    the key is the folder's own.

    Raises DigestMismatch naming each file that is wrong, and Invalid if a file that it needs cannot be read.
    """
    signature, public = folder / SIGNATURE_FILE, key or folder / KEY_FILE
    if not signature.is_file():
        remedy = "Name a folder of `tessera run dossier`, a bundle, or another with a signature of this name."
        raise Invalid(f"{folder} has no {SIGNATURE_FILE}", remedy=remedy)
    # To open a pipe would wait for its other end.
    if not public.is_file():
        raise Invalid(f"{public} is missing, or no file", remedy=GIVE_KEY)
    try:
        with public.open("rb") as file:
            owner = fingerprint(file.read(MAX_KEY_BYTES))
        signed = signed_digests(signature, public)
        faults = list(_changes(folder, signed)) or list(_contradictions(folder, signed))
    except OSError as fault:
        raise Invalid(f"{fault.filename} cannot be read: {fault.strerror}", remedy=GIVE_KEY) from fault
    except ValueError as fault:
        raise Invalid(f"{public} is no public key: {fault}", remedy=GIVE_KEY) from fault
    if faults:
        raise DigestMismatch(
            f"{len(faults)} files of the folder are not as they were signed", errors=faults, remedy=FORGED
        )
    version = digest_at(folder / VERSION_FILE) if VERSION_FILE in signed else None
    return VerifiedFolder(owner, len(signed), version)


def _changes(folder: Path, signed: Mapping[str, Digest]) -> Iterator[Fault]:
    """Yield the files, links and empty folders that were changed, removed or added since the folder was signed."""
    found = dict[str, str]()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            found[name] = "a link, or something else than a file"
        elif path.is_file() and name != SIGNATURE_FILE:
            found[name] = digest_at(path)
        elif path.is_dir() and not any(path.iterdir()):
            found[name] = "an empty folder"
    for name in sorted({*signed, *found}):
        if name not in found:
            yield Fault(pointer=name, detail="is signed and missing")
        elif name not in signed:
            # A signature has no name that is not UTF-8; a folder may.
            shown = name.encode(errors="backslashreplace").decode()
            yield Fault(pointer=shown, detail="is not signed: it was added afterwards")
        elif found[name] != signed[name]:
            yield Fault(pointer=name, detail=f"is {found[name]}; signed is {signed[name]}")


def _contradictions(folder: Path, signed: Mapping[str, Digest]) -> Iterator[Fault]:
    """Yield the faults of a dossier whose files are the signed ones: contradictions among them."""
    if VERSION_FILE not in signed:
        return
    checks = {CRATE_FILE: _crate_faults, VERSIONS_FILE: _version_faults, VERSION_FILE: _weight_faults}
    for name, check in checks.items():
        try:
            yield from check(folder, signed)
        except Invalid as refusal:
            yield Fault(pointer=MODEL_FOLDER, detail=refusal.detail)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as fault:
            yield Fault(pointer=name, detail=f"cannot be read: {str(fault)[:200]}")


def _crate_faults(folder: Path, signed: Mapping[str, Digest]) -> Iterator[Fault]:
    entities = {one["@id"]: one for one in check_document(_document(folder / CRATE_FILE))["@graph"]}
    listed = {name: one["sha256"] for name, one in entities.items() if one["@type"] == "File"}
    for name in sorted({*listed, *signed} - {CRATE_FILE}):
        if f"sha256:{listed.get(name)}" != signed.get(name):
            yield Fault(pointer=name, detail=f"has another digest in {CRATE_FILE}, or is missing there")
    if entities["./"]["identifier"] != signed[VERSION_FILE]:
        yield Fault(pointer=VERSION_FILE, detail=f"is another version than in {CRATE_FILE}")


def _version_faults(folder: Path, signed: Mapping[str, Digest]) -> Iterator[Fault]:
    if VERSIONS_FILE in signed:
        stated = check_document(_document(folder / VERSIONS_FILE))[-1]["digest"]
        if stated != signed[VERSION_FILE]:
            yield Fault(pointer=VERSIONS_FILE, detail=f"is about version {stated}, which {VERSION_FILE} is not")


def _weight_faults(folder: Path, _: Mapping[str, Digest]) -> Iterator[Fault]:
    def root(digest: str) -> bytes:
        found = _document(folder / ROOT_FILE)
        if digest_of(found) != digest:
            raise ValueError(f"{ROOT_FILE} is not the root that it names")
        return found

    manifest = Manifest.read(_document(folder / VERSION_FILE), root)
    _document(folder / MODEL_FOLDER / BLOCKS_FILE)
    opened = ModelFolder.open(folder / MODEL_FOLDER)
    of_folder = {block.name: digest_of(data) for block, data in opened.blocks()}
    if wrong := sorted(name for name, _ in of_folder.items() ^ manifest.blocks.items()):
        detail = f"{', '.join(dict.fromkeys(wrong[:4]))}: not as in {VERSION_FILE}"
        yield Fault(pointer=f"{MODEL_FOLDER}/{WEIGHTS_FILE}", detail=detail)


def _document(path: Path) -> bytes:
    """Return a file's content. Raises OSError, and ValueError for a file that is too large."""
    with path.open("rb") as file:
        found = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(found) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_DOCUMENT_BYTES} bytes")
    return found

"""The archive of a dossier: its documents, with a signature that covers the model folder too."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.dossier import signing_key
from tessera.coordinator.dossier.contents import documents
from tessera.coordinator.dossier.metadata import crate, sbom
from tessera.coordinator.operations.exports import VersionExport
from tessera.coordinator.services import Services
from tessera.shared.model.spec import WEIGHTS_FILE
from tessera.shared.problems import Conflict
from tessera.shared.rounds.export import CRATE_FILE, MODEL_FOLDER, ROOT_FILE, VERSION_FILE, small_files
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.signatures import KEY_FILE, SIGNATURE_FILE, is_installed, sign
from tessera.shared.version import install_line

SBOM_FILE = "sbom.cdx.json"


def require_key(path: Path) -> signing_key.SigningKey:
    """Return the coordinator's key. Raises Conflict if it is missing, or the library that signs."""
    if not is_installed():
        remedy = f"Have the coordinator's administrator run: {install_line('signing', elsewhere=True)}"
        raise Conflict("this coordinator cannot sign: its installation lacks model-signing", remedy=remedy)
    try:
        return signing_key.read(path)
    except FileNotFoundError:
        reason = "has no signing key"
    except (OSError, ValueError) as fault:
        reason = f"cannot use its signing key: {getattr(fault, 'strerror', None) or fault}"
    remedy = "Have its administrator run, on its machine: tessera coordinator signing-key"
    raise Conflict(f"this coordinator {reason}", remedy=remedy)


def archive(services: Services, caller: Principal, export: VersionExport, key: signing_key.SigningKey) -> bytes:
    """Return the dossier on a version as a zip without the model, whose files are signed by their digests alone."""

    def read(digest: str, _: int = 0) -> bytes:
        return services.states.read(digest)

    files = {**documents(services, caller, export.run_id, export.number), SBOM_FILE: sbom(), KEY_FILE: key.public}
    files[VERSION_FILE] = read(export.digest)
    if export.manifest.root:
        files[ROOT_FILE] = read(export.manifest.root)
    entries = {name: (digest_of(raw), len(raw)) for name, raw in files.items()}
    for name, raw in small_files(export.model, read):
        entries[f"{MODEL_FOLDER}/{name}"] = digest_of(raw), len(raw)
    weights = hashlib.sha256()
    for piece in export.weights.pieces():
        weights.update(piece)
    entries[f"{MODEL_FOLDER}/{WEIGHTS_FILE}"] = f"sha256:{weights.hexdigest()}", export.weights.nbytes
    files[CRATE_FILE] = crate(export, entries, services.database.now())
    digests = {name: digest for name, (digest, _) in entries.items()} | {CRATE_FILE: digest_of(files[CRATE_FILE])}
    with services.blobs.file() as file:
        sign(export.spec.name, digests, key.path, Path(file.name))
        files[SIGNATURE_FILE] = file.read()
    return _zip(files)


def _zip(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with ZipFile(packed, "w") as opened:
        for name, raw in sorted(files.items()):
            opened.writestr(ZipInfo(name), raw)
    return packed.getvalue()

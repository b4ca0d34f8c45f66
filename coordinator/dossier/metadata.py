"""Metadata of a dossier for programs: the coordinator's software (CycloneDX 1.6) and the files (RO-Crate 1.2)."""

import json
import re
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from mimetypes import guess_type
from typing import Any

from tessera.coordinator.dossier.records import at
from tessera.coordinator.operations.exports import VersionExport
from tessera.shared.model.spec import WEIGHTS_FILE
from tessera.shared.rounds.export import CRATE_FILE, MODEL_FOLDER
from tessera.shared.version import NAME, VERSION

CRATE = "https://w3id.org/ro/crate/1.2"
MAX_LICENCE = 80
"""Characters of a licence's name; some distributions have its whole text there."""

FileEntry = tuple[str, int]
"""A file's digest and its size in bytes."""


def sbom() -> bytes:
    """Return the distributions that are installed with the coordinator, as CycloneDX 1.6."""
    found = {one["purl"]: one for one in map(_component, distributions())}
    ours = {"type": "application", "name": NAME, "version": VERSION, "purl": _purl(NAME, VERSION)}
    return _json(
        {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": ours},
            "components": [one for purl, one in sorted(found.items()) if purl != ours["purl"]],
        }
    )


def _component(installed: Distribution) -> dict[str, Any]:
    about = installed.metadata
    name = re.sub(r"[-_.]+", "-", installed.name).lower()
    found = {"type": "library", "name": name, "version": installed.version, "purl": _purl(name, installed.version)}
    kinds = [one.rpartition(" :: ")[2] for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    if "License-Expression" in about:
        return {**found, "licenses": [{"expression": about["License-Expression"]}]}
    if "License" in about and len(about["License"]) <= MAX_LICENCE and "\n" not in about["License"]:
        kinds = [about["License"]]
    return {**found, "licenses": [{"license": {"name": kind}} for kind in kinds]} if kinds else found


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def crate(export: VersionExport, files: Mapping[str, FileEntry], now: float) -> bytes:
    """Return the description of a dossier's files and of the run as the action that made its model, as RO-Crate."""
    spec, weights = export.spec, f"{MODEL_FOLDER}/{WEIGHTS_FILE}"
    title = f"version {export.number} of the run {spec.name}"
    entities: list[dict[str, Any]] = [
        {"@id": CRATE_FILE, "@type": "CreativeWork", "about": {"@id": "./"}, "conformsTo": {"@id": CRATE}},
        {
            "@id": "./",
            "@type": "Dataset",
            "name": f"Dossier of {title}",
            "description": f"Documents, model and signature of {title} of the study {spec.study}.",
            "datePublished": at(now),
            "license": "The dossier grants no licence: ask the person who gave it to you.",
            "identifier": export.digest,
            "hasPart": [{"@id": name} for name in sorted(files)],
            "mentions": {"@id": "#run"},
        },
        {
            "@id": "#run",
            "@type": "CreateAction",
            "name": f"Federated training: {spec.name}",
            "identifier": export.run_id,
            "startTime": at(export.started_at),
            "endTime": at(export.ended_at),
            "instrument": {"@id": "#tessera"},
            "object": [{"@id": one} for one in ("#start", "#model", "#data", *files.keys() & {"run.toml"})],
            "result": {"@id": weights},
        },
        {"@id": "#tessera", "@type": "SoftwareApplication", "name": "Tessera", "softwareVersion": VERSION},
        {"@id": "#start", "@type": "CreativeWork", "name": "first version", "identifier": spec.version},
        {"@id": "#model", "@type": "CreativeWork", "name": "model and its blocks", "identifier": spec.model},
        {
            "@id": "#data",
            "@type": "Dataset",
            "name": spec.dataset,
            "description": "The sites' data of this name, which stay at the sites.",
        },
    ]
    for name, (digest, size) in sorted(files.items()):
        kind = guess_type(name)[0] or "application/octet-stream"
        described = {"contentSize": str(size), "encodingFormat": kind, "sha256": digest.removeprefix("sha256:")}
        entities.append({"@id": name, "@type": "File", "name": name, **described})
    context = [f"{CRATE}/context", {"sha256": "https://schema.org/sha256"}]
    return _json({"@context": context, "@graph": entities})


def _json(document: dict[str, Any]) -> bytes:
    return f"{json.dumps(document, indent=1, ensure_ascii=False)}\n".encode()

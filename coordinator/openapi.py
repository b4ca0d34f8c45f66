"""The description of the API, as a running coordinator serves it: `python -m tessera.coordinator.openapi`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tessera.coordinator.app import create_app
from tessera.coordinator.services import assemble
from tessera.coordinator.settings import CoordinatorSettings


def document() -> str:
    """Return the description as JSON, with a line break at its end. Nothing is served, and no table is read."""
    with tempfile.TemporaryDirectory() as folder:
        nowhere = CoordinatorSettings(
            database_url=f"sqlite:///{folder}/none.db",
            blob_url=f"{folder}/blobs",
            staging_dir=Path(folder) / "staging",
        )
        description = create_app(assemble(nowhere), conduct=False).openapi()
    return json.dumps(description, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    sys.stdout.write(document())


if __name__ == "__main__":
    main()

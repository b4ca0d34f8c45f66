"""The kinds of data sets, one file each, named for the kind. Adding a kind means adding a file with an `ADAPTER`,
here or in a folder of the environment variable TESSERA_KINDS."""

import os
from pathlib import Path

FOLDERS = "TESSERA_KINDS"
"""The environment variable with the folders of further kinds, separated as in PATH."""


def own_folders() -> list[Path]:
    """Return the folders of further kinds."""
    return [Path(folder).absolute() for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]


# Loaders and other processes of the worker import a kind by the same name.
__path__.extend(map(str, own_folders()))

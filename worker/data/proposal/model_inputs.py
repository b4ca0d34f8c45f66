"""The sizes of a model's inputs that are proposed: of images, and of texts in tokens."""

from pathlib import Path
from typing import Any

from PIL import Image

from tessera.worker.data.cells import Cells
from tessera.worker.data.kinds.images import dicom_reader
from tessera.worker.data.proposal.options import Proposal
from tessera.worker.data.readers.pictures import FORMATS, UNREADABLE, Pictures, inaccessible, is_dicom
from tessera.worker.data.readers.tokenizer import RUN, TextSlice, tokenizer_of
from tessera.worker.errors import DataError

LENGTHS = 4096
"""Number of texts whose lengths are looked at."""
USUAL_TOKENS = 512
"""The most tokens that are proposed for a text: many models take as many, and a batch's memory grows with them."""
USUAL_SIDE, MAX_OWN_SIDE = 224, 512
"""Pixels: the side of the usual input of vision models, and the largest side that images keep."""


def add_pixels(proposal: Proposal, pictures: Pictures, processor: str | None) -> None:
    """Add the options that turn images into numbers, from the headers of some images."""
    if processor is not None:
        proposal.add("processor", processor, "the image processor that you named")
        return
    sizes, modes = set(), set()
    for place in range(len(pictures)):
        picture = Path(pictures.name(place))
        try:
            with _opened(picture) as image:
                sizes.add(image.size)
                modes.add(image.mode)
        except UNREADABLE as fault:
            if isinstance(fault, OSError) and fault.errno:
                raise inaccessible(pictures, place, fault) from fault
            reason = str(fault)[:200].removesuffix(f" {str(picture)!r}")
            raise DataError(
                f"{picture} cannot be read as an image: {reason}; replace it or take it out of the folder"
            ) from fault
    own = sizes.pop() if len(sizes) == 1 else None
    if own and max(own) <= MAX_OWN_SIDE:
        why = f"the size of the {len(pictures)} images that were looked at"
        proposal.add("size", own[0] if own[0] == own[1] else [own[1], own[0]], why)
    else:
        why = "the usual input of vision models; set it to the model's, or name its `processor` instead"
        proposal.add("size", USUAL_SIDE, why)
    grey = bool(modes) and modes <= {"1", "L"}
    why = "the images are grey" if grey else "images in colour, or of unknown colours; 1 converts to grey"
    proposal.add("channels", 1 if grey else 3, why)


def _opened(picture: Path) -> Image.Image:
    return dicom_reader()(picture, str(picture)) if is_dicom(picture) else Image.open(picture, formats=FORMATS)


def add_max_length(proposal: Proposal, texts: Cells[Any], tokenizer: str | None) -> None:
    """Add the tokens to which texts are truncated, by the lengths of some. Words are counted before
    there is a tokenizer."""
    some = texts[:: -(-len(texts) // LENGTHS)]
    most = USUAL_TOKENS
    if tokenizer in (None, RUN):
        lengths = list(map(number_of_words, some))
        needed, unit = 2 * max(lengths), "words, of which a tokenizer makes one or two tokens each"
    else:
        by_word = isinstance(some[0], list)
        loaded = tokenizer_of("tokenizer", tokenizer, by_word=by_word)
        lengths = TextSlice(some if by_word else list(map(str, some)), by_word=by_word).lengths(loaded)
        # A language model's text has a token for its end.
        needed, unit, most = max(lengths) + 1, "tokens", min(most, loaded.model_max_length)
    longest = f"the longest of {len(lengths)} texts that were looked at has {max(lengths)} {unit}"
    proposal.add("max_length", min(-(-needed // 8) * 8, most), longest)
    if needed > most:
        over = sum(length > most for length in lengths)
        proposal.warnings.append(
            f"{longest}, and {over} have more than max_length, {most}, beyond which they are cut off. Set it as "
            "high as the model and memory allow; `tessera data show` counts what is lost."
        )


def number_of_words(text: object) -> int:
    """Return the length of a text, or of a list of words."""
    return len(text if isinstance(text, list) else str(text).split())

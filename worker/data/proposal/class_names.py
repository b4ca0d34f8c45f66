"""The names of classes that are proposed, and doubts about them."""

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence

from tessera.shared.near_names import composed
from tessera.worker.data.groups import is_unnamed
from tessera.worker.data.load_report import LoadReport
from tessera.worker.data.proposal.options import Proposal
from tessera.worker.data.readers.class_labels import combinations
from tessera.worker.errors import DataError


def add_class_names(
    proposal: Proposal, spelt: Mapping[str, Collection[str]], source: str, in_order: Sequence[str] | None = None
) -> None:
    """Add the names of the classes, sorted unless their order is given. `spelt` has the texts that stand for each."""
    names = list(map(composed, in_order or ())) or sorted(spelt)
    proposal.warnings += _doubts_about(names)
    proposal.warn_of(LoadReport(combined=combinations(names)))
    for name, texts in spelt.items():
        if len(set(map(composed, texts))) < len(texts):
            proposal.warnings.append(
                f"{name!r} is written in {len(texts)} Unicode forms, which look alike: they are the same class."
            )
    if all(name.isdecimal() for name in names):
        names = sorted(names, key=int)
        if names == [str(number) for number in range(len(names))]:
            proposal.reasons["kind"] += "; no `labels`, since the classes are numbers from 0 on"
            return
    proposal.add("labels", names, f"{source}: copy this line to every site, so that classes have equal numbers")


def _doubts_about(names: Sequence[str]) -> Iterator[str]:
    """Yield a warning of a single class, of classes whose names look alike, and of words for a missing value."""
    if len(names) == 1:
        yield (
            f"there is a single class, {names[0]!r}. Correct the data; or if only other sites have further classes, "
            "name all in labels, and these in absent."
        )
    alike: dict[str, list[str]] = {}
    for name in names:
        shown = "".join(
            letter for letter in unicodedata.normalize("NFKC", name) if unicodedata.category(letter) != "Cf"
        )
        alike.setdefault(" ".join(shown.casefold().split()), []).append(name)
    for group in alike.values():
        if len(group) > 1:
            visible = len({" ".join(name.casefold().split()) for name in group}) == 1
            how = "case or spaces" if visible else "characters that look alike"
            yield (
                f"{' and '.join(map(repr, group))} differ only by {how}: are these the same class? Correct the data, "
                "or keep them as different classes."
            )
    if missing := [name for name in names if is_unnamed(name.encode())]:
        yield (
            f"{' and '.join(map(repr, missing))} may stand for a missing value: if so, remove these rows; else it "
            "is a class."
        )


def add_texts_of_classes(proposal: Proposal, tokenizer: str | None) -> None:
    """Make images with a tokenizer those of a contrastive model, which compares them with a text for each class."""
    if tokenizer is not None:
        if "labels" not in proposal.options:
            raise DataError("the classes are numbers: a text for each, which --tokenizer asks for, needs their names")
        proposal.add("kind", "imagetext", "images, compared with a text for each class, as by CLIP")
        proposal.add("template", "a photo of a {}.", "the text of a class; {} stands for its name in labels")
        proposal.add("tokenizer", tokenizer, "the tokenizer that you named")

"""The columns of a table that contain texts, images and classes, by their names and values."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tessera.worker.data.groups import is_person, plain
from tessera.worker.data.proposal.model_inputs import number_of_words
from tessera.worker.data.proposal.options import SAMPLE, Proposal
from tessera.worker.data.readers.absent_files import near_file
from tessera.worker.data.readers.pictures import DICOM, SUFFIXES
from tessera.worker.data.readers.tables import DataTable
from tessera.worker.errors import DataError

TEXT_NAMES = (
    *("text", "sentence", "tokens", "words", "report", "note", "content", "document", "review", "description"),
    "question",
)
IMAGE_NAMES = ("image", "img", "filename", "path")
LABEL_NAMES = ("label", "labels", "class", "target", "category", "diagnosis", "nertags", "tags")
"""Usual names of columns, as `plain` returns them."""
NAMES, MAX_PATH = 3, 1024
"""Number of cells that are looked for as files, and limit on their characters."""
MAX_FEW = 8
"""Number of values of a column that may be classes."""
CODE = re.compile(r"[!-~]*|[\d\s.,:/+-]+([AP]M|UTC)?")
"""One word in ASCII, or numbers: what identities, numbers and dates look like, and texts do not."""


def image_column(table: DataTable) -> str | None:
    """Return the column of paths or bytes of images. Raises DataError if several may be it."""
    return _column(table, "image", IMAGE_NAMES, _is_image)


def text_column(table: DataTable) -> str | None:
    """Return the column of texts or of lists of words. Raises DataError if several may be it."""
    return _column(table, "text", TEXT_NAMES, _is_text)


def label_column(table: DataTable, others: set[str | None]) -> str | None:
    """Return the column with a usual name of classes, or the only one whose type lists them; none of `others`."""
    names = [name for name in table.names if name not in others]
    for usual in LABEL_NAMES:
        if found := [name for name in names if plain(name) == usual]:
            return found[0]
    if len(own := [name for name in names if name in table.classes]) == 1:
        return own[0]
    return None


def has_few_values(table: DataTable, name: str) -> bool:
    """Return True if the first rows have few values in a column, as classes do."""
    return 1 < len(set(map(str, table.cells("label", name)[:SAMPLE]))) <= MAX_FEW


def require_texts(proposal: Proposal, table: DataTable, text: str) -> None:
    """Warn of a column that was named and hardly contains texts. Raises DataError if it names images."""
    _refuse_names_of_images(table, [text])
    cells = table.cells("text", text)[:SAMPLE]
    if _all(cells, _is_code):
        proposal.warnings.append(
            f"column {text!r} has a single word or a number in each cell, such as {cells[0]!r}. Name another one if "
            "these are not the texts to learn from."
        )


def shown_columns(table: DataTable) -> str:
    """Return the names of a table's columns for a message."""
    return ", ".join(table.names[:20])


def _column(table: DataTable, what: str, known: Sequence[str], fits: Callable[[object], bool]) -> str | None:
    """Return the column most of whose values fit: a column with a known name, or else the only such column.

    Reading the column names the values that do not fit; a single such value must not turn images into texts.
    """
    names = [name for name in table.names if name not in table.classes]
    cells = {name: table.cells(what, name)[:SAMPLE] for name in names}
    fitting = [name for name in names if 2 * sum(map(fits, cells[name])) > len(cells[name])]
    by_plain = {plain(name): name for name in reversed(fitting)}
    if usual := next((by_plain[name] for name in known if name in by_plain), None):
        return usual
    likely = [name for name in fitting if plain(name) not in (*LABEL_NAMES, "group") and not is_person(name)]
    long = [name for name in likely if what == "text" and _is_long(list(filter(None, cells[name])))]
    if len(long) == 1:
        return long[0]
    if what == "text":
        if not long:
            _refuse_names_of_images(table, fitting)
        likely = [name for name in likely if not _all(cells[name], _is_code)]
    if len(likely) > 1:
        remedy = "name it with --text" if what == "text" else f"write `{what}` by hand"
        raise DataError(f"{table.where}: {', '.join(likely)} may all be the {what}: {remedy}")
    return likely[0] if likely else None


def _refuse_names_of_images(table: DataTable, columns: Sequence[str]) -> None:
    """Raise DataError for a column with names of images that are not written as their files' paths."""
    for column in columns:
        cells = table.cells("text", column)[:SAMPLE]
        if not _all(cells, lambda cell: isinstance(cell, str) and "\n" not in cell and len(cell) < MAX_PATH):
            continue
        for cell in filter(None, cells[:NAMES]):
            near = near_file(table.folder, cell, SUFFIXES | DICOM)
            # A column of whole paths is found without --text.
            if near and near[1] and near[0].suffix.lower() in SUFFIXES | DICOM:
                raise DataError(
                    f"{table.where}: column {column!r} has names of image files, and {cell!r} {near[1]}: write it as "
                    f"{str(near[0].relative_to(table.folder))!r}, and each other as the path of its file, and run "
                    "the command again, without --text"
                )


def _is_long(texts: Sequence[object]) -> bool:
    """Return True if texts have three words on average, unlike names and dates."""
    return sum(map(number_of_words, texts)) >= 3 * len(texts)


def _all(values: Sequence[object], fits: Callable[[object], bool]) -> bool:
    return bool(values) and all(map(fits, values))


def _is_image(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value.get("bytes") or value.get("path"))
    return isinstance(value, bytes) or (isinstance(value, str) and Path(value).suffix.lower() in SUFFIXES)


def _is_text(value: object) -> bool:
    """Return True if a value is text, or a list of words."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(word, str) for word in value)
    return isinstance(value, str)


def _is_code(value: object) -> bool:
    return isinstance(value, str) and bool(CODE.fullmatch(value.strip()))

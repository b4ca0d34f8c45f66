"""A table `[datasets.NAME]` for a folder or a file, proposed from what it contains, with a reason for each option."""

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from tessera.shared.near_names import absent
from tessera.worker.data.cells import Cells
from tessera.worker.data.dataset import DataError
from tessera.worker.data.groups import (
    PATIENT,
    PERSON_IN_PATH,
    Repeated,
    in_paths,
    is_person,
    is_unnamed,
    person_of,
    plain,
)
from tessera.worker.data.kinds.images import dicom_reader, is_dicom_image
from tessera.worker.data.load_report import LoadReport, by_suffix, counted, empty_texts
from tessera.worker.data.readers.absent_files import near_file
from tessera.worker.data.readers.class_labels import LISTED, class_name, combinations, composed
from tessera.worker.data.readers.data_folders import foreign, names_below
from tessera.worker.data.readers.pictures import (
    DICOM,
    FORMATS,
    GROUP,
    SUFFIXES,
    UNREADABLE,
    PictureFiles,
    inaccessible,
    is_dicom,
)
from tessera.worker.data.readers.table_files import SPLITS, Separator, is_saved, table_files
from tessera.worker.data.readers.tables import READERS, SEPARATORS, DataTable, read_table, separator_of
from tessera.worker.data.readers.tokenizer import RUN, Some, tokenizer_of

TEXT_NAMES = (
    "text",
    "sentence",
    "tokens",
    "words",
    "report",
    "note",
    "content",
    "document",
    "review",
    "description",
    "question",
)
IMAGE_NAMES = ("image", "img", "filename", "path")
LABEL_NAMES = ("label", "labels", "class", "target", "category", "diagnosis", "nertags", "tags")
"""Usual names of columns, as `plain` returns them."""

SAMPLE = 64
"""Number of images and of rows to look at."""
LENGTHS = 4096
"""Number of texts whose lengths are looked at."""
USUAL_TOKENS = 512
"""The most tokens that are proposed for a text: many models take as many, and a batch's memory grows with them."""
MAX_FEW = 8
"""Number of values of a column that may be classes, and of rows that a message names."""
MAX_NAMED = 1000
"""Number of classes above which a column hardly contains classes."""
NAMES, MAX_PATH = 3, 1024
"""Number of cells that are looked for as files, and limit on their characters."""
USUAL_SIDE, MAX_OWN_SIDE = 224, 512
"""Pixels: the side of the usual input of vision models, and the largest side that images keep."""


CODE = re.compile(r"[!-~]*|[\d\s.,:/+-]+([AP]M|UTC)?")
"""One word in ASCII, or numbers: what identities, numbers and dates look like, and texts do not."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _one_line(sentence: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in sentence)


@dataclass
class Proposal:
    """Options in the order in which they are written, each with its reason, and warnings about the data."""

    options: dict[str, object] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, option: str, value: object, reason: str) -> None:
        self.options[option] = value
        self.reasons[option] = reason

    def warn_of(self, report: LoadReport) -> None:
        self.warnings += [f"{detail}. {remedy}" for detail, remedy in report.warnings()]

    def toml(self, name: str) -> str:
        """Return the table, with the reasons as comments. Raises DataError for a name that is not allowed."""
        if not NAME.fullmatch(name):
            raise DataError(f"--name: {name!r} is not made of letters, digits, dashes and underscores")
        lines = [f"[datasets.{name}]"]
        for option, value in self.options.items():
            # A string, a number, a truth value or a list of strings is written alike in JSON and in TOML.
            lines += [f"# {_one_line(self.reasons[option])}", f"{option} = {json.dumps(value, ensure_ascii=False)}"]
        return "\n".join(lines) + "\n"


def propose(
    path: Path,
    *,
    split: str | None = None,
    tokenizer: str | None = None,
    processor: str | None = None,
    text: str | None = None,
    label: str | None = None,
) -> Proposal:
    """Return the options for the data at a path. Raises DataError for what a person has to decide.

    `text` and `label` name columns of a table of texts; otherwise the values of the columns decide.
    """
    if not path.exists():
        raise DataError(absent(path))
    path = path.resolve()
    tokenizer, processor = _from_anywhere(tokenizer), _from_anywhere(processor)
    proposal = Proposal()
    if path.suffix.lower() == ".safetensors":
        proposal.add("kind", "arrays", "a safetensors file holds prepared tensors, `labels` among them")
        proposal.add("file", str(path), "the tensors' names are the model's inputs")
        _refuse(
            f"{path} holds prepared tensors",
            split=split,
            tokenizer=tokenizer,
            processor=processor,
            text=text,
            label=label,
        )
    elif path.is_dir() and not is_saved(path) and not _tables_in(path) and (below := names_below(path))[0]:
        names, passed_over = below
        _of_folder(proposal, path, list(map(Path, names)), processor)
        proposal.warn_of(LoadReport(passed_over=passed_over))
        _refuse(f"{path} is a folder of images, whose folders are the classes", split=split, text=text, label=label)
        _texts_of_classes(proposal, tokenizer)
    else:
        _of_table(proposal, path, split, tokenizer, processor, text, label)
    proposal.add("held_out", 0.2, "the worker measures on this share of the examples, and no run trains on them")
    return proposal


def _refuse(found: str, **options: str | None) -> None:
    """Raise DataError if an option was given that data like these do not have."""
    if given := [f"--{option}" for option, value in options.items() if value is not None]:
        raise DataError(f"{found}: leave out {' and '.join(given)}")


def _from_anywhere(source: str | None) -> str | None:
    """Return the whole path of a folder, since a worker may start elsewhere; or the name on the hub."""
    return str(Path(source).resolve()) if source and Path(source).is_dir() else source


def _texts_of_classes(proposal: Proposal, tokenizer: str | None) -> None:
    """Make images with a tokenizer those of a contrastive model, which compares them with a text for each class."""
    if tokenizer is not None:
        if "labels" not in proposal.options:
            raise DataError("the classes are numbers: a text for each, which --tokenizer asks for, needs their names")
        proposal.add("kind", "imagetext", "images, compared with a text for each class, as by CLIP")
        proposal.add("template", "a photo of a {}.", "the text of a class; {} stands for its name in labels")
        proposal.add("tokenizer", tokenizer, "the tokenizer that you named")


def _tables_in(folder: Path) -> bool:
    return any(file.suffix.lower() in READERS and not foreign(file.name) for file in folder.iterdir())


def _of_folder(proposal: Proposal, folder: Path, found: Sequence[Path], processor: str | None) -> None:
    images = sorted(file for file in found if file.suffix.lower() in SUFFIXES)
    files = images or sorted(file for file in found if is_dicom_image(folder / file))
    if not files:
        kinds = counted(by_suffix(found))
        formats = f"{', '.join(sorted(SUFFIXES))}; {', '.join(READERS)}"
        raise DataError(
            f"{folder} contains no images or tables ({formats}; DICOM), but {kinds}: convert images to PNG, and save "
            "spreadsheets as CSV (UTF-8)"
        )
    tops = sorted({file.parts[0] for file in files if len(file.parts) > 1})
    if splits := [top for top in tops if top.lower() in SPLITS]:
        raise DataError(
            f"{folder} has folders for splits ({', '.join(splits)}): run the command with {folder / splits[0]}. To "
            'measure on another, run it again with another --name, and replace held_out by use = "evaluate"'
        )
    if loose := [file for file in files if len(file.parts) == 1]:
        raise DataError(
            f"{folder / loose[0]} is not in the folder of a class: move each image into one, or write a CSV file "
            "with the columns image and label, and run the command with it"
        )
    below = {
        top: {composed(file.parts[1]) for file in files if file.parts[0] == top and len(file.parts) > 2}
        for top in tops
    }
    classes = below[tops[0]]
    by_domain = len(tops) > 1 and len(classes) > 1 and all(below[top] == classes for top in tops)
    proposal.add("kind", "images", f"{len(files)} images in folders")
    proposal.add("folder", str(folder), "the folder that contains the folders of the classes")
    if by_domain:
        reason = f"each of {', '.join(tops[:8])} contains the same {len(classes)} folders, which are the classes"
        proposal.add("domain_folders", value=True, reason=reason)
    if not images:
        proposal.add("dicom", value=True, reason="the files are DICOM, which the extra `dicom` reads")
    # A class without images here has its number all the same; loading the data set then says what to do about it.
    names = (
        classes if by_domain else {each.name for each in folder.iterdir() if each.is_dir() and not foreign(each.name)}
    )
    bare = [] if by_domain else sorted(names.difference(tops))
    source = "the folders' names" + (f", of which {', '.join(bare)} contain no images here" if bare else "")
    spelt: dict[str, set[str]] = {}
    for name in names:
        spelt.setdefault(composed(name), set()).add(name)
    _labels(proposal, spelt, source)
    step = -(-len(files) // SAMPLE)
    looked_at = [folder / file for file in files[::step]]
    _group_of_folder(proposal, files, looked_at)
    _pixels(proposal, PictureFiles.of(folder, map(str, files[::step])), processor)


def _of_table(
    proposal: Proposal,
    path: Path,
    split: str | None,
    tokenizer: str | None,
    processor: str | None,
    text: str | None,
    label: str | None,
) -> None:
    table, separator = _read(path, split, text=text, label=label)
    proposal.warn_of(LoadReport(passed_over=table.passed_over))
    if text is not None:
        _require_texts(proposal, table, text)
    image = None if text else _column(table, "image", IMAGE_NAMES, _is_image)
    text = None if image else text or _column(table, "text", TEXT_NAMES, _is_text)
    if image is None and text is None:
        raise DataError(
            f"{table.where} has no column of texts or images among {_shown(table)}: if single words are the texts, "
            "name their column with --text; or write kind and the column's name by hand, as docs/data.md describes"
        )
    kind, column = ("images", image) if image else ("text", text)
    proposal.add("kind", kind, f"column {column} contains {kind.removesuffix('s')}s")
    proposal.add("file", str(path), f"a table with the columns {_shown(table)}")
    if split is not None:
        proposal.add("split", split, "the split that you named")
    if separator is not None:
        why = f"the only separator with which the first rows have equally many columns, {len(table.columns.names)}"
        proposal.add("separator", separator, why)
    if image is not None:
        proposal.add("image", image, "paths, relative to the table's folder, or the images' bytes")
    _of_label(proposal, table, image, text, label)
    _of_group(proposal, table, image, text)
    if image is not None:
        cells = table.cells("image", image)[:SAMPLE]
        paths = (cell for cell in cells if isinstance(cell, str))
        _pixels(proposal, PictureFiles.of(table.folder, paths), processor)
        _texts_of_classes(proposal, tokenizer)
        return
    _refuse(f"{path} is a table of texts", processor=processor)
    if tokenizer is not None:
        proposal.add("tokenizer", tokenizer, "the tokenizer that you named")
    else:
        proposal.add("tokenizer", RUN, "the tokenizer that each run's model brings; or a folder with one")
    _max_length(proposal, table.cells("text", str(text)), tokenizer)


def _read(path: Path, split: str | None, **columns: str | None) -> tuple[DataTable, Separator | None]:
    """Return the table, and its separator if the suffix does not say it. Raises DataError if a named column is not
    there."""
    separator = None if is_saved(path) else _unusual_separator(path, split)
    table = read_table("file", (path,), split, separator=separator)
    for option, column in columns.items():
        if column is not None:
            table.cells(option, column)
    return table, separator


def _unusual_separator(path: Path, split: str | None) -> Separator | None:
    file = table_files("file", (path,), split, READERS).files[0]
    usual = SEPARATORS.get(file.suffix.lower())
    found = separator_of(file, SAMPLE) if usual else None
    return None if found == usual else found


def _of_label(proposal: Proposal, table: DataTable, image: str | None, text: str | None, label: str | None) -> None:
    """Add the options of the column of labels, and for texts the head that follows from it."""
    label = label or _label_column(table, {image, text})
    if label is None and (image or len(table.columns.names) > 1):
        few = [name for name in table.columns.names if name not in (image, text) and _has_few_values(table, name)]
        likely = f" ({', '.join(few)} {'have' if len(few) > 1 else 'has'} few values)" if few else ""
        raise DataError(
            f"{table.where} has no obvious column of classes among {_shown(table)}: name it with --label{likely}, or "
            'for texts without classes write the table by hand with head = "causal-lm"'
        )
    values = [] if label is None else table.column("label", label)
    by_word = False
    if text is not None:
        by_word = any(isinstance(value, list) for value in values)
        head = "causal-lm" if label is None else "token-classification" if by_word else "text-classification"
        why = "there is no column of classes" if label is None else f"{label} has one class for each "
        proposal.add("head", head, why if label is None else why + ("word" if by_word else "text"))
        proposal.add("text", text, "the column of texts")
        proposal.warn_of(LoadReport(empty_texts=empty_texts(table.cells("text", text))))
    if label is not None:
        proposal.add("label", label, "the column of classes")
        if by_word and not all(map(_one_each, table.cells("text", str(text))[:SAMPLE], values)):
            raise DataError(
                f"{table.where}: column {label!r} has lists of other lengths than the texts have words. {ONE_CLASS}"
            )
        spelt = _spelt(table, label, [value if by_word else [value] for value in values])
        own = table.class_names(label)
        if len(spelt) > MAX_NAMED:
            raise DataError(
                f"{table.where}: column {label!r} has {len(spelt)} different values, which are hardly classes: name "
                "another column with --label"
            )
        _labels(proposal, spelt, "the names in the table" if own else f"the values of {label}, sorted", own)


ONE_CLASS = "An example has one class: leave one to each, or make an example of each"


def _one_each(text: object, labels: Sequence[object]) -> bool:
    return len(text if isinstance(text, list) else str(text).split()) == len(labels)


def _has_few_values(table: DataTable, name: str) -> bool:
    return 1 < len(set(map(str, table.cells("label", name)[:SAMPLE]))) <= MAX_FEW


def _spelt(table: DataTable, label: str, rows: Sequence[Sequence[object]]) -> dict[str, set[str]]:
    """Return the names of the classes in a column, each with the texts that stand for it. Raises DataError for rows
    without one, and with several."""
    spelt: dict[str, set[str]] = {}
    lacking = []
    for row, values in enumerate(rows):
        try:
            names = list(map(class_name, values))
            listed = any(LISTED.fullmatch(name or "") for name in names)
        except TypeError:
            names, listed = [], True
        if listed:
            raise DataError(f"{table.where}: column {label!r} has a list in row {row}. {ONE_CLASS}")
        if None in names:
            lacking.append(row)
        for name, value in zip(names, values, strict=True):
            spelt.setdefault(name or "", set()).add(str(value))
    if lacking:
        shown = ", ".join(map(str, lacking[:MAX_FEW])) + ", ..." * (len(lacking) > MAX_FEW)
        raise DataError(
            f"{table.where}: column {label!r} has no value in {len(lacking)} of {len(rows)} rows ({shown}; the "
            "first row is 0): fill them in, or remove these rows"
        )
    return spelt


def _of_group(proposal: Proposal, table: DataTable, image: str | None, text: str | None) -> None:
    """Add the column of patients or subjects by its name, or ask about columns of identities that repeat."""
    label = proposal.options.get("label")
    used = (image, text, label if isinstance(label, str) else None)
    persons = [name for name in table.columns.names if name not in used and is_person(name)]
    groups = [name for name in table.columns.names if plain(name) == "group"]
    if found := sorted(persons, key=lambda name: not plain(name).startswith("pat")) or groups:
        proposal.add(
            "group", found[0], "rows with an equal value in this column are held out together: the patient's"
        )
        return
    _ask(proposal, table.ungrouped(None, *used))


def _ask(proposal: Proposal, found: Sequence[Repeated]) -> None:
    """Add warnings of columns and names that are probably one person's in several examples."""
    report = LoadReport(ungrouped=found)
    proposal.warnings += [f"{detail}. {remedy}" for detail, remedy in report.warnings(held_out=True)]


def _group_of_folder(proposal: Proposal, files: Sequence[Path], looked_at: Sequence[Path]) -> None:
    """Add the patient in the headers of DICOM files, of which some are looked at, or in all files' paths."""
    if "dicom" in proposal.options:
        reader = dicom_reader()
        patients = {reader(picture, str(picture)).info[GROUP] for picture in looked_at}
        if len(patients) > 1:
            proposal.add("group", PATIENT, "images with an equal value in their headers are held out together")
        elif not any(patients) or len(looked_at) > 1:
            proposal.warnings.append(
                f"{len(looked_at)} of the files have the same {PATIENT}, {min(patients)!r}: one patient's images may "
                "be trained on and held out. If an image's path names the patient, set group to a pattern for it."
            )
        return
    persons = [person_of(PERSON_IN_PATH, str(file)) for file in files]
    remedy = "Set group to a pattern that matches the patient in each image's path."
    if (found := in_paths(persons, remedy)) and all(persons):
        proposal.add("group", PERSON_IN_PATH, f"a pattern for the patient in an image's path: {found.what}")
    elif found:
        _ask(proposal, [found])


def _max_length(proposal: Proposal, texts: Cells[Any], tokenizer: str | None) -> None:
    """Add the tokens to which texts are truncated, by the lengths of some. Without a tokenizer, words are counted."""
    some = texts[:: -(-len(texts) // LENGTHS)]
    most = USUAL_TOKENS
    if tokenizer is None:
        lengths = [len(text if isinstance(text, list) else str(text).split()) for text in some]
        needed, unit = 2 * max(lengths), "words, of which a tokenizer makes one or two tokens each"
    else:
        by_word = isinstance(some[0], list)
        loaded = tokenizer_of("tokenizer", tokenizer, by_word=by_word)
        lengths = Some(some if by_word else list(map(str, some)), by_word=by_word).lengths(loaded)
        # A language model's text has a token for its end.
        needed, unit, most = max(lengths) + 1, "tokens", min(most, loaded.model_max_length)
    longest = f"the longest of {len(lengths)} texts that were looked at has {max(lengths)} {unit}"
    proposal.add("max_length", min(-(-needed // 8) * 8, most), longest)
    if needed > most:
        over = sum(length > most for length in lengths)
        proposal.warnings.append(
            f"{longest}, and {over} have more than max_length, {most}, beyond which they are cut off. Set it to what "
            "the model takes and memory allows; `tessera data show` counts what is lost."
        )


def _labels(
    proposal: Proposal, spelt: Mapping[str, Collection[str]], source: str, in_order: Sequence[str] | None = None
) -> None:
    """Add the names of the classes, sorted unless their order is given. `spelt` has the texts that stand for each."""
    names = list(map(composed, in_order or ())) or sorted(spelt)
    proposal.warnings += _doubts_about(names)
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
    """Yield a warning of a single class, of classes whose names look alike, of several classes in one name, and of
    words for a missing value."""
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
    report = LoadReport(combined=combinations(names))
    yield from (f"{detail}. {remedy}" for detail, remedy in report.warnings())
    if missing := [name for name in names if is_unnamed(name.encode())]:
        yield (
            f"{' and '.join(map(repr, missing))} may stand for a missing value: if so, remove these rows; else it "
            "is a class."
        )


def _pixels(proposal: Proposal, pictures: PictureFiles, processor: str | None) -> None:
    """Add the options that turn images into numbers, from the headers of some images."""
    if processor is not None:
        proposal.add("processor", processor, "the image processor that you named")
        return
    sizes, modes = set(), set()
    for place in range(len(pictures)):
        picture = pictures[place]
        try:
            with _opened(picture) as image:
                sizes.add(image.size)
                modes.add(image.mode)
        except UNREADABLE as fault:
            if isinstance(fault, OSError) and fault.errno:
                raise inaccessible(pictures, place, fault) from fault
            raise DataError(f"{picture} cannot be read as an image: {str(fault)[:200]}") from fault
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


def _column(table: DataTable, what: str, known: Sequence[str], fits: Callable[[object], bool]) -> str | None:
    """Return the column whose values fit: one with a known name, or else the only one."""
    names = [name for name in table.columns.names if name not in table.columns.classes]
    fitting = [name for name in names if _all(table.cells(what, name)[:SAMPLE], fits)]
    by_plain = {plain(name): name for name in reversed(fitting)}
    if usual := next((by_plain[name] for name in known if name in by_plain), None):
        return usual
    likely = [name for name in fitting if plain(name) not in (*LABEL_NAMES, "group") and not is_person(name)]
    long = [name for name in likely if what == "text" and _is_long(table.cells(what, name)[:SAMPLE])]
    if len(long) == 1:
        return long[0]
    if what == "text":
        if not long:
            _refuse_names_of_images(table, fitting)
        likely = [name for name in likely if not _all(table.cells(what, name)[:SAMPLE], _is_code)]
    if len(likely) > 1:
        remedy = "name it with --text" if what == "text" else f"write `{what}` by hand"
        raise DataError(f"{table.where}: {', '.join(likely)} may all be the {what}: {remedy}")
    return likely[0] if likely else None


def _require_texts(proposal: Proposal, table: DataTable, text: str) -> None:
    """Warn of a column that was named and hardly contains texts. Raises DataError if it names images."""
    _refuse_names_of_images(table, [text])
    cells = table.cells("text", text)[:SAMPLE]
    if _all(cells, _is_code):
        proposal.warnings.append(
            f"column {text!r} has a single word or a number in each cell, such as {cells[0]!r}. Name another one if "
            "these are not the texts to learn from."
        )


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


def _label_column(table: DataTable, others: set[str | None]) -> str | None:
    names = [name for name in table.columns.names if name not in others]
    for usual in LABEL_NAMES:
        if found := [name for name in names if plain(name) == usual]:
            return found[0]
    if len(own := [name for name in names if name in table.columns.classes]) == 1:
        return own[0]
    return None


def _is_long(texts: Sequence[object]) -> bool:
    """Return whether texts have three words on average, unlike names and dates."""
    return sum(len(text if isinstance(text, list) else str(text).split()) for text in texts) >= 3 * len(texts)


def _all(values: Sequence[object], fits: Callable[[object], bool]) -> bool:
    return bool(values) and all(map(fits, values))


def _is_image(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value.get("bytes") or value.get("path"))
    return isinstance(value, bytes) or (isinstance(value, str) and Path(value).suffix.lower() in SUFFIXES)


def _is_text(value: object) -> bool:
    """Return whether a value is text, or a list of words."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(word, str) for word in value)
    return isinstance(value, str)


def _is_code(value: object) -> bool:
    return isinstance(value, str) and bool(CODE.fullmatch(value.strip()))


def _shown(table: DataTable) -> str:
    return ", ".join(table.columns.names[:20])

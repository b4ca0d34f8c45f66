"""The options for a table of texts or images."""

from collections.abc import Sequence
from pathlib import Path

from tessera.worker.data.groups import is_person, plain
from tessera.worker.data.kinds.chat import COLUMNS, ChatOptions, chats_of, layout_of, layouts_in
from tessera.worker.data.load_report import LoadReport, empty_texts
from tessera.worker.data.proposal.class_names import add_class_names, add_texts_of_classes
from tessera.worker.data.proposal.columns import (
    MAX_FEW,
    has_few_values,
    image_column,
    label_column,
    require_texts,
    shown_columns,
    text_column,
)
from tessera.worker.data.proposal.model_inputs import add_max_length, add_pixels, number_of_words
from tessera.worker.data.proposal.options import SAMPLE, Proposal, refuse
from tessera.worker.data.proposal.targets import add_columns, add_targets, truth_columns
from tessera.worker.data.readers.class_labels import LISTED, class_name
from tessera.worker.data.readers.pictures import Pictures
from tessera.worker.data.readers.table_files import Separator, is_saved, table_files
from tessera.worker.data.readers.tables import READERS, SEPARATORS, DataTable, read_table, separator_of
from tessera.worker.data.readers.tokenizer import RUN
from tessera.worker.errors import DataError

MAX_NAMED = 1000
"""Number of classes above which a column hardly contains classes."""
ONE_CLASS = 'Give each example one class, or list texts of labels for problem_type = "multi_label"'


def add_table(
    proposal: Proposal,
    path: Path,
    split: str | None,
    tokenizer: str | None,
    processor: str | None,
    text: str | None,
    label: str | None,
) -> None:
    """Add the options for the table at a path. Raises DataError if a person has to decide."""
    separator = None if is_saved(path) else _unusual_separator(path, split)
    table = read_table("file", (path,), split, separator=separator)
    text, label = (_own_name(table, *each) for each in (("text", text), ("label", label)))
    proposal.warn_of(LoadReport(passed_over=table.passed_over))
    if text is not None:
        require_texts(proposal, table, text)
    options = ChatOptions(file=(path,), tokenizer=RUN)
    if text is None and label is None and layouts_in(options, table):
        _add_chats(proposal, options, table, path, split, separator, tokenizer, processor)
        return
    image = None if text else image_column(table)
    text = None if image else text or text_column(table)
    if image is None and text is None:
        raise DataError(
            f"{table.where} has no column of texts or images among {shown_columns(table)}: if single words are "
            "the texts, name their column with --text; or write kind and the column's name by hand, as "
            "`tessera docs data` describes"
        )
    kind, column = ("images", image) if image else ("text", text)
    proposal.add("kind", kind, f"column {column} contains {kind.removesuffix('s')}s")
    _add_file(proposal, table, path, split, separator)
    if image is not None:
        proposal.add("image", image, "paths, relative to the table's folder, or the images' bytes")
    _add_label(proposal, table, image, text, label)
    _add_group(proposal, table, image, text)
    if image is not None:
        cells = table.cells("image", image)[:SAMPLE]
        paths = (cell for cell in cells if isinstance(cell, str))
        add_pixels(proposal, Pictures.of(table.folder, paths), processor)
        add_texts_of_classes(proposal, tokenizer)
        return
    refuse(f"{path} is a table of texts", processor=processor)
    _add_tokenizer(proposal, tokenizer)
    add_max_length(proposal, table.cells("text", str(text)), tokenizer)


def _add_file(
    proposal: Proposal, table: DataTable, path: Path, split: str | None, separator: Separator | None
) -> None:
    proposal.add("file", str(path), f"a table with the columns {shown_columns(table)}")
    if split is not None:
        proposal.add("split", split, "the split that you named")
    if separator is not None:
        why = f"the only separator with which the first rows have equally many columns, {len(table.names)}"
        proposal.add("separator", separator, why)


def _add_tokenizer(proposal: Proposal, tokenizer: str | None) -> None:
    brought = "the tokenizer that each run's model brings; or a folder with one"
    proposal.add("tokenizer", tokenizer or RUN, "the tokenizer that you named" if tokenizer else brought)


def _add_chats(
    proposal: Proposal,
    options: ChatOptions,
    table: DataTable,
    path: Path,
    split: str | None,
    separator: Separator | None,
    tokenizer: str | None,
    processor: str | None,
) -> None:
    """Add the options for a table of chats. Raises DataError, naming the row, for a chat that cannot be read."""
    refuse(f"{path} is a table of chats", processor=processor)
    layout = layout_of(options, table)
    columns = COLUMNS[layout]
    # This refuses a row that is no chat.
    _ = chats_of(options, table, layout)[:SAMPLE]
    proposal.add("kind", "chat", f"it has the {'columns' if columns[1:] else 'column'} {' and '.join(columns)}")
    _add_file(proposal, table, path, split, separator)
    _add_group(proposal, table, None, None)
    _add_tokenizer(proposal, tokenizer)


def _own_name(table: DataTable, option: str, name: str | None) -> str | None:
    """Return the table's name of a column that was named. Raises DataError if it is not there."""
    if name is not None:
        table.cells(option, name)
    return name and table.own_name(name)


def _unusual_separator(path: Path, split: str | None) -> Separator | None:
    file = table_files("file", (path,), split, READERS).files[0]
    usual = SEPARATORS.get(file.suffix.lower())
    found = separator_of(file, SAMPLE) if usual else None
    return None if found == usual else found


def _add_label(proposal: Proposal, table: DataTable, image: str | None, text: str | None, label: str | None) -> None:
    """Add the options of the column of labels, and for texts the head that follows from it."""
    label = label or label_column(table, {image, text})
    if label is None and (columns := truth_columns(table, {image, text})):
        if text is not None:
            proposal.add("text", text, "the column of texts")
        add_columns(proposal, columns)
        return
    if label is not None and add_targets(proposal, table, text, label):
        return
    if label is None and (image or len(table.names) > 1):
        few = [name for name in table.names if name not in (image, text) and has_few_values(table, name)]
        likely = f" ({', '.join(few)} {'have' if len(few) > 1 else 'has'} few values)" if few else ""
        raise DataError(
            f"{table.where} has no obvious column of classes among {shown_columns(table)}: name it with "
            f'--label{likely}, or for texts without classes write the table by hand with head = "causal-lm"'
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
        lengths = map(number_of_words, table.cells("text", str(text))[:SAMPLE] if by_word else ())
        if any(length != len(value) for length, value in zip(lengths, values, strict=False)):
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
        add_class_names(proposal, spelt, "the names in the table" if own else f"the values of {label}, sorted", own)


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


def _add_group(proposal: Proposal, table: DataTable, image: str | None, text: str | None) -> None:
    """Add the column of patients or subjects by its name, or ask about columns of identities that repeat."""
    label = proposal.options.get("label")
    used = (image, text, label if isinstance(label, str) else None)
    persons = [name for name in table.names if name not in used and is_person(name)]
    groups = [name for name in table.names if plain(name) == "group"]
    if found := sorted(persons, key=lambda name: not plain(name).startswith("pat")) or groups:
        proposal.add(
            "group", found[0], "rows with an equal value in this column are held out together: the patient's"
        )
        return
    proposal.warn_of(LoadReport(ungrouped=table.ungrouped(None, *used)))

"""The options for labels that are several for an example, numbers, or spans of characters, by a table's values."""

from collections.abc import Sequence

from tessera.worker.data.groups import is_person
from tessera.worker.data.proposal.class_names import add_class_names
from tessera.worker.data.proposal.model_inputs import number_of_words
from tessera.worker.data.proposal.options import SAMPLE, Proposal
from tessera.worker.data.readers.class_labels import class_name
from tessera.worker.data.readers.tables import DataTable
from tessera.worker.data.targets.numbers import TRUTH, listed
from tessera.worker.data.targets.spans import OUTSIDE

LEAST_COLUMNS = 2


def truth_columns(table: DataTable, others: set[str | None]) -> list[str]:
    """Return the columns, if all but `others` and identities have 1 or 0 in the first rows; else none."""
    names = [name for name in table.names if name not in others and not is_person(name)]
    found = [name for name in names if _is_truth(table.cells("label", name)[:SAMPLE])]
    return found if len(found) == len(names) >= LEAST_COLUMNS else []


def _is_truth(values: Sequence[object]) -> bool:
    try:
        return {class_name(value) for value in values} <= TRUTH.keys()
    except TypeError:
        return False


def add_columns(proposal: Proposal, columns: Sequence[str]) -> None:
    """Add the options of a column for each label."""
    proposal.add("problem_type", "multi_label", f"{', '.join(columns)} have 1 or 0 in each row")
    proposal.add("label_columns", True, "each of `labels` names a column")
    names = {name: {name} for name in columns}
    add_class_names(proposal, names, "the columns' names", columns)


def add_targets(proposal: Proposal, table: DataTable, text: str | None, label: str) -> bool:
    """Add the options of labels in this column that are not one class each. Return False for classes."""
    values = [listed(value) for value in table.column("label", label)]
    lists = [value for value in values if isinstance(value, list)]
    items = [item for value in lists for item in value]
    if text and items and all(isinstance(item, dict) and {"start", "end", "label"} <= item.keys() for item in items):
        types = sorted({str(item["label"]) for item in items})
        proposal.add("head", "token-classification", f"{label} has spans of characters")
        proposal.add("text", text, "the column of texts")
        proposal.add("label", label, "the column of spans")
        proposal.add("spans", True, "each cell lists spans with start, end and label")
        tags = [OUTSIDE, *(f"{part}-{each}" for each in types for part in "BI")]
        why = "words outside of entities, at an entity's beginning and within one: copy this line to every site"
        proposal.add("labels", tags, why)
        return True
    if lists and all(isinstance(item, str) for item in items) and not _by_word(table, text, values):
        proposal.add("problem_type", "multi_label", f"{label} lists the labels of each example")
        _add_column(proposal, text, label)
        names = sorted(set(map(str, items)))
        add_class_names(proposal, {name: {name} for name in names}, f"the names in {label}, sorted")
        # Numbers are left out of the options of classes.
        proposal.add("labels", proposal.options.get("labels", names), proposal.reasons.get("labels", "the labels"))
        return True
    if _are_measured(values):
        proposal.add("problem_type", "regression", f"{label} has numbers with a fraction, which are hardly classes")
        _add_column(proposal, text, label)
        return True
    return False


def _add_column(proposal: Proposal, text: str | None, label: str) -> None:
    if text:
        proposal.add("head", "text-classification", "each text has its own labels")
        proposal.add("text", text, "the column of texts")
    proposal.add("label", label, "the column of labels")


def _by_word(table: DataTable, text: str | None, values: Sequence[object]) -> bool:
    """Return True if the texts are lists of words, or have as many words as labels."""
    texts = table.cells("text", text)[:SAMPLE] if text else []
    if not texts:
        return False
    return any(isinstance(each, list) for each in texts) or all(
        isinstance(value, list) and number_of_words(each) == len(value)
        for each, value in zip(texts, values, strict=False)
    )


def _are_measured(values: Sequence[object]) -> bool:
    """Return True if all values are numbers, and some have a fraction."""
    try:
        numbers = [float(value) for value in values if isinstance(value, str | int | float)]
    except ValueError:
        return False
    return len(numbers) == len(values) and any(number % 1 for number in numbers)

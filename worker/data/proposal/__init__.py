"""A table `[datasets.NAME]` for a folder or a file, proposed from its content, with a reason for each option."""

from pathlib import Path

from tessera.worker.data.load_report import LoadReport
from tessera.worker.data.proposal.class_names import add_texts_of_classes
from tessera.worker.data.proposal.folders import add_folder
from tessera.worker.data.proposal.options import Proposal, refuse
from tessera.worker.data.proposal.tables import add_table
from tessera.worker.data.readers.data_folders import foreign, names_below
from tessera.worker.data.readers.table_files import is_saved
from tessera.worker.data.readers.tables import READERS
from tessera.worker.data.readers.tokenizer import RUN


def propose(
    path: Path,
    *,
    split: str | None = None,
    tokenizer: str | None = None,
    processor: str | None = None,
    text: str | None = None,
    label: str | None = None,
) -> Proposal:
    """Return the options for the data at a path. Raises DataError if a person has to decide.

    `text` and `label` name columns of a table of texts; otherwise the values of the columns decide.
    """
    path = path.resolve()
    tokenizer, processor = _from_anywhere(tokenizer), _from_anywhere(processor)
    proposal = Proposal()
    if path.suffix.lower() == ".safetensors":
        proposal.add("kind", "arrays", "a safetensors file holds prepared tensors, `labels` among them")
        proposal.add("file", str(path), "the tensors' names are the model's inputs")
        given = {"split": split, "tokenizer": tokenizer, "processor": processor, "text": text, "label": label}
        refuse(f"{path} holds prepared tensors", **given)
    elif path.is_dir() and not is_saved(path) and not _tables_in(path) and (below := names_below(path))[0]:
        add_folder(proposal, path, list(map(Path, below[0])), processor)
        proposal.warn_of(LoadReport(passed_over=below[1]))
        refuse(f"{path} is a folder of images, whose folders are the classes", split=split, text=text, label=label)
        add_texts_of_classes(proposal, tokenizer)
    else:
        add_table(proposal, path, split, tokenizer, processor, text, label)
    proposal.add("held_out", 0.2, "the worker measures on this share of the examples, and no run trains on them")
    return proposal


def _from_anywhere(source: str | None) -> str | None:
    """Return the whole path of a folder, since a worker may start elsewhere; or the name on the hub."""
    return str(Path(source).resolve()) if source and source != RUN and Path(source).is_dir() else source


def _tables_in(folder: Path) -> bool:
    return any(file.suffix.lower() in READERS and not foreign(file.name) for file in folder.iterdir())

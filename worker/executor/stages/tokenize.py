"""The stage that converts a site's texts with the tokenizer of the run's model, and packs them into rows."""

from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from tessera.shared.model.dataset_schema import token_limit
from tessera.shared.model.preprocessing import TOKENIZER
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.packing import POSITIONS, packed
from tessera.worker.data.readers.tokenizer import MAX_TOKENS, tokenized, tokenizer_of
from tessera.worker.errors import DataChanged, DataError, NoChatTemplate, TaskFailure
from tessera.worker.executor.stages.load import PreparedTask
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.model.chats import Chat
from tessera.worker.model.prompts import token_embedding
from tessera.worker.model.sandbox import TokenizerRequest
from tessera.worker.task.handover import FetchedVersion
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.packing_probe import packing_fault

AT_ONCE = 1 << 14
"""Number of texts that a child of the sandbox converts."""


def tokenize(local: LocalTask, fetched: FetchedVersion, loaded: PreparedTask, dataset: Dataset) -> Dataset:
    """Return the data set as it is, or its raw texts as tokens of the run's tokenizer, packed if it is to be.

    Raises TaskFailure and UnsafeConfig. No message depends on the texts.
    """
    task, known = local.task, local.cache.tokenized
    rounds = task.kind == "evaluate" and local.rules.rounds_figures(task)
    # The length of one document decides in which rows the next ones are, and so moves figures without a bound.
    packs = dataset.pack and not rounds
    # The author of a run could choose a template by which the number of examples tells which chats match.
    keeps_cut = rounds and dataset.texts is not None and dataset.texts.of_chats
    # An attack needs the loss of each text.
    packs = packs and task.kind != "attack"
    # Answers are scored with the question before them alone.
    packs = packs and not (task.kind == "evaluate" and _answers(local, dataset))
    if dataset.texts is None and not packs:
        return dataset
    made_as = f"{task.model}{' packed' if packs else ''}{' with cut chats' if keeps_cut else ''}"
    if (last := known.get(task.dataset)) and last[0] == made_as:
        return last[1]

    def make() -> Dataset:
        raw = _with_cut_chats(dataset) if keeps_cut else dataset
        made = _tokenized(local, fetched, loaded, raw) if dataset.texts else dataset
        return packed(made) if packs else made

    made = local.setup.ranks.shared(make)
    known[task.dataset] = made_as, made
    return made


def _with_cut_chats(dataset: Dataset) -> Dataset:
    """Return raw texts, and the held-out ones, among which chats whose answers are cut off will stay."""
    held_out = dataset.held_out and _with_cut_chats(dataset.held_out)
    return replace(dataset, texts=dataset.texts and replace(dataset.texts, keeps_cut=True), held_out=held_out)


def _answers(local: LocalTask, dataset: Dataset) -> bool:
    """Return True if a model has to answer the examples."""
    first = dataset.texts.first[0] if dataset.texts else None
    is_chat = isinstance(first, Chat) or dataset.tokenizer is not None
    offers = bool(dataset.choices) or (isinstance(first, Chat) and bool(first.choices))
    return offers or (is_chat and local.task.max_new_tokens > 0)


def require_apart(local: LocalTask, context: LocalTaskContext, dataset: Dataset) -> None:
    """Raise TaskFailure for packed rows whose documents the model does not keep apart."""
    if POSITIONS in dataset.inputs and (fault := packing_fault(context)):
        raise TaskFailure(
            "packed-texts",
            f"the data set {local.task.dataset!r} is packed (pack = true), and the model {fault}: it must take "
            "position_ids and build its attention mask from them, as Llama does",
        )


def _tokenized(local: LocalTask, fetched: FetchedVersion, loaded: PreparedTask, dataset: Dataset) -> Dataset:
    task, texts = local.task, dataset.texts
    if texts is None:
        return dataset
    with TemporaryDirectory(dir=local.scratch) as folder:
        for name, raw in fetched.tokenizer.items():
            (Path(folder) / name).write_bytes(raw)
        if local.sandbox:
            parts = chain.from_iterable(
                part.texts.parts() for part in (dataset, dataset.held_out) if part and part.texts
            )
            while some := tuple(islice(parts, AT_ONCE)):
                request = TokenizerRequest(
                    tokenizer=fetched.tokenizer[TOKENIZER].decode(errors="replace"),
                    texts=some,
                    max_length=texts.max_length or MAX_TOKENS,
                    by_word=texts.by_word or texts.of_chats,
                )
                local.sandbox.require_tokenizer(request, local.check)
        embeddings = token_embedding(loaded.built.model).num_embeddings
        try:
            tokenizer = tokenizer_of("tokenizer", folder, by_word=texts.by_word)
        except DataError as fault:
            raise TaskFailure("invalid-tokenizer", str(fault).replace(folder, "the run's tokenizer")) from None
    if (highest := max(tokenizer.get_vocab().values())) >= embeddings:
        raise TaskFailure(
            "invalid-tokenizer",
            f"the run's tokenizer has token {highest}; its model has embeddings for 0 to {embeddings - 1}: start the "
            "run from a folder with the model's own tokenizer",
        )
    # Texts keep what fits the model, and the site reads below how many are longer.
    tokenizer.model_max_length = min(tokenizer.model_max_length, token_limit(fetched.document) or MAX_TOKENS)
    try:
        made = tokenized(dataset, tokenizer)
    except DataChanged:
        raise
    except DataError as fault:
        structlog.get_logger("worker").error("texts-not-tokenized", dataset=task.dataset, detail=str(fault))
        raise _failure(fault) from None
    for warning in made.report.sentences():
        structlog.get_logger("worker").warning("texts", dataset=task.dataset, detail=warning)
    return made


def _failure(fault: DataError) -> TaskFailure:
    """Return the failure for texts that cannot be converted, without a word of them."""
    if isinstance(fault, NoChatTemplate):
        detail = "the run's tokenizer has no chat template, which the chats of this site need"
        return TaskFailure("no-chat-template", detail)
    detail = "the run's tokenizer cannot convert the texts of this site; the worker's own log has more"
    return TaskFailure("tokenizer-mismatch", detail)

"""Data sets, and the adapter that each kind of data set provides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import pad

from tessera.shared.model.dataset_schema import ANSWERS, PIXELS, DatasetSchema, Problem, TensorSchema, name_digests
from tessera.shared.schema import Value
from tessera.worker.data.cells import Cells
from tessera.worker.data.dataset_info import DatasetInfo, Pixels
from tessera.worker.data.groups import Groups, Subgroups, UngroupedExamples, is_unnamed
from tessera.worker.data.load_report import LoadReport
from tessera.worker.data.normalization import PixelNormalization
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.errors import DataError
from tessera.worker.model.chats import Chat

LABELS = "labels"


class Options(Value):
    """An adapter's options from the settings file. Unknown options are refused."""


Shape = tuple[int, ...] | None


@dataclass(frozen=True)
class Padding:
    """Padding of texts on the right to `width` tokens, with a value for each tensor that has one value per token."""

    width: int
    values: Mapping[str, int]

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors, of which texts, [examples, tokens], or pairs of them, [examples, 2, tokens], are padded to
        `width` tokens."""
        return {
            name: pad(tensor, (0, self.width - tensor.shape[-1]), value=self.values[name])
            if name in self.values
            else tensor
            for name, tensor in tensors.items()
        }


@dataclass(frozen=True, eq=False, repr=False)
class RawTexts:
    """Texts, and the second ones of pairs, which a tokenizer converts to at most `max_length` tokens.

    Each is the text of an example, or with `of_classes` that of a class. With `by_word` it is a list of words, and
    with `of_chats` a chat.
    """

    first: Sequence[str] | Sequence[Sequence[str]] | Sequence[Chat]
    convert: Callable[[Dataset, RawTexts, Any], Dataset]
    """A function from a data set, its texts and a tokenizer to the data set with tokens. Raises DataError."""
    max_length: int | None
    second: Sequence[str] | None = None
    by_word: bool = False
    of_classes: bool = False
    of_chats: bool = False
    of_pairs: bool = False
    """True if each chat has a rejected and a chosen answer, of which two rows of tokens are made."""
    with_end: bool = False
    """True if a model is to learn where a text ends: each has the tokenizer's end-of-text token, unless it is cut."""
    numbers: Sequence[int] | NDArray[np.int64] = ()
    """The row of each text in the file."""

    tags: Sequence[Sequence[int]] = ()
    """The class of each word of each text, if words have classes."""
    keeps_cut: bool = False
    """True to keep chats whose answers are cut off, without a scored token."""
    settings: str = ""
    """Further settings by which texts become rows."""

    def parts(self) -> Iterator[tuple[str, ...]]:
        """Yield the words of each text, the messages and offered answers of each chat, or the text and a second
        one if there is one."""
        if self.of_chats:
            yield from (chat.texts for chat in cast("Sequence[Chat]", self.first))
        elif self.by_word:
            yield from map(tuple, self.first)
        else:
            yield from zip(self.first, *([] if self.second is None else [self.second]), strict=True)

    def whole_texts(self) -> Iterator[tuple[str, ...]]:
        """Yield the parts of each text that becomes a row of tokens: both chats of a pair."""
        if not self.of_pairs:
            return self.parts()
        return (side.contents for chat in cast("Sequence[Chat]", self.first) for side in chat.sides)

    def rows(self, index: Tensor) -> RawTexts:
        """Return the texts of the examples at these places."""
        if self.of_classes:
            return self
        chosen: dict[str, Any] = {
            name: _chosen(values, index)
            for name in ("first", "second", "numbers", "tags")
            if (values := getattr(self, name)) is not None and len(values)
        }
        return replace(self, **chosen)


class Choices(NamedTuple):
    """The answers that a question offers, as tokens."""

    right: int
    """The place of the right one."""
    shared: int
    """The number of tokens in the example's row that are before each answer."""
    answers: tuple[tuple[int, ...], ...]
    """The tokens of each answer, with those that end it."""

    @classmethod
    def of(cls, noted: Sequence[Any]) -> Choices:
        """Return the answers as a file notes them."""
        return cls(noted[0], noted[1], tuple(map(tuple, noted[2])))


Rows = dict[str, Tensor]
"""The inputs of some examples, by name."""


@dataclass(frozen=True, eq=False, repr=False)
class TableOnDisk:
    """Examples whose rows are read for each batch, so that memory does not grow with them."""

    transform: Callable[[Sequence[int]], Rows]
    """A function from places in the table to the inputs of the rows there. Raises DataError."""
    places: Tensor
    """The place of each example, int64 [examples]."""
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """The shape and the dtype of a row of each input."""
    finish: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """The conversion of the transform's result to rows of this shape and dtype, on any device, by input. Bytes of
    pixels are converted where the model is, so that a quarter is copied."""
    in_loaders: bool = False
    """True if reading takes so long that loaders do it, if the worker has any."""

    def __getitem__(self, index: Tensor) -> Rows:
        return self.finished(self.read(index))

    def read(self, index: Tensor) -> Rows:
        """Return the rows at these places as `transform` makes them, which may be none."""
        return {name: rows[: len(index)] for name, rows in self.transform(self.some(index).tolist()).items()}

    def some(self, index: Tensor) -> Tensor:
        """Return the places of these examples, or of any one if there are none: a rank may have no row of a batch."""
        return self.places[index] if len(index) else self.places[:1]

    def finished(self, rows: Rows) -> Rows:
        """Return the rows with these inputs in the declared shape and dtype, on the same device."""
        return {name: self.finish[name](tensor) if name in self.finish else tensor for name, tensor in rows.items()}

    def chosen(self, index: Tensor) -> TableOnDisk:
        """Return the rows at these places, without reading them."""
        return replace(self, places=self.places[index])

    def padded(self, padding: Padding) -> TableOnDisk:
        """Return the rows of texts padded further."""
        kinds = {
            name: ((*row[:-1], padding.width) if name in padding.values else row, dtype)
            for name, (row, dtype) in self.kinds.items()
        }
        return replace(self, transform=partial(_padded, self.transform, padding), kinds=kinds)


def _padded(transform: Callable[[Sequence[int]], Rows], padding: Padding, places: Sequence[int]) -> Rows:
    return padding.fill(transform(places))


@dataclass(frozen=True, eq=False, repr=False)
class RowsOnDisk:
    """One input of a table on disk, [examples, ...]."""

    table: TableOnDisk
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.table.places), *self.table.kinds[self.name][0])

    @property
    def dtype(self) -> torch.dtype:
        return self.table.kinds[self.name][1]

    def __getitem__(self, index: Tensor) -> Tensor:
        return self.table[index][self.name]


@dataclass(frozen=True, eq=False, repr=False)
class RowRequest:
    """Rows to read together."""

    places: NDArray[np.int64]
    change: Callable[[Rows], Rows] | None = None
    """A conversion of the rows."""


class Loaders(Protocol):
    """Processes that read rows on disk. `worker.data.loaders` implements it."""

    def prepare(self) -> None:
        """Begin to import the modules of loaders."""

    def read(
        self, transform: Callable[[Sequence[int]], Rows], requests: Iterable[RowRequest]
    ) -> Iterator[Rows | DataError]:
        """Yield the result of a table's transform for each request, or its error, in their order."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Examples: each tensor is one of the model's keyword inputs, [examples, ...], and so is each input `on_disk`.

    `common` is part of every batch: the texts of a contrastive model's classes, `input_ids` [classes, tokens].
    `domains`, int64 [examples], is the origin of each example; models do not see it. `held_out` are examples of the
    same kind on which no run trains. `sources` are the original bytes of each example, if its tensors depend on other
    examples too (texts are padded to the longest), or digests, uint8 [examples, bytes]. Examples with equal `groups`
    are held out together, and those whose group is missing one by one. `subgroups` have a place for each example.
    `padding` pads texts to their maximal length.
    `texts` are still to be converted to tensors. `report` is for people at the site. `schema` is sent to the
    coordinator, so it must not depend on the examples.

    Raises DataError if the tensors differ in their number of examples or have none, if `labels` is missing, if a name
    occurs twice, or if the lengths of domains, sources or groups differ.
    """

    tensors: dict[str, Tensor]
    common: Mapping[str, Tensor] = field(default_factory=dict)
    held_out: Dataset | None = None
    domains: Tensor | None = None
    sources: Sequence[bytes] | NDArray[np.uint8] | None = None
    padding: Padding | None = None
    groups: Sequence[bytes] | None = None
    subgroups: Mapping[str, Subgroups] = field(default_factory=dict)
    texts: RawTexts | None = None
    report: LoadReport = field(default_factory=LoadReport)
    schema: DatasetSchema = field(default_factory=DatasetSchema)
    on_disk: TableOnDisk | None = None
    loaders: Loaders | None = None
    """The processes that read the rows `in_loaders`; None reads them in this process."""
    normalization: PixelNormalization | None = None
    """The conversion of bytes to `pixel_values`, if it is known: augmentation changes bytes."""
    pack: bool = False
    """True if tasks put several of these documents into a row (`worker.data.packing`)."""
    share: tuple[int, int] = (0, 1)
    """A rank's number and the number of ranks. Each reads every such row of a batch, and perhaps none."""
    tokenizer: Tokenizer | None = None
    """The tokenizer that wrote chats whose labels are their answers, to read what a model generates."""
    choices: Sequence[Choices] | None = None
    """The answers between which each example asks."""
    sides: NDArray[np.int32] | None = None
    """The longer side of each image as it was read, in pixels, int32 [examples]."""

    def __post_init__(self) -> None:
        if LABELS not in self.inputs:
            names = ", ".join(sorted(self.inputs)) or "none"
            raise DataError(f"no tensor {LABELS!r} among the tensors ({names}): add it")
        domains = self.domains
        sizes = {name: tensor.shape[0] if tensor.shape else 0 for name, tensor in sorted(self.inputs.items())}
        if domains is not None:
            sizes["domain"] = domains.shape[0] if domains.ndim else 0
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise DataError(f"every tensor must have the same leading size, and it must be positive: {sizes}")
        if domains is not None and (domains.ndim != 1 or domains.is_floating_point()):
            raise DataError(f"domain: {domains.dtype} {list(domains.shape)} is not one integer for each example")
        if twice := sorted(self.inputs.keys() & self.common.keys()):
            raise DataError(f"{', '.join(twice)}: given both for each example and as common to all")
        columns = ((f"subgroups: {name}", column.places) for name, column in self.subgroups.items())
        given_each = (
            ("sources", self.sources),
            ("groups", self.groups),
            ("sides", self.sides),
            ("choices", self.choices),
            *columns,
        )
        for what, given in given_each:
            if given is not None and len(given) != self.examples:
                raise DataError(f"{what}: there are {len(given)} for {self.examples} examples; give one for each")

    @property
    def inputs(self) -> dict[str, Tensor | RowsOnDisk]:
        """Everything that has a row for each example, in memory or on disk."""
        return {**self.tensors, **self._rows_on_disk}

    @cached_property
    def _rows_on_disk(self) -> dict[str, RowsOnDisk]:
        # The same objects each time, by which features of images are kept.
        return {name: RowsOnDisk(self.on_disk, name) for name in self.on_disk.kinds} if self.on_disk else {}

    @property
    def in_loaders(self) -> bool:
        """True if loaders read the rows on disk."""
        return bool(self.loaders and self.on_disk and self.on_disk.in_loaders)

    @property
    def examples(self) -> int:
        return self.inputs[LABELS].shape[0]

    @property
    def classes(self) -> Tensor | None:
        """The class of each example, int64 [examples], or None if `labels` is not one class for each example."""
        labels = self.tensors.get(LABELS)
        if labels is None or labels.ndim != 1 or labels.is_floating_point() or ANSWERS in self.schema.inputs:
            return None
        return labels.long()

    @property
    def info(self) -> DatasetInfo:
        """The facts about it that the agent needs."""
        pixels, ungrouped = self.inputs.get(PIXELS), None
        try:
            _ = self.by_group
        except UngroupedExamples as fault:
            ungrouped = str(fault)
        return DatasetInfo(
            examples=self.examples,
            held_out=self.held_out.examples if self.held_out else 0,
            opted_out=self.report.opted_out.examples if self.report.opted_out else 0,
            groups=None if self.groups is None else len(set(self.groups)),
            ungrouped=ungrouped,
            schema=self.schema,
            pack=self.pack,
            raw_texts=self.texts is not None,
            raw_examples=self.texts is not None and not self.texts.of_classes,
            # The losses of examples with a number for each label add up.
            several_labels=len(self.inputs[LABELS].shape) > 1 and not self.inputs[LABELS].dtype.is_floating_point,
            pixels=None if pixels is None else _pixels(pixels, from_bytes=self.normalization is not None),
        )

    @cached_property
    def by_group(self) -> Groups:
        """The examples by group. Raises UngroupedExamples."""
        return Groups.of(self.groups)

    def contradictions(self) -> list[tuple[int, int]]:
        """Return the place of the first example of a content, and that of another with another class, once for each
        further class. Examples whose source is a digest are compared."""
        classes = self.classes
        if classes is None or not isinstance(self.sources, np.ndarray):
            return []
        digests = np.ascontiguousarray(self.sources).view(f"V{self.sources.shape[1]}").ravel()
        _, contents, counts = np.unique(digests, return_inverse=True, return_counts=True)
        again = np.flatnonzero(counts[contents] > 1)
        first: dict[int, int] = {}
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for place, content, number in zip(
            again.tolist(), contents[again].tolist(), classes[again].tolist(), strict=True
        ):
            earlier = first.setdefault(content, place)
            if classes[earlier] != number:
                found.setdefault((content, number), (earlier, place))
        return list(found.values())

    def split_keys(self) -> Iterator[bytes]:
        """Yield the bytes that decide whether each example is held out: its group, or else its identity."""
        if self.groups is None:
            yield from self.identities()
            return
        # Examples without a group are not one group: all of them would be on one side.
        alone = torch.tensor([is_unnamed(group) for group in self.groups]).nonzero().flatten()
        own = self.rows(alone).identities() if len(alone) else iter(())
        for group in self.groups:
            yield next(own) if is_unnamed(group) else group

    def identities(self, dtype: torch.dtype | None = None, unreadable: bytes | None = None) -> Iterator[bytes]:
        """Yield bytes that identify each example, regardless of its label and of the other examples: its source, or
        else a digest of its tensors, converted to `dtype` if given. Of an example that cannot be read yield
        `unreadable`, or raise DataError if that is None."""
        if self.sources is not None:
            yield from map(bytes, self.sources)
            return
        for place in range(self.examples):
            try:
                yield self._identity(place, dtype)
            except DataError:
                if unreadable is None:
                    raise
                yield unreadable

    def _identity(self, place: int, dtype: torch.dtype | None) -> bytes:
        digest = hashlib.sha256()
        for name, values in sorted(self.read(torch.tensor([place])).items()):
            if name == LABELS:
                continue
            row = values[0].to(dtype).contiguous()
            digest.update(f"{name} {row.dtype} {list(row.shape)};".encode())
            digest.update(row.flatten().view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def rows(self, index: Tensor) -> Dataset:
        """Return the examples at the places `index`, int64 [chosen], in that order, without the held-out examples."""
        return Dataset(
            {name: tensor[index] for name, tensor in self.tensors.items()},
            self.common,
            domains=None if self.domains is None else self.domains[index],
            sources=_chosen(self.sources, index),
            padding=self.padding,
            groups=_chosen(self.groups, index),
            sides=_chosen(self.sides, index),
            tokenizer=self.tokenizer,
            choices=_chosen(self.choices, index),
            subgroups={name: column.rows(index) for name, column in self.subgroups.items()},
            texts=self.texts and self.texts.rows(index),
            report=self.report,
            schema=self.schema,
            on_disk=self.on_disk and self.on_disk.chosen(index),
            loaders=self.loaders,
            normalization=self.normalization,
            pack=self.pack,
        )

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the examples at the places `index`. Raises DataError for unreadable files."""
        memory = {name: tensor[index] for name, tensor in self.tensors.items()}
        return memory | (self.on_disk[index] if self.on_disk else {})

    def in_memory(self) -> Dataset:
        """Return the examples with everything in memory. Raises DataError."""
        return replace(self, tensors=self.read(torch.arange(self.examples)), on_disk=None) if self.on_disk else self

    def standardised(self, mean: float, deviation: float) -> Dataset:
        """Return the examples with targets less this mean, over this deviation; held-out ones too. Without targets in
        memory, and for 0 and 1, they stay as they are."""
        labels = self.tensors.get(LABELS)
        if (mean, deviation) == (0, 1) or labels is None or not labels.is_floating_point():
            return self
        targets = ((labels.double() - mean) / deviation).to(labels.dtype)
        held_out = self.held_out and self.held_out.standardised(mean, deviation)
        return replace(self, tensors={**self.tensors, LABELS: targets}, held_out=held_out)

    def padded(self) -> Dataset:
        """Return the examples with texts padded to the maximal length, so that no shape reveals the longest text."""
        if self.padding is None:
            return self
        on_disk = self.on_disk and self.on_disk.padded(self.padding)
        return replace(self, tensors=self.padding.fill(self.tensors), on_disk=on_disk, padding=None)

    def blank(self) -> Dataset:
        """Return one example of zeros with the shapes and dtypes of these, and with texts of the maximal length. It
        reads none of these."""
        inputs = {name: torch.zeros((1, *rows.shape[1:]), dtype=rows.dtype) for name, rows in self.inputs.items()}
        blank = Dataset(inputs, self.common, padding=self.padding, texts=self.texts, schema=self.schema)
        return replace(blank, normalization=self.normalization).padded()

    def placeholder(self, examples: int, end: int | None = None, words: Sequence[int] = (0, 1)) -> dict[str, Tensor]:
        """Return synthetic examples that depend only on the shapes and dtypes of these.

        Texts are of the tokens `words`, at random. Each has the token `end` once, at its end, where some classifiers
        read their answer.
        """
        generator = torch.Generator().manual_seed(0)
        inputs = {}
        for name, tensor in sorted(self.inputs.items()):
            shape = (examples, *tensor.shape[1:])
            if tensor.dtype.is_floating_point and name != LABELS:
                inputs[name] = torch.randn(shape, generator=generator).to(tensor.dtype)
            elif name == "input_ids":
                plain = [word for word in words if word != end] or list(words)
                tokens = torch.tensor(plain)[torch.randint(0, len(plain), shape, generator=generator)]
                if end is not None:
                    tokens[..., -1] = end
                inputs[name] = tokens.to(tensor.dtype)
            else:
                # Masks select everything, and sizes are not 0.
                inputs[name] = torch.full(shape, "mask" in name or "shape" in name).to(tensor.dtype)
        return inputs

    def batches(
        self, batch_size: int | None, generator: torch.Generator | None = None, skip: int = 0
    ) -> Iterator[dict[str, Tensor]]:
        """Yield every example once in batches of `batch_size` (None: one batch); the last may be smaller.

        The order is the stored one, or drawn from `generator`. Every batch contains the common tensors. The first
        `skip` batches are left out, and not read.
        """
        for rows in self.order(batch_size, generator, skip):
            yield {**self.read(rows), **self.common}

    def order(
        self, batch_size: int | None, generator: torch.Generator | None = None, skip: int = 0
    ) -> Sequence[Tensor]:
        """Return the places of the examples of each batch, int64 [batch], as `batches` describes them."""
        count = self.examples
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        rank, ranks = self.share
        return [rows[rank::ranks] for rows in torch.split(order, batch_size or count)[skip:]]


def _pixels(pixels: Tensor | RowsOnDisk, *, from_bytes: bool) -> Pixels:
    dtype = str(pixels.dtype).removeprefix("torch.")
    return Pixels(dtype, tuple(pixels.shape[1:]), pixels.dtype.is_floating_point, from_bytes)


def _chosen(values: Any, index: Tensor) -> Any:
    """Return the values at these places, of a list, an array or cells with one for each example, or None."""
    if isinstance(values, Cells):
        return values.chosen(index.numpy())
    if values is None or isinstance(values, np.ndarray):
        return values if values is None else values[index.numpy()]
    return [values[place] for place in index.tolist()]


def schema_of(
    tensors: Mapping[str, Tensor | RowsOnDisk],
    shapes: Mapping[str, Shape],
    classes: int | None = None,
    names: Sequence[str] | None = None,
    problem: Problem | None = None,
) -> DatasetSchema:
    """Return the schema of these tensors, whose labels are of a `problem` that has no classes.

    `shapes` are for one example. The settings fix them, the number of classes, and the classes' names in order; names
    give the number too.
    """
    inputs = {
        name: TensorSchema(dtype=str(tensor.dtype).removeprefix("torch."), shape=shapes.get(name))
        for name, tensor in tensors.items()
    }
    count = len(names) if names else classes
    return DatasetSchema(inputs=inputs, classes=count, class_names=name_digests(names or ()), problem=problem)


O = TypeVar("O", bound=Options)  # noqa: E741  (the field's letter for options)


@dataclass(frozen=True)
class Adapter(Generic[O]):
    """A kind of data set. A module named after the kind declares it as `ADAPTER`."""

    kind: str
    options: type[O]
    open: Callable[[O], Dataset]
    """A function from the options to the data set. Raises DataError."""
    open_prepared: Callable[[O, PreparedFolder], Dataset] | None = None
    """The same for a kind that makes files of its own from the data; it is used in place of `open`."""

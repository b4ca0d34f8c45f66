"""The blocks of an external base in a folder of safetensors files, found by their digests. Requires no torch."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from tessera.shared.model.blocks import Block, assembled, whole_shapes
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, WEIGHTS_FILE, Model, stored_name
from tessera.shared.problems import Invalid
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, as_bytes, digest_of, from_bytes
from tessera.shared.updates.safetensors_file import ContainerError, read_header, write

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a file has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span

    def values(self) -> Array:
        """Return the tensor, mapped from its file."""
        kind = NUMPY_DTYPES[self.dtype]  # type: ignore[index]  # only those of a block's dtype are read
        return np.memmap(self.span.path, dtype=kind, mode="r", offset=self.span.offset, shape=self.shape)


@dataclass(frozen=True)
class FoundBlock:
    """A block in a folder. Without a span its bytes do not stand there in one piece."""

    block: Block
    raw: RawTensor
    span: Span | None

    @classmethod
    def of(cls, block: Block, raw: RawTensor) -> Self:
        """Return a block of a tensor."""
        return cls(block, raw, _span_of(raw, block))

    def data(self) -> memoryview:
        """Return the block's bytes as they are stored and sent."""
        return part_of(self.raw.values(), self.block)

    def values(self) -> Array:
        """Return the block's values, in its own shape."""
        return from_bytes(self.data(), self.block.dtype).reshape(self.block.shape)


@dataclass(frozen=True)
class ConvertedBlock:
    """A block whose bytes stand in no file, since transformers makes it of others while loading."""

    block: Block
    data: memoryview
    sources: tuple[Path, ...]
    """The files that it was made of."""


def part_of(tensor: Array, block: Block) -> memoryview:
    """Return a block's bytes in the tensor that contains it; the bytes of a whole tensor are not copied."""
    return as_bytes(np.take(tensor, block.part.index(), axis=block.part.axis) if block.part else tensor)


@dataclass(frozen=True)
class BaseFolder:
    """The tensors of a folder's safetensors files: one, or those that an index names."""

    path: Path
    tensors: tuple[RawTensor, ...]
    _digests: dict[tuple[str, str], str] = field(default_factory=dict, compare=False)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the headers of a folder's files. Raises Invalid if it has none, or for one that is damaged."""
        return cls(path, tuple(tensor for file in weight_files(path) for tensor in _tensors_in(file)))

    def find(self, blocks: Iterable[Block], digests: Mapping[str, str]) -> tuple[list[FoundBlock], list[Block]]:
        """Return the blocks, by name in `digests`, that the folder has, and those that it does not have.

        A tensor's name is tried first: some families have others in their files than in memory.
        """
        blocks = tuple(blocks)
        found: list[FoundBlock] = []
        missing: list[Block] = []
        shapes = whole_shapes(blocks)
        for block in blocks:
            shape = shapes[block.tensor]
            alike = [raw for raw in self.tensors if (raw.dtype, raw.shape) == (block.dtype, shape)]
            own = stored_name(block.tensor)
            alike.sort(key=lambda raw: not (own.endswith(raw.name) or raw.name.endswith(own)))
            raw = next((raw for raw in alike if self._digest(raw, block) == digests[block.name]), None)
            if raw is None:
                missing.append(block)
            else:
                found.append(FoundBlock.of(block, raw))
        return found, missing

    def explain(self, missing: Iterable[Block]) -> str:
        """Return the reason why blocks were not found: which files have other bytes, and which tensors are absent."""
        by_name = {raw.name: raw for raw in self.tensors}
        absent, wrong = [], set()
        for block in missing:
            raw = by_name.get(stored_name(block.tensor))
            if raw is None:
                absent.append(block.name)
            else:
                wrong.add(f"{raw.span.path.name} has another {raw.name}")
        said = [*sorted(wrong)[:4], *([f"no file has {', '.join(absent[:4])}"] if absent else [])]
        return "; ".join(said)

    def _digest(self, raw: RawTensor, block: Block) -> str:
        key = (raw.name, block.part.model_dump_json() if block.part else "")
        if key not in self._digests:
            self._digests[key] = digest_of(part_of(raw.values(), block))
        return self._digests[key]


def weight_files(path: Path) -> list[Path]:
    """Return a folder's safetensors files. Raises Invalid if it has none."""
    index = path / INDEX_FILE
    if index.is_file():
        try:
            with index.open("rb") as file:
                names = sorted(set(json.loads(file.read(MAX_DOCUMENT_BYTES))["weight_map"].values()))
            elsewhere = [name for name in names if Path(name).name != name]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            raise Invalid(f"{index} is not an index of weights: {fault}", remedy="Fetch the folder again.") from fault
        if elsewhere:
            raise Invalid(f"{index} names files of other folders: {elsewhere[:4]}", remedy="Fetch the folder again.")
        return [path / name for name in names]
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
    raise Invalid(
        f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
        remedy="Name a folder with safetensors files; other formats may run code.",
    )


def _tensors_in(file: Path) -> Iterator[RawTensor]:
    # A cache of the hub has links to files that are named by their content.
    path = file.resolve()
    try:
        with path.open("rb") as opened:
            header = read_header(opened, path.stat().st_size)
    except (OSError, ContainerError) as fault:
        raise Invalid(f"{file} cannot be read as safetensors: {fault}", remedy="Fetch the file again.") from fault
    for name, entry in header.entries.items():
        span = Span(path, header.data_start + entry.start, entry.nbytes)
        yield RawTensor(name, entry.dtype, entry.shape, span)


def _span_of(raw: RawTensor, block: Block) -> Span | None:
    """Return the place of a block's bytes, if they stand in one piece."""
    if block.part is None:
        return raw.span
    if block.part.axis or len(block.part.spans) > 1:
        return None
    row = raw.span.nbytes // raw.shape[0]
    return Span(raw.span.path, raw.span.offset + block.part.spans[0][0] * row, block.nbytes)


def base_blocks(path: Path, model: Model) -> dict[str, FoundBlock]:
    """Return the blocks of a model's external base in a folder, by name, each verified. Raises Invalid."""
    base = BaseFolder.open(path)
    found, missing = base.find(model.base, model.external)
    if missing:
        raise Invalid(
            f"{path} is not the run's base: {len(missing)} of {len(model.base)} blocks differ: "
            f"{base.explain(missing)}",
            remedy="Name the snapshot that the model was made of. If transformers converts its weights while loading "
            "them, name what `tessera model init` makes of it without --external-base.",
        )
    return {each.block.name: each for each in found}


def write_with_base(file: BinaryIO, trained: BinaryIO, model: Model, base: Mapping[str, FoundBlock]) -> None:
    """Write one safetensors file of the trained blocks, from the file `trained`, and those of the base."""
    trained.seek(0, 2)
    size = trained.tell()
    trained.seek(0)
    header = read_header(trained, size)
    shapes = whole_shapes(model.blocks)
    blocks: dict[str, list[Block]] = {}
    for block in model.blocks:
        blocks.setdefault(block.tensor, []).append(block)

    def data() -> Iterator[bytes | memoryview]:
        for tensor, parts in blocks.items():
            if parts[0].name not in base:
                entry = header.entries[stored_name(tensor)]
                trained.seek(header.data_start + entry.start)
                for start in range(0, entry.nbytes, PIECE_BYTES):
                    yield trained.read(min(PIECE_BYTES, entry.nbytes - start))
            elif parts[0].part is None:
                yield base[tensor].data()
            else:
                yield as_bytes(assembled(parts, lambda block: base[block.name].values()))

    layout = [(stored_name(name), blocks[name][0].dtype, shape) for name, shape in shapes.items()]
    write(file, layout, data(), {"format": "pt"})

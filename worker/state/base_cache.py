"""External bases that a site has added: the place of each block's bytes, and the verified state of the files.

A record for each base says in which file, from which byte on, a block has its bytes. Files of a local snapshot are
referred to and not copied; blocks that no file has in one piece lie in `blobs/`. A verified file is not hashed
again while the file keeps its size, its time of modification and its inode.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, NonNegativeInt

from tessera.shared.problems import DigestMismatch
from tessera.shared.schema import Digest, Value
from tessera.shared.tensors.hashing import Hashing
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.base_folder import Span
from tessera.worker.state.atomic_files import written_whole
from tessera.worker.state.database import StateDatabase

BASES_FOLDER = "bases"
"""Name of the folder of copied blocks in the worker's state directory."""


class FileState(Value):
    """The properties of a file that change with its content."""

    size: NonNegativeInt
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        stat = path.stat()
        return cls(size=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino)


class Place(Value):
    """The bytes of a block in a file."""

    block: str
    file: str
    offset: NonNegativeInt
    nbytes: NonNegativeInt
    sources: tuple[str, ...] = ()
    """The files of the snapshot that a blob was made of, if the block stands in none of them as it is."""

    @classmethod
    def of(cls, block: str, span: Span, sources: Iterable[Path] = ()) -> Self:
        names = tuple(map(str, sources))
        return cls(block=block, file=str(span.path), offset=span.offset, nbytes=span.nbytes, sources=names)

    @property
    def span(self) -> Span:
        return Span(Path(self.file), self.offset, self.nbytes)

    @property
    def origin(self) -> str:
        """The names of the snapshot's files that have the block, without their folders."""
        return ", ".join(Path(name).name for name in self.sources or (self.file,))


class BaseRecord(Value):
    """A base that was added."""

    source: Annotated[str, Field(min_length=1)]
    added_at: datetime
    files: dict[str, FileState]
    places: dict[Digest, Place]

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places.values())


@dataclass(frozen=True)
class BlockPlaces:
    """The places of blocks by digest, and a sentence for each file that no longer has what was added."""

    spans: Mapping[str, Span]
    wrong: Mapping[str, str]


@dataclass(frozen=True)
class BaseCache:
    """The records in the database of a folder. Several processes may use it."""

    folder: Path

    def records(self) -> list[BaseRecord]:
        """Return the bases that were added, by source. Raises StateError."""
        return self._database.documents(BaseRecord, "SELECT record FROM bases ORDER BY source")

    def find(self, digests: Iterable[str]) -> BlockPlaces:
        """Return the places of these blocks. In a file that changed since it was verified they are hashed again."""
        wanted = set(digests)
        spans: dict[str, Span] = {}
        wrong: dict[str, str] = {}
        for record in self.records():
            places = {digest: record.places[digest] for digest in wanted & record.places.keys() - spans.keys()}
            changed = {name for name in {place.file for place in places.values()} if self._is_changed(record, name)}
            for digest, place in places.items():
                if place.file not in changed or _digest_at(place.span) == digest:
                    spans[digest] = place.span
                elif place.file not in wrong:
                    gone = "is no longer there" if not Path(place.file).exists() else "has other bytes"
                    made = f", which was made of {place.origin}," if place.sources else ""
                    wrong[place.file] = (
                        f"{place.file} {gone}: {place.block}{made} differs from the block that was added"
                    )
            if unharmed := changed - wrong.keys():
                self._verified(record, unharmed)
        return BlockPlaces(spans, wrong)

    def others(self, names: Mapping[str, str]) -> list[str]:
        """Return a sentence for each file that has other bytes under the names of blocks, given by their digests.

        Only of the added base that has most of the blocks: other models have blocks of the same names.
        """
        best = max(self.records(), key=lambda record: len(names.keys() & record.places.keys()), default=None)
        if best is None or not names.keys() & best.places.keys():
            return []
        lacking = {name for digest, name in names.items() if digest not in best.places}
        found = {place.origin: place.block for place in best.places.values() if place.block in lacking}
        return [f"{files} has another {block}" for files, block in sorted(found.items())]

    def add(self, source: str, places: Mapping[str, Place]) -> BaseRecord:
        """Record blocks of a base that were just verified: the place of each digest.

        Blocks that were added before stay while their files do: runs take a base with other heads or dtypes.
        """
        with self._database.writing():
            known = self._read(source)
            kept = {
                digest: place
                for digest, place in (known.places.items() if known else ())
                if known and not self._is_changed(known, place.file)
            }
            together = {**kept, **places}
            files = {name: FileState.of(Path(name)) for name in sorted({place.file for place in together.values()})}
            record = BaseRecord(source=source, added_at=datetime.now(UTC), files=files, places=together)
            self._write(record)
        return record

    def remove(self, source: str) -> BaseRecord | None:
        """Remove a base, and the blobs that no other base needs. Return its record, or None if there is none."""
        with self._database.writing() as connection:
            record = self._read(source)
            connection.execute("DELETE FROM bases WHERE source = ?", (source,))
            kept = {place.file for other in self.records() for place in other.places.values()}
            # Before another process adds a base that needs one of them.
            for blob in map(self._blob, record.places if record else ()):
                if str(blob) not in kept:
                    blob.unlink(missing_ok=True)
        return record

    def changed(self, record: BaseRecord) -> set[str]:
        """Return the record's files that are not as they were when they were verified."""
        return {name for name in record.files if self._is_changed(record, name)}

    @property
    def blobs(self) -> Path:
        """The folder of blocks that no file of a snapshot has in one piece."""
        return self.folder.resolve() / BASES_FOLDER / "blobs"

    def keep(self, digest: str, pieces: Iterable[bytes | memoryview], max_bytes: int) -> Span:
        """Store a block as a blob. Raises DigestMismatch for other bytes, or for more than `max_bytes`."""
        path = self._blob(digest)
        with written_whole(path) as file:
            hashing = Hashing(file)
            for piece in pieces:
                hashing.write(piece)
                if hashing.tell() > max_bytes:
                    raise DigestMismatch(f"{digest} has more than the {max_bytes} bytes of its block")
            hashing.require(digest)
            return Span(path, 0, hashing.tell())

    def _blob(self, digest: str) -> Path:
        return self.blobs / digest.replace(":", "-")

    def _is_changed(self, record: BaseRecord, name: str) -> bool:
        try:
            return FileState.of(Path(name)) != record.files[name]
        except (OSError, KeyError):
            return True

    def _verified(self, record: BaseRecord, names: Iterable[str]) -> None:
        """Note that files were found to be as they were added, unless the record was changed or removed meanwhile.
        Only all of a file's blocks vouch for the file."""
        states: dict[str, FileState] = {}
        with suppress(OSError):
            for name in names:
                # Before it is read: what is written to it meanwhile is not verified.
                state = FileState.of(Path(name))
                placed = [(digest, place.span) for digest, place in record.places.items() if place.file == name]
                if all(_digest_at(span) == digest for digest, span in placed):
                    states[name] = state
            with self._database.writing():
                if self._read(record.source) == record:
                    self._write(record.model_copy(update={"files": {**record.files, **states}}))

    def _write(self, record: BaseRecord) -> None:
        self._database.write("INSERT OR REPLACE INTO bases VALUES (?, ?)", record.source, record.model_dump_json())

    def _read(self, source: str) -> BaseRecord | None:
        return self._database.document(BaseRecord, "SELECT record FROM bases WHERE source = ?", source)

    @cached_property
    def _database(self) -> StateDatabase:
        return StateDatabase.of(self.folder)


def _digest_at(span: Span) -> str | None:
    """Return the digest of a file's bytes, or None if the file does not have them."""
    try:
        data = np.memmap(span.path, dtype=np.uint8, mode="r", offset=span.offset, shape=(span.nbytes,))
    except (OSError, ValueError):
        return None
    return digest_of(data.data)

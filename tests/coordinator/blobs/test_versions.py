"""Versions are written as they are computed: what shares its sources in one pass, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import State
from tessera.shared.rounds.versions import States, StoredTensor
from tessera.shared.tensors.lazy import CHUNK, ArrayTensor, ComputedTensor, digest_of
from tests.support.storage import NOW, blobs_in, unfinished

pytestmark = pytest.mark.both_databases(long="postgresql")

VALUES = np.arange(CHUNK + 7, dtype=np.float32)


class Watched(ArrayTensor):
    """A tensor that counts how often it is read, and may break off."""

    reads = 0
    breaks = False

    def chunks(self) -> Iterator[np.ndarray]:
        object.__setattr__(self, "reads", self.reads + 1)
        for chunk in super().chunks():
            yield chunk
            if self.breaks:
                raise RuntimeError("the source is gone")


@pytest.fixture
def blobs(tmp_path: Path, database: Database) -> Blobs:
    return blobs_in(tmp_path, database)


def times(factor: int, source: ArrayTensor) -> ComputedTensor:
    return ComputedTensor(source.shape, "F32", (source,), lambda parts: factor * parts[0])


def test_what_shares_a_source_is_stored_in_one_pass(blobs: Blobs, database: Database) -> None:
    source = Watched(VALUES)
    state = State(1, {"w": times(2, source)}, server_state={"m": times(3, source), "small": ArrayTensor(np.ones(2))})
    manifest, new = States(blobs).store(state)
    assert source.reads == 1
    assert manifest.blocks == {"w": digest_of((2 * VALUES).tobytes())}
    assert manifest.server_state["m"].digest == digest_of((3 * VALUES).tobytes())
    # Few bytes stay in the row; the manifest comes last.
    assert {blob.size for blob in new[:-1] if blob.inline is not None} == {8}
    with database.transaction() as session:
        blobs.record(session, NOW, new)
    assert blobs.read(manifest.blocks["w"]) == (2 * VALUES).tobytes()


def test_what_is_stored_is_not_stored_again(blobs: Blobs) -> None:
    kept = StoredTensor(blobs, digest_of(b"kept"), (1,), "F32")
    manifest, new = States(blobs).store(State(1, {"w": kept}, server_state={"w": kept}))
    assert (manifest.blocks["w"], manifest.server_state["w"].digest) == (kept.digest, kept.digest)
    assert [blob.digest for blob in new] == [new[-1].digest]


def test_one_tensor_under_two_names_is_one_blob(blobs: Blobs) -> None:
    tensor = times(2, Watched(VALUES))
    manifest, _ = States(blobs).store(State(1, {"w": tensor}, server_state={"w": tensor}))
    assert manifest.blocks["w"] == manifest.server_state["w"].digest
    assert tensor.sources[0].reads == 1  # type: ignore[attr-defined]


def test_a_pass_that_breaks_off_leaves_no_file(blobs: Blobs) -> None:
    source = Watched(VALUES)
    object.__setattr__(source, "breaks", True)
    with pytest.raises(RuntimeError, match="the source is gone"):
        States(blobs).store(State(1, {"w": times(2, source), "v": times(3, source)}))
    assert unfinished(blobs) == []


@pytest.mark.both_databases
def test_in_several_threads_the_version_is_the_same(blobs: Blobs) -> None:
    state = State(1, {f"w{index}": times(index, ArrayTensor(VALUES)) for index in range(8)})
    assert States(blobs, threads=3).store(state) == States(blobs).store(state)


def test_a_fault_in_one_of_several_threads_is_told_and_leaves_no_file(blobs: Blobs) -> None:
    source = Watched(VALUES)
    object.__setattr__(source, "breaks", True)
    sound = {f"w{index}": times(index, ArrayTensor(VALUES)) for index in range(8)}
    with pytest.raises(RuntimeError, match="the source is gone"):
        States(blobs, threads=2).store(State(1, {**sound, "broken": times(2, source)}))
    assert unfinished(blobs) == []


# ---------------------------------------------------------------- manifests


def version(blobs: Blobs, database: Database, values: dict[str, float], before: str | None) -> str:
    """A version of blocks of one element each; its digest."""
    model = {name: ArrayTensor(np.array([value], np.float32)) for name, value in values.items()}
    _, new = States(blobs).store(State(1, model), before)
    with database.transaction() as session:
        blobs.record(session, NOW, new)
    return new[-1].digest


@pytest.mark.both_databases
def test_a_version_that_changes_little_is_written_as_what_differs_from_its_root(
    blobs: Blobs, database: Database
) -> None:
    values = {f"block.{place}": float(place) for place in range(200)}
    first = version(blobs, database, values, None)
    changed = {**values, "block.7": -1.0}
    second = version(blobs, database, changed, first)
    third = version(blobs, database, {**changed, "block.8": -2.0}, second)
    states = States(blobs)
    # However many versions there are, only the root has to be had beside the latest.
    assert [states.manifest(digest).root for digest in (first, second, third)] == [None, first, first]
    assert blobs.size(second) < blobs.size(third) < 0.02 * blobs.size(first)
    for digest, wanted in ((second, changed), (third, {**changed, "block.8": -2.0})):
        manifest = States(blobs).manifest(digest)
        assert {name: blobs.read(blob) for name, blob in manifest.blocks.items()} == {
            name: np.float32(value).tobytes() for name, value in wanted.items()
        }
        assert first in manifest.digests


def test_a_version_that_changes_much_is_written_whole_and_is_the_next_root(blobs: Blobs, database: Database) -> None:
    values = {f"block.{place}": float(place) for place in range(20)}
    first = version(blobs, database, values, None)
    moved = {name: value + 1 for name, value in values.items()}
    second = version(blobs, database, moved, first)
    third = version(blobs, database, {**moved, "block.0": 9.0}, second)
    states = States(blobs)
    assert [states.manifest(digest).root for digest in (second, third)] == [None, second]


def test_a_root_that_has_a_root_is_refused(blobs: Blobs, database: Database) -> None:
    values = {f"block.{place}": float(place) for place in range(20)}
    first = version(blobs, database, values, None)
    second = version(blobs, database, {**values, "block.7": -1.0}, first)
    hostile = blobs.save([Manifest(blocks={}, root=second).document()])
    with pytest.raises(ValueError, match="has itself a root"):
        States(blobs).manifest(hostile.digest)

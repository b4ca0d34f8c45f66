"""Blobs in an S3-compatible store, which is believed in nothing."""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import structlog.testing

from tessera.coordinator.blobs import object_store
from tessera.coordinator.blobs.object_store import WINDOW_BYTES, Objects
from tessera.coordinator.blobs.portions import Portion
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.coordinator.limits.cache import LruCache
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.model.blocks import Block
from tessera.shared.problems import NotFound, StoreAway, StoreSpoilt
from tessera.shared.rounds.aggregate import AcceptedUpdate, Aggregation
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import ArrayTensor, as_bytes, digest_of
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tests.coordinator.blobs.test_store import INLINE, SIZES, data_of, streamed
from tests.support.federation import small_model, values
from tests.support.storage import NOW, unfinished
from tests.support.stores import KEY, SECRET, Bucket, Mending, serving

DATA = data_of(5000)


@pytest.fixture(scope="module", params=[pytest.param("moto", marks=pytest.mark.long), "rclone"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with serving(request.param, tmp_path_factory.mktemp("store")) as bucket:
        yield bucket


def opened(tmp_path: Path, database: Database, bucket: Bucket) -> Blobs:
    tmp_path.mkdir(exist_ok=True)
    return Blobs(database, bucket.url, tmp_path / "staging", INLINE, readahead_bytes=128 << 20)


@pytest.fixture
def blobs(tmp_path: Path, database: Database, bucket: Bucket) -> Blobs:
    return opened(tmp_path, database, bucket)


@SIZES
def test_what_was_saved_is_read_opened_and_streamed(blobs: Blobs, bucket: Bucket, size: int) -> None:
    data = data_of(size)
    stored = blobs.save([data[: size // 2], data[size // 2 :]])
    assert bucket.holds(stored.digest) == (size > INLINE)
    assert blobs.read(stored.digest) == data
    start, stop = size // 3, size // 2
    with blobs.open(stored.digest) as file:
        file.seek(start)
        assert file.read(stop - start) == data[start:stop]
        assert file.seek(-1, 1) == stop - 1 if stop else True
        assert file.seek(0, 2) == size
        assert file.read() == b""
    assert asyncio.run(streamed(blobs, stored, start, stop)) == data[start:stop]
    assert unfinished(blobs) == []


def test_one_that_goes_in_parts_comes_back_whole(blobs: Blobs) -> None:
    data = hashlib.shake_256(b"large").digest(WINDOW_BYTES + (2 << 20))
    assert blobs.read(blobs.save([data]).digest) == data


def test_a_batch_is_safe_at_its_end(blobs: Blobs, database: Database) -> None:
    sizes = [5, 5000, 300_000]
    with blobs.batch() as batch:
        stored = []
        for size in sizes:
            with batch.writer() as writer:
                writer.write(data_of(size))
                stored.append(writer.finish())
    with database.transaction() as session:
        blobs.record(session, NOW, stored)
    assert [blobs.read(blob.digest) for blob in stored] == [data_of(size) for size in sizes]
    assert unfinished(blobs) == []


def test_what_the_store_has_and_the_table_has_not_does_not_exist(blobs: Blobs, bucket: Bucket) -> None:
    stored = blobs.put([DATA])
    assert bucket.holds(stored.digest)
    with pytest.raises(NotFound):
        blobs.read(stored.digest)


# ---------------------------------------------------------------- behind our back


def spoilt(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("met", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("instead", "told"),
    [(spoilt(DATA), "no longer has the bytes"), (DATA[:-1], "another length"), (None, "missing from the store")],
    ids=["replaced", "truncated", "deleted"],
)
def test_what_is_done_behind_our_back_is_noticed_before_and_after_the_first_use(
    blobs: Blobs, bucket: Bucket, met: bool, instead: bytes | None, told: str
) -> None:
    stored = blobs.save([DATA])
    if met:
        assert blobs.read(stored.digest) == DATA
    if instead is None:
        bucket.lose(stored.digest)
    else:
        bucket.replace(stored.digest, instead)
    for _ in range(2):
        with pytest.raises(StoreSpoilt, match=told):
            blobs.read(stored.digest)
        with pytest.raises(StoreSpoilt, match=told):
            asyncio.run(streamed(blobs, stored, 10, 20))
        with pytest.raises(StoreSpoilt, match=told):
            blobs.rehash(stored)
    bucket.replace(stored.digest, DATA)
    assert blobs.read(stored.digest) == DATA


def test_one_that_is_replaced_while_it_is_read_is_not_read_on(blobs: Blobs, bucket: Bucket) -> None:
    data = data_of(300_000)
    stored = blobs.save([data])
    with blobs.open(stored.digest) as file:
        assert file.read(1000) == data[:1000]
        bucket.replace(stored.digest, spoilt(data))
        with pytest.raises(StoreSpoilt, match="no longer has the bytes"):
            file.read()


def test_the_keys_of_a_store_may_be_in_files(
    blobs: Blobs, bucket: Bucket, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = blobs.save([DATA])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        (tmp_path / name).write_text(f"{os.environ[name]}\n")
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / name))
        monkeypatch.delenv(name)
    assert opened(tmp_path, database, bucket).read(stored.digest) == DATA


def test_an_object_that_was_hashed_is_not_hashed_again_after_a_restart(
    blobs: Blobs, bucket: Bucket, database: Database, tmp_path: Path
) -> None:
    stored = blobs.save([DATA])
    blobs.verify_portion(Portion((stored,), inline=False))
    later = opened(tmp_path, database, bucket)
    with database.snapshot() as session:
        portions = later.portions(session, [stored.digest])
    assert later.unverified(portions) == []
    # The tag of the row is compared with that of each answer.
    bucket.replace(stored.digest, spoilt(DATA))
    with pytest.raises(StoreSpoilt, match="no longer has the bytes"):
        later.read(stored.digest)


def test_one_that_came_again_under_another_tag_is_hashed_and_taken(blobs: Blobs, bucket: Bucket) -> None:
    stored = blobs.save([DATA])
    assert blobs.read(stored.digest) == DATA
    known = blobs._objects
    assert known is not None
    # As some stores do for the same bytes, if they encrypt them or got them in other parts.
    known._tags.keep(stored.digest, "another")
    assert blobs.read(stored.digest) == DATA
    assert known._tags.get(stored.digest) not in (None, "another")


def test_a_merge_does_not_ask_the_store_for_each_block_of_an_update(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = small_model(width=256), dict[str, int]()
    start = values(model)
    # The blocks in which the updates are 2 MB each, and the last of them 22 MB, in blocks of .1 to 8 MB.
    large = Block(tensor="embeddings.weight", role="embedding", shape=(20_000, 256), dtype="F32")
    model = model.model_copy(update={"blocks": (*model.blocks, large)})
    start[large.name] = np.zeros(large.shape, np.float32)
    version = {name: blobs.save([as_bytes(value)]).digest for name, value in start.items()}
    states, document = States(blobs), blobs.save([canonical(model)]).digest
    ref = VersionRef(number=1, digest=blobs.save([Manifest(blocks=version).document()]).digest)
    accepted = []
    for site in "abc":
        changes = [
            TrainedBlock(
                block, ArrayTensor(start[block.name] + np.float32(ord(site))), ArrayTensor(start[block.name])
            )
            for block in model.blocks
            if block != large or site == "c"
        ]
        file = io.BytesIO()
        write_update(file, "raw", changes)
        digest = blobs.save([file.getvalue()]).digest
        sizes[digest] = len(file.getvalue())
        accepted.append(AcceptedUpdate(site, site, digest, 10, {}, Plan(), ref))
    spec = RunSpec(
        name="r", method=MethodSpec(name="fedavg"), model=document, version=ref.digest, dataset="d", rounds=9
    )
    asked, get = Counter[str](), obstore.get

    def counting(store: Any, path: str, **given: Any) -> Any:
        asked[f"sha256:{path[3:]}"] += 1
        return get(store, path, **given)

    monkeypatch.setattr(obstore, "get", counting)
    made = Aggregation(states, Inspector(blobs, states)).merge(spec, Bounds(), ref, accepted)
    assert made.manifest.blocks.keys() == version.keys()
    for digest, nbytes in sizes.items():
        # One that is larger was hashed before.
        times = 2 if nbytes > WINDOW_BYTES else 1
        assert asked[digest] <= times * math.ceil(nbytes / WINDOW_BYTES), nbytes


def test_what_is_remembered_of_objects_is_bounded(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert blobs._objects is not None
    monkeypatch.setattr(blobs._objects, "_tags", LruCache(2))
    stored = [blobs.save([data_of(1000 + number)]) for number in range(4)]
    for blob in stored:
        blobs.read(blob.digest)
    assert [blob.digest in blobs._objects._tags for blob in stored] == [False, False, True, True]


# ---------------------------------------------------------------- away


def test_a_store_that_is_away_says_so_soon_and_is_found_again(blobs: Blobs, bucket: Bucket) -> None:
    stored = blobs.save([DATA])
    assert blobs.writable()
    before = bucket.line.refused
    with bucket.away():
        with pytest.raises(StoreAway) as away:
            blobs.save([data_of(6000)])
        with pytest.raises(StoreAway):
            blobs.read(stored.digest)
        with pytest.raises(StoreAway):
            list(blobs.listed(time.time(), 10))
        with pytest.raises(StoreAway):
            blobs.discard(stored.digest, time.time() + 60)
        with pytest.raises(StoreAway):
            _ = stored in blobs
        assert blobs._objects is not None
        blobs._objects._probed_until = 0
        assert not blobs.writable()
    # Each of the seven calls above is tried four times at most.
    assert 7 <= bucket.line.refused - before <= 7 * (1 + object_store.RETRIES["max_retries"])
    assert (away.value.status, away.value.retryable, away.value.retry_after_seconds) == (503, True, 2)
    assert SECRET not in str(away.value)
    assert blobs.writable()
    assert blobs.read(stored.digest) == DATA
    assert blobs.read(blobs.save([data_of(6000)]).digest) == data_of(6000)
    assert unfinished(blobs) == []


def test_a_store_that_does_not_admit_us_says_no_secret(
    tmp_path: Path, bucket: Bucket, database: Database, capfd: pytest.CaptureFixture[str]
) -> None:
    blobs = Blobs(database, "s3://no-such-bucket", tmp_path / "staging", INLINE, readahead_bytes=1 << 20)
    with structlog.testing.capture_logs() as lines, pytest.raises(StoreAway) as away:
        blobs.save([DATA])
    assert "store.away" in [line["event"] for line in lines]
    told = str(lines) + "".join(capfd.readouterr())
    for secret in (SECRET, KEY):
        assert secret not in str(away.value)
        assert secret not in told


def test_a_server_that_knows_no_ranges_is_found_unfit(
    blobs: Blobs, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blobs.writable()
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    directly = Objects(bucket.url, 1 << 20)
    # As it is, and not as the line to it mends it.
    assert directly.serves() == (not isinstance(bucket.line, Mending))


@pytest.mark.parametrize("url", [f"s3://{KEY}:{SECRET}@tiles/prefix", f"s3://tiles?secret_access_key={SECRET}"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY") as refusal:
        Objects(url, 1 << 20)
    assert SECRET not in str(refusal.value)


# ---------------------------------------------------------------- removing


def test_a_removed_object_is_gone_and_one_that_is_younger_stays(blobs: Blobs, bucket: Bucket) -> None:
    old, young = blobs.put([DATA]), blobs.put([data_of(6000)])
    now = time.time()
    assert not blobs.discard(young.digest, now - 3600)
    assert blobs.discard(old.digest, now + 3600)
    assert not blobs.discard(old.digest, now + 3600)
    assert (bucket.holds(old.digest), bucket.holds(young.digest)) == (False, True)
    assert (old in blobs, young in blobs) == (False, True)


@pytest.mark.long
def test_more_than_a_thousand_objects_are_all_listed(blobs: Blobs, bucket: Bucket) -> None:
    """A store gives a thousand names at a time."""
    digests = {digest_of(str(number).encode()) for number in range(1100)}
    asyncio.run(_fill(bucket, digests))
    assert blobs.writable()
    listed = [digest for page in blobs.listed(time.time() + 60, 500) for digest in page]
    assert len(listed) == len(digests)
    assert set(listed) == digests
    assert not [digest for page in blobs.listed(time.time() - 3600, 500) for digest in page]


async def _fill(bucket: Bucket, digests: set[str]) -> None:
    async with asyncio.Semaphore(16):
        await asyncio.gather(
            *(obstore.put_async(bucket.behind, object_store.key_of(digest), b"x") for digest in digests)
        )


def test_two_processes_share_a_bucket(tmp_path: Path, database: Database, bucket: Bucket) -> None:
    url = database.url.render_as_string(hide_password=False)
    with closing(Database(url, lambda: NOW)) as another:
        here, there = opened(tmp_path / "a", database, bucket), opened(tmp_path / "b", another, bucket)
        stored = here.save([DATA])
        assert there.read(stored.digest) == DATA
        there.save([DATA])
        assert here.read(stored.digest) == DATA
        assert isinstance(stored, StoredBlob)

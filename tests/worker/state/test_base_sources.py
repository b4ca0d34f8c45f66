"""The sources from which a site fills its cache of external bases."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import ViTConfig, ViTForImageClassification

from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.base_folder import BaseFolder, Span
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.model.snapshot import convert_blocks
from tessera.worker.state.base_cache import BaseCache, BaseRecord, Place
from tessera.worker.state.base_sources import BaseSources, BaseUnavailable
from tests.support.mirror import serving
from tests.worker.task.test_external_base import VIT, made


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ViTForImageClassification(ViTConfig(**VIT)).save_pretrained(tmp_path / "snapshot")
    return tmp_path / "snapshot"


@pytest.fixture
def start(snapshot: Path) -> ModelFolder:
    return made(snapshot, snapshot.parent / "model")


def fetched(model: Model, folder: Path, *sources: str) -> dict[str, Span]:
    blocks = {model.external[block.name]: block for block in model.base}
    convert = partial(convert_blocks, model.config, model.head)
    return BaseSources(BaseCache(folder), sources).fetch(blocks, convert)


def test_what_a_mirror_gave_before_it_failed_is_not_fetched_again(
    snapshot: Path, start: ModelFolder, tmp_path: Path
) -> None:
    found, _ = BaseFolder.open(snapshot).find(start.model.base, start.model.external)
    for each in found:
        (tmp_path / start.model.external[each.block.name].replace(":", "-")).write_bytes(each.data())
    count = len(set(start.model.external.values()))
    with serving(tmp_path, fails_at=3) as (url, asked):
        with pytest.raises(BaseUnavailable, match=f"{count - 2} of {count} blocks") as refusal:
            fetched(start.model, tmp_path / "state", url)
        assert "503" in str(refusal.value.faults)
        fetched(start.model, tmp_path / "state", url)
    assert len(asked) == count + 1


def added(cache: BaseCache, file: Path, *contents: bytes) -> BaseRecord:
    """A base whose blocks stand one behind the other in a file."""
    file.write_bytes(b"".join(contents))
    offsets = accumulate(map(len, contents), initial=0)
    return cache.add(
        "base",
        {
            digest_of(raw): Place(block=str(offset), file=str(file), offset=offset, nbytes=len(raw))
            for raw, offset in zip(contents, offsets, strict=False)
        },
    )


def test_a_base_that_is_removed_or_added_again_during_its_verification_stays_so(tmp_path: Path) -> None:
    cache, file = BaseCache(tmp_path / "bases"), tmp_path / "weights"
    record = added(cache, file, b"first")
    # Another process, while this one reads the file.
    both = added(BaseCache(cache.folder), file, b"first", b"second")
    cache._verified(record, record.files)
    assert cache.records() == [both]
    BaseCache(cache.folder).remove("base")
    cache._verified(both, both.files)
    assert cache.records() == []


def test_a_file_that_was_verified_again_is_not_read_another_time(tmp_path: Path) -> None:
    cache, file = BaseCache(tmp_path / "bases"), tmp_path / "weights"
    record = added(cache, file, b"first", b"second")
    file.touch()
    assert cache.changed(record) == {str(file)}
    assert len(cache.find(record.places).spans) == 2
    assert cache.changed(*cache.records()) == set()


def test_a_name_on_the_hub_is_a_source_at_a_commit(
    snapshot: Path, start: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the hub's library keeps what it has fetched; no server is asked for a commit that is there.
    commit = "0123456789" * 4
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(snapshot, tmp_path / "models--org--vit" / "snapshots" / commit)
    spans = fetched(start.model, tmp_path / "state", f"org/vit@{commit}")
    assert {span.path.parent.name for span in spans.values()} == {commit}
    with pytest.raises(BaseUnavailable) as refusal:
        fetched(start.model, tmp_path / "other", "org/vit@" + "f" * 40)
    assert "the hub has no org/vit@ffff" in refusal.value.faults[0]

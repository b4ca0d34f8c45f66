"""The index of verified images: a later start reads what has changed, and unreadable images are named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.prepared import PreparedFolder, mapped
from tessera.worker.data.readers import image_index
from tessera.worker.data.readers.arrow_rows import ArrowRows
from tessera.worker.data.readers.byte_cells import byte_cells
from tessera.worker.data.readers.pictures import Pictures, PixelReader, Prepare, Resizing
from tessera.worker.data.registry import load, streamed
from tessera.worker.errors import DataError
from tests.support.pretrained import picture

COUNT = 40


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    for place in range(COUNT):
        picture(tmp_path / "scans" / str(place % 2) / f"{place:02}.png", (place, place, place), size=(4, 4))
    return tmp_path / "scans"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the images that are opened, as they are."""
    names: list[str] = []

    def noted(pictures: Pictures, place: int, mode: str) -> Image.Image:
        picture = pictures[place]
        names.append(picture.name if isinstance(picture, Path) else "bytes")
        return opening(pictures, place, mode)

    opening = image_index.opened
    monkeypatch.setattr(image_index, "opened", noted)
    return names


def opened(source: Path, prepared: Path | None, **options: Any) -> Dataset:
    where = {"folder": str(source)} if source.is_dir() and not options.get("image") else {"file": str(source)}
    return load("images", {"size": 4, "in_memory": False, **where, **options}, prepared=PreparedFolder(prepared))


def test_second_start_reads_only_the_images_that_changed(scans: Path, tmp_path: Path, read: list[str]) -> None:
    prepared = tmp_path / "state" / "prepared" / "scans"
    first = opened(scans, prepared)
    assert len(read) == COUNT
    read.clear()
    again = opened(scans, prepared)
    assert read == []
    assert list(again.identities()) == list(first.identities())
    picture(scans / "0" / "04.png", (255, 0, 0), size=(4, 4))
    os.utime(scans / "0" / "04.png", ns=(0, 5))
    picture(scans / "1" / "new.png", (0, 255, 0), size=(4, 4))
    (scans / "0" / "06.png").unlink()
    changed = opened(scans, prepared)
    assert sorted(read) == ["04.png", "new.png"]
    assert list(changed.identities()) == list(opened(scans, None).identities())
    assert torch.equal(
        changed.in_memory().tensors["pixel_values"], opened(scans, None).in_memory().tensors["pixel_values"]
    )
    read.clear()
    opened(scans, prepared)
    assert read == []


def test_index_of_other_options_or_that_is_damaged_is_made_anew(scans: Path, tmp_path: Path, read: list[str]) -> None:
    prepared = tmp_path / "prepared"
    opened(scans, prepared)
    for change in ({"channels": 1}, {}):
        read.clear()
        opened(scans, prepared, **change)
        assert len(read) == COUNT
    file = prepared / image_index.INDEX_FILE
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(file.read_bytes()[:-200])
    read.clear()
    opened(scans, prepared)
    assert len(read) == COUNT


def test_processor_s_other_inputs_are_in_the_index(scans: Path, tmp_path: Path, read: list[str]) -> None:
    # Of images that it leaves as they are, the shape must be looked at.
    CLIPImageProcessorPil(do_resize=False, do_center_crop=False).save_pretrained(tmp_path / "as-they-are")
    options = {"size": None, "processor": str(tmp_path / "as-they-are")}
    first = opened(scans, tmp_path / "prepared", **options)
    read.clear()
    again = opened(scans, tmp_path / "prepared", **options)
    assert read == ["00.png"]
    assert torch.equal(first.in_memory().tensors["pixel_values"], again.in_memory().tensors["pixel_values"])
    picture(scans / "0" / "02.png", (0, 0, 0), size=(9, 4))
    with pytest.raises(DataError, match="use a processor with a fixed size"):
        opened(scans, tmp_path / "prepared", **options)


@pytest.mark.parametrize("in_memory", [False, True])
def test_unreadable_images_are_named_and_a_share_may_be_left_out(scans: Path, *, in_memory: bool) -> None:
    for place in (1, 8, 11, 20):
        (scans / str(place % 2) / f"{place:02}.png").write_bytes(b"no image")
    with pytest.raises(DataError) as refused:
        opened(scans, None, in_memory=in_memory)
    assert "image: 4 of 40 images cannot be read, more than max_unreadable = 0 allows" in str(refused.value)
    assert f"{scans / '0' / '08.png'} cannot be read: it is none of PNG" in str(refused.value)
    with pytest.raises(DataError, match=r"more than max_unreadable = 0\.09 allows"):
        opened(scans, None, in_memory=in_memory, max_unreadable=0.09)
    dataset = opened(scans, None, in_memory=in_memory, max_unreadable=0.1)
    assert (dataset.examples, int(dataset.tensors["labels"].sum())) == (36, 18)
    greys = [round(255 * (float(image[0, 0, 0]) + 1) / 2) for image in dataset.in_memory().tensors["pixel_values"]]
    assert greys == [place for place in (*range(0, 40, 2), *range(1, 40, 2)) if place not in (1, 8, 11, 20)]
    assert len(set(dataset.identities())) == 36
    ((warning, _),) = dataset.report.warnings()
    assert warning.startswith(f"4 unreadable images left out. image: {scans / '0' / '08.png'} cannot be read")


def test_class_of_which_all_images_are_unreadable_is_named(scans: Path) -> None:
    for place in range(1, COUNT, 2):
        (scans / "1" / f"{place:02}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="has no example of '1'"):
        opened(scans, None, max_unreadable=0.6, labels=["0", "1"])


# ---------------------------------------------------------------- in the cells of tables


def held(scans: Path, count: int) -> list[bytes]:
    return [(scans / str(place % 2) / f"{place:02}.png").read_bytes() for place in range(count)]


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_images_in_cells_are_read_from_their_files(scans: Path, tmp_path: Path, read: list[str], form: str) -> None:
    datasets.disable_progress_bars()
    cells = [{"bytes": content, "path": None} for content in held(scans, 30)]
    table = pa.table({"image": cells, "label": [0, 1, 2] * 10})
    options: dict[str, Any] = {"image": "image"}
    if form == "parquet":
        (tmp_path / "shards").mkdir()
        for place in range(2):
            file = tmp_path / "shards" / f"{place}.parquet"
            pq.write_table(table.slice(15 * place, 15), file, row_group_size=4)
        source = tmp_path / "shards"
    else:
        source = tmp_path / "saved"
        datasets.Dataset(table).save_to_disk(str(source), num_shards=3)
    dataset = opened(source, tmp_path / "prepared", **options)
    chosen = torch.tensor([29, 3, 16, 3])
    kept = opened(source, None, in_memory=True, **options).rows(chosen)
    assert torch.equal(dataset.rows(chosen).in_memory().tensors["pixel_values"], kept.tensors["pixel_values"])
    assert dataset.tensors["labels"].tolist() == [0, 1, 2] * 10
    read.clear()
    again = opened(source, tmp_path / "prepared", **options)
    assert read == []
    assert list(again.identities()) == list(dataset.identities())


def test_table_that_changes_leaves_no_file_behind(scans: Path, tmp_path: Path) -> None:
    for count in (2, 4):
        rows = "".join(f"{place % 2}/{place:02}.png,0\n" for place in range(count))
        (scans / "list.csv").write_text("image,label\n" + rows)
        assert opened(scans / "list.csv", tmp_path / "prepared").examples == count
    index, table = sorted(path.name for path in (tmp_path / "prepared").iterdir())
    assert (index, table[:6]) == (image_index.INDEX_FILE, "table-")


def test_cells_without_bytes_are_paths_beside_the_table(scans: Path, tmp_path: Path, read: list[str]) -> None:
    contents = held(scans, 3)
    mixed = [
        {"bytes": contents[0], "path": "gone.png"},
        {"bytes": None, "path": "1/01.png"},
        {"bytes": None, "path": None},
    ]
    pq.write_table(pa.table({"image": mixed, "label": [0, 1, 0]}), scans / "mixed.parquet")
    with pytest.raises(DataError, match=r"row 2 of .*mixed\.parquet has neither a path nor an image's bytes"):
        opened(scans / "mixed.parquet", None, image="image")
    dataset = opened(scans / "mixed.parquet", tmp_path / "prepared", image="image", max_unreadable=0.4)
    assert dataset.examples == 2
    read.clear()
    opened(scans / "mixed.parquet", tmp_path / "prepared", image="image", max_unreadable=0.4)
    assert read == []
    os.utime(scans / "1" / "01.png", ns=(0, 5))
    opened(scans / "mixed.parquet", tmp_path / "prepared", image="image", max_unreadable=0.4)
    assert read == ["01.png"]


def test_rows_in_another_order_get_no_digests_of_other_images(scans: Path, tmp_path: Path) -> None:
    # Images without compression are of one size, and those unpacked together often of one time.
    names = ["first.bmp", "second.bmp"]
    for name, grey in zip(names, (1, 2), strict=True):
        picture(scans / name, (grey, grey, grey), size=(4, 4))
        os.utime(scans / name, ns=(0, 5))

    def identities(order: list[str], prepared: Path | None) -> list[bytes]:
        cells = pa.array(
            [{"bytes": None, "path": name} for name in order], pa.struct({"bytes": "binary", "path": "string"})
        )
        pq.write_table(pa.table({"image": cells, "label": [0, 1]}), scans / "list.parquet")
        return list(opened(scans / "list.parquet", prepared, image="image").identities())

    for order in (names, names[::-1]):
        assert identities(order, tmp_path / "prepared") == identities(order, None)


def test_cells_are_read_by_row_and_one_group_is_kept(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = held(scans, 10)
    pq.write_table(pa.table({"image": contents, "label": [0] * 10}), tmp_path / "a.parquet", row_group_size=4)
    read = byte_cells([tmp_path / "a.parquet"], None)["image"].read
    reads: list[int] = []
    reading = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, *given: Any, **more: Any) -> pa.Table:
        reads.append(group)
        return reading(self, group, *given, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    assert read(np.array([0, 3, 9, 8, 2])) == [contents[row] for row in (0, 3, 9, 8, 2)]
    assert reads == [0, 2, 0]
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"row 5: .*a\.parquet cannot be read any more"):
        # As in a loader, which opens the files anew.
        pickle.loads(pickle.dumps(read))(np.array([5]))  # noqa: S301


def test_table_of_images_changed_later_is_named(scans: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": held(scans, 4), "label": [0] * 4}), tmp_path / "a.parquet")
    dataset = opened(tmp_path / "a.parquet", None, image="image")
    os.utime(tmp_path / "a.parquet", ns=(0, 5))
    with pytest.raises(DataError, match=r"row 0 of .* has changed since the worker started"):
        next(dataset.batches(2))


def test_arrow_cells_with_nulls_are_not_all_bytes(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    for name, cells in (("full", [b"a", b"b"]), ("lacking", [b"a", None])):
        datasets.Dataset(pa.table({"image": cells})).save_to_disk(str(tmp_path / name))
        files = sorted((tmp_path / name).glob("*.arrow"))
        assert byte_cells(files, ArrowRows([*map(mapped, files)]))["image"].all_bytes == (name == "full")


# ---------------------------------------------------------------- memory


def reader_of(scans: Path, prepare: Prepare) -> PixelReader:
    found = Pictures.of(scans, [f"{place % 2}/{place:02}.png" for place in range(COUNT)])
    return PixelReader(found, found.stamps(), "RGB", prepare, (4, 4, 3))


def test_batch_of_any_size_is_converted_in_parts_with_the_same_bits(scans: Path) -> None:
    together: list[int] = []

    def noted(images: list[Image.Image]) -> dict[str, torch.Tensor]:
        together.append(len(images))
        return Resizing(4, 4)(images)

    pixels = reader_of(scans, noted)(range(COUNT))["pixel_values"]
    assert together == [16, 16, 8]
    whole = [Image.open(scans / str(place % 2) / f"{place:02}.png").convert("RGB") for place in range(COUNT)]
    assert torch.equal(pixels, Resizing(4, 4)(whole)["pixel_values"])


def test_processor_that_pads_to_the_largest_image_is_refused_in_any_part_of_a_batch(scans: Path) -> None:
    picture(scans / "1" / "33.png", (1, 2, 3), size=(6, 6))

    def padded(images: list[Image.Image]) -> dict[str, torch.Tensor]:
        largest = max(image.height for image in images)
        return {"pixel_values": torch.zeros(len(images), largest, largest, 3)}

    with pytest.raises(DataError, match=r"pixel_values is \[6, 6, 3\] for one image and \[4, 4, 3\] for another"):
        reader_of(scans, padded)(range(COUNT))


def test_loader_copies_few_bytes_for_each_image_and_the_worker_keeps_no_object(tmp_path: Path) -> None:
    picture(tmp_path / "0" / "a-usual-name.png", (1, 2, 3), size=(2, 2))
    sizes = []
    for count in (100, 1100):
        rows = "".join("0/a-usual-name.png,0\n" for _ in range(count))
        (tmp_path / "list.csv").write_text("image,label\n" + rows)
        dataset = opened(tmp_path / "list.csv", None)
        assert dataset.on_disk
        sizes.append(len(pickle.dumps(dataset.on_disk.transform)))
        part = dataset.rows(torch.arange(count // 2))
        assert all(isinstance(each.sources, np.ndarray) for each in (dataset, part))
    # A path of 18 bytes, and two numbers of 8.
    assert (sizes[1] - sizes[0]) / 1000 == pytest.approx(34, abs=1)


def test_data_are_shown_without_their_pixels_in_memory() -> None:
    assert streamed("images", {"size": 4, "in_memory": True}) == {"size": 4, "in_memory": False}
    assert streamed("digits", {}) == {}

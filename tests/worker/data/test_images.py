"""Images from folders and tables, and images with texts: the same pixels and class numbers at every site."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

from tessera.shared.model.dataset_schema import name_digests
from tessera.shared.model.preprocessing import vocabulary_in
from tessera.shared.version import install_line
from tessera.worker.data.content import digests_of
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.data.readers import image_index as reader
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward
from tessera.worker.training.batches import Batches
from tests.support.dicom_files import written as dicom_file
from tests.support.pretrained import CLS, PAD, SEP, bert_tokenizer, image_processor, picture, plain_tokenizer

RED, GREEN, BLUE, GREY = (255, 0, 0), (0, 255, 0), (0, 0, 255), (51, 51, 51)

CLIP = {
    "model_type": "clip",
    "projection_dim": 8,
    "text_config": {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16,
        "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "max_position_embeddings": 16,
    },
    "vision_config": {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4,
    },
}  # fmt: skip


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder with two classes' folders: a red cat, a grey one and a green dog."""
    folder = tmp_path / "pets"
    picture(folder / "cat" / "a.png", RED)
    picture(folder / "cat" / "deeper" / "b.PNG", GREY)
    picture(folder / "dog" / "c.bmp", GREEN, size=(9, 30))
    (folder / "dog" / "notes.txt").write_text("not an image")
    (folder / "dog" / "._c.bmp").write_text("nor is this")
    return folder


def opened(kind: str = "images", **options: Any) -> Dataset:
    return load(kind, {name: str(value) if isinstance(value, Path) else value for name, value in options.items()})


def refusal(kind: str = "images", **options: Any) -> str:
    with pytest.raises(DataError) as refused:
        opened(kind, **options)
    return str(refused.value)


def colours(dataset: Dataset) -> list[list[float]]:
    """Each image's colour, which must be the same all over."""
    pixels = dataset.tensors["pixel_values"].flatten(2)
    assert torch.equal(pixels.amin(dim=2), pixels.amax(dim=2))
    return [[round(value, 3) for value in pixel] for pixel in pixels[:, :, 0].tolist()]


# ---------------------------------------------------------------- on disk


@pytest.mark.parametrize("by_processor", [False, True])
def test_pixels_on_disk_are_those_in_memory(pets: Path, clip: Path, *, by_processor: bool) -> None:
    options = {"labels": ["cat", "dog"]} | ({"processor": clip} if by_processor else {"size": 4})
    kept, stored = (opened(folder=pets, **options, in_memory=here) for here in (True, False))
    assert stored.on_disk
    assert (kept.on_disk, sorted(stored.on_disk.kinds), sorted(stored.tensors)) == (
        None,
        ["pixel_values"],
        ["labels"],
    )
    assert kept.schema == stored.schema
    assert list(kept.identities()) == list(stored.identities())
    chosen = torch.tensor([2, 0])
    for one, other in ((kept, stored), (kept.rows(chosen), stored.rows(chosen)), (kept, stored.in_memory())):
        draws = [torch.Generator().manual_seed(0) for _ in range(2)]
        for here, there in zip(one.batches(2, draws[0]), other.batches(2, draws[1]), strict=True):
            assert here.keys() == there.keys()
            assert all(torch.equal(here[name], there[name]) for name in here)
    assert torch.equal(kept.placeholder(2)["pixel_values"], stored.placeholder(2)["pixel_values"])


def test_only_what_is_small_is_kept_in_memory_without_a_word(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not opened(folder=pets, size=4, labels=["cat", "dog"]).on_disk
    monkeypatch.setattr(reader, "MAX_IN_MEMORY", 3 * 3 * 4 * 4 * 4 - 1)
    assert opened(folder=pets, size=4, labels=["cat", "dog"]).inputs["pixel_values"].shape == (3, 3, 4, 4)
    assert not opened(folder=pets, size=4, labels=["cat", "dog"], in_memory=True).on_disk


def test_an_image_that_is_changed_or_removed_later_is_named(pets: Path) -> None:
    dataset = opened(folder=pets, size=4, labels=["cat", "dog"], in_memory=False)
    picture(pets / "cat" / "a.png", BLUE)
    os.utime(pets / "cat" / "a.png", ns=(0, 0))
    with pytest.raises(DataError, match=r"a\.png has changed since the worker started; restart it"):
        next(dataset.batches(1))
    (pets / "cat" / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be read"):
        next(dataset.batches(1))


def test_the_contents_have_a_digest_without_the_first_image(pets: Path) -> None:
    dataset = opened(folder=pets, size=4, labels=["cat", "dog"], in_memory=False)
    before = digests_of(dataset)
    (pets / "cat" / "a.png").unlink()
    after = digests_of(dataset)
    assert after.content != before.content
    # They were made when the files were found.
    assert (after.readable == before.readable).all()


def test_pixels_are_read_ahead_in_order_and_a_fault_ends_it(pets: Path) -> None:
    dataset = opened(folder=pets, size=4, labels=["cat", "dog"], in_memory=False)
    batches = Batches(dataset, 1, torch.device("cpu"))
    assert [int(batch["labels"]) for batch in batches] == [0, 0, 1]
    (pets / "dog" / "c.bmp").unlink()
    seen = iter(batches)
    assert [int(next(seen)["labels"]) for _ in range(2)] == [0, 0]
    with pytest.raises(DataError, match=r"c\.bmp"):
        next(seen)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reading")]


# ---------------------------------------------------------------- from folders


def test_each_folder_is_a_class_and_pixels_are_scaled_as_the_options_say(pets: Path) -> None:
    dataset = opened(folder=pets, labels=["dog", "cat"], size=[4, 6])
    assert dataset.tensors["pixel_values"].shape == (3, 3, 4, 6)
    assert dataset.tensors["pixel_values"].dtype == torch.float32
    # (value / 255 - 0.5) / 0.5, and 51 / 255 is a fifth
    assert colours(dataset) == [[1, -1, -1], [-0.6, -0.6, -0.6], [-1, 1, -1]]
    assert dataset.tensors["labels"].tolist() == [1, 1, 0]


def test_grey_images_have_one_channel_and_each_channel_may_have_its_own_scale(pets: Path) -> None:
    grey = opened(folder=pets, labels=["dog", "cat"], size=4, channels=1, mean=[0.0], std=[0.1])
    assert colours(grey)[1] == [2.0]  # (51 / 255 - 0) / 0.1
    tinted = opened(folder=pets, labels=["dog", "cat"], size=4, mean=[0.0, 0.1, 0.2], std=[1.0, 0.5, 0.2])
    assert colours(tinted)[1] == [0.2, 0.2, 0.0]


def test_folders_may_be_links_and_what_is_hidden_is_passed_over(pets: Path, tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "d.png", BLUE)
    (pets / "emu").symlink_to(tmp_path / "elsewhere")
    (pets / "dog" / "up").symlink_to(pets)
    picture(pets / "cat" / ".ipynb_checkpoints" / "a-checkpoint.png", RED)
    picture(pets / ".trash" / "e.png", RED)
    dataset = opened(folder=pets, labels=["cat", "dog", "emu"], size=2)
    assert dataset.tensors["labels"].tolist() == [0, 0, 1, 2]
    assert colours(dataset)[3] == [-1, -1, 1]


def test_folders_of_domains_hold_folders_of_classes(tmp_path: Path) -> None:
    for domain, label in (("sketch", "cat"), ("photo", "dog"), ("photo", "cat")):
        picture(tmp_path / domain / label / "a.png", RED)
    dataset = opened(folder=tmp_path, domain_folders=True, labels=["cat", "dog"], size=2)
    assert dataset.tensors["labels"].tolist() == [0, 1, 0]  # photo/cat, photo/dog, sketch/cat
    assert dataset.domains is not None
    assert dataset.domains.tolist() == [0, 0, 1]


def test_the_processor_says_how_pixels_are_made(pets: Path, tmp_path: Path) -> None:
    processor = image_processor(tmp_path / "processor", side=8)
    dataset = opened(folder=pets, labels=["dog", "cat"], processor=processor)
    assert dataset.tensors["pixel_values"].shape == (3, 3, 8, 8)
    assert colours(dataset) == [[1, -1, -1], [-0.6, -0.6, -0.6], [-1, 1, -1]]
    assert set(dataset.tensors) == {"pixel_values", "labels"}
    assert str(dataset.schema) == "labels int64 [], pixel_values float32 [3, 8, 8]"


def test_images_whose_size_no_setting_fixes_have_no_shape_in_what_is_declared(tmp_path: Path) -> None:
    CLIPImageProcessorPil(do_resize=False, do_center_crop=False).save_pretrained(tmp_path / "as-they-are")
    picture(tmp_path / "scans" / "0" / "a.png", RED)
    dataset = opened(folder=tmp_path / "scans", processor=tmp_path / "as-they-are")
    assert dataset.tensors["pixel_values"].shape == (1, 3, 10, 12)
    assert str(dataset.schema) == "labels int64 [], pixel_values float32"


def test_more_images_than_are_prepared_at_once_stay_in_order(tmp_path: Path) -> None:
    for place in range(130):
        picture(tmp_path / str(place % 2) / f"{place:03}.png", (place, place, place), size=(2, 2))
    dataset = opened(folder=tmp_path, size=2, channels=1, mean=[0.0], std=[1.0])
    assert [round(255 * grey) for (grey,) in colours(dataset)] == [*range(0, 130, 2), *range(1, 130, 2)]
    assert dataset.tensors["labels"].tolist() == [0] * 65 + [1] * 65


def test_a_photograph_is_turned_the_way_up_that_it_was_taken(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 1))
    image.putdata([RED, BLUE])
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise, so that what is on the left comes on top
    (tmp_path / "0").mkdir()
    image.save(tmp_path / "0" / "a.png", exif=exif)
    pixels = opened(folder=tmp_path, size=[2, 1]).tensors["pixel_values"]
    assert pixels[0, :, :, 0].tolist() == [[1, -1], [-1, -1], [-1, 1]]


def alike_on_white(folder: Path, *images: Image.Image, suffix: str = ".png", **more: Any) -> list[list[int]]:
    """The colours of the first and of the last pixel of images as a model gets them, 0 to 255."""
    (folder / "0").mkdir(parents=True)
    for place, image in enumerate(images):
        image.save(folder / "0" / f"{place}{suffix}", **more)
    pixels = opened(folder=folder, size=[1, 2], mean=[0.0], std=[1.0]).tensors["pixel_values"]
    return [pixel for image in pixels for pixel in image[:, 0].T.mul(255).round().int().tolist()]


def with_alpha(mode: str, hidden: Any, alpha: int) -> Image.Image:
    """Two pixels: a colour under this alpha, and black."""
    image = Image.new(mode, (2, 1))
    image.putdata([(*hidden, alpha), (*(0 for _ in hidden), 255)])
    return image


def test_colours_under_transparent_pixels_are_not_seen(tmp_path: Path) -> None:
    white, black = [255] * 3, [0] * 3
    colours = [with_alpha("RGBA", hidden, 0) for hidden in (RED, GREEN)]
    greys = [with_alpha("LA", hidden, 0) for hidden in ((0,), (90,))]
    palettes = [image.quantize(4) for image in colours]
    assert all(isinstance(image.info.get("transparency", b""), bytes) for image in palettes)
    for suffix in (".png", ".tif", ".webp", ".gif"):
        exact = {"lossless": True, "exact": True} if suffix == ".webp" else {}
        assert alike_on_white(tmp_path / suffix, *colours, suffix=suffix, **exact) == [white, black] * 2
    assert alike_on_white(tmp_path / "grey", *greys) == [white, black] * 2
    assert alike_on_white(tmp_path / "palette", *palettes) == [white, black] * 2
    for mode, hidden, dark in (("RGB", RED, (0, 0, 0)), ("L", 90, 0), ("P", 1, 0)):
        image = Image.new(mode, (2, 1))
        if mode == "P":
            image.putpalette([*(0, 0, 0), *RED])
        image.putdata([hidden, dark])
        assert alike_on_white(tmp_path / mode, image, transparency=hidden) == [white, black]
    # A third of red on white.
    assert alike_on_white(tmp_path / "part", with_alpha("RGBA", RED, 85))[0] == [255, 170, 170]
    assert alike_on_white(tmp_path / "opaque", with_alpha("RGBA", (10, 20, 30), 255))[0] == [10, 20, 30]
    frames = [image.convert("RGBA") for image in colours]
    moving = alike_on_white(tmp_path / "moving", frames[0], save_all=True, append_images=frames[1:])
    assert moving == [white, black]


# ---------------------------------------------------------------- from tables


def test_a_table_names_images_by_their_place_beside_it(pets: Path) -> None:
    (pets / "list.csv").write_text("image,label,hospital\ncat/a.png,cat,n\ndog/c.bmp,dog,s\n")
    dataset = opened(file=pets / "list.csv", labels=["cat", "dog"], size=2, domain="hospital")
    assert dataset.tensors["labels"].tolist() == [0, 1]
    assert colours(dataset) == [[1, -1, -1], [-1, 1, -1]]
    assert dataset.domains is not None
    assert dataset.domains.tolist() == [0, 1]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_parquet_file_holds_the_bytes_of_images(pets: Path, *, wrapped: bool) -> None:
    held = [(pets / name).read_bytes() for name in ("cat/a.png", "dog/c.bmp")]
    # A path beside the bytes is where they came from, and nothing is looked for there.
    cells = [{"bytes": raw, "path": "http://nowhere.example/a.png"} for raw in held] if wrapped else held
    pq.write_table(pa.table({"picture": cells, "class": [1, 0]}), pets / "held.parquet")
    dataset = opened(file=pets / "held.parquet", image="picture", label="class", size=2)
    assert colours(dataset) == [[1, -1, -1], [-1, 1, -1]]
    assert dataset.tensors["labels"].tolist() == [1, 0]


@pytest.mark.parametrize("named", ["folder", "table"])
def test_images_of_a_table_in_their_folder_are_not_ignored_and_those_without_a_row_are_named(
    tmp_path: Path, named: str
) -> None:
    for name in ("a.png", "b.png", "left.png", "deeper/c.png", "deeper/.hidden.png", "@eaDir/a.png"):
        picture(tmp_path / name, RED)
    (tmp_path / "README.md").touch()
    (tmp_path / "metadata.csv").write_text("image,label\na.png,0\n./b.png,1\ndeeper/../deeper/c.png,1\n")
    file = tmp_path if named == "folder" else tmp_path / "metadata.csv"
    report = opened(file=file, size=2).report
    assert report.without_row == [str(tmp_path / "left.png")]
    assert report.ignored_files == ({".md": 1} if named == "folder" else {})
    assert f"1 image beside the table's without a row: {tmp_path / 'left.png'}" in dict(report.warnings())


def test_image_twice_with_two_labels_is_named_and_counted(pets: Path) -> None:
    assert opened(folder=pets, labels=["cat", "dog"], size=2).report.copies == 0
    for name in ("cat/z.png", "dog/z.png"):
        (pets / name).write_bytes((pets / "cat" / "a.png").read_bytes())
    report = opened(folder=pets, labels=["cat", "dog"], size=2).report
    warnings = dict(report.warnings())
    assert "2 images with the same content as an earlier one" in warnings
    told = f"{pets / 'cat' / 'a.png'} ('cat') and {pets / 'dog' / 'z.png'} ('dog')"
    assert warnings[f"1 image twice with different labels: {told}"].startswith("Correct the labels")
    (pets / "list.csv").write_text("image,label\ncat/a.png,0\ncat/a.png,1\n")
    report = opened(file=pets / "list.csv", size=2).report
    assert (report.copies, len(report.contradictions)) == (1, 1)


# ---------------------------------------------------------------- what is wrong is named


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("cat\\a.png", "has the separators of Windows"),
        ("cat/A.PNG", "differs in upper and lower case"),
        ("Cat\\a.PNG", "has the separators of Windows and differs in upper and lower case"),
        ("cat/a", "lacks its suffix"),
        ("cat/a.jpg", "has another suffix"),
        ("a.png", "names another folder"),
        ("/mnt/old/cat/a.png", "names another folder"),
        ("cat/a.png ", "has spaces around it"),
    ],
)
def test_name_that_is_spelt_otherwise_than_its_file_is_told_from_a_damaged_image(
    pets: Path, written: str, said: str
) -> None:
    picture(pets / "cat" / "a.png", RED)
    (pets / "list.csv").write_text(f"image,label\n{written},0\ndog/c.bmp,1\n")
    told = refusal(file=pets / "list.csv", size=2, max_unreadable=0.9)
    assert f"No such file or directory; the name {said}: write it as in '{pets / 'cat' / 'a.png'}'" in told


def test_causes_that_lie_outside_of_an_image_are_never_left_out(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"folder": pets, "labels": ["cat", "dog"], "size": 2, "max_unreadable": 0.9}
    (pets / "cat" / "gone.png").symlink_to("/nowhere/at/all.png")
    assert "it is a link to /nowhere/at/all.png, where no file is: restore" in refusal(**options)
    (pets / "cat" / "gone.png").unlink()
    (pets / "list.csv").write_text("image,label\ncat,0\n")
    assert "Is a directory; name the image in it" in refusal(file=pets / "list.csv", size=2, max_unreadable=0.9)
    (pets / "list.csv").write_text("image,label\n" + "nothing.png,0\n" * 5)
    told = refusal(file=pets / "list.csv", size=2, max_unreadable=0.9)
    assert "image: 5 of 5 images are not there." in told
    assert f"restore the file, or correct its path, which begins at {pets}" in told
    (pets / "cat" / "large.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a pointer of Git LFS in place of the image: fetch it by `git lfs pull`" in refusal(**options)
    (pets / "cat" / "large.png").unlink()
    Image.new("I;16", (4, 4), 40_000).save(pets / "cat" / "z.png")
    assert "more than 8 bits per channel" in refusal(**options)
    (pets / "cat" / "z.png").unlink()
    opening = open

    def guarded(path: Any, *given: Any, **more: Any) -> Any:
        if str(path).endswith("a.png"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opening(path, *given, **more)

    monkeypatch.setattr("builtins.open", guarded)
    told = refusal(**options)
    assert f"{pets / 'cat' / 'a.png'} cannot be read: Permission denied; let the worker's user read" in told


def encoded(form: str, **more: Any) -> bytes:
    # Noise, so that no end of the data is short.
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, form, **more)
    return content.getvalue()


@pytest.mark.parametrize("more", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"quality": 100}])
@pytest.mark.parametrize("end", [b"", b"\xff\xd9", bytes(5000)])
def test_photograph_whose_end_is_missing_is_damaged(pets: Path, more: dict[str, Any], end: bytes) -> None:
    content = encoded("JPEG", **more)
    thumbnail = Image.Exif()
    thumbnail[0x010E] = "\xff\xd9"
    # What cameras write after the end is none of the image.
    (pets / "cat" / "whole.jpg").write_bytes(encoded("JPEG", exif=thumbnail, **more) + b"\xff\xda\xff\xd9 more")
    Image.new("RGB", (1, 3), RED).save(pets / "cat" / "small.jpg", **more)
    options: dict[str, Any] = {"folder": pets, "labels": ["cat", "dog"], "size": 2}
    assert opened(**options).examples == 5
    (pets / "cat" / "cut.jpg").write_bytes(content[: -len(content) // 3] + end)
    assert f"{pets / 'cat' / 'cut.jpg'} cannot be read" in refusal(**options)
    assert opened(**options, max_unreadable=0.2).examples == 5


def test_wrong_checksum_of_a_png_file_is_damage(pets: Path) -> None:
    content = bytearray(encoded("PNG", compress_level=0))
    content[len(content) // 2] ^= 1
    (pets / "cat" / "z.png").write_bytes(content)
    assert "z.png cannot be read: " in refusal(folder=pets, labels=["cat", "dog"], size=2)
    (pets / "cat" / "z.png").write_bytes(encoded("PNG")[:-12])
    assert "z.png cannot be read: " in refusal(folder=pets, labels=["cat", "dog"], size=2)


def test_pages_and_frames_after_the_first_are_counted(pets: Path, tmp_path: Path) -> None:
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE))
    for suffix in (".tif", ".gif", ".png", ".webp"):
        red.save(pets / "cat" / f"pages{suffix}", save_all=True, append_images=[blue])
    options: dict[str, Any] = {"folder": str(pets), "labels": ["cat", "dog"], "size": 2, "in_memory": False}
    for _ in range(2):
        report = load("images", options, prepared=PreparedFolder(tmp_path / "prepared")).report
        assert report.partly_read == 4
    assert any(said.startswith("4 images with several pages or frames") for said, _ in report.warnings())


def test_a_folder_that_is_no_class_is_named(pets: Path) -> None:
    assert "has 'dog', not among the 1 names in `labels`" in refusal(folder=pets, labels=["cat"], size=2)
    assert "has 'cat', 'dog'; list the classes' names" in refusal(folder=pets, size=2)
    picture(pets / "stray.png", RED)
    assert "stray.png is not in the folder of a class" in refusal(folder=pets, labels=["cat", "dog"], size=2)


def test_a_folder_that_may_not_be_read_is_named_rather_than_left_out(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def guarded(path: str) -> object:
        if Path(path).name == "deeper":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    told = f"folder: {pets / 'cat' / 'deeper'} cannot be read: Permission denied"
    assert told in refusal(folder=pets, labels=["cat", "dog"], size=2)


@pytest.mark.parametrize(
    "content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_an_image_that_cannot_be_read_is_named(pets: Path, content: bytes) -> None:
    (pets / "cat" / "b.png").write_bytes(content)
    assert f"image: {pets / 'cat' / 'b.png'} cannot be read" in refusal(folder=pets, labels=["cat", "dog"], size=2)


def test_an_image_whose_colours_cannot_be_converted_is_named(pets: Path) -> None:
    Image.new("LAB", (2, 2)).save(pets / "cat" / "b.tif")
    told = refusal(folder=pets, labels=["cat", "dog"], size=2, channels=1)
    assert f"image: {pets / 'cat' / 'b.tif'} cannot be read: conversion from LAB" in told


def test_a_picture_too_large_to_be_one_is_refused(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (100, 10):  # more than this is a warning, and more than twice as much an error
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert "decompression bomb" in refusal(folder=pets, labels=["cat", "dog"], size=2)


def test_deep_grey_scales_are_refused_rather_than_clipped(pets: Path) -> None:
    Image.new("I;16", (4, 4), 40_000).save(pets / "cat" / "z.png")
    assert "more than 8 bits per channel" in refusal(folder=pets, labels=["cat", "dog"], size=2)


def test_a_row_without_an_image_is_named(pets: Path) -> None:
    (pets / "list.csv").write_text("image,label\ncat/a.png,0\n,1\n")
    assert f"image: row 1 of {pets / 'list.csv'}" in refusal(file=pets / "list.csv", size=2)
    (pets / "list.csv").write_text("image,label\nhttp://nowhere.example/a.png,0\n")
    assert "nowhere.example/a.png cannot be read" in refusal(file=pets / "list.csv", size=2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "give either processor or size"),
        ({"size": 4, "processor": "x"}, "give either processor or size"),
        ({"size": 0}, "size"),
        ({"size": 1 << 15}, "at most 16384 pixels a side"),
        ({"size": 4, "std": [0.0]}, "std"),
        ({"size": 4, "mean": [0.1, 0.2]}, "mean: give one value"),
        ({"processor": "x", "mean": [0.1]}, "leave them out"),
        ({"size": 4, "window": [40.0, 400.0]}, "set dicom = true"),
        ({"size": 4, "file": "x.csv"}, "give either folder or file"),
        ({"size": 4, "domain": "hospital"}, "are about a file"),
        ({"size": 4, "folder": "/nowhere/at/all"}, "folder: there is no file or folder /nowhere/at/all"),
        ({"processor": "/nowhere/at/all"}, "processor: there is no file or folder /nowhere/at/all"),
    ],
)
def test_wrong_options_are_named(pets: Path, options: dict[str, Any], told: str) -> None:
    assert told in refusal(**{"folder": pets, "labels": ["cat", "dog"], **options})


def test_files_that_are_not_images_are_counted_by_suffix(pets: Path) -> None:
    for name in ("1.dcm", "2.DCM", "deeper/3.dcm", "IM0004"):
        file = pets / "dog" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"DICM")
    dataset = load("images", {"folder": str(pets), "labels": ["cat", "dog"], "size": 2}, held_out=0.5, key=b"any")
    assert dataset.report.ignored_files == {".dcm": 3, ".txt": 1, "without suffix": 1}
    (warning, remedy), (hidden, _) = dataset.report.warnings()
    assert warning == "5 files ignored: 3 .dcm, 1 .txt, 1 without suffix"
    assert "DICOM" in remedy
    assert hidden == "1 file or folder that systems or programs leave passed over: 1 ._*"


def test_folders_and_files_that_file_servers_leave_are_neither_classes_nor_images(pets: Path) -> None:
    for name in (
        *("@eaDir/cat/SYNOPHOTO_THUMB_M.jpg", "#recycle/cat/old.png", "$RECYCLE.BIN/old.png", "lost+found/x.png"),
        *("cat/@eaDir/a.png/SYNOPHOTO_THUMB_M.jpg", "cat/~snapshot/a.png", "__MACOSX/cat/._a.png"),
        *("cat/_gsdata_/a.png", "dog/@Recycle/a.png", "System Volume Information/x.png", ".@__thumb/a.png"),
    ):
        picture(pets / name, RED)
    (pets / "dog" / "Thumbs.db").touch()
    (pets / "desktop.ini").touch()
    dataset = opened(folder=pets, labels=["cat", "dog"], size=2)
    assert dataset.tensors["labels"].tolist() == [0, 0, 1]
    assert dataset.report.passed_over["@eaDir"] == 2
    assert sum(dataset.report.passed_over.values()) == 14
    told = refusal(folder=pets, labels=["cat", "dog", "@eaDir"], size=2)
    assert "labels: '@eaDir': a system or a program leaves folders of this name beside data" in told


def test_folders_named_much_like_those_of_file_servers_are_classes(tmp_path: Path) -> None:
    for name in ("recycle", "snapshot", "found", "_normal"):
        picture(tmp_path / name / "a.png", RED)
    dataset = opened(folder=tmp_path, labels=["recycle", "snapshot", "found", "_normal"], size=2)
    assert (dataset.examples, dataset.report.passed_over) == (4, {})


def test_dicom_files_are_read_where_the_options_say_so(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.array([[0, 100], [200, 4000]], np.uint16)
    dicom_file(pets / "dog" / "d.DCM", values, WindowCenter=100, WindowWidth=201)
    options: dict[str, Any] = {"folder": pets, "labels": ["cat", "dog"], "size": 2, "channels": 1, "dicom": True}
    shown = opened(**options, in_memory=False)
    assert shown.tensors["labels"].tolist() == [0, 0, 1, 1]
    assert shown.in_memory().tensors["pixel_values"][3].flatten().tolist() == pytest.approx([-1, 0, 1, 1], abs=0.01)
    wider = opened(**options, window=[2000.0, 4001.0]).tensors["pixel_values"][3].flatten().tolist()
    assert wider == pytest.approx([-1, -0.95, -0.9, 1], abs=0.01)
    (pets / "dog" / "d.DCM").write_bytes(b"DICM")
    assert "d.DCM cannot be read" in refusal(**options)
    monkeypatch.setitem(sys.modules, "tessera.worker.data.readers.dicom", None)
    assert install_line("dicom") in refusal(**options)


def test_class_without_an_image_is_named(pets: Path) -> None:
    (pets / "dog" / "c.bmp").rename(pets / "dog" / "c.dcm")
    told = refusal(folder=pets, labels=["cat", "dog"], size=2)
    assert "labels: " in told
    assert "(ignored: 1 .dcm, 1 .txt; set dicom = true to read DICOM files) has no example of 'dog'" in told
    assert told.endswith('set absent = ["dog"]')
    for absent in (["dog"], "any"):
        assert opened(folder=pets, labels=["cat", "dog"], absent=absent, size=2).examples == 2
    misspelt = refusal(folder=pets, labels=["cat", "dog"], absent=["dogg"], size=2)
    assert misspelt == "absent: 'dogg' is not among the names in `labels`; did you mean `dog`?"
    (pets / "dog" / "c.dcm").write_bytes(b"DICM")
    (pets / "list.csv").write_text("image,label\ndog/c.dcm,0\n")
    assert "set dicom = true to read DICOM files" in refusal(file=pets / "list.csv", size=2)


def test_a_folder_without_images_or_processor_is_named(tmp_path: Path, pets: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"folder: {empty} contains no images" in refusal(folder=empty, size=2)
    assert f"processor: {empty} cannot be loaded" in refusal(folder=pets, labels=["cat", "dog"], processor=empty)


# ---------------------------------------------------------------- with texts


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A folder with an image processor and a tokenizer in it."""
    image_processor(tmp_path / "clip", side=8)
    return bert_tokenizer(tmp_path / "clip", ("a", "photo", "of", "cat", "dog", "black"))


def test_every_batch_has_a_text_for_each_class(pets: Path, clip: Path) -> None:
    dataset = opened(
        "imagetext",
        folder=pets,
        labels=["dog", "black cat", "cat"],
        absent=["black cat"],
        processor=clip,
        template="a {}",
    )
    a, cat, dog, black = 4, 7, 8, 9
    assert dataset.common["input_ids"].tolist() == [
        [CLS, a, dog, SEP, PAD],
        [CLS, a, black, cat, SEP],
        [CLS, a, cat, SEP, PAD],
    ]
    assert dataset.common["attention_mask"].sum(dim=1).tolist() == [4, 5, 4]
    assert dataset.tensors["labels"].tolist() == [2, 2, 0]
    model = instantiate(CLIP, "contrastive", seed=0)
    for size, examples in ((2, [2, 1]), (None, [3])):
        found = [forward(model, "contrastive", batch).logits for batch in dataset.batches(size)]
        assert [logits.shape for logits in found if logits is not None] == [(count, 3) for count in examples]


def test_tokenizer_and_pixels_may_come_from_elsewhere_and_texts_be_filled_up(pets: Path, tmp_path: Path) -> None:
    words = ("a", "photo", "of", "cat", "dog", ".")
    # As SigLIP's: it is padded to its full length, and attends to the padding.
    siglip = plain_tokenizer(tmp_path / "siglip", words, model_input_names=["input_ids"])
    dataset = opened("imagetext", folder=pets, labels=["cat", "dog"], tokenizer=siglip, size=4, max_length=8)
    assert dataset.common["input_ids"].tolist() == [[2, 3, 4, 2, 5, 7, 1, 1], [2, 3, 4, 2, 6, 7, 1, 1]]
    assert set(dataset.common) == {"input_ids"}
    declared = "input_ids int64 [8], labels int64 [], pixel_values float32 [3, 4, 4]"
    assert (str(dataset.schema), dataset.schema.classes) == (declared, 2)
    assert dataset.schema.class_names == name_digests(["cat", "dog"])
    assert dataset.schema.vocabulary == vocabulary_in((siglip / "tokenizer.json").read_bytes()) is not None
    assert dataset.tensors["pixel_values"].shape == (3, 3, 4, 4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"template": "a photo"}, "template: has no {}"),
        ({"labels": None}, "labels"),
        ({"labels": ["cat", "dog", "emu", "gnu"], "absent": "any"}, "'emu' and 'gnu' have the same tokens in"),
        ({"max_length": 3}, "'cat' and 'dog' have the same tokens in"),
        ({"processor": None, "size": 4}, "give tokenizer, or a processor that contains one"),
        ({"tokenizer": "/nowhere/at/all"}, "tokenizer: there is no file or folder /nowhere/at/all"),
    ],
)
def test_wrong_options_of_images_with_texts_are_named(
    pets: Path, clip: Path, options: dict[str, Any], told: str
) -> None:
    given = {"folder": pets, "labels": ["cat", "dog"], "processor": clip, **options}
    assert told in refusal("imagetext", **given)

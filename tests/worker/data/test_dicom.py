"""DICOM files, written by pydicom, look to the model as they do to a radiologist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gdcm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydicom
import pytest
from PIL import Image
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, JPEGLosslessSV1, RLELossless

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.data.readers.dicom import read_dicom
from tessera.worker.data.readers.pictures import BrokenImage, is_dicom
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tests.support.dicom_files import written

# Slices of a body: air, water, and bone, in Hounsfield units.
UNITS = np.array([[-1000, 10, 40], [80, 410, 1000]])
STORED = (UNITS + 1024).astype(np.uint16)


def seen(path: Path, **options: Any) -> list[list[Any]]:
    return np.asarray(read_dicom(path, str(path), **options)).tolist()


def test_values_are_rescaled_and_cut_to_the_files_first_window(tmp_path: Path) -> None:
    tags = {"RescaleSlope": 1, "RescaleIntercept": -1024, "WindowCenter": [40, 600], "WindowWidth": [401, 2000]}
    # Of 401 units about 40, the lowest is -160 and the highest 240: 10 is at 170.5 / 400 of the way.
    path = written(tmp_path / "a.dcm", STORED, **tags)
    assert seen(path) == [[0, 109, 128], [153, 255, 255]]


def test_the_settings_window_replaces_the_files(tmp_path: Path) -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -2048, "WindowCenter": 40, "WindowWidth": 401}
    path = written(tmp_path / "a.dcm", STORED, VOILUTFunction="SIGMOID", **tags)
    assert seen(path, window=(0.5, 2001)) == [[0, 130, 138], [148, 232, 255]]


def test_without_a_window_the_whole_range_is_shown(tmp_path: Path) -> None:
    assert seen(written(tmp_path / "a.dcm", STORED)) == [[0, 129, 133], [138, 180, 255]]


def test_an_image_of_one_value_is_black(tmp_path: Path) -> None:
    assert seen(written(tmp_path / "a.dcm", np.full((1, 2), 7, np.uint16))) == [[0, 0]]


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    assert seen(written(tmp_path / "a.dcm", STORED, "MONOCHROME1")) == [[255, 126, 122], [117, 75, 0]]


def test_signed_values_need_no_rescaling(tmp_path: Path) -> None:
    path = written(tmp_path / "a.dcm", UNITS.astype(np.int16), WindowCenter=40, WindowWidth=401)
    assert seen(path) == [[0, 109, 128], [153, 255, 255]]


def test_a_table_of_values_is_followed(tmp_path: Path) -> None:
    table = pydicom.Dataset()
    table.LUTDescriptor, table.LUTData = [4, 0, 8], [255, 200, 100, 0]
    for name in ("LUTDescriptor", "LUTData"):
        table[name].VR = "US"
    path = written(tmp_path / "a.dcm", np.array([[0, 1], [2, 9]], np.uint16), VOILUTSequence=[table])
    assert seen(path) == [[255, 200], [100, 0]]


def test_colours_stay(tmp_path: Path) -> None:
    colours = np.array([[[255, 0, 10], [1, 2, 3]]], np.uint8)
    assert seen(written(tmp_path / "a.dcm", colours, "RGB", 8)) == colours.tolist()


def test_table_of_more_entries_than_eight_bits_count_is_followed(tmp_path: Path) -> None:
    table = pydicom.Dataset()
    table.LUTDescriptor, table.LUTData = [4096, 0, 8], [place // 16 for place in range(4096)]
    for name in ("LUTDescriptor", "LUTData"):
        table[name].VR = "US"
    values = np.array([[0, 160], [1600, 4000]], np.uint16)
    for sequence in ("VOILUTSequence", "ModalityLUTSequence"):
        window = {} if sequence == "VOILUTSequence" else {"WindowCenter": 128, "WindowWidth": 256}
        path = written(tmp_path / "a.dcm", values, **{sequence: [table]}, **window)
        assert seen(path) == [[0, 10], [100, 250]]


def groups(**attributes: Any) -> pydicom.Dataset:
    """The functional groups of a frame, of one sequence with these attributes."""
    found = pydicom.Dataset()
    for sequence, names in {
        "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept", "RescaleType"),
        "FrameVOILUTSequence": ("WindowCenter", "WindowWidth", "VOILUTFunction"),
    }.items():
        item = pydicom.Dataset()
        for name in names:
            if name in attributes:
                setattr(item, name, attributes[name])
        if len(item):
            setattr(found, sequence, [item])
    return found


RESCALED = {"RescaleSlope": 1, "RescaleIntercept": -1024, "RescaleType": "HU"}
WINDOWED = {"WindowCenter": [40, 600], "WindowWidth": [401, 2000]}


@pytest.mark.parametrize("where", ["shared", "per frame", "both"])
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_enhanced_file_of_one_frame_looks_like_the_classic_one(tmp_path: Path, where: str, kind: str) -> None:
    classic = written(tmp_path / "a.dcm", STORED, kind, RescaleSlope=1, RescaleIntercept=-1024, **WINDOWED)
    shared, frame = {
        "shared": ([groups(**RESCALED, **WINDOWED)], [pydicom.Dataset()]),
        "per frame": ([pydicom.Dataset()], [groups(**RESCALED, **WINDOWED)]),
        "both": ([groups(**RESCALED)], [groups(**WINDOWED)]),
    }[where]
    tags = {"SharedFunctionalGroupsSequence": shared, "PerFrameFunctionalGroupsSequence": frame}
    # What is at the top of the file too is not of this frame.
    path = written(tmp_path / "b.dcm", STORED, kind, NumberOfFrames=1, WindowCenter=0, WindowWidth=9, **tags)
    assert seen(path) == seen(classic)
    assert seen(path, window=(40.0, 400.0)) == seen(classic, window=(40.0, 400.0))


def test_padding_is_black_and_no_end_of_the_range(tmp_path: Path) -> None:
    values = np.array([[-2000, 0], [50, 100]], np.int16)
    assert seen(written(tmp_path / "a.dcm", values, PixelPaddingValue=-2000)) == [[0, 0], [128, 255]]
    # As if the value had no sign, and as a range of values around white.
    header = pydicom.dcmread(tmp_path / "a.dcm")
    header["PixelPaddingValue"] = pydicom.DataElement("PixelPaddingValue", "US", 63536)
    header.save_as(tmp_path / "b.dcm")
    assert seen(tmp_path / "b.dcm") == [[0, 0], [128, 255]]
    tags = {"PixelPaddingValue": 4000, "PixelPaddingRangeLimit": 4095}
    bright = np.array([[4000, 0], [50, 100], [4095, 100]], np.uint16)
    assert seen(written(tmp_path / "c.dcm", bright, **tags)) == [[0, 0], [128, 255], [0, 255]]
    assert seen(written(tmp_path / "d.dcm", bright, "MONOCHROME1", **tags)) == [[0, 255], [128, 0], [0, 0]]
    assert seen(written(tmp_path / "e.dcm", bright[:1, :1], **tags)) == [[0]]


@pytest.mark.parametrize("uid", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
@pytest.mark.parametrize("with_meta", [False, True])
def test_file_without_a_preamble_looks_like_one_with_it(tmp_path: Path, uid: str, *, with_meta: bool) -> None:
    path = written(tmp_path / "a.dcm", STORED, WindowCenter=1064, WindowWidth=401)
    header = pydicom.dcmread(path)
    header.file_meta.TransferSyntaxUID = uid
    if not with_meta:
        del header.file_meta
    header.preamble = None
    encoding = {} if with_meta else {"implicit_vr": uid == ImplicitVRLittleEndian, "little_endian": True}
    header.save_as(tmp_path / "IM0001", **encoding)
    assert (tmp_path / "IM0001").read_bytes()[128:132] != b"DICM"
    assert is_dicom(tmp_path / "IM0001")
    assert seen(tmp_path / "IM0001") == seen(path)


@pytest.mark.parametrize(
    ("attribute", "tags"),
    [
        ("RescaleIntercept None", {"RescaleSlope": 2}),
        ("RescaleSlope 0", {"RescaleSlope": 0, "RescaleIntercept": 1}),
        ("HighBit 15", {"HighBit": 15}),
        ("PixelPresentation COLOR", {"PixelPresentation": "COLOR"}),
        ("PhotometricInterpretation HSV", {"PhotometricInterpretation": "HSV"}),
        ("Window Width", {"WindowCenter": 40, "WindowWidth": 0}),
        ("2 items in PerFrameFunctionalGroupsSequence", {"PerFrameFunctionalGroupsSequence": [groups()] * 2}),
    ],
)
def test_attribute_that_is_not_understood_is_named_and_its_image_is_not_damaged(
    tmp_path: Path, attribute: str, tags: dict[str, Any]
) -> None:
    path = written(tmp_path / "a.dcm", STORED, **tags)
    with pytest.raises(DataError, match=attribute) as refused:
        read_dicom(path, str(path))
    assert not isinstance(refused.value, BrokenImage)


@pytest.mark.parametrize("kind", ["YBR_FULL", "RGB"])
@pytest.mark.parametrize("planes", [0, 1])
def test_colours_are_the_same_in_any_order_of_samples(tmp_path: Path, kind: str, planes: int) -> None:
    colours = np.array([[[255, 0, 10], [1, 2, 3]]], np.uint8)
    stored = np.asarray(Image.fromarray(colours).convert("YCbCr")) if kind == "YBR_FULL" else colours
    header = pydicom.dcmread(written(tmp_path / "a.dcm", colours, "RGB", 8))
    header.PhotometricInterpretation, header.PlanarConfiguration = kind, planes
    header.PixelData = (stored.transpose(2, 0, 1) if planes else stored).tobytes()
    header.save_as(tmp_path / "a.dcm")
    assert np.abs(np.array(seen(tmp_path / "a.dcm")) - colours.astype(int)).max() <= 2


def test_compressed_image_whose_end_is_missing_is_damaged(tmp_path: Path) -> None:
    header = pydicom.dcmread(written(tmp_path / "a.dcm", STORED))
    header.compress(RLELossless)
    header.save_as(tmp_path / "a.dcm")
    (tmp_path / "a.dcm").write_bytes((tmp_path / "a.dcm").read_bytes()[:-20])
    with pytest.raises(BrokenImage, match=r"end is missing|End of file"):
        seen(tmp_path / "a.dcm")


def test_run_lengths_are_decompressed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.dcm", STORED)
    header = pydicom.dcmread(path)
    header.compress(RLELossless)
    header.save_as(tmp_path / "rle.dcm")
    assert seen(tmp_path / "rle.dcm") == seen(path)


def test_lossless_jpeg_as_archives_send_it_is_decompressed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.dcm", np.arange(64 * 64, dtype=np.uint16).reshape(64, 64))
    reader = gdcm.ImageReader()
    reader.SetFileName(str(path))
    assert reader.Read()
    change = gdcm.ImageChangeTransferSyntax()
    change.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.JPEGLosslessProcess14_1))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer = gdcm.ImageWriter()
    writer.SetFileName(str(tmp_path / "jpeg.dcm"))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    assert writer.Write()
    assert pydicom.dcmread(tmp_path / "jpeg.dcm").file_meta.TransferSyntaxUID == JPEGLosslessSV1
    assert seen(tmp_path / "jpeg.dcm") == seen(path)


def test_what_is_not_one_image_is_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(DataError) as refused:
            read_dicom(path, str(path))
        assert str(path) in str(refused.value)
        return str(refused.value)

    assert "2 frames: save those" in refusal(written(tmp_path / "f.dcm", np.zeros((2, 3, 4), np.uint16)))
    large = written(tmp_path / "l.dcm", STORED, Rows=30_000, Columns=30_000)
    assert "900000000 pixels" in refusal(large)
    report = pydicom.dcmread(written(tmp_path / "r.dcm", STORED))
    del report.PixelData
    report.save_as(tmp_path / "r.dcm")
    assert "without an image" in refusal(tmp_path / "r.dcm")
    short = written(tmp_path / "s.dcm", STORED, Rows=4)
    assert "cannot be read" in refusal(short)
    (tmp_path / "t.dcm").write_text("not DICOM")
    assert "cannot be read" in refusal(tmp_path / "t.dcm")
    (tmp_path / "e.dcm").touch()
    assert "cannot be read" in refusal(tmp_path / "e.dcm")


# ---------------------------------------------------------------- where they are found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of DICOM files, whose names end as archives write them or not at all."""
    for number, name in enumerate(("0/IM000001", "0/1.2.840.113619", "1/a.dcm", "1/b.DICOM")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, np.full((2, 3), 1000 * number, np.uint16), WindowCenter=1500, WindowWidth=3001)
    (tmp_path / "0" / "notes.txt").write_text("no image")
    (tmp_path / "0" / "short").write_bytes(b"DICM")
    written(tmp_path / "1" / "DICOMDIR", STORED)
    return tmp_path


def brightness(dataset: Dataset) -> list[float]:
    return [round(float(image.mean()), 2) for image in dataset.in_memory().tensors["pixel_values"]]


def opened(**options: Any) -> Dataset:
    return load("images", {"size": 2, "channels": 1, **options})


@pytest.mark.parametrize("in_memory", [True, False])
def test_files_are_dicom_by_their_content_where_their_names_do_not_say(folder: Path, *, in_memory: bool) -> None:
    dataset = opened(folder=str(folder), dicom=True, in_memory=in_memory)
    assert sorted(brightness(dataset)) == [-1.0, -0.33, 0.33, 1.0]
    assert dataset.tensors["labels"].tolist() == [0, 0, 1, 1]
    assert dataset.report.ignored_files == {".txt": 1, "without suffix": 2}
    with pytest.raises(DataError, match="set dicom = true to read DICOM files"):
        opened(folder=str(folder))


@pytest.mark.parametrize("form", ["csv", "paths", "bytes", "records"])
def test_tables_name_dicom_files_or_contain_them(folder: Path, form: str) -> None:
    names = ["0/IM000001", "0/1.2.840.113619", "1/a.dcm"]
    contents = [(folder / name).read_bytes() for name in names]
    if form == "csv":
        table = folder / "list.csv"
        table.write_text("image,label\n" + "".join(f"{name},0\n" for name in names))
    else:
        images = {
            "paths": names,
            "bytes": contents,
            "records": [{"bytes": contents[0], "path": None}, *({"bytes": None, "path": name} for name in names[1:])],
        }[form]
        table = folder / "list.parquet"
        pq.write_table(pa.table({"image": images, "label": [0] * 3}), table)
    dataset = opened(file=str(table), dicom=True, in_memory=False)
    assert brightness(dataset) == [-1.0, -0.33, 0.33]
    with pytest.raises(DataError, match=r"of 3 images cannot be read.*set dicom = true to read DICOM files"):
        opened(file=str(table))


def test_what_a_table_names_and_is_not_one_image_is_refused_by_its_name(folder: Path) -> None:
    written(folder / "0" / "frames", np.zeros((2, 3, 4), np.uint16))
    for name, said in (("0/frames", "holds 2 frames: save those"), ("0/notes.txt", "it is none of PNG")):
        (folder / "list.csv").write_text(f"image,label\n{name},0\n")
        with pytest.raises(DataError, match=f"{name}.* {said}"):
            opened(file=str(folder / "list.csv"), dicom=True)
    damaged = (folder / "0" / "IM000001").read_bytes()[:-1]
    pq.write_table(pa.table({"image": [damaged], "label": [0]}), folder / "list.parquet")
    with pytest.raises(DataError, match=r"the image in row 0 of .*list\.parquet cannot be read"):
        opened(file=str(folder / "list.parquet"), dicom=True)


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_of_one_patient_in_the_headers_are_one_group(tmp_path: Path, *, in_memory: bool) -> None:
    folder = tmp_path / "scans" / "ill"
    folder.mkdir(parents=True)
    for number, patient in enumerate(("p1", "p2", " p1 ", "")):
        written(folder / f"{number}.dcm", STORED + number, PatientID=patient, StudyID="s1")
    options = {"folder": str(tmp_path / "scans"), "dicom": True, "labels": ["ill"], "size": 2, "in_memory": in_memory}
    prepared = PreparedFolder(tmp_path / "prepared")
    (warning, remedy), *others = load("images", options, prepared=prepared).report.warnings(held_out=True)
    assert ("PatientID in the images' headers has 2 values in 3 examples" in warning, others) == (True, [])
    assert 'Set group = "PatientID"' in remedy
    # Twice: the second time from the index.
    for _ in range(2):
        loaded = load("images", {**options, "group": "PatientID"}, prepared=prepared)
        assert loaded.groups is not None
        assert (loaded.groups[0] == loaded.groups[2] != loaded.groups[1], loaded.groups[3]) == (True, b"")
        ((warning, _),) = loaded.report.warnings(held_out=True)
        assert "1 example has no group" in warning
    assert len(set(load("images", {**options, "group": "StudyID"}, prepared=prepared).groups or ())) == 1
    with pytest.raises(DataError, match="group: DICOM has no keyword 'PatientId'; did you mean `PatientID`"):
        load("images", {**options, "group": "PatientId"})

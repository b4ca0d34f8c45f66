"""Images of DICOM files, as a viewer shows them: rescaled, windowed, and in eight bits. Needs the extra `dicom`."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydicom import Dataset as Header
from pydicom import dcmread
from pydicom.datadict import keyword_dict
from pydicom.pixels.processing import apply_color_lut, apply_windowing
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian

from tessera.shared.near_names import did_you_mean
from tessera.worker.data.groups import PATIENT
from tessera.worker.data.readers.pictures import GROUP, BrokenImage, holds_dicom
from tessera.worker.errors import DataError, in_short

GREY = ("MONOCHROME1", "MONOCHROME2")
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
"""The values of PhotometricInterpretation that pydicom converts to RGB."""

FUNCTIONAL_GROUPS = {
    "PixelValueTransformationSequence": ("ModalityLUTSequence", "RescaleSlope", "RescaleIntercept"),
    "FrameVOILUTSequence": ("VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
}
"""The groups of attributes that decide what a viewer shows of a frame, and the attributes of other files that they
replace (DICOM PS3.3, C.7.6.16.2)."""

PIXEL_DATA = b"\xe0\x7f\x10\0"
"""The tag of the image's element, in little endian."""

Values = np.ndarray[Any, Any]
Window = tuple[float, float]
"""The centre and the width of the values to show, in the units that the file's rescaling gives (CT: Hounsfield)."""


def require_keyword(keyword: str) -> None:
    """Raise DataError if the standard has no such keyword."""
    if keyword not in keyword_dict:
        near = did_you_mean(keyword, keyword_dict)
        raise DataError(f"group: DICOM has no keyword {keyword!r}{near}")


def read_dicom(file: Path | bytes, name: str, window: Window | None = None, group: str = PATIENT) -> Image.Image:
    """Return the image of a DICOM file, in mode L or RGB. `name` names it for people. Its `info["group"]` is the
    value of the keyword `group` in the header; empty without one.

    Grey values are rescaled by the file's modality table or slope, cut to `window`, to the file's first window if
    None, or to their own range if it has neither, and inverted for MONOCHROME1 (DICOM PS3.3, C.11.1, C.11.2 and
    C.7.6.3.1.2). Padding is black (C.7.5.1.1.2). Raises DataError for files without exactly one image, for images of
    more pixels than Pillow reads, and for attributes that are not understood, and BrokenImage for damaged files.
    """
    try:
        content = file if isinstance(file, bytes) else file.read_bytes()
        header = _header(content)
        _require_one_image(name, header, content)
        _apply_functional_groups(name, header)
        image = _shown(name, header, window)
        image.info[GROUP] = str(header.get(group) or "")
        return image
    except DataError:
        raise
    # pydicom and the libraries that decompress raise whatever a damaged file leads to.
    except Exception as fault:
        reason = in_short(fault) or type(fault).__name__
        raise BrokenImage(f"image: {name} cannot be read: {reason}; replace it or take it out") from fault


def _header(content: bytes) -> Header:
    """Return the elements of a DICOM file. One without a preamble may begin with any element of a data set."""
    header = dcmread(BytesIO(content), force=holds_dicom(content))
    if "TransferSyntaxUID" not in header.file_meta:
        implicit = header.original_encoding[0]
        header.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else ExplicitVRLittleEndian
    return header


def _require_one_image(name: str, header: Header, content: bytes) -> None:
    """Raise DataError before anything is decompressed."""
    if "PixelData" not in header and ("Rows" in header or PIXEL_DATA in content):
        # pydicom leaves out elements whose end it does not find.
        raise BrokenImage(
            f"image: {name} describes an image but is without an image: its end is missing; replace it or take it out"
        )
    if "PixelData" not in header:
        raise DataError(f"image: {name} is a DICOM file without an image; take it out")
    if (frames := int(header.get("NumberOfFrames") or 1)) != 1:
        raise DataError(f"image: {name} holds {frames} frames: save those to learn from as files of their own")
    pixels, most = int(header.Rows) * int(header.Columns), Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise DataError(f"image: {name} has {pixels} pixels, more than the {most} that are read; take it out")
    if header.get("PixelPresentation") in ("COLOR", "MIXED"):
        raise DataError(f"image: {name} has PixelPresentation {header.PixelPresentation}: save it in RGB")
    if int(header.HighBit) >= int(header.BitsStored):
        raise DataError(
            f"image: {name} has HighBit {header.HighBit} with BitsStored {header.BitsStored}, as the standard no "
            "longer allows: save it with its lowest bit in bit 0"
        )


def _apply_functional_groups(name: str, header: Header) -> None:
    """Give the header of an enhanced file the attributes that classic files have for their one image."""
    for groups in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        items: Sequence[Header] = header.get(groups) or []
        if len(items) > 1:
            raise DataError(f"image: {name} has {len(items)} items in {groups} for one frame: correct it")
        for sequence, attributes in FUNCTIONAL_GROUPS.items():
            found = (items[0].get(sequence) if items else None) or []
            for attribute in attributes if found else ():
                header.pop(attribute, None)
                if attribute in found[0]:
                    header[attribute] = found[0][attribute]


def _shown(name: str, header: Header, window: Window | None) -> Image.Image:
    values, kind = header.pixel_array, header.PhotometricInterpretation
    if kind in GREY and values.ndim == 2:
        return _in_eight_bits(_grey(name, values, header, window))
    if kind == "PALETTE COLOR":
        bits = header.RedPaletteColorLookupTableDescriptor[2]
        return _in_eight_bits(apply_color_lut(values, header) / (2**bits - 1))
    if kind in COLOURS and values.ndim == 3:
        return _in_eight_bits(values / (2**header.BitsStored - 1))
    raise DataError(
        f"image: {name} has PhotometricInterpretation {kind} and SamplesPerPixel {header.SamplesPerPixel}, which are "
        "not read: convert it to RGB or MONOCHROME2, or take it out"
    )


def _grey(name: str, values: Values, header: Header, window: Window | None) -> Values:
    """Return grey values, [height, width], from 0 (black) to 1 (white)."""
    padding = _padding(values, header)
    shown = _windowed(name, _rescaled(name, values, header), header, window, ~padding)
    shown = 1 - shown if header.PhotometricInterpretation == "MONOCHROME1" else shown
    return np.where(padding, 0.0, shown)


def _padding(values: Values, header: Header) -> Values:
    """Return the mask of stored values that stand for pixels outside of the image, bool [height, width]."""
    value = header.get("PixelPaddingValue")
    if value is None:
        return np.zeros(values.shape, np.bool_)
    limit = header.get("PixelPaddingRangeLimit")
    # Files with signed values often write the number as if it had no sign.
    ends = np.array([value, value if limit is None else limit]).astype(values.dtype)
    inside: Values = (values >= ends.min()) & (values <= ends.max())
    return inside


def _rescaled(name: str, values: Values, header: Header) -> Values:
    """Return the values in the units of the modality."""
    if table := header.get("ModalityLUTSequence"):
        return _looked_up(values, table[0], header)
    slope, intercept = header.get("RescaleSlope"), header.get("RescaleIntercept")
    if slope is None and intercept is None:
        return values
    if not slope or intercept is None:
        raise DataError(
            f"image: {name} has RescaleSlope {slope} and RescaleIntercept {intercept}: correct them, or take it out"
        )
    return values * float(slope) + float(intercept)


def _windowed(name: str, values: Values, header: Header, window: Window | None, of_image: Values) -> Values:
    """Return values from 0 (below the window) to 1 (above it).

    Without a window it is the range of the values that `of_image`, bool [height, width], selects.
    """
    if window:
        header.WindowCenter, header.WindowWidth = window
        for attribute in ("VOILUTFunction", "VOILUTSequence"):
            header.pop(attribute, None)
    if table := header.get("VOILUTSequence"):
        low, high = 0.0, 2.0 ** table[0].LUTDescriptor[2] - 1
        values = _looked_up(values, table[0], header)
    elif None in (header.get("WindowCenter"), header.get("WindowWidth")):
        inside = values[of_image] if of_image.any() else values
        low, high = float(inside.min()), float(inside.max())
    else:
        try:
            # Values far outside show the range that windows are mapped to.
            low, high = apply_windowing(np.array([-1e30, 1e30]), header)
            values = apply_windowing(values, header)
        except ValueError as fault:
            raise DataError(f"image: {name}: {in_short(fault)}; set `window`, or take it out") from fault
    shown: Values = (values - low) / max(high - low, np.finfo(np.float64).tiny)
    return shown


def _looked_up(values: Values, table: Header, header: Header) -> Values:
    """Return the entry of a table for each value; its first or last one for values outside (PS3.3, C.11.1.1.1).

    pydicom's own functions take a wrong entry if the table has more than its entries' bits can count.
    """
    count, first, _ = table.LUTDescriptor
    entries = table.LUTData
    if isinstance(entries, bytes):
        order = "<" if header.file_meta.TransferSyntaxUID.is_little_endian else ">"
        entries = np.frombuffer(entries, f"{order}u2")
    places = np.rint(values).astype(np.int64) - first
    found: Values = np.asarray(entries)[places.clip(0, (count or 1 << 16) - 1)]
    return found


def _in_eight_bits(shown: Values) -> Image.Image:
    """Return the image of values from 0 to 1, [height, width] or [height, width, 3]."""
    return Image.fromarray(np.rint(shown.clip(0, 1) * 255).astype(np.uint8))

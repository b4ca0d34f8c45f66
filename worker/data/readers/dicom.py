"""Images of DICOM files, as a viewer shows them: rescaled, windowed, and in eight bits. Needs the extra `dicom`."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydicom import Dataset as Header
from pydicom import dcmread
from pydicom.datadict import keyword_dict
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi, apply_windowing

from tessera.shared.near_names import did_you_mean
from tessera.worker.data.dataset import DataError, in_short
from tessera.worker.data.groups import PATIENT
from tessera.worker.data.readers.pictures import GROUP

GREY = ("MONOCHROME1", "MONOCHROME2")
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
    C.7.6.3.1.2). Raises DataError for files without exactly one image, for images of more pixels than Pillow reads,
    and for what pydicom cannot read.
    """
    try:
        header = dcmread(BytesIO(file) if isinstance(file, bytes) else file)
        _require_one_image(name, header)
        image = _shown(header, window)
        image.info[GROUP] = str(header.get(group) or "").strip()
        return image
    except DataError:
        raise
    # pydicom and the libraries that decompress raise whatever a damaged file leads to.
    except Exception as fault:
        reason = in_short(fault) or type(fault).__name__
        raise DataError(f"image: {name} cannot be read: {reason}; replace it or take it out") from fault


def _shown(header: Header, window: Window | None) -> Image.Image:
    values, kind = header.pixel_array, header.PhotometricInterpretation
    if kind in GREY:
        shown = _windowed(values, header, window)
        return _in_eight_bits(1 - shown if kind == "MONOCHROME1" else shown)
    if kind == "PALETTE COLOR":
        bits = header.RedPaletteColorLookupTableDescriptor[2]
        return _in_eight_bits(apply_color_lut(values, header) / (2**bits - 1))
    # pydicom has converted other colours to RGB.
    return _in_eight_bits(values / (2**header.BitsStored - 1))


def _require_one_image(name: str, header: Header) -> None:
    """Raise DataError before anything is decompressed."""
    if "PixelData" not in header:
        raise DataError(f"image: {name} is a DICOM file without an image; take it out")
    if (frames := int(header.get("NumberOfFrames") or 1)) != 1:
        raise DataError(f"image: {name} holds {frames} frames: save those to learn from as files of their own")
    pixels, most = int(header.Rows) * int(header.Columns), Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise DataError(f"image: {name} has {pixels} pixels, more than the {most} that are read; take it out")


def _windowed(values: np.ndarray[Any, Any], header: Header, window: Window | None) -> np.ndarray[Any, Any]:
    """Return grey values from 0 (below the window) to 1 (above it)."""
    values = apply_modality_lut(values, header)
    if window:
        header.WindowCenter, header.WindowWidth = window
        for name in ("VOILUTFunction", "VOILUTSequence"):
            header.pop(name, None)
    if header.get("VOILUTSequence"):
        low, high = 0.0, 2.0 ** header.VOILUTSequence[0].LUTDescriptor[2] - 1
        values = apply_voi(values, header)
    elif None in (header.get("WindowCenter"), header.get("WindowWidth")):
        low, high = float(values.min()), float(values.max())
    else:
        # What is far outside shows the range that windows are mapped to.
        low, high = apply_windowing(np.array([-1e30, 1e30]), header)
        values = apply_windowing(values, header)
    shown: np.ndarray[Any, Any] = (values - low) / max(high - low, np.finfo(np.float64).tiny)
    return shown


def _in_eight_bits(shown: np.ndarray[Any, Any]) -> Image.Image:
    """Return the image of values from 0 to 1, [height, width] or [height, width, 3]."""
    return Image.fromarray(np.rint(shown.clip(0, 1) * 255).astype(np.uint8))

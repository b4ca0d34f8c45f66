"""DICOM files, written by pydicom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.dataset import FileMetaDataset
from pydicom.pixels import set_pixel_data
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid


def written(path: Path, values: np.ndarray[Any, Any], kind: str = "MONOCHROME2", bits: int = 12, **tags: Any) -> Path:
    header = pydicom.Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.SOPClassUID = header.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    set_pixel_data(header, values, kind, bits)
    for name, value in tags.items():
        setattr(header, name, value)
    header.save_as(path, enforce_file_format=True)
    return path

"""The dtypes of tensors on the wire, and numpy's names for them."""

from typing import Literal

import ml_dtypes
import numpy as np

DType = Literal["F64", "F32", "F16", "BF16"]
"""The element types that can be averaged, by their safetensors names."""

NUMPY_DTYPES: dict[DType, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

"""Arrays of any element type."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

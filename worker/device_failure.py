"""The failure of a GPU, after which a process can compute nothing on it any more."""

import torch

ASSERTION = "device-side assert"
"""The part of torch's message by which a GPU refuses an index: of a token, a position or a label."""


class DeviceFailed(Exception):
    """A GPU that only a new process can use again."""

    def __init__(self) -> None:
        super().__init__(
            "the GPU cannot be used by this process any more: start the worker again, or have systemd do so"
        )


def is_device_failure(fault: BaseException | None) -> bool:
    """Return whether an error, or its cause, is that of a failed GPU."""
    if fault is None:
        return False
    # Before 2.8 torch raised a RuntimeError.
    failed = isinstance(fault, getattr(torch, "AcceleratorError", ())) or ASSERTION in str(fault)
    return failed or is_device_failure(fault.__cause__)

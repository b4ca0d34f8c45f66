"""The errors by which a worker's tasks end, beside the site's rules (`governance`) and its state (`state`).

    ValueError
     +- TaskFailure              a task that cannot be executed as given
     |   +- ExecutorEnded        the end of a process that executes tasks
     +- ConfigError              a model that transformers cannot build
     |   +- UnsafeConfig
     +- ModelMismatch            a model that differs from its block table
     +- UnknownArchitecture      attention that the block map cannot explain
     +- UnknownAttention         attention that cannot be measured
     +- DataError                a data set that cannot be read
         +- DataChanged
         +- NoChatTemplate
    UnsupportedRun (of shared)
     +- InputMismatch            a model that does not take the data set's inputs
     +- Indivisible              a batch that cannot be computed in pieces
    MemoryError
     +- ExampleTooLarge          an example that does not fit into memory
    ArithmeticError
     +- TrainingDiverged         a loss or a weight that is not finite
         +- NoFiniteLoss
    RuntimeError
     +- LoaderFailed             a process that reads data
    HiddenFailure                a failure that is hidden from the coordinator

`faults.failures` has the code by which each is reported. Needs no torch: the agent catches them, and the executor
raises them.
"""

from collections.abc import Iterable

from tessera.shared.methods.base import UnsupportedRun


class TaskFailure(ValueError):
    """A task that cannot be executed as given. Both the code and the text are reported to the coordinator."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class ExecutorEnded(TaskFailure):
    """The end of an executor's process while it loads the data sets, or within a task."""

    repeats = False
    """True if the task itself is not the cause, so that it begins again without a newer checkpoint too."""


NO_FIGURES = "no-figures", "this site has no figures of the version; its own log has more"
"""The code and the text of a TaskFailure whose cause stays at the site."""


class HiddenFailure(Exception):
    """A failure in a secure sum that may depend on the data, by the name of its class: the coordinator learns nothing
    of it."""


class ConfigError(ValueError):
    """A config and head from which transformers cannot build a model."""


class UnsafeConfig(ConfigError):
    """A config that could run code, reach a network or exhaust memory."""


class ModelMismatch(ValueError):
    """Mismatch between a model and its block table. `faults` has one sentence per block."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(sorted(faults))
        super().__init__("the model and its block table disagree: " + "; ".join(self.faults))


class UnknownArchitecture(ValueError):
    """Attention that neither `LAYOUTS` nor the mapping explains. `tensors` has the names of the unexplained ones."""

    def __init__(self, problem: str, tensors: Iterable[str]) -> None:
        self.tensors = tuple(sorted(tensors))
        shown = ", ".join(self.tensors[:12]) + (", ..." if len(self.tensors) > 12 else "")
        super().__init__(f"{problem}: {shown}. Describe it in a mapping file (`tessera docs blockmap`)")


class UnknownAttention(ValueError):
    """An attention that cannot be measured. The text names its layer."""


class DataError(ValueError):
    """A data set with an unknown kind, invalid options or an unreadable file."""


class DataChanged(DataError):
    """A file that changed after the worker read it at its start."""


class NoChatTemplate(DataError):
    """Chats for a tokenizer that has no chat template."""


class LoaderFailed(RuntimeError):
    """A loader that ended or is stuck. The message names it, with the remedy."""


class InputMismatch(UnsupportedRun):
    """A model that does not take a data set's inputs. The text has no values and no examples."""


class Indivisible(UnsupportedRun):
    """A batch whose loss is not the sum of the losses of its pieces. An automatic size depends on the memory that
    examples take."""


class ExampleTooLarge(MemoryError):
    """A single example for which the device has too little memory."""


class TrainingDiverged(ArithmeticError):
    """A loss, a gradient or a weight that is not finite."""


class NoFiniteLoss(TrainingDiverged):
    """A loss that is not finite for another reason than the learning rate: the data, or the version."""


def in_short(fault: BaseException) -> str:
    """Return a library's error message on one line, cut off after 300 characters."""
    return " ".join(str(fault).split())[:300]


ASSERTION = "device-side assert"
"""The part of torch's message by which a GPU refuses an index: of a token, a position or a label."""


def is_device_failure(fault: BaseException | None) -> bool:
    """Return True if an error, or its cause, reports a failed GPU."""
    if fault is None:
        return False
    # torch.AcceleratorError. Before 2.8 torch raised a RuntimeError.
    names = {kind.__name__ for kind in type(fault).__mro__}
    return "AcceleratorError" in names or ASSERTION in str(fault) or is_device_failure(fault.__cause__)


def is_machine_failure(fault: BaseException) -> bool:
    """Return True if an error says that memory is exhausted, or that a GPU failed: no example is the cause."""
    # torch.OutOfMemoryError, without an import of torch.
    exhausted = "OutOfMemoryError" in {kind.__name__ for kind in type(fault).__mro__}
    return exhausted or isinstance(fault, MemoryError) or is_device_failure(fault)

"""What a site allows, whatever a coordinator asks. Judged with the worker's own block table, never another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from pydantic import Field, PositiveFloat, PositiveInt

from shared.blocks import EVERYTHING, Block, Frozen, Selector
from shared.privacy import Budget
from shared.wire import Label, Task, TaskKind

GIB = 1 << 30
SHOWN = 8


class PolicyViolation(Exception):
    """A task asks for what the site does not allow. `rule` is the setting that forbids it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class Allowance(Budget):
    """What all runs together may find out of one example of a data set. Runs without privacy may not train on it."""

    evaluations: bool = Field(
        default=False, description="whether versions may be measured on what is held out of it, which nothing covers"
    )

    def check(self, task: Task) -> None:
        """Judges what a task on the data set is, before what it would spend. Raises PolicyViolation."""
        if task.kind == "train" and task.privacy is None:
            raise PolicyViolation("privacy", f"the data set {task.dataset!r} has a budget, and the run no privacy")
        if task.kind == "train" and task.privacy and task.privacy.selection == "uncovered":
            raise PolicyViolation("privacy", f"{task.dataset!r} has a budget, which covers no exact choice of blocks")
        if task.kind == "evaluate" and not (task.held_out and self.evaluations):
            raise PolicyViolation("privacy", f"no version is measured on {task.dataset!r}, which has a budget")


class Policy(Frozen):
    """A site's rules. By default any installed method may use any data set that the settings name, within bounds."""

    methods: tuple[str, ...] | None = Field(default=None, description="methods allowed; all installed if left out")
    datasets: tuple[Label, ...] | None = Field(default=None, description="data sets that runs may use")
    models: tuple[str, ...] | None = Field(default=None, description="transformers' model types that runs may use")
    may_send: Selector = Field(default=EVERYTHING, description="blocks that may leave")
    never_send: tuple[str, ...] = Field(
        default=(), description="names of blocks that never leave, as shell patterns; stronger than may_send"
    )
    max_epochs: PositiveInt = Field(default=100, description="passes over the data in one task, over all phases")
    max_batch: PositiveInt = Field(default=65_536, description="examples in one batch")
    max_tries: PositiveInt = Field(default=10, description="updates of one round that one worker hands in")
    max_task_seconds: PositiveFloat = Field(default=7 * 86400.0, description="however often its lease is renewed")
    min_measured: PositiveInt = Field(default=1, description="fewest examples that a version is measured on")
    max_model_bytes: PositiveInt = 64 * GIB
    max_upload_bytes: PositiveInt = 16 * GIB
    max_lease_seconds: PositiveFloat = 3600.0

    def allows_method(self, name: str) -> bool:
        return self.methods is None or name in self.methods

    def allows_dataset(self, name: str) -> bool:
        return self.datasets is None or name in self.datasets

    def _withholds(self, block: Block) -> bool:
        return any(fnmatchcase(block.name, pattern) for pattern in self.never_send)

    def check_task(self, task: Task, kinds: Sequence[TaskKind]) -> None:
        """Judges a task by itself, before anything is fetched for it. Raises PolicyViolation."""
        if task.kind not in kinds:
            raise PolicyViolation("kinds", f"this worker does not {task.kind}")
        if not self.allows_method(task.method.name):
            raise PolicyViolation("methods", f"the method {task.method.name[:80]!r} is not allowed here")
        if not self.allows_dataset(task.dataset):
            raise PolicyViolation("datasets", f"runs may not use the data set {task.dataset!r}")
        if task.kind == "train":
            self.check_epochs(task.training.epochs)
        if task.lease_seconds > self.max_lease_seconds:
            raise PolicyViolation(
                "max_lease_seconds",
                f"a lease of {task.lease_seconds} s is longer than the {self.max_lease_seconds} s allowed",
            )

    def check_epochs(self, epochs: int) -> None:
        if epochs > self.max_epochs:
            raise PolicyViolation("max_epochs", f"{epochs} epochs are more than the {self.max_epochs} allowed")

    def check_batch(self, size: int | None, examples: int) -> None:
        """Judges the batches that so many examples make; all in one if `size` is None. Raises PolicyViolation."""
        if (largest := min(size or examples, examples)) > self.max_batch:
            raise PolicyViolation("max_batch", f"a batch of {largest} is more than the {self.max_batch} allowed")

    def check_measured(self, examples: int) -> None:
        if examples < self.min_measured:
            raise PolicyViolation(
                "min_measured",
                f"figures of {examples} examples tell too much of each; {self.min_measured} are wanted",
            )

    def check_duration(self, seconds: float) -> None:
        if seconds > self.max_task_seconds:
            raise PolicyViolation(
                "max_task_seconds", f"the task takes longer than the {self.max_task_seconds:g} s allowed"
            )

    def check_model_type(self, model_type: str) -> None:
        if self.models is not None and model_type not in self.models:
            raise PolicyViolation("models", f"the model type {model_type[:80]!r} is not allowed here")

    def check_model(self, nbytes: int) -> None:
        if nbytes > self.max_model_bytes:
            raise PolicyViolation(
                "max_model_bytes", f"a model of {nbytes} bytes is larger than the {self.max_model_bytes} allowed"
            )

    def check_memory(self, nbytes: int) -> None:
        """Judges the server memory that a plan fetches, which may be as large as a model. Raises PolicyViolation."""
        if nbytes > self.max_model_bytes:
            raise PolicyViolation(
                "max_model_bytes",
                f"server memory of {nbytes} bytes is larger than the {self.max_model_bytes} allowed",
            )

    def check_upload(self, asked: Iterable[Block]) -> None:
        """Judges the blocks that a plan asks for, before they are trained. Raises PolicyViolation naming them."""
        blocks = tuple(asked)
        if refused := [block.name for block in blocks if self._withholds(block)]:
            raise PolicyViolation("never_send", f"these blocks never leave: {_listed(refused)}")
        if refused := [block.name for block in blocks if not self.may_send.holds(block)]:
            raise PolicyViolation("may_send", f"these blocks may not leave: {_listed(refused)}")

    def check_private(self, asked: Iterable[Block]) -> None:
        """Judges those of a plan's blocks that the method keeps at the site. Raises PolicyViolation naming them."""
        if refused := [block.name for block in asked]:
            raise PolicyViolation("private", f"the method keeps these at the site: {_listed(refused)}")

    def check_egress(self, names: Iterable[str], nbytes: int, asked: Sequence[Block], kept: Iterable[str]) -> None:
        """Judges what is about to leave: the names in an update file of `nbytes`, against what the plan asked for,
        what the site allows, and what the method meant to keep. Raises PolicyViolation."""
        names = set(names)
        if unasked := names - {block.name for block in asked}:
            raise PolicyViolation("plan", f"the plan did not ask for {_listed(unasked)}")
        self.check_upload(block for block in asked if block.name in names)
        if private := names & set(kept):
            raise PolicyViolation("vault", f"the method keeps these and sends them too: {_listed(private)}")
        if nbytes > self.max_upload_bytes:
            raise PolicyViolation(
                "max_upload_bytes", f"an update of {nbytes} bytes is larger than the {self.max_upload_bytes} allowed"
            )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")

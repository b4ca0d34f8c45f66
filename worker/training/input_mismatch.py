"""Mismatches of a data set, a model and a training loss that do not depend on the examples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import torch
from torch import Tensor

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.model.dataset_schema import limits
from tessera.shared.model.spec import Head, Model
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.errors import ASSERTION, InputMismatch, in_short, is_device_failure
from tessera.worker.model.forward import IGNORED, CrossEntropy, counted_labels, evaluation_mode, forward
from tessera.worker.training.context import LocalTaskContext, synthetic_batch

FAULTS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""The errors of libraries when a model meets other inputs than it takes. Our own errors are subclasses."""

UNKNOWN_INDEX = ("index out of range in self", "Target ")
"""The beginnings of torch's messages about a token or a label that the model lacks."""


@contextmanager
def explained(
    model: Model, context: LocalTaskContext, dataset: Dataset, *, private: bool, rehearses: bool = True
) -> Iterator[None]:
    """Raise InputMismatch in place of a library's error if the model fails on a synthetic example too.

    Its text has only what the site's settings fix. Of a private task's errors, no other is explained, as it could
    depend on the examples. Without `rehearses`, nothing is computed.
    """
    try:
        yield
    except FAULTS as fault:
        takes = f"The model is a {limits(model)}"
        if is_device_failure(fault):
            # Nothing can be computed any more, no synthetic example either.
            if private or ASSERTION not in str(fault):
                raise
            raise InputMismatch(
                f"the GPU stopped at a token, a position or a label that the model lacks. {takes}"
            ) from fault
        if type(fault) not in FAULTS:
            raise
        if rehearses and rehearsal_fault(context, dataset.padded() if private else dataset, context.forward):
            raise InputMismatch(
                f"the model gives no output for a synthetic example of the data set ({dataset.schema})"
                f"{_cause(model, context, dataset)}. {takes}"
            ) from fault
        if not private and str(fault).startswith(UNKNOWN_INDEX):
            raise InputMismatch(f"the data set has tokens or labels that the model lacks. {takes}") from fault
        raise


def count_labelled(head: Head, dataset: Dataset) -> None:
    """Log the examples from which nothing is learned, since none of their labels counts.

    Raises InputMismatch if these are all. Labels that are read from a file in training are not counted.
    """
    labels = dataset.inputs[LABELS]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return
    counted = labels[:, None] if labels.ndim < 2 else counted_labels(head, labels)
    without = int((counted == IGNORED).flatten(1).all(dim=1).sum())
    if without and without == len(labels):
        raise InputMismatch(
            f"no example of the data set has a label that counts: all of their labels are {IGNORED}. A max_length "
            "that cuts texts off before their answers does this"
        )
    if without:
        structlog.get_logger("worker").warning("examples-without-labels", examples=without, of=len(labels))


def _cause(model: Model, context: LocalTaskContext, dataset: Dataset) -> str:
    """Return the cause of a synthetic example's failure, by the settings alone: the schema, or the error of an
    example whose texts are padded to their maximal length. An error is left out if its shapes may depend on the
    examples."""
    if found := dataset.schema.mismatches(model, padded=True, prefers=context.preference is not None):
        return f": {'; '.join(found)}"
    fixed = all(one.shape is not None for one in dataset.schema.inputs.values())
    fault = rehearsal_fault(context, dataset.padded(), context.forward)
    return f": {type(fault).__name__}: {in_short(fault)}" if fault and fixed and dataset.schema.inputs else ""


def require_own_loss(context: LocalTaskContext, dataset: Dataset) -> None:
    """Raise UnsupportedRun if settings change the training loss, and the model's own is no plain cross entropy.

    The two are compared on a synthetic example. A model that fails on it fails in training too, where that is
    explained.
    """

    def compare(batch: dict[str, Tensor]) -> None:
        own, labels = forward(context.model, context.head, batch), batch["labels"]
        if own.logits is not None and not labels.is_floating_point():
            expected = CrossEntropy().of_batch(own.logits, context.head, labels)
            precise = own.logits.dtype.itemsize >= 4
            if torch.allclose(own.loss.float(), expected, rtol=1e-5 if precise else 1e-2):
                return
        raise UnsupportedRun(
            f"the loss of this {context.model.config.model_type} for {context.head} on the data set "
            f"({dataset.schema}) is not the cross entropy of its logits: leave training.label_smoothing and "
            "training.class_weights out"
        )

    if context.objective and not context.preference:
        rehearsal_fault(context, dataset, compare)


def require_output(context: LocalTaskContext, dataset: Dataset) -> None:
    """Raise InputMismatch if the model fails on a synthetic example of the maximal length."""
    if fault := rehearsal_fault(context, dataset.padded(), context.forward):
        raise InputMismatch(
            f"the model gives no output for a synthetic example of the data set ({dataset.schema}), padded to the "
            "data set's max_length, which the model must accept"
        ) from fault


def rehearsal_fault(
    context: LocalTaskContext, dataset: Dataset, compute: Callable[[dict[str, Tensor]], object]
) -> Exception | None:
    """Return the error of `compute` on a batch of one synthetic example, or None."""
    batch = synthetic_batch(context.model, dataset)
    try:
        with evaluation_mode(context.model), torch.no_grad():
            compute(batch)
    except (torch.OutOfMemoryError, UnsupportedRun):
        raise
    except FAULTS as fault:
        return fault
    return None

"""The forward pass and the losses of each kind of head."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from tessera.shared.methods.base import Output, UnsupportedRun
from tessera.shared.model.dataset_schema import ANSWERS, IDS, LABELS, MULTI_LABEL, REGRESSION
from tessera.shared.model.spec import Head, Model
from tessera.shared.model.training_loss import class_weights_of
from tessera.shared.run_settings import DPO_BETA, Training

IGNORED = -100
"""Label of positions that the loss ignores, in transformers' models and in ours."""

NUMBER_HEADS: tuple[Head, ...] = ("text-classification", "image-classification")
"""The heads whose labels may be numbers."""


@dataclass(frozen=True)
class CrossEntropy:
    """A cross entropy with integer labels that replaces the model's own loss, which has none of these settings."""

    label_smoothing: float = 0.0
    """Share of a label's weight that all classes have equally (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""
    class_weights: Tensor | None = None
    """The weight of each class, float32 [classes]."""
    private: bool = False
    """True for differential privacy: an example's loss does not depend on the weights of the others' labels."""

    def of_batch(self, logits: Tensor, head: Head, labels: Tensor) -> Tensor:
        """Return the mean over all labels that count, each by the weight of its class."""
        return self.of_examples(logits, head, labels).mean() if self.private else self._of(logits, head, labels)

    def of_examples(self, logits: Tensor, head: Head, labels: Tensor) -> Tensor:
        """Return the loss of each example, [examples]: the sum of its labels' weighted losses over their number."""
        each = self._of(logits, head, labels, "none")
        if labels.ndim == 1:
            return each
        counted = counted_labels(head, labels) != IGNORED  # [examples, positions]
        return each.reshape(counted.shape).sum(dim=1) / counted.sum(dim=1).clamp(min=1)

    def _of(self, logits: Tensor, head: Head, labels: Tensor, reduction: str = "mean") -> Tensor:
        logits = logits[:, :-1] if head == "causal-lm" else logits
        return cross_entropy(
            _precise(logits).flatten(0, -2),  # [labels, classes]
            counted_labels(head, labels).flatten(),
            self.class_weights,
            reduction=reduction,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )

    def weight_of(self, head: Head, labels: Tensor) -> Tensor:
        """Return the sum of the weights of the labels that count, a scalar on their device."""
        labels = counted_labels(head, labels)
        weights = 1.0 if self.class_weights is None else self.class_weights[labels.clamp(min=0)]
        return (weights * (labels != IGNORED)).sum()


@dataclass(frozen=True)
class Preference(CrossEntropy):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    An example is a pair of texts, and of two classes: the label 1 says that its second text is preferred. The logits
    are the texts' rewards. Of equal rewards the first class is predicted, which is the wrong one.
    """

    beta: float = DPO_BETA
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors that the reference has in place of the model's of these names."""

    def rewards(
        self, model: nn.Module, batch: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return beta log(pi(y|x) / pi_ref(y|x)) of each text, [examples, 2], by the sums over the tokens of its
        answers y. The inputs are [examples, 2, tokens]; of `ANSWERS` those tokens are not 0."""
        inputs = {name: tensor.flatten(0, 1) for name, tensor in batch.items() if name != LABELS}
        answers = inputs.pop(ANSWERS) != 0
        # A position predicts the next token.
        labels = inputs[IDS].masked_fill(~answers, IGNORED)[:, 1:]

        def log_likelihoods(values: Mapping[str, Tensor] | None) -> Tensor:
            output: Any = model(**inputs) if values is None else functional_call(model, dict(values), (), inputs)
            logits = _precise(output.logits[:, :-1]).flatten(0, 1)
            each = cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=IGNORED)
            return -each.view_as(labels).sum(dim=1)

        # The reference first: nothing of it stays in memory. Compiled code would be compiled again for its tensors.
        with torch.no_grad(), without_dropout(model), uncompiled(model):
            reference = log_likelihoods(self.reference)
        rewards: Tensor = self.beta * (log_likelihoods(values) - reference)
        return rewards.view(-1, 2)


def _precise(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 if they are."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def objective_of(
    training: Training, model: Model, device: torch.device, *, private: bool = False
) -> CrossEntropy | None:
    """Return the training loss that a run's settings ask for; None for the model's own.

    For a private task, the weights are divided by the mean weight of all classes, which reads no example.
    """
    weights = class_weights_of(training, model)
    if weights is None:
        return CrossEntropy(training.label_smoothing, private=private) if training.label_smoothing else None
    each = torch.tensor(weights, dtype=torch.float32, device=device)
    return CrossEntropy(training.label_smoothing, each / each.mean() if private else each, private)


def forward(
    model: nn.Module,
    head: Head,
    batch: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    objective: CrossEntropy | None = None,
) -> Output:
    """Return the loss and logits of a batch of the model's keyword inputs, which include `labels`.

    `values` replace the model's tensors of the same names; an `objective` replaces its own loss, and a `Preference`
    its logits too. A contrastive model is a classifier whose classes are texts: beside `pixel_values` [examples, ...]
    it takes `input_ids` [classes, tokens], and its loss is the cross-entropy of each image's logits over the texts.
    """
    if isinstance(objective, Preference):
        logits = objective.rewards(model, batch, values)
        return Output(objective.of_batch(logits, head, batch[LABELS]), logits)
    # Half of the families require pixels and sound in the dtype of the weights.
    dtype = next(model.parameters()).dtype
    inputs = {
        name: tensor.to(dtype) if tensor.is_floating_point() and name != "labels" else tensor
        for name, tensor in batch.items()
    }
    if head == "text-classification" and "attention_mask" in inputs and _reads_last_place(model):
        inputs = _padded_on_the_left(inputs)
    # Some models make the inputs of their decoder from the labels.
    numbers = has_numbers(head, batch.get("labels"))
    ours = head == "contrastive" or numbers or (objective is not None and head != "seq2seq-lm")
    labels = inputs.pop("labels") if ours else None
    if head == "causal-lm" and "position_ids" in inputs:
        # With a cache, transformers does not look for the documents of packed rows.
        inputs["use_cache"] = False  # type: ignore[assignment]
    output: Any = model(**inputs) if values is None else functional_call(model, dict(values), (), inputs)
    if numbers:
        logits, each = output.logits, number_losses(model, output.logits, batch["labels"])
        return Output(each.mean(), logits, each)
    if objective:
        logits, loss = output.logits, objective.of_batch(output.logits, head, batch["labels"])
    elif labels is None:
        logits, loss = output.get("logits"), output.loss
    else:
        logits = output.logits_per_image  # [examples, classes]
        loss = cross_entropy(logits, labels)
    return Output(_zero_without_labels(loss, head, batch.get("labels")), logits)


def has_numbers(head: Head, labels: Tensor | None) -> bool:
    """Return True if the labels are numbers rather than classes: 0 or 1 for each of several labels, [examples,
    labels], or the targets of a regression, [examples] or [examples, outputs]."""
    return labels is not None and labels.is_floating_point() and head in NUMBER_HEADS


def learns_several_labels(model: nn.Module) -> bool:
    """Return True if numbers are several labels of an example, and False if they are the targets of a regression.

    `problem_type` of its config decides; without it, as in transformers, the number of outputs.
    """
    config: Any = model.config
    said = getattr(config, "problem_type", None)
    return said == MULTI_LABEL or (said != REGRESSION and config.num_labels > 1)


def number_losses(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each example, [examples], of labels that are numbers: the mean binary cross entropy of its
    labels, or the mean squared error of its targets.

    In transformers' own losses, weights and labels of different dtypes have no gradient. Raises ValueError if the
    model has another number of outputs.
    """
    logits = _precise(logits)
    if logits.numel() != labels.numel():
        raise ValueError(f"the model has {logits.shape[-1]} outputs, and labels are {list(labels.shape[1:])}")
    of_each = binary_cross_entropy_with_logits if learns_several_labels(model) else mse_loss
    found: Tensor = of_each(logits.reshape(labels.shape), labels.to(logits.dtype), reduction="none")
    return found.flatten(1).mean(dim=1) if found.ndim > 1 else found


def _zero_without_labels(loss: Tensor, head: Head, labels: Tensor | None) -> Tensor:
    """Return the loss of a batch, or 0 if none of its labels counts: the mean over none is not a number."""
    if labels is None or labels.is_floating_point():
        return loss
    counted = labels if labels.ndim < 2 else counted_labels(head, labels)
    return torch.where((counted != IGNORED).any(), loss, torch.zeros_like(loss))


def _reads_last_place(model: nn.Module) -> bool:
    """Return True if the model reads its answer from the last place of a row, padding or not, as XLNet does."""
    config = getattr(model, "config", None)
    return getattr(config, "model_type", None) == "xlnet"


def _padded_on_the_left(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return texts with their padding moved before them."""
    order = inputs["attention_mask"].argsort(dim=1, stable=True)  # [examples, tokens]
    return {
        name: tensor.gather(1, order) if tensor.shape == order.shape else tensor for name, tensor in inputs.items()
    }


def label_count(head: Head, labels: Tensor) -> int:
    """Return the number of labels over which the model's own loss of a batch is the mean."""
    if labels.is_floating_point():
        return len(labels)
    return int(((labels if labels.ndim < 2 else counted_labels(head, labels)) != IGNORED).sum())


def one_for_each(labels: Tensor) -> bool:
    """Return True if each example has exactly one label that counts."""
    return labels.is_floating_point() or (labels.ndim < 2 and bool((labels != IGNORED).all()))


def counted_labels(head: Head, labels: Tensor) -> Tensor:
    """Return the labels of the positions that predict one, of which the loss ignores those that are `IGNORED`."""
    # A position predicts the next one.
    return labels[:, 1:] if head == "causal-lm" else labels


def losses(output: Output, head: Head, labels: Tensor, objective: CrossEntropy | None = None) -> Tensor:
    """Return the loss of each example of a batch, [examples], each independent of the other examples.

    The model's own loss is not the mean of these for texts: it divides by the tokens of the whole batch. Raises
    UnsupportedRun for a head without logits and for floating-point labels of another task than
    `has_numbers` describes.
    """
    if output.each is not None:
        return output.each
    logits = output.logits
    if logits is None or labels.is_floating_point():
        raise UnsupportedRun(
            f"per-example losses need logits and integer labels: the head {head} has "
            f"{'no logits' if logits is None else f'labels of {labels.dtype}'}"
        )
    return (objective or CrossEntropy()).of_examples(logits, head, labels)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, without a change of torch's random state. On exit, restore its modules'
    modes: some are in evaluation mode in training, such as normalisations of a private task."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Run a model's own code within the block. Compiled code passes over newer hooks."""
    return torch.compiler.set_stance("force_eager") if "forward" in vars(model) else nullcontext()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode. On exit, restore its modules' modes, its parameters' `requires_grad` and
    torch's random state."""
    modes = [(module, module.training) for module in model.modules()]
    needs = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    devices = sorted({parameter.device.index for parameter, _ in needs if parameter.is_cuda})
    model.train(mode=False)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, needed in needs:
            parameter.requires_grad_(needed)

"""What a model makes of a batch, whatever its head: the one place that knows how each head is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from shared.methods.contract import Output
from shared.model import Head


def forward(model: Callable[..., Any], head: Head, batch: Mapping[str, Tensor]) -> Output:
    """The loss and the logits of a batch that holds the model's keyword inputs, `labels` among them.

    A contrastive model is a classifier whose classes are texts: `input_ids` [classes, tokens] beside `pixel_values`
    [examples, ...], and the loss is the cross-entropy of each image's logits over the texts.
    """
    if head != "contrastive":
        output = model(**batch)
        return Output(output.loss, output.get("logits"))
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits_per_image  # [examples, classes]
    return Output(cross_entropy(logits, batch["labels"]), logits)

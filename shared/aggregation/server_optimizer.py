"""Server optimizers: a round's mean step is treated as a gradient, and applied with momentum or adaptively.

Reddi et al. 2021, Adaptive Federated Optimization, arXiv 2003.00295, Algorithms 1 and 2; SGD with momentum is FedAvgM
of Hsu et al. 2019, arXiv 1909.06335. As there, no moment is corrected for its bias, and the second starts at tau^2.

They work with any method: for each block that its merge changed, g = base - merged is the gradient. Moments belong
to a block and are stored in the version, under `server/m/<block>` and `server/v/<block>`. A block that a round did
not merge keeps its value and its moments, bit for bit; a gradient of zero would still have moved it. So a frozen
block keeps its moments until it is trained again.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from tessera.shared.schema import Compatibility, Value
from tessera.shared.tensors.lazy import Array

PREFIX = "server/"
"""Prefix of the names of a server optimizer's state; no method may use it."""


@dataclass(frozen=True)
class OptimizerMoment:
    """A moment of a block's gradients: its initial value, and the update from the last value and a gradient."""

    start: float
    next: Callable[[Array, Array], Array]


class OptimizerRule(Value):
    """One kind of server optimizer. Its arithmetic is on flat float64 chunks."""

    buffered: ClassVar[Compatibility] = Compatibility(
        "its memory would add to steps that come late", 'kind = "none"', lambda optimizer: optimizer.neutral
    )
    """Says whether it takes steps from different versions."""
    unequal_steps: ClassVar[Compatibility] = Compatibility()
    """Says whether it takes steps of unequal local work."""

    @property
    def neutral(self) -> bool:
        """Return True if the rule leaves every merge unchanged."""
        return False

    def moments(self) -> dict[str, OptimizerMoment]:
        """Return the rule's moments, by letter."""
        return {}

    @abstractmethod
    def step(self, g: Array, moments: Mapping[str, Array]) -> Array:
        """Return the step to subtract from the base, given the gradient and the moments with the gradient in them."""


class NoOptimizer(OptimizerRule):
    """The merged blocks are the next version."""

    buffered = Compatibility()
    kind: Literal["none"] = "none"

    @property
    def neutral(self) -> bool:
        return True

    def step(self, g: Array, moments: Mapping[str, Array]) -> Array:
        return g


class Momentum(OptimizerRule):
    """m = momentum m + g; w = w - learning_rate m. At its defaults it is `none`, bit for bit."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: float = Field(default=1.0, gt=0, le=1000, description="the step size at the coordinator")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="share of the last step that is kept")

    @property
    def neutral(self) -> bool:
        return (self.learning_rate, self.momentum) == (1.0, 0.0)

    def moments(self) -> dict[str, OptimizerMoment]:
        return {"m": OptimizerMoment(0.0, lambda m, g: self.momentum * m + g)} if self.momentum else {}

    def step(self, g: Array, moments: Mapping[str, Array]) -> Array:
        step: Array = self.learning_rate * moments.get("m", g)
        return step


class AdaptiveOptimizer(OptimizerRule):
    """m = beta1 m + (1 - beta1) g; w = w - learning_rate m / (sqrt(v) + tau), with v as the kind says.

    An entry that would move by much more than `tau` a round moves by about `learning_rate` instead. The paper tunes
    it for every task; 1e-3 is about the distance that a few dozen local steps of fine-tuning move an entry.
    """

    learning_rate: float = Field(default=1e-3, gt=0, le=1000, description="the step size at the coordinator")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of the steps")
    tau: float = Field(default=1e-3, gt=0, le=1, description="added to the root of the second moment")

    def moments(self) -> dict[str, OptimizerMoment]:
        first = {"m": OptimizerMoment(0.0, lambda m, g: self.beta1 * m + (1 - self.beta1) * g)} if self.beta1 else {}
        return {**first, "v": OptimizerMoment(self.tau**2, self.second)}

    @abstractmethod
    def second(self, v: Array, g: Array) -> Array:
        """Return the next v."""

    def step(self, g: Array, moments: Mapping[str, Array]) -> Array:
        step: Array = self.learning_rate * moments.get("m", g) / (np.sqrt(moments["v"]) + self.tau)
        return step


class Adam(AdaptiveOptimizer):
    """v = beta2 v + (1 - beta2) g^2."""

    kind: Literal["adam"] = "adam"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")

    def second(self, v: Array, g: Array) -> Array:
        after: Array = self.beta2 * v + (1 - self.beta2) * g * g
        return after


class Yogi(AdaptiveOptimizer):
    """v = v - (1 - beta2) g^2 sign(v - g^2)."""

    kind: Literal["yogi"] = "yogi"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")

    def second(self, v: Array, g: Array) -> Array:
        after: Array = v - (1 - self.beta2) * g * g * np.sign(v - g * g)
        return after


class Adagrad(AdaptiveOptimizer):
    """v = v + g^2, and no momentum unless asked for, as is usual with Adagrad."""

    kind: Literal["adagrad"] = "adagrad"
    beta1: float = Field(default=0.0, ge=0, lt=1, description="decay of the mean of the steps")

    def second(self, v: Array, g: Array) -> Array:
        after: Array = v + g * g
        return after


ServerOptimizer = Annotated[NoOptimizer | Momentum | Adam | Yogi | Adagrad, Field(discriminator="kind")]
"""The rule that computes a version from the merged updates."""

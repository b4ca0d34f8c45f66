"""Settings of a run that no method owns: local training, differential privacy, hours."""

import math
import operator
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from tessera.shared.schema import Compatibility, Condition, Value

MAX_STEPS = 1_000_000
"""Steps of a round that a run may set, and those whose learning rates a method sums one by one."""

MAX_CLASSES = 100_000

DPO_BETA = 0.1

Decay = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(gt=0, le=1e6)]


MAX_MAGNITUDE = 30
COLOURS = ("brightness", "contrast", "saturation", "hue", "rand_augment")


class Augmentation(Value):
    """Random changes of images in training. By default there are none."""

    crop: tuple[float, float] | None = Field(
        default=None,
        description="smallest and largest share of an image's area, such as [0.5, 1.0], that is cut out at random "
        "and resized to the whole image's size",
    )
    crop_aspect: tuple[float, float] = Field(
        default=(0.75, 1.333),
        description="for `crop`: smallest and largest ratio of the width cut out to its height",
    )
    crop_padding: NonNegativeInt = Field(
        default=0,
        le=1024,
        description="pixels of black put on each side of an image, of which a part of the image's size is cut out at "
        "random",
    )
    horizontal_flip: float = Field(default=0.0, ge=0, le=1, description="probability of mirroring left to right")
    vertical_flip: float = Field(default=0.0, ge=0, le=1, description="probability of mirroring top to bottom")
    brightness: float = Field(
        default=0.0, ge=0, le=1, description="largest change of the brightness, as a share of it"
    )
    contrast: float = Field(default=0.0, ge=0, le=1, description="largest change of the contrast, as a share of it")
    saturation: float = Field(
        default=0.0, ge=0, le=1, description="largest change of the saturation, as a share of it"
    )
    hue: float = Field(
        default=0.0, ge=0, le=0.5, description="largest turn of the hue, as a share of the circle of colours"
    )
    rand_augment: NonNegativeInt = Field(
        default=0, le=8, description="number of operations of RandAugment, drawn for each image"
    )
    rand_augment_magnitude: int = Field(
        default=9, ge=0, le=MAX_MAGNITUDE, description="strength of RandAugment's operations"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name, values, most in (("crop", self.crop, 1.0), ("crop_aspect", self.crop_aspect, 100.0)):
            if values and not 0 < values[0] <= values[1] <= most:
                raise ValueError(f"{name} is {list(values)}: give two numbers above 0, at most {most:g}, in order")
        for name, needs in (("crop_aspect", "crop"), ("rand_augment_magnitude", "rand_augment")):
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and not getattr(self, needs):
                raise ValueError(f"{name} is set without {needs}: set {needs}, or leave {name} out")
        return self

    @property
    def colours(self) -> list[str]:
        """The settings in use that change colours."""
        return [name for name in COLOURS if getattr(self, name)]


class Training(Value):
    """Settings of local training, common to all methods."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(("momentum",), lambda training: training.optimizer == "sgd", 'optimizer to "sgd"'),
        Condition(("betas",), lambda training: training.optimizer == "adamw", 'optimizer to "adamw"'),
        Condition(("decay_norms_and_biases",), lambda training: training.weight_decay > 0, "weight_decay above 0"),
        Condition(("dpo_beta",), lambda training: training.loss == "dpo", 'loss to "dpo"'),
    )

    # Write a setting that is newer than 0.1.0 only if it is used (`exclude_if`): what sites keep of a run that began
    # before, its terms and the digest of its approval, stays true.

    epochs: PositiveInt | None = Field(
        default=1, le=1000, description="passes over a site's examples in a round; leave it out if `steps` is given"
    )
    steps: PositiveInt | None = Field(
        default=None,
        le=MAX_STEPS,
        description="steps of the local optimizer in a round, in place of `epochs`",
    )
    batch_size: PositiveInt | None = Field(
        default=32, description="examples per step; null, which TOML cannot say, puts all in one batch"
    )
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="the local optimizer")
    learning_rate: float = Field(default=1e-4, gt=0, le=100, description="the step size of the local optimizer")
    full_fine_tuning: bool = Field(
        default=False,
        description="whether a model with adapters or prompts trains whole, and not only these and, beside adapters, "
        "the head",
    )
    rates: dict[str, Factor] = Field(
        default={},
        max_length=16,
        description="learning rates by the role of a block, as multiples of `learning_rate`; `private` is for the "
        "modules that a method adds at each site",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="a constant learning rate, or its decay to zero over all rounds of the run",
    )
    warmup: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the run's rounds over which the learning rate first rises",
    )
    weight_decay: float = Field(default=0.01, ge=0, le=10, description="decay of the weights by the local optimizer")
    decay_norms_and_biases: bool = Field(
        default=True, description="whether weights of normalisation layers and biases decay too"
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="for sgd")
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.999),
        description="for adamw: decay of the means of gradients and of their squares",
    )
    keep_moments: bool = Field(
        default=False,
        description="whether each site keeps the optimizer's moments for its next round, in place of new ones",
    )
    max_gradient_norm: float | None = Field(
        default=None, gt=0, description="l2 norm that a batch's gradient is clipped to"
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="of forward and backward passes; weights stay in their own type"
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="whether the backward pass computes activations again in place of keeping them: less memory, and "
        "about a third more time",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of each label's weight in the training loss that is spread evenly over all classes",
    )
    class_weights: Annotated[tuple[Factor, ...] | dict[str, Factor], Field(max_length=MAX_CLASSES)] | None = Field(
        default=None,
        description="weight of each class in the training loss: a list, or a table by name in which others have 1",
    )
    augmentation: Augmentation = Field(
        default=Augmentation(),
        description="random changes of images in training",
    )
    loss: Literal["dpo"] | None = Field(
        default=None,
        exclude_if=operator.not_,
        description="the model's own loss if left out; `dpo` learns which of two answers is preferred, by adapters "
        "alone",
    )
    dpo_beta: float = Field(
        default=DPO_BETA,
        gt=0,
        le=100,
        exclude_if=DPO_BETA.__eq__,
        description="for `dpo`: the larger, the closer the model stays to the run's first version",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_epochs(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is not None and "epochs" not in given:
            return {**given, "epochs": None}
        return given

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        if self.epochs and self.steps:
            raise ValueError(
                f"epochs is {self.epochs} and steps is {self.steps}, but only one can set the length of a round: "
                "leave out the other"
            )
        if not self.epochs and not self.steps:
            raise ValueError("epochs is null and steps is not given: set one of them to the length of a round")
        return self

    @model_validator(mode="after")
    def _has_moments(self) -> Self:
        if self.keep_moments and self.optimizer == "sgd" and not self.momentum:
            raise ValueError(
                "keep_moments is true, but sgd without momentum has no moments: set momentum or optimizer, or leave "
                "keep_moments out"
            )
        return self

    @property
    def scheduled(self) -> bool:
        """True if the learning rate differs between steps."""
        return self.schedule != "constant" or self.warmup > 0

    def of_steps(self, steps: int | None) -> Self:
        """Return the settings with this number of steps as the length of a round, if there is one."""
        return self.model_copy(update={"steps": steps, "epochs": None}) if steps else self

    @property
    def augments(self) -> bool:
        """True if training changes images at random."""
        return self.augmentation != _UNCHANGED


_UNCHANGED = Augmentation()

MAX_EPSILON = 1000.0
MAX_DELTA = 0.1

MAX_PER_GROUP = 1024
DEFAULT_PER_GROUP = 8

WEAK_EPSILON = 10.0
"""An epsilon above this protects hardly anything: it lets a unit make an outcome 22,000 times as likely.
With a larger one, noise hides so little of a site that its sums count as exact."""
NO_PROTECTION = "no protection"

Unit = Literal["example", "group"]
"""The unit that differential privacy protects: an example, or a group of examples, such as all of one patient."""


def with_meaning(epsilon: float, shown: str) -> str:
    """Return an epsilon as it is shown, followed by the words `no protection` if it is too large."""
    return f"{shown}: {NO_PROTECTION}" if epsilon > WEAK_EPSILON else shown


class Budget(Value):
    """Privacy loss per protected unit: (epsilon, delta) for neighbouring data sets, in one of which one unit of the
    other, an example or a group, is replaced by nothing."""

    epsilon: float = Field(
        gt=0, le=MAX_EPSILON, description="bound on the privacy loss; the smaller, the more private"
    )
    delta: float = Field(gt=0, lt=MAX_DELTA, description="well below one over the number of examples, or of groups")

    @property
    def bound(self) -> str:
        """The bound in words."""
        epsilon = f"epsilon {self.epsilon:g}"
        meaning = f" ({with_meaning(self.epsilon, epsilon)})" if self.epsilon > WEAK_EPSILON else ""
        return f"{epsilon} at delta {self.delta:g}{meaning}"


class InvalidDelta(ValueError):
    """A delta that gives no guarantee."""


def check_delta(delta: float, units: int, unit: str, setting: str) -> None:
    """Raise InvalidDelta for a delta that would permit the release of whole units. `setting` is its name."""
    if delta > (most := units**-1.1):
        raise InvalidDelta(
            f"a delta of {delta:g} gives no guarantee for {units} {unit}s: set {setting} to {most:.2g} or less, "
            f"better to less than {0.1 / units:.2g}"
        )


class UnitBudget(Budget):
    """A budget that names the unit whose loss it bounds."""

    unit: Unit = Field(
        default="example",
        description="what is protected as one: each example, or each group of examples, such as all of one patient",
    )

    @property
    def in_words(self) -> str:
        return f"{self.bound} for each {self.unit}"

    def in_unit(self, unit: Unit) -> Budget | None:
        """Return a bound on the loss of `unit` that follows from this one, or None if none does.

        Data sets that differ in one example of a group are each one replaced group from a third, without that group:
        P(M) <= e^epsilon (e^epsilon P'(M) + delta) + delta. A group may have any number of examples, so no bound on
        the loss of an example is one on that of a group.
        """
        if self.unit == unit:
            return self
        delta = self.delta * (1 + math.exp(min(self.epsilon, 500)))
        if unit == "group" or self.epsilon > MAX_EPSILON / 2 or delta >= MAX_DELTA:
            return None
        return Budget(epsilon=2 * self.epsilon, delta=delta)

    def is_met_by(self, other: "UnitBudget") -> bool:
        """Return True if the loss of this budget's unit stays within it under `other`."""
        bound = other.in_unit(self.unit)
        return bound is not None and bound.epsilon <= self.epsilon and bound.delta <= self.delta

    def counts(self, other: "UnitBudget") -> bool:
        """Return True if what keeps to `other` costs this budget a known loss."""
        return self.unit == "example" or other.unit == "group"


def rho_of(target: Budget) -> float:
    """Return the zCDP that would use up the target (Bun and Steinke 2016, arXiv 1605.02065, proposition 1.3)."""
    log = math.log(1 / target.delta)
    # epsilon = rho + 2 sqrt(rho log(1/delta)), solved for the root of rho.
    return (math.sqrt(log + target.epsilon) - math.sqrt(log)) ** 2


def about_together(budgets: Iterable[Budget], delta: float) -> float:
    """Return the epsilon at `delta` of a zCDP that uses up all of the budgets: an estimate, within
    some percent of the result of an accountant of the mechanisms themselves."""
    rho = sum(map(rho_of, budgets))
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


class Privacy(UnitBudget):
    """DP-SGD at each worker, on the blocks that the round trains (Abadi et al. 2016, arXiv 1607.00133, algorithm 1).

    (epsilon, delta) bounds what all updates of the run together reveal about one example, or one group of examples,
    of one worker's data set. It does not cover whole sites, nor evaluations.
    """

    # A site trains at most once from each version, and its ledger counts each training with the steps of its plan.
    buffered: ClassVar[Compatibility] = Compatibility()
    unequal_steps: ClassVar[Compatibility] = Compatibility()

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("selection_share", "selections"), lambda privacy: privacy.selection == "noisy", 'selection to "noisy"'
        ),
    )

    unit: Unit = Field(
        default="example",
        description="what is protected as one: each example, or each group of examples, such as all of one patient, "
        "by the `group` of the sites' data sets. `training.batch_size`, epochs and steps then count groups",
    )
    max_per_group: PositiveInt | None = Field(
        default=None,
        le=MAX_PER_GROUP,
        description='for `unit = "group"`: most examples of a group in a step, drawn again in each; '
        f"{DEFAULT_PER_GROUP} if left out",
    )
    clip_norm: float = Field(
        gt=0,
        le=1e6,
        description="l2 norm that the gradient of one example, or the mean gradient of one group's, over all "
        "trained blocks is clipped to",
    )
    clip: Literal["whole", "per-layer"] = Field(
        default="whole",
        description="what is clipped to `clip_norm`: the whole gradient; or the part of it in each layer, and that "
        "outside layers, with noise by the root of the number of these parts that train",
    )
    selection: Literal["refused", "noisy", "uncovered"] = Field(
        default="refused",
        description="for methods that choose blocks by looking at the data: refused; noisy, at the expense of the "
        "budget; or uncovered, so that epsilon does not bound what the choice reveals",
    )
    selection_share: float = Field(
        default=0.1, gt=0, lt=1, description="of the budget, for noisy selection (measured in zCDP)"
    )
    selections: PositiveInt | None = Field(
        default=None, description="noisy choices that a worker makes in the run; one a round if left out"
    )

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if self.max_per_group is not None and self.unit != "group":
            raise ValueError(
                f'max_per_group is {self.max_per_group}, but unit is "example": set unit to "group", or leave '
                "max_per_group out"
            )
        return self

    @property
    def caveat(self) -> str:
        """The remainder of a sentence on the bound, if the bound does not cover the whole run."""
        return "; the choice of blocks is not covered" if self.selection == "uncovered" else ""

    @property
    def at_workers(self) -> str:
        """The bound of a run in words, with its caveat."""
        return f"{self.in_words} of each worker{self.caveat}"

    @property
    def examples_per_unit(self) -> int:
        """The most examples of a protected unit in one step."""
        return 1 if self.unit == "example" else self.max_per_group or DEFAULT_PER_GROUP


class ClientPrivacy(Budget):
    """DP-FedAvg with one site as the unit (McMahan et al. 2018, arXiv 1710.06963, algorithm 1).

    (epsilon, delta) bounds what all versions of the run together reveal about one site's updates. Without secure sums
    it protects nothing from the coordinator, which reads each update and adds the noise. With them the sites clip and
    add the noise, and it holds against the coordinator too.
    """

    buffered: ClassVar[Compatibility] = Compatibility("its noise is computed for updates of one version")
    unequal_steps: ClassVar[Compatibility] = Compatibility("a step that was divided is no longer within clip_norm")

    delta: float = Field(gt=0, lt=0.1, description="well below one over the number of sites")
    clip_norm: float = Field(
        ge=1e-6,
        le=1e6,
        description="l2 norm that a site's whole update is clipped to; the first one if adaptive",
    )
    clip_quantile: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of updates that adaptive clipping leaves as they are; if left out, clip_norm is fixed",
    )
    expected_sites: PositiveInt | None = Field(
        default=None,
        description="number by which the noisy sum is divided, however many updates come; cohort.size if left out",
    )
    honest_sites: PositiveInt | None = Field(
        default=None,
        description="for secure_sums: senders of each sum, at least, that add their share of the noise and reveal it "
        "to no other; if left out, the quorum of the sums less the helpers that may collude",
    )


DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES

_DAY = "|".join(DAYS)
_SPAN = re.compile(rf"(?:({_DAY})(?:-({_DAY}))? )?([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


def _parsed(text: str) -> list[tuple[int, int]]:
    """Return when it begins, in minutes of the week, and how many minutes it lasts: once for each of its days."""
    found = _SPAN.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no time of the week such as 'Mon-Fri 19:00-07:00' or '00:00-06:30'")
    first, last, *clock = found.groups()
    from_hour, from_minute, to_hour, to_minute = map(int, clock)
    begin, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
    if begin == end or end > DAY_MINUTES:
        raise ValueError(f"{text!r} does not end, or ends at no time of day")
    at = DAYS.index(first) if first else 0
    days = 7 if first is None else 1 if last is None else (DAYS.index(last) - at) % 7 + 1
    lasts = (end - begin) % DAY_MINUTES or DAY_MINUTES
    return [(((at + day) % 7) * DAY_MINUTES + begin, lasts) for day in range(days)]


def _checked(text: str) -> str:
    _parsed(text)
    return text


Span = Annotated[
    str, Field(max_length=32, json_schema_extra={"pattern": f"^{_SPAN.pattern}$"}), AfterValidator(_checked)
]
"""A time of the week, such as `Mon-Fri 19:00-07:00`. It begins on each of its days, or on every day without them; one
whose end is not after its beginning ends the day after."""


def is_open(hours: Iterable[Span], local: datetime) -> bool:
    """Return True if the wall clock `local` is within one of the spans."""
    return any((_minute(local) - begin) % WEEK_MINUTES < lasts for span in hours for begin, lasts in _parsed(span))


def minutes_until_open(hours: Iterable[Span], local: datetime) -> int:
    """Return the minutes of the wall clock until the next span begins; at least one."""
    begins = (begin for span in hours for begin, _ in _parsed(span))
    return min(((begin - _minute(local) - 1) % WEEK_MINUTES + 1 for begin in begins), default=WEEK_MINUTES)


def _minute(local: datetime) -> int:
    return local.weekday() * DAY_MINUTES + 60 * local.hour + local.minute


def is_weak(privacy: Budget | None) -> bool:
    """Return True if noise hides hardly anything of a unit: there is none, or too little to count."""
    return privacy is None or privacy.epsilon > WEAK_EPSILON

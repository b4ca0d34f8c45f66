"""Lengths and learning rates of local training: how many steps a task makes, and the rate of each."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor
from statistics import median

from tessera.shared.run_settings import MAX_STEPS, Training

LEAST_BATCH_IN_SUM = 16
"""In exact sums: an update over few examples would show them, however many sites are in the sum."""


def steps_per_epoch(training: Training, examples: int) -> int:
    """Return the number of batches in one pass over `examples` examples."""
    return 1 if training.batch_size is None else max(1, ceil(examples / training.batch_size))


def local_steps(training: Training, examples: int) -> int:
    """Return the number of optimizer steps of one phase over `examples` examples."""
    return training.steps or (training.epochs or 0) * steps_per_epoch(training, examples)


def local_epochs(training: Training, examples: int) -> int:
    """Return the number of passes over `examples` examples in one phase; the last pass may end early."""
    return ceil(local_steps(training, examples) / steps_per_epoch(training, examples))


def trains_on_few(training: Training, examples: int, least: int) -> bool:
    """Return True if a phase ends before a pass over `examples` examples, with batches of fewer than `least`."""
    few = training.batch_size is not None and training.batch_size < least
    return few and local_steps(training, examples) < steps_per_epoch(training, examples)


@dataclass(frozen=True)
class Pace:
    """The time that a worker takes for a task."""

    seconds_per_step: float
    fixed_seconds: float = 0.0
    """The time that does not depend on the number of steps, such as that of transfers."""


def step_range(training: Training, examples: int, factor: float) -> tuple[int, int]:
    """Return the fewest and the most steps of fitted work, by the steps that `training` says for these examples. The
    range includes these."""
    own = local_steps(training, examples)
    return max(1, ceil(own / factor)), max(own, min(floor(own * factor), MAX_STEPS))


def fitted_steps(
    training: Training, examples: Mapping[str, int], paces: Mapping[str, Pace], factor: float
) -> dict[str, int]:
    """Return the steps with which all workers finish together, by name, within `factor` of the steps that `training`
    says: in the time that the median worker of known pace takes for the latter. A worker of unknown pace makes the
    latter. `examples` are those of each worker."""
    own = {name: local_steps(training, count) for name, count in examples.items()}
    known = {name: paces[name] for name in own if name in paces}
    takes = [pace.fixed_seconds + pace.seconds_per_step * own[name] for name, pace in known.items()]
    found = dict(own)
    for name, pace in known.items():
        made = round(min((median(takes) - pace.fixed_seconds) / pace.seconds_per_step, MAX_STEPS))
        least, most = step_range(training, examples[name], factor)
        found[name] = min(max(made, least), most)
    return found


def rate_factors(training: Training, steps: int, round_number: int, rounds: int) -> Iterator[float]:
    """Yield the share of the learning rate, above 0 and at most 1, at each of the `steps` of a task.

    The schedule runs over all rounds, counted from 1, and a task's steps share its round evenly. So the rate depends
    on no memory and is the same after a restart, and sites with different numbers of steps end a round alike. The
    decay to zero is that of torch's LinearLR and CosineAnnealingLR, whose first step has the full rate. The warm-up
    counts the step that is about to be made, since a rate of zero would waste the first.
    """
    # Taken out of the loop, which may have a million steps.
    warmup, schedule = training.warmup, training.schedule
    for step in range(steps):
        begun = (round_number - 1 + step / steps) / rounds
        if begun < warmup:
            made = (round_number - 1 + (step + 1) / steps) / rounds
            yield min(1.0, made / warmup)
            continue
        decayed = (begun - warmup) / (1 - warmup)
        match schedule:
            case "constant":
                yield 1.0
            case "linear":
                yield 1 - decayed
            case "cosine":
                # (1 + cos(pi x)) / 2, which in this form is never rounded to zero.
                yield math.cos(math.pi / 2 * decayed) ** 2


def require_summable(training: Training, steps: int, *, alike: bool = True) -> None:
    """Raise ValueError for more steps under a schedule, or of those that are not `alike`, than the coordinator sums,
    which a site may claim."""
    if (training.scheduled or not alike) and steps > MAX_STEPS:
        constant = ", or a constant training.schedule without training.warmup" if alike else ""
        raise ValueError(
            f"{steps} steps in a round are more than the {MAX_STEPS} whose learning rates the method can sum: set "
            f"training.steps{constant}"
        )


def full_rate_steps(training: Training, steps: int, round_number: int, rounds: int) -> float:
    """Return the sum of a task's `rate_factors`: its learning rates over `learning_rate`. Raises as
    `require_summable`."""
    require_summable(training, steps)
    return math.fsum(rate_factors(training, steps, round_number, rounds)) if training.scheduled else float(steps)

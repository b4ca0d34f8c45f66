"""The sites of a run's rounds, and how long a round waits for them."""

import operator
from collections.abc import Collection, Iterable
from math import ceil, inf, sqrt
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from tessera.shared.api.tasks import MAX_STALENESS, WORK_FACTOR, CohortTerms
from tessera.shared.problems import Invalid
from tessera.shared.schema import Condition, Label, Value
from tessera.shared.tensors.lazy import digest_of

DeadlineSeconds = Annotated[float, Field(gt=0, le=30 * 86400)]


class Cohort(Value):
    """Participants and time limits of a round. Sites are counted, not workers: a site's token admits any number of
    workers, under names that the site chooses."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("target_updates",),
            lambda cohort: cohort.target_updates < min(cohort.size or inf, len(cohort.sites or ()) or inf),
            "it below size and the number of sites",
        ),
        Condition(
            ("max_staleness", "staleness", "memory", "mixing"),
            lambda cohort: cohort.mode == "buffer",
            'mode to "buffer"',
        ),
        Condition(("work_factor",), lambda cohort: cohort.work == "fitted", 'work to "fitted"'),
    )

    mode: Literal["barrier", "buffer"] = Field(
        default="barrier",
        exclude_if="barrier".__eq__,
        description="barrier: a round merges updates that started from the version before it; buffer: a version is "
        "made as soon as target_updates sites have sent updates, of this or earlier versions, and the other sites go "
        "on with their work",
    )
    max_staleness: PositiveInt = Field(
        default=MAX_STALENESS,
        le=1000,
        exclude_if=MAX_STALENESS.__eq__,
        description="mode buffer: the most versions made since the version that an update started from; a task that "
        "would exceed it is cancelled, and its worker asked again",
    )
    staleness: Literal["sqrt", "none"] = Field(
        default="sqrt",
        exclude_if="sqrt".__eq__,
        description="mode buffer: what a block's step is multiplied by: sqrt: 1 / sqrt(1 + t), if the block has "
        "changed t times since the version that the update started from; none: 1",
    )

    memory: bool = Field(
        default=False,
        exclude_if=operator.not_,
        description="mode buffer: add to each version's mean step the latest steps of the sites that sent none for "
        "it, so that fast sites do not decide where the model goes (CA2FL)",
    )
    mixing: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        exclude_if=operator.not_,
        description="mode buffer, for versions of one update: the share by which a version moves to the values that "
        "the site sent, times its weight by staleness (FedAsync)",
    )

    max_updates_per_site: PositiveInt | None = Field(
        default=None,
        exclude_if=operator.not_,
        description="versions from which a site trains in the run at most; with `privacy`, the noise is computed for "
        "this many rounds if there are more",
    )

    work: Literal["fixed", "fitted"] = Field(
        default="fixed",
        exclude_if="fixed".__eq__,
        description="fixed: each worker trains for the steps or epochs of `training`; fitted: for its own number of "
        "steps, by its speed so far, with which all finish together; a site's step is then divided by its number of "
        "steps, as in FedNova",
    )
    work_factor: float = Field(
        default=WORK_FACTOR,
        gt=1,
        le=1000,
        exclude_if=WORK_FACTOR.__eq__,
        description="work fitted: the most that a worker makes, as a multiple of the steps that `training` says; one "
        "over it is the least",
    )

    size: PositiveInt | None = Field(default=None, description="sites chosen per round; every live site if left out")
    over_selection: float | None = Field(
        default=None,
        gt=0,
        le=10,
        exclude_if=operator.not_,
        description="a round asks this share of sites more than `size`, such as 0.3, and closes once `size` sites "
        "sent updates",
    )
    workers_per_site: PositiveInt = Field(
        default=1, le=1000, description="workers of a chosen site that take part; their updates count as one"
    )
    target_updates: PositiveInt | None = Field(
        default=None, description="number of sites; a round closes early once this many sent updates"
    )
    quorum: PositiveInt = Field(default=1, description="fewest sites whose updates a round needs")
    deadline_seconds: DeadlineSeconds = Field(
        default=3600, description="time after which a round closes with the updates that it has"
    )
    adaptive_deadline: bool = Field(
        default=False,
        exclude_if=operator.not_,
        description="whether a round that has its quorum closes before `deadline_seconds`, once every task that is "
        "still out takes longer than the median of this and earlier rounds' tasks and 3 MAD (median absolute "
        "deviations)",
    )
    max_attempts: PositiveInt = Field(
        default=3,
        le=100,
        description="attempts at a round before the run pauses; the second follows after 1 s, the third after 10 s, "
        "each later one after a minute",
    )
    max_task_attempts: PositiveInt = Field(
        default=3, le=100, description="leases of a task before it counts as expired"
    )
    sites: tuple[Label, ...] | None = Field(
        default=None, description="sites that may take part, be it to train or to evaluate; all if left out"
    )
    require: tuple[Label, ...] = Field(
        default=(), description="sites that every round asks, and without whose update none is merged"
    )
    min_coverage: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the examples of the sites that have the data set; people are notified of a "
        "version that rests on less",
    )

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.size is not None and self.quorum > self.size:
            raise ValueError(f"a quorum of {self.quorum} cannot come from a cohort of {self.size}")
        if self.over_selection and (self.size is None or self.target_updates or self.buffers):
            raise ValueError(
                "over_selection asks more sites than size, and closes a round at size updates: set size, leave "
                'target_updates out, and leave mode at "barrier"'
            )
        if self.size is not None and len(self.require) > self.size:
            raise ValueError(f"require names {len(self.require)} sites, and a cohort has {self.size}: raise size")
        if self.sites is not None and (absent := sorted(set(self.require) - set(self.sites))):
            raise ValueError(f"require names {', '.join(absent)}: add {'them' if absent[1:] else 'it'} to sites too")
        return self

    @model_validator(mode="after")
    def _merges_once(self) -> Self:
        if self.memory and self.staleness != "none":
            raise ValueError(
                "memory corrects for late updates itself, and a lower weight would favour fast sites again: set "
                'staleness to "none"'
            )
        if self.memory and self.mixing is not None:
            raise ValueError("memory and mixing are two ways to merge late updates: leave one out")
        if self.mixing is not None and (self.target_updates, self.quorum) != (1, 1):
            raise ValueError(
                "mixing makes a version of one update: set target_updates and quorum to 1, or leave mixing out"
            )
        return self

    def absent(self, sites: Iterable[str]) -> list[str]:
        """Return the required sites that are not among these."""
        return sorted(set(self.require).difference(sites))

    def lack(self, sites: Collection[str]) -> str:
        """Return the rule that keeps a round of these sites from being merged, in words; empty if there is none."""
        if absent := self.absent(sites):
            return f"cohort.require names {', '.join(absent)}"
        return "" if len(sites) >= self.quorum else f"the quorum is {self.quorum}"

    def without(self, names: Collection[str], others: Iterable[str]) -> Self:
        """Return the cohort without these sites. The other sites that it names may take part, or else all `others`.
        Raises Invalid if too few are left."""
        left = {
            "sites": tuple(name for name in self.sites or others if name not in names),
            "require": tuple(name for name in self.require if name not in names),
        }
        if len(left["sites"]) < self.quorum:
            raise Invalid(
                f"the run cannot go on without {', '.join(names)}: cohort.quorum is {self.quorum}, and the number of "
                f"other sites is {len(left['sites'])}",
                remedy="Start another run with a smaller quorum or further sites: `tessera run create --from RUN`.",
            )
        return self.model_copy(update=left)

    @property
    def buffers(self) -> bool:
        return self.mode == "buffer"

    @property
    def asked(self) -> int | None:
        """The number of sites that a round asks; None for all."""
        if self.size is None:
            return None
        # Without what a product such as 100 * 0.07 has beyond 7.
        return self.size + ceil(round(self.size * (self.over_selection or 0), 9))

    @property
    def enough(self) -> int | None:
        """The number of sites with whose updates a round closes early; None to wait for each."""
        return self.size if self.over_selection else self.target_updates

    def oldest_base(self, number: int) -> int:
        """Return the oldest version from which an update may start that is merged into version `number`."""
        return number - 1 - (self.max_staleness if self.buffers else 0)

    def beside(self, at_work: Collection[str]) -> Self | None:
        """Return the cohort that is asked while these sites are at work; None if they are as many as it has."""
        left = {
            "size": None if self.size is None else self.size - len(at_work),
            "quorum": max(self.quorum - len(at_work), 0),
            "require": tuple(name for name in self.require if name not in at_work),
        }
        return None if self.size is not None and self.size <= len(at_work) else self.model_copy(update=left)

    def staleness_weight(self, changes: int) -> float:
        """Return the factor of a block's step if the block has changed this often since the update's version
        (FedBuff, Nguyen et al. 2022, arXiv 2106.06639, which counts all versions since)."""
        return 1 / sqrt(1 + changes) if self.staleness == "sqrt" else 1.0

    @property
    def terms(self) -> CohortTerms:
        """The rules as tasks carry them, without the names of other sites."""
        rules = self.model_dump(include=set(CohortTerms.model_fields))
        rules |= {"size": self.asked, "target_updates": self.enough}
        if self.sites is None:
            return CohortTerms(**rules)
        named = digest_of("/".join(sorted(self.sites)).encode())
        return CohortTerms(**rules, invited=len(self.sites), invited_digest=named)

"""The interface of a method: two halves that share nothing but data. The defaults together are FedAvg.

The coordinator's half plans each round and merges updates into the next version, without torch. The worker's half
takes part in local training, and sees one model and one site's data. The former is created for each call and the
latter for each task, so neither remembers anything on `self`: the server's memory is `State`, a site's is its vault.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import Field, PositiveInt

from tessera.shared.aggregation.local_work import EFFECTIVE_STEPS, ROUND, effective_steps, ratios, require_equal
from tessera.shared.aggregation.mean import Normalization, average
from tessera.shared.aggregation.robust import FEW_SENDERS, Mean, RobustRule, guarded
from tessera.shared.aggregation.server_optimizer import NoOptimizer, OptimizerRule
from tessera.shared.model.attention_stats import LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import EVERYTHING, NOTHING, Match, Selector, trainable_blocks
from tessera.shared.model.spec import Head, Lora, Modality
from tessera.shared.run_settings import MAX_STEPS, ClientPrivacy, Privacy, Training
from tessera.shared.schedule import local_steps
from tessera.shared.schema import Compatibility, Value
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import Array, StretchedStep, Tensor
from tessera.shared.tensors.statistics import is_statistic

if TYPE_CHECKING:
    import torch

    PromptFunction = Callable[[torch.Tensor], torch.Tensor]


class MethodSettings(Value):
    """A method's own settings; unknown names are rejected."""

    @property
    def probe_examples(self) -> int:
        """The number of a site's first examples on which `WorkerHalf.measure` measures each version; 0 for none. A
        site whose policy asks for more examples for a figure uses as many."""
        return 0

    def epochs_left(self, most: int) -> int:
        """Return the most epochs of the phase that the run's settings measure, for all phases to have `most`."""
        return most


Guard = Literal["robust", "client_privacy", "secure_sums"]
"""A setting of a run by which updates affect a version only through a robust rule, or only through their mean."""


class UnsupportedRun(ValueError):
    """A run that its method cannot do. The message says why, and what to change."""


C = TypeVar("C", bound=MethodSettings)


LORA_RANK = "lora_rank"
"""The name of a plan's scalar with the rank at which its worker trains the model's adapters; of the task's metric
with that rank; and of a site's largest rank among its resources."""

SECONDS_PER_STEP = "seconds_per_step"
"""The name of a site's resource with the time of a usual training step, for fitted work."""

REFERENCE = "reference/"
"""The prefix of the names of a run's first adapters in its server state, to which preferences compare a model. Each
version keeps them; without any, they are zero."""

EXTRA = "extra/"
"""The prefix of the names of extra arrays in an update, in a site's policy and in its records."""


class ExtraArray(Value):
    """An array that a plan asks for beside blocks, such as a prototype of each class."""

    name: str = Field(pattern=r"^[a-z0-9_.-]{1,64}$")
    shape: tuple[PositiveInt, ...] = Field(min_length=1, max_length=8)
    dtype: DType = "F32"

    @property
    def block(self) -> Block:
        """The array in the form of a block, which is in no version and whose step starts from zero."""
        return Block(tensor=EXTRA + self.name, role="extra", shape=self.shape, dtype=self.dtype)


class Plan(Value):
    """One worker's work in a round."""

    stage: str = Field(default="train", pattern=r"^[ -~]{0,64}$")
    """The round's name on the dashboard and the command line."""
    fetch: Selector = EVERYTHING
    train: Selector = EVERYTHING
    upload: Selector = EVERYTHING
    extra: tuple[ExtraArray, ...] = Field(default=(), max_length=64, exclude_if=operator.not_)
    """The arrays to send beside the blocks of `upload`: `LocalResult.extra` has all of them. Without any, a plan's
    digest, from which sites draw their seeds, does not name them."""
    server_state: tuple[str, ...] = Field(default=(), max_length=64)
    """Shell patterns for the names of the server state to fetch."""
    scalars: dict[str, float] = Field(default_factory=dict)
    steps: PositiveInt | None = Field(default=None, le=MAX_STEPS, exclude_if=operator.not_)
    """The worker's own number of steps (`cohort.work`), in place of `training.steps` and `epochs`."""

    @property
    def lora_rank(self) -> int | None:
        """The rank at which the worker trains the model's adapters; None for their whole rank."""
        rank = self.scalars.get(LORA_RANK)
        return None if rank is None else int(rank)

    def rank_metric(self, lora: Lora | None) -> dict[str, float]:
        """Return the rank of a model's adapters as a metric of the task, if sites train different ones."""
        return {LORA_RANK: float(self.lora_rank or lora.rank)} if lora and lora.ranks else {}

    def sent(self, blocks: Iterable[Block]) -> tuple[Block, ...]:
        """Return the blocks of an update, with the extra arrays. Raises SelectorError as `resolve` does."""
        return (*self.upload.resolve(blocks), *(each.block for each in self.extra))


@dataclass(frozen=True)
class State:
    """The server's whole memory of a run, which each version stores; a run resumes by loading it."""

    round: int
    """The number of rounds committed so far, which is the version's number."""
    model: Mapping[str, Tensor]
    server_state: Mapping[str, Tensor] = field(default_factory=dict)
    """The method's tensors on the server by name, such as an optimizer's moments."""
    scalars: Mapping[str, float] = field(default_factory=dict)

    def advanced(self, changed: Mapping[str, Tensor]) -> State:
        """Return the state of the next round, with some blocks changed."""
        return replace(self, round=self.round + 1, model={**self.model, **changed})


@dataclass(frozen=True)
class Participant:
    """A worker as a method sees it when it plans."""

    name: str
    examples: int
    resources: Mapping[str, float] = field(default_factory=dict)
    """The limits that its site declares: `memory_bytes`, `upload_bytes_per_second`, `lora_rank`,
    `seconds_per_step`."""
    site: str = ""
    """The admitted site of its token, by default its name. A worker chooses its name but not its site, so
    participants are counted by site."""
    last_round: int = 0
    """The last round of the run with an accepted update of this worker; its vault dates from that round."""
    steps: int | None = None
    """The steps that it makes in a round of fitted work; None for as many as `training` says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", self.site or self.name)


@dataclass(frozen=True)
class Update:
    """A site's accepted update. `blocks` holds the blocks that were sent; an absent block did not change.

    If several workers of a site take part, it is their pooled update (`shared.rounds.aggregate.pooled`), under the
    name of the first of them.
    """

    worker: str
    examples: int
    blocks: Mapping[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)
    site: str = ""
    """The admitted site of the worker's token, as `Participant.site`."""
    plan: Plan = field(default_factory=Plan)
    """The worker's plan."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """The extra arrays of the plan, by name, with zeros in the rows that the site's policy withholds."""
    staleness: int = 0
    """The number of versions since its base version; the largest of several workers' updates."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """The examples behind each block of a region's update that fewer than all of its sites sent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", self.site or self.worker)


def median_metrics(updates: Sequence[Update], names: Iterable[str], most: float) -> dict[str, float]:
    """Return the median of each named metric over the updates that report it as a number from 0 to `most`.

    For `merge` to add to the scalars that `warnings` and charts read. A private site reports none. A mean would
    follow the claim of one site, by a large number or by many examples.
    """
    reports = {name: [u.metrics[name] for u in updates if 0 <= u.metrics.get(name, -1.0) <= most] for name in names}
    return {name: median(values) for name, values in reports.items() if values}


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run that both halves may use."""

    blocks: tuple[Block, ...]
    rounds: int
    normalization: Normalization = "participants"
    training: Training = field(default_factory=Training)
    privacy: Privacy | None = None
    upload_budget: int | None = None
    """The size limit of an update in bytes. Coarser codecs are chosen to meet it, so a method may ignore it."""
    upload_seconds: float | None = None
    """The time limit of an upload at the bandwidth that a worker declares, met in the same way."""
    robust: RobustRule = field(default_factory=Mean)
    workers_per_site: int = 1
    """The number of workers per site in a round. A method sees their updates as one."""
    max_update_norm: float | None = None
    """The largest l2 norm of a step that is merged, also if `merge` scales steps up."""
    client_privacy: ClientPrivacy | None = None
    buffered: bool = False
    """True if `merge` gets updates of different versions."""
    memory: bool = False
    """True if the mean that `merge` computes is corrected by each site's latest update."""
    fitted: bool = False
    """True if plans have numbers of steps by the workers' speeds (`cohort.work`)."""
    secure_sums: bool = False
    """True if `merge` gets one update: the mean of all sites', of which it knows nothing else."""
    lossy_settings: tuple[str, ...] = ()
    """The run's settings by which the coordinator may read other values than a worker sent. A worker's half sees
    neither these nor the server optimizer."""
    server_optimizer: OptimizerRule = field(default_factory=NoOptimizer)
    external: frozenset[str] = frozenset()
    """The names of the blocks of an external base, which never change."""
    head: Head | None = None
    """The model's head."""
    lora: Lora | None = None
    """The rank and the scale, `alpha / rank`, of the model's adapters; None without adapters."""
    lora_rank: int | None = None
    """The rank at which one worker trains the adapters, if that is less than theirs."""

    @cached_property
    def trainable(self) -> Selector:
        """The blocks that may train: in a model with adapters or prompts not its base, unless the run says so, and of
        its adapters the parts within a worker's rank. Preferences train adapters alone. Plans and phases that select
        more train and send only these."""
        inserted = trainable_blocks(self.blocks, self.external, trains_head=self.training.loss is None)
        chosen = EVERYTHING if self.training.full_fine_tuning else inserted
        if self.lora is None or self.lora_rank is None:
            return chosen
        beyond = sorted({*self.lora.parts}.difference(self.lora.parts_within(self.lora_rank)))
        parts = Match(roles=("adapter",), names=tuple(f"*.lora_?.{part}.*" for part in beyond))
        return chosen.model_copy(update={"exclude": (*chosen.exclude, parts)})

    def trained(self, selector: Selector) -> Selector:
        """Return the part of a selector that may train."""
        base = self.trainable.exclude
        if not base or not any(selector.holds(block) for block in self.blocks if not self.trainable.holds(block)):
            return selector
        return selector.model_copy(update={"exclude": (*selector.exclude, *base)})

    def require_trainable(self, selector: Selector, purpose: str) -> None:
        """Raise UnsupportedRun if adapters or prompts leave none of the selected blocks to train. `purpose` says
        how the method uses them, as a verb with its object."""
        if self.trainable.exclude and not any(self.trained(selector).holds(block) for block in self.blocks):
            roles = sorted({block.role for block in self.blocks if self.trainable.holds(block)})
            remedy = "leave out training.loss" if self.training.loss else "set training.full_fine_tuning to true"
            raise UnsupportedRun(
                f"the method {purpose}, but none of these trains in this model, where only {' and '.join(roles)} "
                f"blocks do: change method.settings, choose another method, or {remedy}"
            )


Mode = Literal["buffered", "unequal_steps", "regional"]
MODES: Mapping[Mode, tuple[str, ...]] = {
    "buffered": ("plan", "merge"),
    "unequal_steps": ("plan", "check", "merge"),
    "regional": ("merge",),
}
"""The modes that a method declares itself compatible with or not, and the hooks on which each declaration rests: a
class that overrides one of these hooks declares it again."""


class CoordinatorHalf(Generic[C]):
    """The coordinator's half: numpy only; no clock, no network, no files."""

    sticky: ClassVar[bool] = False
    """True if the server state depends on each site's vault. A site then stays with the worker whose update was
    merged, because the vault is that worker's, and takes no part while that worker is away."""

    averages_parts: ClassVar[bool] = False
    """True if `merge` averages each block over the sites that sent it, as the default does, so that sites may train
    adapters of different ranks."""

    buffered: ClassVar[Compatibility] = Compatibility()
    """Says whether `merge` takes updates that started from earlier versions (`cohort.mode = "buffer"`): a memory of
    its sites may assume that they hold the present version."""
    unequal_steps: ClassVar[Compatibility] = Compatibility()
    """Says whether each site may make its own number of steps (`cohort.work = "fitted"`) and nothing but `scaled` is
    needed for that."""
    regional: ClassVar[Compatibility] = Compatibility()
    """Says whether the mean of a region's sites, with the weights of its blocks, can stand for their updates."""

    normalized: ClassVar[bool] = False
    """True if each step is divided by its worker's local work in every run, as it is in all runs with fitted work."""

    covers_extra: ClassVar[bool] = False
    """True if, in a run with `privacy`, the extra arrays follow from results of training with noise, and from no
    example otherwise; for instance a trained model's logits on public data."""

    def __init__(self, settings: C, run: RunInfo) -> None:
        self.settings = settings
        self.run = run

    @classmethod
    def declared(cls, mode: Mode) -> Compatibility:
        """Return the declaration of that name, unless a later class overrides a hook on which it rests."""
        declaring, *acting = (next(c for c in cls.__mro__ if name in vars(c)) for name in (mode, *MODES[mode]))
        if any(declaring in each.__mro__[1:] for each in acting):
            return Compatibility(f"the method overrides {' or '.join(MODES[mode])} and does not declare {mode}")
        return getattr(cls, mode)  # type: ignore[no-any-return]  # a declaration

    def require(self, mode: Mode, otherwise: str) -> None:
        """Raise UnsupportedRun if the method, with its settings, does not go with a mode. `otherwise` is the setting
        that leaves it."""
        declared = self.declared(mode)
        if not declared.allows(self.settings):
            raise UnsupportedRun(f"{declared.fault}: {declared.remedy}{otherwise}, or choose a method such as fedavg")

    def check_memory(self) -> None:
        """Raise UnsupportedRun for a memory of updates, unless all sites send the same blocks in all rounds and
        `merge` is their mean."""
        own, remedy = type(self), "leave out cohort.memory"
        if any(getattr(own, name) is not getattr(CoordinatorHalf, name) for name in ("plan", "plan_for", "merge")):
            raise UnsupportedRun(
                "cohort.memory needs a mean of the same blocks of all sites, which the method does not promise: "
                f"{remedy}, or choose a method such as fedavg"
            )
        if self.normalizes:
            raise UnsupportedRun(
                "cohort.memory adds steps as they were sent, and these are divided by their local work: "
                f"{remedy}, or set cohort.work to fixed and choose a method such as fedavg"
            )
        if self.run.lora and self.run.lora.ranks:
            raise UnsupportedRun(
                "cohort.memory needs the same blocks of all sites, and the model has adapters of several ranks: "
                f"{remedy}, or create the model with one rank (--lora-rank 8)"
            )

    @property
    def normalizes(self) -> bool:
        """True if `merge` divides each step by its worker's local work (`shared.aggregation.local_work`)."""
        return self.normalized or self.run.fitted

    @property
    def takes_regions(self) -> bool:
        """True if a region may stand for its sites in the run: single sites have local work and latest updates."""
        is_declared = self.declared("regional").allows(self.settings)
        return is_declared and not self.normalizes and not self.run.memory

    def open_blocks(self, state: State) -> Selector:
        """Return the blocks that this state's updates may change: what an update of an earlier version says of others
        is left out. A method that freezes blocks in a later stage overrides this."""
        return EVERYTHING

    @property
    def merged_beside(self) -> Selector:
        """The blocks that `merge` changes although no site trains or sends them."""
        return NOTHING

    def start(self, state: State) -> State:
        """Return the state before the first round, with any server state added. Raises UnsupportedRun."""
        return state

    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        """Return a plan for each worker of the cohort, by name. The run ends if there are none.

        The creation of a run calls this once for a worker that does not exist, to check the selectors.
        """
        return {worker.name: self.plan_for(state, worker) for worker in cohort}

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan()

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics that a worker reports with its blocks. Raises ValueError, which rejects the update. An
        override calls this, for the local work that steps are divided by."""
        if self.normalizes:
            require_equal(metrics.get(EFFECTIVE_STEPS), self.expected_steps(plan, examples), examples)

    def expected_steps(self, plan: Plan, examples: int) -> float:
        """Return the effective steps of a plan for a worker with that many examples."""
        training = self.run.training
        steps = local_steps(training.of_steps(plan.steps), examples)
        return effective_steps(steps, training, int(plan.scalars.get(ROUND, 1)), self.run.rounds, self._mu)

    @property
    def _mu(self) -> float:
        """The weight of a term mu/2 |w - w_t|^2 in the loss by which sent blocks train, for the version w_t."""
        return 0.0

    def step_scale(self, metrics: Mapping[str, float]) -> float:
        """Return the factor by which `merge` scales the step of an update with these metrics, up to a factor common
        to the round. Norms are compared after scaling (`max_norm_of_median`), within a round and across rounds, so
        the factor depends on these metrics alone."""
        # Without the mean local work, which depends on the round's cohort, so that rounds can be compared.
        return 1 / metrics[EFFECTIVE_STEPS] if self.normalizes else 1.0

    def scaled(self, state: State, updates: Sequence[Update]) -> Sequence[Update]:
        """Return the updates of a round with their steps as `merge` scales them, with which their distances from the
        merged step are measured."""
        if not self.normalizes:
            return updates
        # A site counts with at most the local work of the examples that it may weigh: the mean scales all sites'
        # steps, so a site that claims unlimited examples must not raise it.
        own = [update.metrics[EFFECTIVE_STEPS] for update in updates]
        most = [self.expected_steps(update.plan, update.examples) for update in updates]
        weights = [update.examples for update in updates] if self.run.robust.neutral else None
        return [self._stretched(state, *each) for each in zip(updates, ratios(own, most, weights), strict=True)]

    def _stretched(self, state: State, update: Update, ratio: float) -> Update:
        # The sent update met the largest norm, but an update of few steps is scaled up by a large factor.
        limit, norm = self.run.max_update_norm, update.metrics.get(UPDATE_NORM)
        factor = min(ratio, limit / norm) if limit is not None and norm else ratio
        if ratio == 1:
            return update
        blocks = {
            name: tensor if is_statistic(name) else StretchedStep(state.model[name], tensor, factor)
            for name, tensor in update.blocks.items()
        }
        return replace(update, blocks=blocks)

    def weight(self, update: Update) -> float:
        """Return the weight of an update in the mean."""
        return float(update.examples)

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        """Return the next state. `updates` are sorted by worker; tensors are lazy and are read block by block."""
        updates = self.scaled(state, updates)
        if not self.run.robust.neutral:
            blocks = [update.blocks for update in updates]
            moved, few = guarded(self.run.robust, state.model, blocks, self.run.normalization)
            return replace(state.advanced(moved), scalars={**state.scalars, FEW_SENDERS: float(len(few))})
        senders = [(self.weight(update), update.blocks) for update in updates]
        by_name = {block.name: block for block in self.run.blocks}

        def inclusion(name: str) -> float:
            return self.inclusion_probability(by_name[name])

        weights = [{b: self.weight(replace(u, examples=n)) for b, n in u.weights.items()} for u in updates]
        return state.advanced(average(state.model, senders, self.run.normalization, inclusion, weights))

    def check_merge(self, guard: Guard) -> None:
        """Raise UnsupportedRun if updates can affect a version past a guard of the run: without passing its robust
        rule, or other than by their steps in the mean.

        A class that overrides `merge` overrides this too, else every guard is refused. Metrics and the presence of
        blocks may count: those that a guard hides are not there.
        """
        if self.normalizes and guard != "robust":
            raise UnsupportedRun(
                f"steps are divided by each site's local work, and {guard} does not take that into account: "
                f'leave {guard} out, or choose a method such as fedavg with cohort.work = "fixed"'
            )
        if type(self).merge is not CoordinatorHalf.merge:
            raise UnsupportedRun(
                f"the method overrides merge, and does not say that {guard} guards all of it "
                f"(CoordinatorHalf.check_merge): leave out {guard}, or choose a method such as fedavg"
            )

    def check_rounds(self) -> None:
        """Raise UnsupportedRun if a run under way cannot change to this number of rounds, `run.rounds`. A method that
        reads it in either half overrides this. The learning rate is constant; other schedules are refused before."""

    def largest_update(self, plan: Plan) -> int:
        """Return the most bytes of an update, before any codec. Override it if workers choose among the blocks."""
        return sum(block.nbytes for block in plan.sent(self.run.blocks))

    def inclusion_probability(self, block: Block) -> float:
        """Return the probability that a worker sends the block, for the `inverse-probability` average. Raises
        UnsupportedRun if it is unknown, for instance because the choice depends on data."""
        return 1.0

    def warnings(self, state: State) -> Sequence[str]:
        """Return warnings about this version, as sentences; for instance about a layer that no worker trains."""
        return ()


@dataclass(frozen=True)
class Output:
    """A model's output for a batch."""

    loss: torch.Tensor
    """A scalar, the mean over the scored examples or positions, by the run's settings of the training loss."""
    logits: torch.Tensor | None
    """[examples, classes] or [examples, positions, classes]; None for a task without classes."""
    each: torch.Tensor | None = None
    """The loss of each example, [examples], where labels are numbers rather than classes."""


class TaskContext(Protocol):
    """A task at a worker, as the worker's half sees it."""

    plan: Plan
    blocks: Sequence[Block]
    """The blocks of the run's versions."""
    vault: Mapping[str, Array]
    """The values that this site kept with its last accepted update of this run; empty the first time."""
    server_state: Mapping[str, Array]
    """The server state that the plan fetches, by name."""
    batches: Iterable[Mapping[str, torch.Tensor]]
    """The site's training examples in their order, each time it is iterated; none in a run with privacy."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def private(self) -> Sequence[Block]:
        """The blocks of the modules added with `add_private`: they train, and are in no version."""

    def read(self, block: Block) -> Array:
        """Return the block's present value, in its own shape and dtype."""

    def read_all(self, blocks: Iterable[Block]) -> dict[str, Array]:
        """Return the present values of blocks by name, as `read` does: sooner, if they are many."""

    def write(self, block: Block, values: Array) -> None:
        """Overwrite the block's value in the model."""

    def tensors(self, values: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Convert values by block name to whole tensors by tensor name, on the device; zero without a value."""

    def forward(self, batch: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor] | None = None) -> Output:
        """Return the model's output for a batch, with `values` in place of its tensors of those names."""

    def forward_with_features(self, batch: Mapping[str, torch.Tensor]) -> tuple[Output, torch.Tensor]:
        """Return the model's output for a batch, and the input of its head in the same pass, [examples, width]: the
        mean over tokens other than padding. Raises ValueError if the model has no head of its own."""

    def features(self, batch: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the features of `forward_with_features`, with `values` in place of the model's tensors of those
        names, in evaluation mode and without gradient."""

    def attention(
        self, batches: Iterable[Mapping[str, torch.Tensor]], tokens: TaskTokens
    ) -> Mapping[str, LayerAttention]:
        """Return the attention statistics of each attention layer, by the layer's name (`shared.model.blocks`).
        Raises ValueError for attention that cannot be measured, and for tokens that cannot be located."""

    def attention_rows(self, batch: Mapping[str, torch.Tensor], queries: int) -> Mapping[str, Array]:
        """Return attention probabilities of each attention layer by the layer's name, float32 [sequences, heads,
        queries, keys], of at most that many queries spread over the tokens. Padding has none. Raises ValueError as
        `attention` does."""

    def gradient_norms(
        self, batches: Iterable[Mapping[str, torch.Tensor]], blocks: Sequence[Block]
    ) -> Mapping[str, float]:
        """Return the l2 norm of the mean loss's gradient by layer name, over the given blocks of each layer."""

    def fisher(self, batches: Iterable[Mapping[str, torch.Tensor]], blocks: Sequence[Block]) -> Mapping[str, float]:
        """Return the mean over examples of the squared norm of that gradient for each example's own loss."""

    def top_k(self, scores: Array, count: int, picks: int | None = None) -> Sequence[int]:
        """Return the indices of the `count` candidates with the largest sums of scores [examples, candidates], of
        equals the first. Scores are in [0, 1]; a run with privacy adds its noise to the sums.
        Several calls for one choice pass the total number of `picks`, and then cost as much privacy as one choice."""

    def add_private(self, name: str, module: torch.nn.Module) -> None:
        """Add a module that stays at this site, with its values from the vault, to the model until the task ends."""

    def insert_prompts(self, prompts: Mapping[Modality, PromptFunction]) -> None:
        """Insert a function of the model's prompts into each of these towers, in place of the prompts themselves,
        until the task ends. It maps [tokens, width] to [any number, width]."""

    def text_features(self, batch: Mapping[str, torch.Tensor], prompts: PromptFunction | None = None) -> torch.Tensor:
        """Return the features of a batch's texts in the space that a dual encoder shares with images, float32 [texts,
        width], each of length one, with `prompts` of the model's inserted for this pass. By default the inserted
        prompts are those of the task. Raises ValueError for another model."""

    def replace_output(self, function: Callable[[TaskContext, Mapping[str, torch.Tensor], Any], Any]) -> None:
        """Replace each output of the model's forward pass by a function of this context, the pass's inputs and its
        output, an object of transformers, until the task ends."""

    def patch_features(self, output: Any) -> torch.Tensor:
        """Return the features of an image's patches in that space, float32 [images, patches, width], each of length
        one, from an output of the model. Raises ValueError if the model pools all patches into one feature."""


@dataclass(frozen=True)
class Phase:
    """One phase of local training."""

    train: Selector
    """The run's blocks that train."""
    epochs: int | None = None
    """The number of epochs; the run's length of a round, in epochs or steps, if None."""
    private: bool = True
    """True if the modules added with `add_private` train too."""
    rates: Sequence[tuple[Selector, float]] = ()
    """Multiples of the learning rate of blocks of the run, beside `training.rates`; the same for all of a tensor."""
    private_learning_rate: float | None = None
    """The learning rate of the modules added with `add_private`; the run's, by its `training.rates`, if None."""
    name: str = "train"
    """Moments that a site keeps (`training.keep_moments`) go on in the phase of the same name."""
    personal: bool = False
    """True for a last phase that trains a model of the site's own. If it diverges, the update is sent all the same:
    `on_phase_diverged` puts an earlier model in its place."""


@dataclass(frozen=True)
class TrainingStats:
    """The totals of local training."""

    examples: int
    steps: int
    loss: float
    rate_sum: float
    """The sum of the run's learning rates at these steps: `steps` times the rate if it is constant. It leaves out the
    run's `training.rates` by role."""


@dataclass(frozen=True)
class Extra:
    """The values of an extra array."""

    values: Array
    examples: Array | int
    """The number of examples behind each row of the first axis, or behind each of them alike. A row over fewer than
    the site's `min_evaluation_examples` leaves as zeros."""


@dataclass(frozen=True)
class LocalResult:
    """The result of local training: `upload` and `extra` are sent, `keep` goes to the vault and never leaves the
    site."""

    upload: Mapping[str, Array]
    keep: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)
    """The plan's extra arrays, by name."""


BEYOND_TRAINING = {
    "private": "keeps blocks at the sites",
    "select": "has each site choose blocks",
    "measure": "measures each version at the sites",
    "loss": "has a loss of its own",
    "after_backward": "corrects gradients",
    "phases": "trains in phases of its own",
    "rates": "trains some blocks at other rates",
    "setup": "prepares each site's model",
    "on_phase_start": "prepares each site's training",
    "collect": "sends or keeps more than trained blocks",
}
"""By hook of a `WorkerHalf`, the act of a method with a hook of its own, beside training the plan's blocks."""


class WorkerHalf(Generic[C]):
    """The worker's half, at a site: torch, but no network and no other worker."""

    loss_by_example: ClassVar[bool] = False
    """True if the loss has a mean over examples beside the model's own loss, which is a mean over labels. Where an
    example has several labels or none, a batch is then not trained in pieces."""

    one_example_per_row: ClassVar[bool] = False
    """True if the method compares or measures the examples of a batch by its rows. A row must then not hold several
    texts (`pack` of a data set)."""

    signals: ClassVar[tuple[str, ...]] = ()
    """The beginnings of the names of metrics that are only watched. Like a loss they leave the site rounded, and not
    if it has fewer examples than its `min_evaluation_examples`."""

    metric_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """The least and the largest value of an example in each figure of `metrics`, by its name, which begins with
    `own_`. A value outside counts as the nearest one, and one that is not a number as the least."""

    def __init__(self, settings: C, run: RunInfo) -> None:
        self.settings = settings
        self.run = run

    @classmethod
    def beyond_training(cls, settings: C) -> str | None:  # noqa: ARG003  (for overrides)
        """Return an act of this half beside training the plan's blocks by the model's own loss, as a verb with its
        object, or None. A site's own training script has no such half, and cannot do it."""
        own = (said for hook, said in BEYOND_TRAINING.items() if getattr(cls, hook) is not getattr(WorkerHalf, hook))
        return next(own, None)

    @property
    def computed_rank(self) -> int | None:
        """The rank of the adapters with which the model computes in training; None for their whole rank. By default
        it is the rank at which the worker trains."""
        return self.run.lora_rank

    def private(self) -> Selector:
        """Return the run's blocks that never leave the site; a plan that uploads one of them is rejected. They are
        stored in the vault and restored from it, as are modules added with `TaskContext.add_private`."""
        return NOTHING

    def setup(self, context: TaskContext) -> None:
        """Prepare training or evaluation; the version and the vault's values are loaded. Remove torch hooks again in
        `collect`: the model may be used in the next round too."""

    def select(self, context: TaskContext, batches: Iterable[Mapping[str, torch.Tensor]]) -> Selector:
        """Return the blocks to train and send, among those that the plan trains."""
        return context.plan.train

    def measure(self, context: TaskContext, probes: Mapping[str, torch.Tensor]) -> LocalResult:
        """Measure the fetched version on a batch of a site's first examples (`settings.probe_examples`). Return
        metrics, and what to keep in the vault. A task whose metrics do not leave the site does without."""
        return LocalResult({})

    def rates(self, plan: Plan) -> Sequence[tuple[Selector, float]]:
        """Return the `Phase.rates` of a round with one phase."""
        return ()

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        """Return the phases of training, each with its own optimizer. Without phases nothing trains."""
        return [Phase(selected, rates=self.rates(context.plan))]

    def personalization_phases(self, context: TaskContext) -> Sequence[Phase]:
        """Return the phases of local training before a version is evaluated as this site's personal model."""
        return ()

    def on_phase_start(self, context: TaskContext, phase: Phase) -> None:
        """Prepare a phase."""

    def on_phase_diverged(self, context: TaskContext, phase: Phase) -> None:
        """Replace the diverged model of a `personal` phase by its last one."""

    def training_state(self) -> Mapping[str, Array]:
        """Return the state that this half gathered while training, for a checkpoint. `setup` and `select` run again
        when a task resumes, so their results need not be in it."""
        return {}

    def on_phase_resume(self, context: TaskContext, phase: Phase, state: Mapping[str, Array]) -> None:
        """Prepare a phase that resumes in its middle, in place of `on_phase_start`, with the `training_state` of that
        time. The tensors that trained so far are restored after this. Tasks of a half that overrides `on_phase_start`
        but not this have no checkpoints."""

    @property
    def resumable(self) -> bool:
        """True if the half can resume a phase in its middle."""
        half = type(self)
        starts = half.on_phase_start is not WorkerHalf.on_phase_start
        return not starts or half.on_phase_resume is not WorkerHalf.on_phase_resume

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of one batch, a scalar; by default the model's own."""
        return context.forward(batch).loss

    def metrics(self, context: TaskContext, outputs: Output, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return, for each name in `metric_ranges`, a value or a count of each example of a batch in an evaluation,
        [examples], by the model's outputs and the labels. The figure is their mean over all examples. Rounded figures
        give this one example at a time. It runs before `setup` for a version, and after it for a personal model."""
        return {}

    def after_backward(self, context: TaskContext) -> None:
        """Correct gradients, between the backward pass and the optimizer's step."""

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        """Return the values to send and to keep: by default those of the selected blocks that the plan uploads, and
        the private ones."""
        chosen = (block for block in context.plan.upload.resolve(context.blocks) if selected.holds(block))
        sent = [block for block in chosen if self.run.trainable.holds(block)]
        kept = [*self.private().resolve(context.blocks), *context.private]
        return LocalResult(
            upload=context.read_all(sent),
            keep=context.read_all(kept),
        )


@dataclass(frozen=True)
class Chart:
    """A line chart of metrics over a run's versions, for the run's page."""

    name: str
    """A noun phrase for use within a sentence: "No warm-up signals: ..."."""
    scalars: tuple[str, ...]
    """Names or prefixes of names in `State.scalars`. Each name is a line, labelled without the part before the first
    dot."""
    missing: str = "no version has any yet"
    """The reason for an empty chart, shown after the name and a colon."""
    requires: Mapping[str, Any] = field(default_factory=dict)
    """The settings, other than the defaults, that the metrics require."""
    title: str = ""
    """The heading; by default the name."""
    description: str = ""
    """The text between the heading and the chart."""
    unit: str = ""


@dataclass(frozen=True)
class Method(Generic[C]):
    """A method, as its file declares it in `METHOD`. The parts left out are those of FedAvg."""

    name: str
    source: str = field(kw_only=True)
    """The paper, section and equation that it follows."""
    good_for: str = ""
    """The purpose for which a person would choose it, and the needs of its model."""
    sends: str = ""
    """The parts of the model that leave a site."""
    settings: type[C] = MethodSettings  # type: ignore[assignment]  # mypy has no defaults for type variables
    coordinator: type[CoordinatorHalf[C]] = CoordinatorHalf
    worker: type[WorkerHalf[C]] = WorkerHalf
    charts: tuple[Chart, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    """The settings of local training, other than the defaults, that the method requires."""
    paper: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """The keys of a run's file that the paper states, such as `training.optimizer`, with value and source."""
    unstated: str = ""
    """The settings that the sources of `paper` leave open."""
    is_preselected: bool = False
    """True for the method that a form offers first."""


UPDATE_NORM = "update_norm"
"""The metric with an update's l2 norm, which the coordinator measures."""


class MethodSpec(Value):
    """A method's name and settings, in the specs of runs and tasks."""

    name: str = Field(description="the method's name")
    settings: dict[str, Any] = Field(default={}, description="the method's own settings")

"""LoRA: training of low-rank adapters, B A beside a matrix, and of the head; the rest of the model is frozen.

With p_k a site's share of the weights and s = alpha / rank, `average` is one of:

- `factors`, FedIT (Zhang et al. 2023, arXiv 2305.05644): A = sum p_k A_k and B = sum p_k B_k. The product of the
  means is not the mean of the products. With `freeze_a` it is FFA-LoRA (Sun et al. 2024, arXiv 2403.12313, section
  4): A keeps its first value, so that the average is exact, sum p_k B_k A = B A, and half as many bytes are sent;
- `partition`, raFLoRA (Wu et al. 2026, arXiv 2602.13486): the factors of the rank whose product is closest to the
  sum, over parts of the rank, of the mean of B_k A_k over the sites that train the part;
- `stack`, FLoRA (Wang et al. 2024, arXiv 2409.05976): W = W + s sum p_k B_k A_k, and new adapters in each round;
- `residual`, FedEx-LoRA (Singhal et al. 2024, arXiv 2410.09432): A and B as with `factors`, and
  W = W + s (sum p_k B_k A_k - B A).

If sites train adapters of different ranks (`Lora.ranks`), the mean of a factor, as that of any block, is one over the
sites that sent the part; and in a sum over all sites an absent part counts as unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from random import Random
from typing import Literal

import numpy as np
from pydantic import Field

from tessera.shared.aggregation.low_rank import BestFactors, DeferredArray, Product, ProductSum, RowsOf
from tessera.shared.methods.base import (
    CoordinatorHalf,
    Guard,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    TaskContext,
    UnsupportedRun,
    Update,
    WorkerHalf,
)
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import NOTHING, Match, Selector, named
from tessera.shared.model.spec import Lora
from tessera.shared.schema import Compatibility, Condition
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Tensor

ADAPTERS = Match(roles=("adapter",))
A_FACTORS = Match(roles=("adapter",), names=("*.lora_A.*",))
HEAD = Match(roles=("head",))

START = "lora_start"
"""The scalar of a plan with the seed of the values with which a site's new A begins."""


class LoraSettings(MethodSettings):
    conditions = (Condition(("average",), lambda settings: not settings.freeze_a, "freeze_a to false"),)

    freeze_a: bool = Field(default=False, description="freeze A and train only B, as FFA-LoRA does")
    train_head: bool = Field(default=True, description="train and send the head too, if there is one")
    average: Literal["factors", "partition", "stack", "residual"] = Field(
        default="factors",
        description="of the adapters: A and B each (FedIT); the best factors of the mean products of the rank's "
        "parts (raFLoRA); the mean product, added to the base, and new adapters (FLoRA); or A and B each, and the "
        "difference from the mean product added to the base (FedEx-LoRA)",
    )

    @property
    def changes_base(self) -> bool:
        return self.average in ("stack", "residual")


Pair = tuple[tuple[Block, ...], Block]
"""The blocks of B, one beside each block of the matrix, and A."""


@dataclass(frozen=True)
class Adapter:
    """An adapter and its matrix, by their blocks: the parts of a fused matrix, as which B is divided too."""

    matrix: tuple[Block, ...]
    pairs: tuple[Pair, ...]
    """One for each part of the rank."""
    transposed: bool
    """True if the matrix is [inputs, outputs], as a Conv1D's is."""


def adapters_of(blocks: Sequence[Block], lora: Lora | None) -> list[Adapter]:
    """Return the adapters of a model's blocks. Raises UnsupportedRun for a table in which they fit no matrix."""
    by_tensor: dict[str, list[Block]] = {}
    for block in blocks:
        by_tensor.setdefault(block.tensor, []).append(block)
    # In models with a fused Conv1D all matrices are stored as its is. Of a square one, the shape does not tell.
    conv1d = any(block.part and block.part.axis == 1 for block in blocks)
    found = []
    for path in dict.fromkeys(name.partition(".lora_A.")[0] for name in by_tensor if ".lora_A." in name):
        matrix = tuple(by_tensor.get(f"{path}.base_layer.weight", ()))
        factors = [
            [tuple(by_tensor.get(f"{path}.lora_{factor}.{part}.weight", ())) for factor in "BA"]
            for part in (lora.parts if lora else ())
        ]
        pairs = tuple((rows, a[0]) for rows, a in factors if a)
        shapes = {tuple((b.shape[0], a.shape[-1]) for b in rows if b.shape[1:] == a.shape[:1]) for rows, a in pairs}
        stored = tuple(block.shape for block in matrix)
        turned = tuple(shape[::-1] for shape in stored)
        if not stored or shapes not in ({stored}, {turned}) or len(pairs) < len(factors):
            raise UnsupportedRun(
                f"the adapter of {path} does not fit a matrix: create the model with `tessera model init`"
            )
        found.append(Adapter(matrix, pairs, conv1d if stored == turned else shapes == {turned}))
    return found


class LoraCoordinator(CoordinatorHalf[LoraSettings]):
    buffered = unequal_steps = regional = Compatibility(
        "a product of adapters takes both factors as a site sent them from one version",
        'average = "factors"',
        lambda settings: settings.average == "factors",
    )
    averages_parts = True

    def start(self, state: State) -> State:
        if not any(ADAPTERS.holds(block) for block in self.run.blocks):
            raise UnsupportedRun("the model has no adapters: create it with `tessera model init --lora-rank N`")
        if "train_head" in self.settings.model_fields_set and self.settings.train_head and not self._heads:
            raise UnsupportedRun(
                "train_head is true, and the model has no head that can train: it is tied to the embeddings, part of "
                "the external base, or frozen by training.loss. Leave train_head out, or set it to false"
            )
        if self.settings.average != "factors":
            self._check_products()
        return state

    def _check_products(self) -> None:
        """Raise UnsupportedRun for settings with which the products of single updates have no such mean."""
        run, average = self.run, self.settings.average
        adapters_of(run.blocks, run.lora)
        unfit = {
            "DoRA": (run.lora is not None and run.lora.dora, "has lengths of rows, which products leave out"),
            "server_optimizer": (not run.server_optimizer.neutral, "would step from the result"),
            "normalization": (
                run.normalization != "participants",
                "divides by other weights than the mean of products",
            ),
            "cohort.workers_per_site": (run.workers_per_site > 1, "averages A and B over a site's workers first"),
            "training.keep_moments": (
                run.training.keep_moments and average != "residual",
                "keeps moments of factors that each round replaces",
            ),
        }
        for name, (is_set, reason) in unfit.items():
            if is_set:
                raise UnsupportedRun(f'{name} {reason}: leave it out, or set average to "factors"')

    @property
    def _heads(self) -> list[Block]:
        """The blocks of the head that can train."""
        return [block for block in self.run.blocks if HEAD.holds(block) and self.run.trainable.holds(block)]

    @property
    def merged_beside(self) -> Selector:
        if not self.settings.changes_base:
            return NOTHING
        return named(
            block.name for adapter in adapters_of(self.run.blocks, self.run.lora) for block in adapter.matrix
        )

    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        plans = super().plan(state, cohort, rng)
        if self.settings.average != "stack":
            return plans
        return {
            name: plan.model_copy(update={"scalars": {START: float(rng.getrandbits(53))}})
            for name, plan in plans.items()
        }

    def plan_for(self, state: State, worker: Participant) -> Plan:
        headed = self.settings.train_head and bool(self._heads)
        adapters = Selector(
            include=(ADAPTERS, HEAD) if headed else (ADAPTERS,),
            exclude=(A_FACTORS,) if self.settings.freeze_a else (),
        )
        return Plan(stage="adapters", train=adapters, upload=adapters)

    def check_merge(self, guard: Guard) -> None:
        """Accept everything for the means of blocks, and nothing for products: these need each update as it is."""
        if self.settings.average != "factors":
            raise UnsupportedRun(
                f'average = "{self.settings.average}" multiplies B and A of each update, and {guard} lets only '
                f'blocks affect a version, each by itself: leave {guard} out, or set average to "factors", with '
                "freeze_a for an exact mean"
            )

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged = super().merge(state, updates)
        match self.settings.average:
            case "partition":
                return replace(merged, model={**merged.model, **self._partitioned(state, updates)})
            case "stack":
                kept = {block.name: state.model[block.name] for block in self.run.blocks if ADAPTERS.holds(block)}
                return replace(merged, model={**merged.model, **kept, **self._moved(state, updates, {})})
            case "residual":
                return replace(merged, model={**merged.model, **self._moved(state, updates, merged.model)})
        return merged

    def _moved(self, state: State, updates: Sequence[Update], means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the matrices moved by the sites' mean product, less the product of these means of factors."""
        moved: dict[str, Tensor] = {}
        for adapter in adapters_of(self.run.blocks, self.run.lora):
            sent = [pair for pair in adapter.pairs if any(_sends(update, pair) for update in updates)]
            for place, matrix in enumerate(adapter.matrix if sent else ()):
                products: list[Product] = []
                for rows, a in sent:
                    b = rows[place]
                    products += [
                        (self._scale * share, _own(state, update, b), _own(state, update, a))
                        for share, update in self._shares(updates)
                    ]
                    if means:
                        products.append((-self._scale, means[b.name], means[a.name]))
                moved[matrix.name] = ProductSum(state.model[matrix.name], products, adapter.transposed)
        return moved

    def _partitioned(self, state: State, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the best factors of the sum of the mean products of each part of the rank."""
        moved: dict[str, Tensor] = {}
        for adapter in adapters_of(self.run.blocks, self.run.lora):
            products: list[Product] = []
            for pair in adapter.pairs:
                rows, a = pair
                senders = [update for update in updates if _sends(update, pair)]
                # A part that no site trained stays in the sum as it is.
                shares = self._shares(senders) or [(1.0, Update("", 1, {}))]
                products += [
                    (share, RowsOf([_own(state, update, b) for b in rows]), _own(state, update, a))
                    for share, update in shares
                ]
            if any(_sends(update, pair) for update in updates for pair in adapter.pairs):
                moved |= _divided(adapter, BestFactors(products, sum(a.shape[0] for _, a in adapter.pairs)))
        return moved

    @property
    def _scale(self) -> float:
        assert self.run.lora is not None  # noqa: S101 (as `start` requires)
        return self.run.lora.scale

    def _shares(self, updates: Sequence[Update]) -> list[tuple[float, Update]]:
        total = sum(map(self.weight, updates))
        return [(self.weight(update) / total, update) for update in updates]


def _sends(update: Update, pair: Pair) -> bool:
    rows, a = pair
    return any(block.name in update.blocks for block in (*rows, a))


def _own(state: State, update: Update, block: Block) -> Tensor:
    """Return a block of an update; one that it lacks did not change."""
    return update.blocks.get(block.name, state.model[block.name])


def _divided(adapter: Adapter, best: BestFactors) -> dict[str, Tensor]:
    """Return factors as the adapter's blocks."""
    found: dict[str, Tensor] = {}
    low = 0
    for rows, a in adapter.pairs:
        part = slice(low, low := low + a.shape[0])
        found[a.name] = DeferredArray(a.shape, a.dtype, partial(lambda part: best.factors[1][part], part))
        # As `RowsOf` has joined them.
        top = 0
        for b in rows:
            at = (slice(top, top := top + b.shape[0]), part)
            found[b.name] = DeferredArray(b.shape, b.dtype, partial(lambda at: best.factors[0][at], at))
    return found


class LoraWorker(WorkerHalf[LoraSettings]):
    @classmethod
    def beyond_training(cls, settings: LoraSettings) -> str | None:
        # By other averages adapters go on from the version's values.
        return "begins new adapters in each round" if settings.average == "stack" else None

    @property
    def computed_rank(self) -> int | None:
        # The base holds the mean product less the product of all parts. A site that computes without a part would
        # train another model than the version.
        return None if self.settings.average == "residual" else super().computed_rank

    def setup(self, context: TaskContext) -> None:
        """Begin new adapters if the plan says so: A as PEFT does, with values up to 1 / sqrt(inputs); B is zero."""
        if (seed := context.plan.scalars.get(START)) is None:
            return
        rng = np.random.default_rng(int(seed))
        for block in context.blocks:
            if A_FACTORS.holds(block) and self.run.trainable.holds(block):
                values = rng.uniform(-1, 1, block.shape) / sqrt(block.shape[1])
                context.write(block, values.astype(NUMPY_DTYPES[block.dtype]))


METHOD = Method(
    name="lora",
    good_for="large models on slow lines. The model needs LoRA adapters, small matrices beside frozen weights: "
    "`tessera model init --lora-rank 8`, or `--lora-rank 4,8,16` for sites of different ranks",
    sends="the adapters and the head, a few percent of the model",
    settings=LoraSettings,
    coordinator=LoraCoordinator,
    worker=LoraWorker,
    source="Zhang et al., FedIT, arXiv 2305.05644; freeze_a: Sun et al., FFA-LoRA, arXiv 2403.12313; average: "
    "raFLoRA, arXiv 2602.13486; FLoRA, arXiv 2409.05976; FedEx-LoRA, arXiv 2410.09432",
)

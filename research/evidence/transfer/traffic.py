"""The bytes of a round in each direction, from the plans of the methods themselves and the product's codecs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import numpy as np

from common.arrays import Array
from common.names import CONTROL
from evidence.transfer.models import Large, Variant, table
from small_tasks.safl_bytes import CLAIMED, nbytes, pruned_bytes
from tessera.shared.methods.base import MethodSpec, Participant, RunInfo, State
from tessera.shared.methods.layer_choice import Candidates
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.methods.safl_settings import SAFLSettings
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import CHUNK, ArrayTensor, chunk_counts
from tessera.shared.updates import rounded_steps
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import TrainedBlock

SITES = 10
"""In a round."""
LINE = 100e6
"""Bits per second."""
LATE = 1000
"""A round in which every stage of a method has begun."""


@dataclass(frozen=True)
class Arm:
    """A method with its settings, on one form of a model."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: Variant = "plain"

    def __hash__(self) -> int:
        return hash(self.name)


def _safl(name: str, **settings: Any) -> Arm:
    return Arm(name, "safl", settings)


ARMS = (
    *(Arm(name, name) for name in ("fedavg", "fedprox", "fednova", "feddyn", "moon", "ditto", "scaffold")),
    *(Arm(name, name) for name in ("fedper", "fedrep", "fedbabu", "fedbn", "local")),
    *(Arm(f"fedfrozen {s}", "fedfrozen", {"scope": s}) for s in ("all_but_qk", "attn_vo", "v_head", "v_only")),
    _safl("safl, third of the layers, one choice", score="last"),
    _safl("safl, third, each site its own", score="random"),
    _safl("safl, third, one choice, no head", score="last", always=["norm"]),
    Arm("lora, with the head", "lora", variant="lora"),
    Arm("lora", "lora", {"train_head": False}, "lora"),
    Arm("lora, A frozen", "lora", {"train_head": False, "freeze_a": True}, "lora"),
    Arm("promptfl", "promptfl", {"modalities": ["text", "vision"]}, "prompts"),
    Arm("pfeddc", "pfeddc", {}, "prompts"),
    Arm("fedpgp", "fedpgp", {}, "prompts"),
    Arm("fedotp", "fedotp", {}, "prompts"),
    Arm("fedvpt", "fedvpt", {}, "deep prompts"),
)
"""SAFL's `last` is a choice that all sites share, and `random` one that each site makes: the bytes are those of any
score that leads to such choices."""


@dataclass(frozen=True)
class Traffic:
    """The blocks that a site trains and sends in a round, and those that it fetches, before any codec."""

    trained: tuple[Block, ...]
    sent: tuple[Block, ...]
    fetched: tuple[Block, ...]
    state: tuple[Block, ...] = ()
    """Blocks whose server state is fetched too."""


@cache
def traffic(arm: Arm, large: Large) -> Traffic:
    """Return one site's round among SITES, late in a run.

    A version has changed where the round before changed it, which is the union of what the sites sent; the site has
    all other blocks. Raises ValueError as `state_of`.
    """
    blocks = table(large, arm.variant)
    # The optimizer that the method needs: the bytes do not depend on it.
    training = Training(optimizer="sgd")
    half = coordinator_half(
        MethodSpec(name=arm.method, settings=dict(arm.settings)), RunInfo(blocks, 2 * LATE, training=training)
    )
    kept = {CONTROL + "any": ArrayTensor(np.zeros(1, np.float32))} if arm.method == "scaffold" else {}
    state = State(LATE, {}, kept)
    cohort = [Participant(str(number), 1) for number in range(SITES)]
    plans = list(half.plan(state, cohort, Random(0)).values())  # noqa: S311 (no secret: the same each time)
    sent = plans[0].upload.resolve(blocks)
    changed = {block.name: block for plan in plans for block in plan.upload.resolve(blocks)}
    fetched = tuple(changed.values())
    return Traffic(plans[0].train.resolve(blocks), sent, fetched, state_of(plans[0].server_state, fetched))


def state_of(patterns: Sequence[str], fetched: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks whose server state a plan fetches: all that are fetched, or none.

    Raises ValueError for a state whose size is not known here.
    """
    if unknown := [pattern for pattern in patterns if not pattern.startswith(CONTROL)]:
        raise ValueError(f"a plan fetches the server state {unknown[0]}, whose size is not known here: add it")
    return fetched if patterns else ()


def possible(arm: Arm, large: Large) -> bool:
    """Return whether a model has the form that the method needs."""
    return arm.variant in large.variants


# ---------------------------------------------------------------- codecs

UP_CODECS = (
    pipeline.RAW, pipeline.LOSSLESS, "delta+fp16", "delta+int8", "delta+int4", "delta+topk=0.01", "delta+lowrank=16",
)  # fmt: skip
WEIGHT_SPREAD = 0.02
"""The standard deviation of a transformer's weights at its start."""


def _steps(count: int) -> Array:
    """Return random steps, about as far as fifty of AdamW at 2e-5."""
    return np.random.default_rng(1).standard_normal(CHUNK, dtype=np.float32)[:count] * np.float32(2e-5 * 50**0.5)


def encoded_bytes(codec: str, blocks: Collection[Block]) -> int:
    """Return the bytes of an update of these blocks, without its header.

    Sizes are those of the product's own encoder for synthetic values: weights from a normal distribution, and steps
    as long as fifty of AdamW at 2e-5. Only lossless stages depend on the values.
    """
    return sum(_block_bytes(pipeline.suited(codec, block), block) for block in blocks)


def _block_bytes(codec: str, block: Block) -> int:
    lowrank = pipeline.parse(codec).lowrank
    if lowrank:
        # Two float32 factors, each piece of which has its length before it.
        size = lowrank.size(block.shape)
        return 4 * size + 4 * len(list(chunk_counts(size)))
    return sum(_chunk_bytes(codec, count) for count in chunk_counts(block.numel))


@cache
def _chunk_bytes(codec: str, count: int) -> int:
    """Return the encoded size of a float32 chunk."""
    random = np.random.default_rng(0)
    base = (random.standard_normal(count, np.float32) * np.float32(WEIGHT_SPREAD)).astype(np.float32)
    change = TrainedBlock(
        Block(tensor="chunk", role="other", shape=(count,), dtype="F32"),
        ArrayTensor(base + _steps(count)),
        ArrayTensor(base),
    )
    chosen = pipeline.worthwhile(codec, change)
    return sum(memoryview(piece).nbytes for piece in pipeline.encode(chosen, change, np.random.default_rng(0)))


def step_bytes(blocks: Collection[Block]) -> int:
    """Return the bytes of a version's step with `download_codec = "int8"`."""
    large = [block for block in blocks if block.numel >= rounded_steps.LEAST_ELEMENTS]
    small = [block for block in blocks if block.numel < rounded_steps.LEAST_ELEMENTS]
    return encoded_bytes(rounded_steps.CODEC, large) + encoded_bytes(pipeline.LOSSLESS, small)


def up_and_down(found: Traffic, *, coded: bool) -> tuple[int, int]:
    """Return the bytes that a site sends and fetches: raw, or in 8 bits both ways. A server state comes lossless."""
    if not coded:
        return nbytes(found.sent), nbytes(found.fetched) + nbytes(found.state)
    state = encoded_bytes(pipeline.LOSSLESS, found.state)
    return encoded_bytes("delta+int8", found.sent), step_bytes(found.fetched) + state


def line_seconds(moved: float) -> float:
    """Return the seconds that a line of 100 Mbit/s takes for these bytes, and nothing else on it."""
    return 8 * moved / LINE


# ---------------------------------------------------------------- the claim of 75 %

PRUNED = 0.375
"""The share of rows whose pruning takes K = 8 of 16 layers from 60 to 75 % (`safl_bytes`)."""


@dataclass(frozen=True)
class Claim:
    """SAFL's savings on one model, for each number of layers from 1: shares of the whole model's bytes."""

    layers: int
    in_layers: float
    """The share of the model's bytes that is in layers."""
    up: Sequence[float]
    """Also of both ways, if all sites make one choice."""
    pruned: Sequence[float]
    """Up, with PRUNED of the rows of each matrix left as they were."""
    own_choices: Sequence[float]
    """Both ways, if each site draws its layers."""

    def most(self, savings: Sequence[float]) -> int:
        """Return the largest number of layers that saves what the paper claims; 0 if none does."""
        return max((count for count, saving in enumerate(savings, 1) if saving >= CLAIMED), default=0)


def claim(blocks: tuple[Block, ...], always: Sequence[str]) -> Claim:
    """Return the savings. Downloads are the union of SITES choices: one, or expected ones of independent draws."""
    candidates = SAFLSettings(score="last", always=tuple(always)).candidates(blocks)
    whole, rest, count = nbytes(blocks), nbytes(candidates.always), len(candidates.layers)
    up, pruned, own = list[float](), list[float](), list[float]()
    for number in range(1, count + 1):
        chosen = candidates.top({layer.name: float(layer.index) for layer in candidates.layers}, number)
        sent = rest + sum(layer.nbytes for layer in chosen)
        spared = pruned_bytes([block for layer in chosen for block in layer.blocks], PRUNED)
        union = rest + sum(_expected(candidates, number))
        up.append(1 - sent / whole)
        pruned.append(1 - (sent - spared) / whole)
        own.append(1 - (sent + union) / (2 * whole))
    layered = nbytes([block for block in blocks if block.layer is not None])
    return Claim(count, layered / whole, up, pruned, own)


def _expected(candidates: Candidates, number: int) -> Iterator[float]:
    """Yield the expected bytes of each stack that at least one of SITES sends, if each draws its layers."""
    for stack, quota in zip(candidates.stacks, candidates.quotas(number), strict=True):
        missed = (1 - quota / len(stack)) ** SITES
        yield (1 - missed) * sum(layer.nbytes for layer in stack)

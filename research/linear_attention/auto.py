"""Where FedFrozen's own rule would end a warm-up: the coordinator's half itself, on the simulation's updates."""

from __future__ import annotations

from collections.abc import Iterable

from common.names import FROZEN_FROM
from linear_attention.problem import Weights
from tessera.shared.methods.base import MethodSpec, RunInfo, State, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block, Role
from tessera.shared.tensors.lazy import ArrayTensor

BLOCK_ROLES: tuple[Role, ...] = ("query", "key", "value")


def warmup_rounds(start: Weights, versions: Iterable[tuple[Weights, Weights]], rounds: int) -> int:
    """For how many of a run's rounds everything trains, with the method's default settings."""
    blocks = tuple(
        Block(tensor=role, role=role, shape=matrix.shape, dtype="F64")
        for role, matrix in zip(BLOCK_ROLES, start, strict=True)
    )
    half = coordinator_half(MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"}), RunInfo(blocks, rounds))
    state = half.start(State(0, _named(start)))
    for sent, mean in versions:
        # The simulation has averaged already, so what the half would average is not read.
        merged = half.merge(state, [Update(f"{k}/w", 1, _named(theirs)) for k, theirs in enumerate(_each(sent))])
        state = State(merged.round, _named(mean), merged.server_state, merged.scalars)
        if FROZEN_FROM in state.scalars:
            return int(state.scalars[FROZEN_FROM])
    return rounds


def _each(sent: Weights) -> Iterable[Weights]:
    return (Weights(*matrices) for matrices in zip(*sent, strict=True))


def _named(weights: Weights) -> dict[str, ArrayTensor]:
    return {role: ArrayTensor(matrix, "F64") for role, matrix in zip(BLOCK_ROLES, weights, strict=True)}

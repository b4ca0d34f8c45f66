"""The reference of a run that learns preferences: its first version, in every round.

All versions have the same base, so that the first adapters are the reference. If they are zero, it is the base alone,
and nothing is stored. Otherwise they are part of the server state of each version, under the digests that they have
in the first one: sites that join later find them there, and no garbage collection removes them.
"""

from dataclasses import replace
from typing import Any

from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import REFERENCE, CoordinatorHalf, State, UnsupportedRun
from tessera.shared.methods.registry import needs_one_example_per_row
from tessera.shared.model.selectors import Match
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import Tensor

ADAPTERS = Match(roles=("adapter",))
B_FACTORS = Match(roles=("adapter",), names=("*.lora_B.*",))


def begun(spec: RunSpec, model: Model, half: CoordinatorHalf[Any], state: State) -> State:
    """Return the state before the first round, with the reference if the run learns preferences and its first
    adapters are not zero. Raises UnsupportedRun for a method with which the run cannot."""
    # An earlier run, of whose versions this is one, had another reference.
    own = {name: tensor for name, tensor in state.server_state.items() if not name.startswith(REFERENCE)}
    if spec.training.loss == "dpo":
        _check_method(spec, model, half)
        own |= {REFERENCE + name: tensor for name, tensor in _reference(model, state).items()}
    return replace(state, server_state=own)


def _check_method(spec: RunSpec, model: Model, half: CoordinatorHalf[Any]) -> None:
    name = spec.method.name
    beside = {
        "changes the base, with which preferences compare a model": any(map(half.merged_beside.holds, model.blocks)),
        "compares or measures rows of one text each, and a pair has two": needs_one_example_per_row(spec.method),
        "measures attention, for which a pair is no text": half.settings.probe_examples > 0,
    }
    if found := [said for said, holds in beside.items() if holds]:
        raise UnsupportedRun(
            f"the method {name} {found[0]}: change method.settings, choose a method such as fedavg, or leave out "
            'training.loss = "dpo"'
        )


def _reference(model: Model, state: State) -> dict[str, Tensor]:
    """Return the first adapters by block name; none if they are zero. Raises UnsupportedRun."""
    moved = any(
        chunk.any() for block in model.blocks if B_FACTORS.holds(block) for chunk in state.model[block.name].chunks()
    )
    if not (moved or (model.lora and model.lora.dora)):
        return {}
    if model.lora and model.lora.ranks:
        raise UnsupportedRun(
            "a site of a smaller rank would compare with a part of the first version, whose adapters of several "
            "ranks are not zero: begin with new adapters, or create the model with one rank (--lora-rank 8)"
        )
    return {block.name: state.model[block.name] for block in model.blocks if ADAPTERS.holds(block)}

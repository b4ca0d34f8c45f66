"""The learning rates of a run's blocks, by their roles."""

from collections.abc import Iterator, Sequence

from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training

PRIVATE = "private"
"""The name in `training.rates` of the modules that a method adds at a site, which are in no version."""


def rate_of(training: Training, block: Block, *, private: bool = False) -> float:
    """Return the learning rate of a block, which is in a `private` module of the method or in the model."""
    return training.learning_rate * training.rates.get(PRIVATE if private else block.role, 1.0)


def rate_faults(training: Training, blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the reasons why a model of these blocks cannot be trained at the run's rates, with the remedies."""
    if not training.rates:
        return
    roles: list[str] = sorted({block.role for block in blocks})
    for name in sorted(training.rates.keys() - {*roles, PRIVATE}):
        yield f"no block of the model has the role {name[:32]!r}; it has {', '.join(roles)}"
    first: dict[str, Block] = {}
    for block in blocks:
        other = first.setdefault(block.tensor, block)
        if rate_of(training, block) != rate_of(training, other):
            both = f"{other.role} and {block.role}"
            yield f"{block.tensor} is one tensor of the roles {both}, which need the same rate: set both alike"
            return

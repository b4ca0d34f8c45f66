"""AdamW over joined tensors moves every element as torch's own does, bit for bit."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from tessera.worker.training.optimization.joined_adamw import JoinedAdamW, can_join
from tessera.worker.training.optimization.optimizer_state import optimizer_tensors, set_optimizer_tensors

SHAPES = [(), (1,), (7,), (8, 3), (31,), (64,), (5, 5, 5), (1000,)]
"""Whole vectors of a processor, and rests of every length."""
BETAS = (0.8, 0.95)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def groups(given: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    halves = given[::2], given[1::2], []
    return [{"params": half, "lr": 0.1 / (1 + n), "weight_decay": n * decay} for n, half in enumerate(halves)]


def steps(
    optimizer: torch.optim.Optimizer, given: list[nn.Parameter], without: int = -1, since: int = 0
) -> Iterator[None]:
    """Yield after each step with new gradients, from one step on without one of them."""
    dice = torch.Generator().manual_seed(1)
    for number in range(8):
        for place, parameter in enumerate(given):
            gradient = torch.randn(parameter.shape, generator=dice) * 10.0**-place
            parameter.grad = None if number >= since and place == without else gradient
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        yield


@pytest.mark.parametrize(("without", "since"), [(-1, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_every_step_has_the_bits_of_torchs_own(decay: float, without: int, since: int) -> None:
    ours, theirs = parameters(), parameters()
    joined = JoinedAdamW(groups(ours, decay), betas=BETAS)
    own = torch.optim.AdamW(groups(theirs, decay), betas=BETAS)
    for _ in zip(steps(joined, ours, without, since), steps(own, theirs, without, since), strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_moments_that_are_asked_for_are_torchs_own_and_go_on() -> None:
    ours, theirs = parameters(), parameters()
    joined, own = JoinedAdamW(groups(ours, 0.01), betas=BETAS), torch.optim.AdamW(groups(theirs, 0.01), betas=BETAS)
    for number, _ in enumerate(zip(steps(joined, ours), steps(own, theirs), strict=True)):
        if number in (2, 5):
            found, expected = (
                optimizer_tensors(each, {str(place): one for place, one in enumerate(of)})
                for each, of in ((joined, ours), (own, theirs))
            )
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(map(torch.equal, ours, theirs))


def test_moments_that_are_set_replace_those_so_far() -> None:
    ours, theirs = parameters(), parameters()
    joined, own = JoinedAdamW(groups(ours, 0.01), betas=BETAS), torch.optim.AdamW(groups(theirs, 0.01), betas=BETAS)
    named = {str(place): one for place, one in enumerate(theirs)}
    list(islice(steps(own, theirs), 3))
    list(islice(steps(joined, ours), 1))
    kept = optimizer_tensors(own, named)
    set_optimizer_tensors(joined, {str(place): one for place, one in enumerate(ours)}, kept)
    for mine, other in zip(ours, theirs, strict=True):
        mine.data.copy_(other)
    for group, other in zip(joined.param_groups, own.param_groups, strict=True):
        group["lr"] = other["lr"]
    list(steps(own, theirs)), list(steps(joined, ours))
    assert all(map(torch.equal, ours, theirs))


def test_hooks_are_called_once_for_each_step() -> None:
    given, called = parameters(), list[int]()
    torch.optim.AdamW(given)
    joined = JoinedAdamW(groups(given, 0.01), betas=BETAS)
    joined.register_step_post_hook(lambda *_: called.append(1))
    list(steps(joined, given, without=2, since=3))
    assert len(called) == 8


def test_only_parameters_in_float32_on_the_cpu_are_joined() -> None:
    assert can_join(nn.Parameter(torch.ones(2)))
    others = [torch.ones(2), nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2, device="meta"))]
    assert not any(map(can_join, others))

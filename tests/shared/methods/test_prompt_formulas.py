"""The formulas of methods of prompts: pFedDC's fusions and FedOTP's transport."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from tessera.shared.methods.fedotp import Transport, transport_plan
from tessera.shared.methods.pfeddc import fused, fusion_weights
from tessera.shared.model.spec import Fusion


class Fuse:
    """A fusion with the matrices with which it starts."""

    def __init__(self, fusion: Fusion, width: int) -> None:
        self.weights = fusion_weights(fusion, width)
        self._fusion = fusion

    def __call__(self, shared: Tensor, own: Tensor) -> Tensor:
        return fused(self._fusion, self.weights, shared, own)


def test_attention_that_fuses_starts_as_what_asks_and_looks_at_what_answers() -> None:
    torch.manual_seed(0)
    shared, own = 0.02 * torch.randn(3, 16), 0.02 * torch.randn(3, 16)
    for asks, expected in (("local", own), ("global", shared)):
        fuse = Fuse(Fusion.model_validate({"asks": asks, "heads": 2}), 16)
        assert torch.equal(fuse(shared, own), expected)
        nn.init.normal_(fuse.weights["output"])
        other = 0.02 * torch.randn(3, 16)
        moved = fuse(shared, other) if asks == "global" else fuse(other, own)
        assert (moved - fuse(shared, own)).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("size", [0.02, 1.0, 50.0])
def test_no_output_projection_makes_attention_a_constant_or_larger_than_what_asks(size: float) -> None:
    torch.manual_seed(0)
    fuse, shared, own = Fuse(Fusion(heads=2), 16), 0.02 * torch.randn(4, 16), 0.02 * torch.randn(4, 16)
    # It sends whatever it is handed the same way: what a loss that asks the same of each token would teach it.
    one_way = torch.outer(torch.randn(16), torch.ones(16) @ fuse.weights["value"]) * size
    fuse.weights["output"].copy_(one_way)
    added = fuse(shared, own) - shared
    assert 0 < added.norm() <= (1 + 1e-6) * shared.norm()
    assert (added - added.mean(dim=0)).norm() > 0.7 * added.norm()
    # The same tokens in another order ask the same questions.
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(fuse(shared[order], own), fuse(shared, own)[order])


def test_other_fusions_are_the_mean_and_one_after_the_other() -> None:
    shared, own = torch.tensor([[2.0, 4.0]]), torch.tensor([[4.0, 8.0]])
    assert Fuse(Fusion(kind="mean"), 2)(shared, own).tolist() == [[3.0, 6.0]]
    assert Fuse(Fusion(kind="concat"), 2)(shared, own).tolist() == [[2.0, 4.0], [4.0, 8.0]]


def test_an_mlp_that_fuses_is_the_formula_and_has_the_parameters_of_attention() -> None:
    torch.manual_seed(0)
    fuse, shared, own = Fuse(Fusion(kind="mlp"), 24), torch.randn(3, 24), torch.randn(3, 24)
    for fusion in (fuse, Fuse(Fusion(), 24)):
        assert sum(tensor.numel() for tensor in fusion.weights.values()) == 4 * 24**2
    assert torch.equal(fuse(shared, own), shared)
    hidden, output = (nn.init.normal_(fuse.weights[name]) for name in ("hidden", "output"))
    both = torch.cat([layer_norm(each, (24,), eps=0.0) for each in (shared, own)], dim=1)
    found = gelu(both @ hidden.T) @ output.T
    alike = found.mean(dim=0).expand(3, 24)
    by_token = found - alike
    joined = by_token + alike * by_token.norm() / (by_token.norm() ** 2 + alike.norm() ** 2) ** 0.5
    added = joined * shared.norm() / (shared.norm() ** 2 + joined.norm() ** 2) ** 0.5
    torch.testing.assert_close(fuse(shared, own), shared + added)
    # Not a sum over tokens: those in another order have other answers.
    assert not torch.allclose(fuse(shared, own[[1, 0, 2]]), fuse(shared, own), atol=1e-3)


def test_random_attention_is_the_same_everywhere() -> None:
    shared, own = torch.randn(3, 16), torch.randn(3, 16)
    one, other = (Fuse(Fusion(kind="random-attention", heads=2), 16) for _ in range(2))
    assert torch.equal(one(shared, own), other(shared, own))
    added = one(shared, own) - shared
    assert 0.05 * shared.norm() < added.norm() <= shared.norm()


@pytest.mark.parametrize("regularization", [0.01, 0.1, 1.0])
def test_a_transport_plan_meets_its_marginals_and_no_plan_that_does_is_better(regularization: float) -> None:
    costs = torch.rand(3, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    transport = Transport(mass=0.6, regularization=regularization, iterations=3000)
    plan = transport_plan(costs, transport)
    torch.testing.assert_close(plan.sum(dim=-2), torch.full((3, 2), 0.3, dtype=torch.float64))
    assert (plan.sum(dim=-1) <= 1 / 5 + 1e-6).all()

    def objective(plan: Tensor) -> Tensor:
        return (costs * plan + regularization * plan * (plan.log() - 1)).sum(dim=(-2, -1))

    # Moving mass between two patches of a column, where rows have room, only costs.
    best, tried = objective(plan), 0
    for column in range(2):
        for here, there in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 0), (3, 1)):
            moved = plan.clone()
            step = 0.05 * plan[:, here, column]
            moved[:, here, column] -= step
            moved[:, there, column] += step
            allowed = (moved.sum(dim=-1) <= 1 / 5 + 1e-6).all(dim=-1)
            assert (objective(moved)[allowed] >= best[allowed] - 1e-6).all()
            tried += int(allowed.sum())
    assert tried > 5


def test_all_of_the_mass_fills_each_patch_and_a_small_regularization_chooses_the_nearest() -> None:
    costs = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.9, 0.2], [0.8, 0.1]])
    whole = transport_plan(costs, Transport(mass=1, regularization=0.1, iterations=1000))
    torch.testing.assert_close(whole.sum(dim=1), torch.full((4,), 0.25), rtol=1e-3, atol=1e-4)
    # Each prompt of a quarter of the mass takes its nearest patch.
    sharp = transport_plan(costs, Transport(mass=0.5, regularization=0.005, iterations=1000))
    expected = torch.tensor([[0.25, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.25]])
    torch.testing.assert_close(sharp, expected, rtol=0, atol=1e-3)

"""What the baselines compute, held against arithmetic or their definition."""

from __future__ import annotations

import numpy as np
import torch

from tessera.worker.model.build import instantiate
from tests.support.tasks import VIT, images, one_task

HEAD = {"classifier.weight", "classifier.bias"}
BODY = "vit.layernorm.weight"
PLAIN = {"optimizer": "sgd", "batch_size": None, "weight_decay": 0.0}


def test_fedprox_without_its_term_is_fedavg_bit_for_bit() -> None:
    _, plain = one_task("fedavg", epochs=2)
    _, held = one_task("fedprox", {"mu": 0.0}, epochs=2)
    assert all((held.upload[name] == plain.upload[name]).all() for name in plain.upload)


def test_fedprox_adds_mu_times_the_distance_to_the_gradient() -> None:
    mu, rate = 0.5, 0.1
    _, result = one_task("fedprox", {"mu": mu}, epochs=2, learning_rate=rate, **PLAIN)
    model = instantiate(VIT, "image-classification", seed=1)
    (batch,) = images().batches(None, None)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
        with torch.no_grad():
            for parameter, origin in zip(model.parameters(), start, strict=True):
                step = mu * (parameter - origin) + (0 if parameter.grad is None else parameter.grad)
                parameter.sub_(rate * step)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(result.upload[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_fedprox_stays_nearer_to_where_it_started() -> None:
    start = {n: p.detach().numpy() for n, p in instantiate(VIT, "image-classification", seed=1).named_parameters()}

    def moved(mu: float) -> float:
        _, result = one_task("fedprox", {"mu": mu}, epochs=5, **PLAIN)
        return sum(float(np.square(result.upload[name] - start[name]).sum()) for name in start)

    assert moved(10.0) < moved(0.1) < moved(0.0)


def test_fedper_keeps_the_head_and_sends_all_else() -> None:
    context, result = one_task("fedper")
    assert set(result.keep) == HEAD
    assert set(result.upload) == {block.name for block in context.blocks} - HEAD


def test_fedper_goes_on_with_the_head_that_it_kept() -> None:
    kept = {"classifier.weight": np.full((3, 16), 0.25, np.float32), "classifier.bias": np.ones(3, np.float32)}
    # A rate so small that what was restored is still to be recognised.
    _, result = one_task("fedper", vault=kept, learning_rate=1e-6, **PLAIN)
    for name, values in kept.items():
        np.testing.assert_allclose(result.keep[name], values, atol=1e-5)


def test_fedper_with_other_private_blocks_keeps_those() -> None:
    _, result = one_task("fedper", {"private": [{"roles": ["norm"]}]})
    assert result.keep
    assert all("norm" in name for name in result.keep)
    assert set(result.upload) >= HEAD


def test_fedrep_trains_the_head_on_the_first_body_and_then_the_body_on_that_head() -> None:
    _, result = one_task("fedrep", {"head_epochs": 3}, epochs=1, **PLAIN)
    # The head ends as it was when the body began: three steps of the head alone, on the body of the version.
    model = instantiate(VIT, "image-classification", seed=1)
    (batch,) = images().batches(None, None)
    head = [model.classifier.weight, model.classifier.bias]
    for _ in range(3):
        for parameter, gradient in zip(head, torch.autograd.grad(model(**batch).loss, head), strict=True):
            parameter.data.sub_(0.05 * gradient)
    np.testing.assert_allclose(result.keep["classifier.weight"], head[0].detach().numpy(), rtol=1e-4, atol=1e-6)
    assert not np.array_equal(result.upload[BODY], model.get_parameter(BODY).detach().numpy())

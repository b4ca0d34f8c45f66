"""The averages of LoRA's products against dense matrices: raFLoRA, FLoRA and FedEx-LoRA, with mixed ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.aggregation.low_rank import BestFactors, ProductSum
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import State, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.spec import Head, Lora, Model
from tessera.shared.problems import Invalid
from tessera.shared.rounds.planning import begun, run_facts
from tessera.shared.tensors.lazy import CHUNK, ArrayTensor, to_array
from tessera.simulation import Conditions, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import activate_adapters, instantiate, write_block
from tests.support.task_document import NO_DIGEST
from tests.support.tasks import untrained

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], Head]] = {
    "bert": ({"model_type": "bert", **SIZES, "num_labels": 3}, "text-classification"),
    "gpt2, fused and transposed": (
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, **SIZES},
        "causal-lm",
    ),
    "gpt_neox, fused head by head": ({"model_type": "gpt_neox", **SIZES}, "causal-lm"),
}
EVERY = pytest.mark.parametrize("name", MODELS)
LORA = Lora(rank=8, alpha=12, roles=("query", "value", "output", "mlp"), ranks=(2, 4, 8))
RANKS = {"a": 2, "b": 4, "c": 8}
EXAMPLES = {"a": 10, "b": 20, "c": 70}
Values = Mapping[str, np.ndarray]


def spec_of(average: str, **changes: Any) -> RunSpec:
    method = {"name": "lora", "settings": {"average": average}}
    wanted = {"name": "averages", "method": method, "dataset": "data", "rounds": 2, "model": NO_DIGEST}
    return RunSpec.model_validate({**wanted, "version": NO_DIGEST, **changes})


def model_of(name: str, lora: Lora = LORA) -> tuple[Model, dict[str, np.ndarray]]:
    config, head = MODELS[name]
    return untrained(config, head, seed=1, lora=lora)


def state_of(values: Values) -> State:
    return State(3, {name: ArrayTensor(value) for name, value in values.items()})


def updates_of(model: Model, values: Values) -> list[Update]:
    """An update of each site: the factors of its rank, moved at random, and the head."""
    rng, sent = np.random.default_rng(5), []
    for site, rank in RANKS.items():
        parts = LORA.parts_within(rank)
        blocks = {
            block.name: ArrayTensor((values[block.name] + rng.normal(size=block.shape)).astype(np.float32))
            for block in model.blocks
            if block.role == "head" or (block.role == "adapter" and any(f".{part}." in block.name for part in parts))
        }
        sent.append(Update(site, EXAMPLES[site], blocks))
    return sent


def merged(average: str, model: Model, values: Values, updates: list[Update]) -> dict[str, np.ndarray]:
    spec = spec_of(average)
    half = coordinator_half(spec.method, run_facts(spec, model))
    return {name: to_array(tensor) for name, tensor in half.merge(state_of(values), updates).model.items()}


def products(model: Model, values: Values, part: str) -> dict[str, np.ndarray]:
    """B A of a part of the rank, without its scale, as a change of each matrix or part of one: [outputs, inputs]."""
    found = {}
    for block in model.blocks:
        if f".lora_B.{part}." in block.name:
            path, _, label = block.name.partition(f".lora_B.{part}.weight")
            a = values[f"{path}.lora_A.{part}.weight"].astype(np.float64)
            found[f"{path}.base_layer.weight{label}"] = values[block.name].astype(np.float64) @ a
    assert found
    return found


def own(values: Values, update: Update) -> dict[str, np.ndarray]:
    return {**values, **{name: to_array(tensor) for name, tensor in update.blocks.items()}}


def started(model: Model, values: dict[str, np.ndarray], *, zero: bool) -> dict[str, np.ndarray]:
    """A version whose B is away from zero, as after some rounds, or at it."""
    rng = np.random.default_rng(9)
    moved = {b.name: rng.normal(size=b.shape).astype(np.float32) for b in model.blocks if ".lora_B." in b.name}
    return values if zero else {**values, **moved}


def mean_products(model: Model, values: Values, updates: list[Update]) -> dict[str, np.ndarray]:
    """sum_k p_k alpha / rank B_k A_k, with the version's own factors for a part that a site did not train."""
    total: dict[str, np.ndarray] = {}
    for update in updates:
        for part in LORA.parts:
            for name, product in products(model, own(values, update), part).items():
                share = update.examples / 100 * LORA.alpha / LORA.rank
                total[name] = total.get(name, 0) + share * product
    return total


def oriented(model: str, change: np.ndarray) -> np.ndarray:
    return change.T if model.startswith("gpt2") else change


@EVERY
def test_stacking_adds_the_mean_product_to_the_base_and_leaves_the_adapters_at_their_start(name: str) -> None:
    model, values = model_of(name)
    updates = updates_of(model, values)
    after = merged("stack", model, values, updates)
    expected = mean_products(model, values, updates)
    for matrix, change in expected.items():
        np.testing.assert_allclose(after[matrix] - values[matrix], oriented(name, change), rtol=1e-5, atol=1e-5)
    still = [block.name for block in model.blocks if block.name not in expected and block.role != "head"]
    assert all((after[block] == values[block]).all() for block in still)
    assert {block.role for block in model.blocks if block.name in expected} >= {"query", "value", "output", "mlp"}


@EVERY
@pytest.mark.parametrize("zero", [True, False], ids=["at its start", "later"])
def test_with_the_residual_the_new_version_computes_with_the_mean_product(name: str, *, zero: bool) -> None:
    model, values = model_of(name)
    values = started(model, values, zero=zero)
    updates = updates_of(model, values)
    after = merged("residual", model, values, updates)
    found: dict[str, np.ndarray] = {}
    for part in LORA.parts:
        for matrix, product in products(model, after, part).items():
            found[matrix] = found.get(matrix, 0) + LORA.alpha / LORA.rank * product
    for matrix, expected in mean_products(model, values, updates).items():
        moved = (after[matrix] - values[matrix]).astype(np.float64)
        np.testing.assert_allclose(
            moved + oriented(name, found[matrix]), oriented(name, expected), rtol=1e-5, atol=2e-5
        )
    # A and B are averaged as without it.
    plain = merged("factors", model, values, updates)
    assert all((after[b.name] == plain[b.name]).all() for b in model.blocks if b.role in ("adapter", "head"))


@EVERY
@pytest.mark.parametrize("zero", [True, False], ids=["at its start", "later"])
def test_by_partition_the_factors_are_the_best_of_the_mean_of_each_part_over_its_sites(
    name: str, *, zero: bool
) -> None:
    model, values = model_of(name)
    values = started(model, values, zero=zero)
    updates = updates_of(model, values)
    after = merged("partition", model, values, updates)
    dense: dict[str, Any] = {}
    for part, senders in (("rank_2", updates), ("rank_4", updates[1:]), ("rank_8", updates[2:])):
        weight = sum(update.examples for update in senders)
        for update in senders:
            for matrix, product in products(model, own(values, update), part).items():
                dense[matrix] = dense.get(matrix, 0) + update.examples / weight * product
    found: dict[str, Any] = {}
    for part in LORA.parts:
        for matrix, product in products(model, after, part).items():
            found[matrix] = found.get(matrix, 0) + product
    # A fused matrix is decomposed whole.
    for tensor in {matrix.partition("#")[0] for matrix in dense}:
        names = [matrix for matrix in dense if matrix.partition("#")[0] == tensor]
        whole = np.concatenate([dense[each] for each in names])
        left, singular, right = np.linalg.svd(whole, full_matrices=False)
        best = (left[:, :8] * singular[:8]) @ right[:8]
        np.testing.assert_allclose(np.concatenate([found[each] for each in names]), best, rtol=1e-4, atol=1e-4)
    assert all((after[b.name] == values[b.name]).all() for b in model.blocks if b.role not in ("adapter", "head"))


@pytest.mark.parametrize("average", ["partition", "stack", "residual"])
def test_a_round_in_which_no_site_moved_an_adapter_leaves_every_matrix_as_it_was(average: str) -> None:
    model, values = model_of("bert")
    heads = [block.name for block in model.blocks if block.role == "head"]
    update = Update("a", 10, {name: ArrayTensor(values[name] + 1) for name in heads})
    after = merged(average, model, values, [update])
    assert all((after[name] == values[name]).all() for name in values if name not in heads)


def test_a_part_that_no_site_trains_keeps_its_product() -> None:
    """With sites of rank 2 alone the other parts are averaged over no site: they stay in the sum as they are."""
    model, values = model_of("bert")
    values = started(model, values, zero=False)
    after = merged("partition", model, values, updates_of(model, values)[:1])
    first = own(values, updates_of(model, values)[0])
    matrix = "bert.encoder.layer.0.attention.self.query.base_layer.weight"
    expected = sum(products(model, first, part)[matrix] for part in LORA.parts)
    found = sum(products(model, after, part)[matrix] for part in LORA.parts)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_sum_of_products_is_the_same_in_chunks_that_end_within_rows() -> None:
    rng = np.random.default_rng(0)
    base, b, a = (rng.normal(size=shape).astype(np.float32) for shape in ((700, 999), (700, 3), (3, 999)))
    assert base.size > 2 * CHUNK
    assert CHUNK % 999
    whole = ProductSum(ArrayTensor(base), [(0.5, ArrayTensor(b), ArrayTensor(a))])
    np.testing.assert_allclose(to_array(whole), base + 0.5 * (b @ a), rtol=1e-5, atol=1e-5)


def test_factors_of_a_product_of_a_smaller_rank_have_rows_of_a_that_can_train() -> None:
    rng = np.random.default_rng(0)
    b, a = rng.normal(size=(9, 1)), rng.normal(size=(1, 7))
    beside = (1.0, ArrayTensor(0 * b, "F64"), ArrayTensor(2 * a + 1, "F64"))
    terms = [(1.0, ArrayTensor(b, "F64"), ArrayTensor(a, "F64")), beside]
    rows, columns = BestFactors(terms, 2).factors
    np.testing.assert_allclose(rows @ columns, b @ a, atol=1e-12)
    np.testing.assert_allclose(columns @ columns.T, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(rows[:, 1], 0, atol=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a server optimizer": ({"server_optimizer": {"kind": "adam"}}, "server_optimizer would step from the result"),
    "a robust rule": (
        {"robust": {"rule": "median"}, "cohort": {"quorum": 3}},
        "robust lets only blocks affect a version",
    ),
    "another denominator": ({"normalization": "cohort"}, "normalization"),
    "several workers of a site": (
        {"cohort": {"workers_per_site": 2}},
        "cohort.workers_per_site averages A and B",
    ),
    "client privacy": (
        {
            "client_privacy": {"epsilon": 100.0, "delta": 1e-5, "clip_norm": 1.0, "expected_sites": 3},
            "normalization": "cohort",
        },
        "client_privacy lets only blocks affect a version",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("average", ["partition", "stack", "residual"])
def test_a_run_whose_settings_hide_the_products_is_refused(case: str, average: str) -> None:
    changes, said = REFUSED[case]
    model, values = model_of("bert", Lora(rank=2, alpha=4))
    with pytest.raises(Invalid) as refusal:
        begun(spec_of(average, **changes), model, state_of(values))
    assert said in str(refusal.value.errors)
    assert 'average to "factors"' in str(refusal.value.errors)
    begun(spec_of("factors", **changes), model, state_of(values))


def refusal_of(model: Model, values: Values, spec: RunSpec) -> str:
    with pytest.raises(Invalid) as refusal:
        begun(spec, model, state_of(values))
    return str(refusal.value.errors)


@pytest.mark.parametrize("average", ["stack", "residual"])
def test_a_base_that_a_merge_cannot_change_is_refused(average: str) -> None:
    model, values = model_of("bert")
    base = [block.name for block in model.blocks if block.role not in ("adapter", "head")]
    external = model.model_copy(update={"external": dict.fromkeys(base, NO_DIGEST)})
    said = refusal_of(external, values, spec_of(average))
    assert "merge changes 5 blocks of the external base" in said
    assert "without --external-base" in said
    config = {**MODELS["bert"][0], "dtype": "bfloat16"}
    short, start = untrained(config, "text-classification", lora=LORA)
    as_float = short.model_copy(
        update={"blocks": tuple(b if b.name in base else b.model_copy(update={"dtype": "F32"}) for b in short.blocks)}
    )
    said = refusal_of(as_float, start, spec_of(average))
    assert "merge changes 5 blocks of 16 bits" in said
    assert "--dtype float32" in said
    begun(spec_of("partition"), external, state_of(values))


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "another denominator": ({"normalization": "cohort"}, "normalization 'cohort' divides by the weights of all"),
    "client privacy": (REFUSED["client privacy"][0], "client_privacy divides by the number of all sites"),
    "another merge": (
        {"method": {"name": "scaffold"}, "training": {"optimizer": "sgd"}},
        "or choose a method such as lora",
    ),
    "secure sums": (
        {"secure_sums": {"helpers": ["a", "b", "c"], "quorum": 3}, "cohort": {"quorum": 3}},
        "secure_sums needs one plan for all sites",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_run_that_would_not_average_each_part_over_its_sites_is_refused(case: str) -> None:
    changes, said = PARTS[case]
    model, values = model_of("bert")
    found = refusal_of(model, values, spec_of("factors", **changes))
    assert said in found
    assert "create the model with one rank" in found
    one, start = model_of("bert", Lora(rank=2, alpha=4))
    begun(spec_of("factors", **changes), one, state_of(start))


def test_the_rows_of_a_run_of_one_rank_are_serialised_as_before() -> None:
    assert Lora(rank=2, alpha=4).model_dump() == {"rank": 2, "alpha": 4.0, "roles": ("query", "value")}
    assert "lora_ranks" not in spec_of("factors").model_dump()
    with pytest.raises(ValueError, match="ascend up to rank 8"):
        Lora(rank=8, alpha=4, ranks=(4, 2, 8))


OTHERS: dict[str, dict[str, Any]] = {
    "fedfrozen": {"method": {"name": "fedfrozen", "settings": {"warmup_rounds": 1}}},
    "safl": {"method": {"name": "safl", "settings": {"layers": 1}}},
    "fedprox": {"method": {"name": "fedprox"}},
    "stack, private, in few bits": {
        "method": {"name": "lora", "settings": {"average": "stack"}},
        "privacy": {"epsilon": 50.0, "delta": 1e-3, "clip_norm": 1.0},
        "codec": "delta+int8",
    },
    "partition": {"method": {"name": "lora", "settings": {"average": "partition"}}, "download_codec": "int8"},
    "residual, private": {
        "method": {"name": "lora", "settings": {"average": "residual"}},
        "privacy": {"epsilon": 50.0, "delta": 1e-3, "clip_norm": 1.0},
    },
}


SHORT = ("fedfrozen", "stack, private, in few bits", "residual, private")


@pytest.mark.parametrize(
    "case", [case if case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in OTHERS]
)
def test_sites_of_different_ranks_take_part_in_other_methods_and_under_privacy(case: str) -> None:
    config, head = MODELS["bert"]
    wide = {**config, "num_hidden_layers": 2}
    model, values = untrained(wide, head, seed=1, lora=LORA)
    tokens = torch.randint(3, 18, (24, 6), generator=torch.Generator().manual_seed(0))
    data = Dataset({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[:, 0] % 3})
    sites = {name: data.rows(torch.arange(8) + 8 * place) for place, name in enumerate(RANKS)}
    spec = {
        "rounds": 2, "seed": 2, "training": {"learning_rate": 0.05, "batch_size": 8}, "lora_ranks": RANKS,
        **OTHERS[case],
    }  # fmt: skip
    result = simulate(spec, Weights(model, values), sites, conditions=Conditions(keep_versions="all"))
    for round_ in result.rounds:
        assert {task.worker.partition("/")[0]: task.metrics["lora_rank"] for task in round_.tasks} == RANKS
    start, end = result.arrays(0), result.arrays(2)
    moved = {name for name in end if not np.array_equal(start[name], end[name])}
    stacked = case.startswith("stack")
    for part in LORA.parts:
        assert any(f".lora_B.{part}." in name for name in moved) == (not stacked)
    # The base only with the mean product of FLoRA, or with FedEx-LoRA's difference.
    assert any(".base_layer.weight" in name for name in moved) == case.startswith(("stack", "residual"))


def test_a_table_in_which_an_adapter_fits_no_matrix_is_refused() -> None:
    model, values = model_of("bert")
    wrong = next(block.name for block in model.blocks if ".lora_B.rank_4." in block.name)
    kept = tuple(block for block in model.blocks if block.name != wrong)
    said = refusal_of(model.model_copy(update={"blocks": kept}), values, spec_of("stack"))
    assert "does not fit a matrix: create the model with `tessera model init`" in said


@pytest.mark.parametrize("average", ["stack", "residual"])
def test_each_site_starts_from_the_mean_of_the_sites_models_whatever_its_rank(average: str) -> None:
    """With the residual the base alone, or with some parts, is another model than the version."""
    config, head = MODELS["bert"]
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, values = untrained({**config, **dropout}, head, seed=1, lora=LORA)
    tokens = torch.randint(3, 18, (60, 6), generator=torch.Generator().manual_seed(0))
    data = Dataset({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[:, 0] % 3})
    sites = {name: data.rows(torch.arange(20) + 20 * place) for place, name in enumerate(RANKS)}
    spec = {
        "rounds": 2, "seed": 2, "lora_ranks": RANKS, "method": {"name": "lora", "settings": {"average": average}},
        "training": {"learning_rate": 0.2, "batch_size": None, "steps": 4},
    }  # fmt: skip
    result = simulate(spec, Weights(model, values), sites, conditions=Conditions(keep_versions="all"))
    first = result.arrays(1)
    one = {**spec, "rounds": 1, "training": {**spec["training"], "steps": 1, "learning_rate": 1e-9}}
    begun_at = simulate(one, Weights(model, first), sites).rounds[0].tasks
    computed = {task.worker.partition("/")[0]: task.metrics["loss"] for task in begun_at}
    whole, truncated = (loss_of(model, first, data, parts) for parts in (LORA.parts, LORA.parts_within(2)))
    for place, name in enumerate(RANKS):
        assert computed[name] == pytest.approx(whole[place], rel=6e-3), name
    assert (abs(whole[0] / truncated[0] - 1) > 0.02) == (average == "residual")


def loss_of(model: Model, values: Values, data: Dataset, parts: Any) -> list[float]:
    """The loss of each site's rows, of a model that computes with these parts of its adapters."""
    built = instantiate(model.config, model.head, lora=model.lora)
    tensors = named_tensors(built)
    for block in model.blocks:
        write_block(tensors, block, values[block.name])
    activate_adapters(built, list(parts))
    built.eval()
    with torch.no_grad():
        rows = (data.read(torch.arange(20) + 20 * place) for place in range(len(RANKS)))
        return [float(built(**batch).loss) for batch in rows]

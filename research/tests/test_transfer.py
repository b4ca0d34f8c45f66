"""Large models from their configs: bytes and memory, by hand where they are few, and the tables of the document."""

from __future__ import annotations

import pytest

from common.document import block, tidied
from evidence.transfer.__main__ import COMMAND, digits, lines, time
from evidence.transfer.memory import merge_peak_bytes, worker_memory
from evidence.transfer.models import BERT, CLIP, LLAMA, MODELS, QWEN, TOKENS, VIT, Large, table
from evidence.transfer.traffic import (
    ARMS,
    claim,
    encoded_bytes,
    line_seconds,
    possible,
    state_of,
    step_bytes,
    traffic,
    up_and_down,
)
from small_tasks.safl_bytes import nbytes, union_bytes
from tessera.shared.methods.registry import methods
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training
from tessera.worker.model.device_memory import MARGIN_BYTES, needed_bytes

BY_NAME = {arm.name: arm for arm in ARMS}


@pytest.mark.parametrize(
    ("large", "millions"), [(BERT, 109.5), (VIT, 85.8), (CLIP, 149.6), (LLAMA, 8030.3), (QWEN, 7615.6)]
)
def test_models_have_the_published_numbers_of_parameters(large: Large, millions: float) -> None:
    assert sum(block.numel for block in table(large)) / 1e6 == pytest.approx(millions, abs=0.05)


def test_every_method_of_the_product_is_counted() -> None:
    assert {arm.method for arm in ARMS} == set(methods())


def test_scaffold_fetches_the_model_and_as_much_again() -> None:
    up, down = up_and_down(traffic(BY_NAME["scaffold"], BERT), coded=False)
    assert (up, down) == (nbytes(table(BERT)), 2 * nbytes(table(BERT)))


@pytest.mark.long
def test_lora_sends_its_rank_times_inputs_and_outputs() -> None:
    up, down = up_and_down(traffic(BY_NAME["lora"], BERT), coded=False)
    # 12 layers, queries and values, two factors of 8 x 768 in float32.
    assert up == down == 12 * 2 * 2 * 8 * 768 * 4


def test_prompts_of_both_towers_are_eighty_kibibytes() -> None:
    assert up_and_down(traffic(BY_NAME["pfeddc"], CLIP), coded=False) == (81_920, 81_920)


def test_sites_that_choose_by_themselves_fetch_the_union() -> None:
    up, down = up_and_down(traffic(BY_NAME["safl, third, each site its own"], VIT), coded=False)
    assert up < down <= nbytes(table(VIT))
    assert not possible(BY_NAME["pfeddc"], VIT)


def test_a_server_state_of_unknown_size_is_refused() -> None:
    assert state_of(("control/*",), table(VIT)) == table(VIT)
    with pytest.raises(ValueError, match=r"fetches the server state moments/\*, whose size is not known here"):
        state_of(("moments/*",), table(VIT))


def test_int8_takes_a_byte_for_each_weight_and_four_for_each_scale() -> None:
    block = Block(tensor="w", role="mlp", layer=0, shape=(1024, 512), dtype="F32")
    # Two chunks of 2^18 elements, in rows of 256 with a scale; each chunk's length comes before it.
    expected = 1024 * 512 + 4 * (1024 * 512 // 256) + 2 * 4
    assert encoded_bytes("delta+int8", [block]) == step_bytes([block]) == expected


def test_lowrank_sends_two_factors() -> None:
    block = Block(tensor="w", role="mlp", layer=0, shape=(1024, 512), dtype="F32")
    assert encoded_bytes("delta+lowrank=16", [block]) == 16 * (1024 + 512) * 4 + 4


@pytest.mark.long
def test_expected_union_is_the_mean_of_draws() -> None:
    blocks, whole = table(VIT), nbytes(table(VIT))
    found = claim(blocks, ("head", "norm"))
    # A site's own layers and the union, each against the whole model.
    drawn = 1 - ((1 - found.up[3]) + union_bytes(blocks, 10, 4) / whole) / 2
    assert found.own_choices[3] == pytest.approx(drawn, abs=0.01)


def test_memory_has_weights_gradients_and_two_moments() -> None:
    held, whole = worker_memory(BY_NAME["fedavg"], VIT), nbytes(table(VIT))
    assert (held.weights, held.gradients, held.moments) == (whole, whole, 2 * whole)
    assert worker_memory(BY_NAME["lora"], VIT).activations < held.activations
    # What a worker compares with its free memory.
    trained = traffic(BY_NAME["fedavg"], VIT).trained
    counted = needed_bytes(table(VIT), trained, Training()) - MARGIN_BYTES
    assert held.total - held.activations == counted


def test_memory_has_the_private_modules_of_a_site() -> None:
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"model_type": "clip", "projection_dim": 16, "text_config": {**tower, "vocab_size": 90}}
    small = Large("small", {**config, "vision_config": {**tower, "patch_size": 56}}, "contrastive", 2, 8)
    shared, fused = (worker_memory(BY_NAME[name], small) for name in ("promptfl", "pfeddc"))
    prompts = 2 * TOKENS * 32
    # Each tower has as many local prompts, and four projections of its cross-attention.
    private = prompts + 2 * 4 * 32**2
    assert (shared.gradients, shared.moments) == (4 * prompts, 8 * prompts)
    assert (fused.gradients, fused.moments) == (4 * (prompts + private), 8 * (prompts + private))
    assert fused.weights - shared.weights == 4 * private
    assert fused.activations > shared.activations > 0


def test_a_merge_of_many_updates_takes_no_more_than_of_few() -> None:
    assert merge_peak_bytes(20, 2) < 1.1 * merge_peak_bytes(2, 2)
    assert merge_peak_bytes(2, 6) < 1.1 * merge_peak_bytes(2, 2)


def test_numbers_have_three_digits_and_times_their_unit() -> None:
    assert [digits(value) for value in (0, 0.0819, 437.9, 32121.04)] == ["0", "0.0819", "438", "32100"]
    assert line_seconds(12_500_000) == 1
    assert [time(round(12_500_000 * seconds)) for seconds in (0.5, 90, 5400)] == ["0.5 s", "1.5 min", "1.5 h"]


# Half a minute of CPU: each model is laid out several times.
@pytest.mark.long
def test_the_document_has_the_tables_of_the_command() -> None:
    assert block(COMMAND) == tidied(lines())
    assert len(MODELS) == 5

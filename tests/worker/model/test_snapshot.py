"""A snapshot's blocks are those of the model that transformers loads, made a group of tensors at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from typer.testing import CliRunner

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Head
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.base_folder import BaseFolder
from tessera.worker.cli.worker import app
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import AUTO_CLASSES
from tessera.worker.model.pretrained import digests_of, load_pretrained, plain_config, read_object
from tessera.worker.model.snapshot import Snapshot, convert_blocks
from tessera.worker.state.base_cache import BaseCache
from tessera.worker.state.base_sources import BaseSources, BaseUnavailable
from tests.support.variants import variants
from tests.worker.model.test_filling import CASES
from tests.worker.model.test_zoo import OFTEN

LLAMA = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MIXTRAL = {**LLAMA, "num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
VICTIM = "model.layers.1.self_attn.q_proj.weight"
JOINED = {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}


def saved(folder: Path, model_type: str, config: Mapping[str, Any], head: Head = "features", **more: Any) -> Path:
    """A snapshot of random weights, in the layout of the hub."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AUTO_CLASSES[head].from_config(AutoConfig.for_model(model_type, **config))
    model.save_pretrained(folder, **more)
    return folder


def opened(folder: Path, head: Head = "features", **config: Any) -> Snapshot:
    return Snapshot.open(BaseFolder.open(folder), plain_config(read_object(folder / "config.json")) | config, head)


def digests(snapshot: Snapshot) -> dict[str, str]:
    blocks = block_table(snapshot.model)
    found = {each.block.name: digest_of(each.data()) for each in snapshot.in_place(blocks)}
    made = {each.block.name: digest_of(each.data) for each in snapshot.converted(blocks)}
    assert not found.keys() & made.keys()
    return found | made


def as_loaded(folder: Path, head: Head = "features", **config: Any) -> dict[str, str]:
    """The digests of the tensors that transformers loads from the folder."""
    settings = plain_config(read_object(folder / "config.json")) | config
    model, new = load_pretrained(str(folder), settings, head, 0, None)
    return digests_of(named_tensors(model), [block for block in block_table(model) if block.tensor not in new])


@pytest.mark.parametrize("name", variants(CASES, OFTEN | {"mixtral"}))
def test_the_blocks_of_the_zoo_are_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    model_type, case = CASES[name]
    folder = saved(tmp_path / "snapshot", model_type, case.config)
    assert digests(opened(folder)) == as_loaded(folder)


@pytest.mark.parametrize("head", ["causal-lm", "features", "text-classification"])
def test_weights_of_a_language_model_serve_each_head(head: Head, tmp_path: Path) -> None:
    for tied in (False, True):
        folder = saved(tmp_path / str(tied), "llama", {**LLAMA, "tie_word_embeddings": tied}, "causal-lm")
        found = digests(opened(folder, head, pad_token_id=0))
        assert found == as_loaded(folder, head, pad_token_id=0)
        assert ("lm_head.weight" in found) == (head == "causal-lm" and not tied)


def test_only_blocks_of_joined_tensors_are_converted_and_each_names_its_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "mixtral", MIXTRAL, "causal-lm", max_shard_size="20KB")
    stored = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert sum(".experts." in name for name in stored) == 3 * MIXTRAL["num_local_experts"]
    snapshot = opened(folder, "causal-lm")
    blocks = block_table(snapshot.model)
    made = {each.block.name: {path.name for path in each.sources} for each in snapshot.converted(blocks)}
    assert made.keys() == JOINED
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    down = {file for name, file in index.items() if name.endswith(".w2.weight")}
    assert made["model.layers.0.mlp.experts.down_proj"] == down
    assert {each.block.name for each in snapshot.in_place(blocks)} == {block.name for block in blocks} - JOINED


def test_the_model_keeps_nothing_of_what_was_converted(tmp_path: Path) -> None:
    """Memory holds one group of tensors: twelve layers take as much as one."""
    folder = saved(tmp_path / "snapshot", "mixtral", MIXTRAL | {"num_hidden_layers": 3})
    snapshot = opened(folder)
    held = [
        sum(parameter.nbytes for parameter in snapshot.model.parameters() if not parameter.is_meta)
        for _ in snapshot.converted(block_table(snapshot.model))
    ]
    assert held == [0] * 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_another_dtype_than_the_files_are_cast(dtype: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "llama", LLAMA)
    snapshot = opened(folder, dtype=dtype)
    assert not snapshot.unchanged
    assert digests(snapshot) == as_loaded(folder, dtype=dtype)


def test_a_config_without_a_dtype_means_that_of_the_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "llama", LLAMA | {"dtype": "bfloat16"})
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    snapshot = opened(folder)
    assert {block.dtype for block in block_table(snapshot.model)} == {"BF16"}
    assert digests(snapshot) == as_loaded(folder)


def wanted(folder: Path, head: Head = "causal-lm") -> tuple[dict[str, Block], Any]:
    """The blocks of a base by their digests, and the function that converts those of a folder."""
    settings = plain_config(read_object(folder / "config.json"))
    names, table = as_loaded(folder, head), {block.name: block for block in block_table(opened(folder, head).model)}
    return {digest: table[name] for name, digest in names.items()}, partial(convert_blocks, settings, head)


def test_a_source_that_was_not_added_is_searched_for_joined_blocks_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "mixtral", MIXTRAL, "causal-lm")
    blocks, convert = wanted(folder)
    sources = BaseSources(BaseCache(tmp_path / "bases"), (str(folder),))
    spans = sources.fetch(blocks, convert)
    assert {span.path.parent.name for span in spans.values()} == {"snapshot", "blobs"}
    assert all(digest_of(span.path.read_bytes()[span.offset :][: span.nbytes]) == d for d, span in spans.items())
    # The next task finds the blobs.
    shutil.rmtree(folder)
    lookup = BaseCache(tmp_path / "bases").find(blocks)
    assert {blocks[digest].name for digest in lookup.spans} == JOINED


def test_the_file_with_another_expert_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "mixtral", MIXTRAL, "causal-lm", max_shard_size="20KB")
    blocks, convert = wanted(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name, file = next((name, file) for name, file in index.items() if name.endswith(".0.w2.weight"))
    tensors = load_file(folder / file)
    tensors[name] = tensors[name] + 1
    save_file(tensors, folder / file, {"format": "pt"})
    with pytest.raises(BaseUnavailable, match=r"1 of \d+ blocks.*down_proj") as refusal:
        BaseSources(BaseCache(tmp_path / "bases"), (str(folder),)).fetch(blocks, convert)
    assert any(file in fault and "give another" in fault for fault in refusal.value.faults)


def add(folder: Path, state: Path, *words: str) -> Any:
    config = state.parent / f"{state.name}.toml"
    lines = ('url = "http://127.0.0.1:1"', 'token = "t"', 'name = "w"', f'state_dir = "{state}"')
    config.write_text("\n".join([*lines, "[datasets.digits]", 'kind = "digits"']))
    return CliRunner().invoke(
        app, ["cache", "add", str(folder), "--config", str(config), "--head", "causal-lm", *words]
    )


def test_adding_copies_joined_blocks_only_and_remembers_their_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "mixtral", MIXTRAL, "causal-lm", max_shard_size="20KB")
    result = add(folder, tmp_path / "state")
    assert result.exit_code == 0, result.output
    cache = BaseCache(tmp_path / "state")
    (record,) = cache.records()
    assert record.places.keys() == set(as_loaded(folder, "causal-lm").values())
    copied = {place.block: place for place in record.places.values() if place.sources}
    assert copied.keys() == JOINED
    assert {Path(place.file).parent for place in copied.values()} == {cache.blobs}
    assert {Path(name).parent for place in copied.values() for name in place.sources} == {folder}


def test_a_base_with_another_file_than_the_runs_names_that_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "llama", LLAMA, "causal-lm", max_shard_size="20KB")
    blocks, convert = wanted(folder)
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][VICTIM]
    tensors = load_file(file)
    tensors[VICTIM] += 1
    save_file(tensors, file, {"format": "pt"})
    assert add(folder, tmp_path / "state").exit_code == 0
    other = saved(tmp_path / "other", "llama", LLAMA | {"hidden_size": 16}, "causal-lm")
    assert add(other, tmp_path / "state").exit_code == 0
    with pytest.raises(BaseUnavailable) as refusal:
        BaseSources(BaseCache(tmp_path / "state")).fetch(blocks, convert)
    assert f"such as {VICTIM}. {file.name} has another {VICTIM}. Add them" in str(refusal.value)
    assert str(folder) not in str(refusal.value)


def test_a_snapshot_that_lacks_a_layer_is_refused_with_what_lacks(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "llama", LLAMA, "causal-lm")
    tensors = load_file(folder / "model.safetensors")
    del tensors[VICTIM]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = add(folder, tmp_path / "state")
    assert result.exit_code == 2
    assert f"do not fit a llama; they lack {VICTIM}" in " ".join(result.output.split())


def test_experts_that_do_not_fit_together_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "snapshot", "mixtral", MIXTRAL, "causal-lm")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".1.w2.weight"))
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = add(folder, tmp_path / "state")
    assert result.exit_code == 2
    assert "transformers cannot convert" in result.output
    assert "w2.weight" in result.output

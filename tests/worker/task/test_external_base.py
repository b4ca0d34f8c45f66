"""A base that the sites have: no byte of it passes the coordinator, and each is verified by its digest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

from tessera.shared.api.runs import Evaluation, Run, RunSpec, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.client.export import export_folder
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.spec import Lora, Model
from tessera.shared.problems import Invalid
from tessera.shared.updates.base_folder import BaseFolder
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation import simulate
from tessera.worker.agent import Agent
from tessera.worker.cli.model import app as model_app
from tessera.worker.cli.worker import app as worker_app
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, load
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.base_cache import BASES_FOLDER, BaseCache
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.datafiles import eighth_of_digits, key_file
from tests.support.federation import start_run
from tests.support.mirror import serving
from tests.support.tapping import Tap
from tests.support.tasks import EACH_METHOD
from tests.support.variants import variants

VIT = {
    "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 32, "num_labels": 10, "num_hidden_layers": 3,
    "num_attention_heads": 2, "intermediate_size": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LORA = MethodSpec(name="lora")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded snapshot, whose tensors have other names than in memory."""
    folder = tmp_path_factory.mktemp("base") / "snapshot"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ViTForImageClassification(ViTConfig(**VIT)).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def start(snapshot: Path) -> ModelFolder:
    return made(snapshot, snapshot.parent / "model")


def made(snapshot: Path, out: Path, *words: str) -> ModelFolder:
    arguments = ["init", str(out), "--config", str(snapshot), "--head", "image-classification", "--external-base"]
    result = CliRunner().invoke(model_app, [*arguments, *(words or ("--lora-rank", "2"))])
    assert result.exit_code == 0, result.output
    return ModelFolder.open(out)


def worker(*words: object) -> str:
    result = CliRunner().invoke(worker_app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


class Site:
    """A worker, and the wire to its coordinator."""

    draws_alike = False
    """Whether nothing is mixed into its seeds, so that it draws the same for two models."""

    def __init__(self, coordinator: LiveCoordinator, folder: Path, url: str, **settings: Any) -> None:
        self.config = folder / "worker.toml"
        digits = eighth_of_digits(folder, held_out=0.2)
        given = {
            "url": url, "token": coordinator.token("site", "a"), "name": "w", "state_dir": folder / "state",
            "held_out_key_file": key_file(folder), "threads": 1, "poll_seconds": 0,
        }  # fmt: skip
        settings_of = WorkerSettings(**given, datasets={"digits": digits}, **settings)
        lines = [f"{key} = {json.dumps(value, default=str)}" for key, value in given.items()]
        self.config.write_text(
            "\n".join([*lines, "[datasets.digits]", *(f"{k} = {json.dumps(v)}" for k, v in digits.items())])
        )
        self.settings = settings_of
        self.cache = BaseCache(folder / "state")

    def works_until(self, condition: Callable[[], bool]) -> None:
        agent = Agent(self.settings, Stop())

        def over() -> bool:
            if task := agent._next():
                agent._run_task(task)
            return condition()

        until(over)
        agent.close()

    def task(self, client: Client, run: Run) -> TaskView:
        """The task that this worker took and ended: it starts anew, as after a restart."""
        agent = Agent(self.settings, Stop())
        if self.draws_alike:
            agent._runner = replace(agent._runner, seed_key=None)
        taken = until(agent._next)
        agent._run_task(taken)
        agent.close()
        return next(task for made in client.rounds(run.id) for task in made.tasks if task.id == taken.id)


@pytest.fixture
def site(coordinator: LiveCoordinator, tmp_path: Path) -> Callable[..., Site]:
    return lambda url=None, **settings: Site(coordinator, tmp_path, url or coordinator.url, **settings)


def begin(client: Client, start: ModelFolder, **spec: Any) -> Run:
    uploaded = upload_model(client, start)
    given = {"name": "external", "method": LORA, "dataset": "digits", "rounds": 1, **spec}
    wanted = RunSpec(model=uploaded.model, version=uploaded.version, **given)
    return client.create_run(wanted)


def test_a_run_needs_no_byte_of_the_base_from_the_coordinator(
    coordinator: LiveCoordinator, site: Callable[..., Site], snapshot: Path, start: ModelFolder, tmp_path: Path
) -> None:
    client, model = coordinator.client(), start.model
    base = sum(block.nbytes for block in model.base)
    assert {block.role for block in model.stored} == {"adapter", "head"}
    with Tap(coordinator.url) as tap:
        one = site(tap.url)
        said = worker("cache", "add", snapshot, "--config", one.config)
        assert "of them 0 bytes copied" in said
        run = begin(client, start, rounds=2, evaluation=Evaluation(sites=True))
        one.works_until(lambda: any(found.version == 2 for found in client.measurements(run.id)))
        until(lambda: client.run(run.id).state == "completed")
        up, down = bytes(tap.up), tap.down
    assert b"/v1/blobs" in up
    asked = {match.decode() for match in re.findall(rb"sha256:[0-9a-f]{64}", up)}
    assert down < base
    # Some blocks of zeros are equal to an adapter's.
    own = {
        digest for version in client.versions(run.id) for digest in client.manifest(version.digest).blocks.values()
    }
    assert len(base_digests := set(model.external.values()) - own) > 20
    assert not asked & base_digests
    assert not any(map(client.has_blob, base_digests))

    # The export takes the base from a folder.
    last = client.run(run.id)
    with pytest.raises(Invalid, match="external") as refusal:
        export_folder(client, last, tmp_path / "none", None, lambda _: None)
    assert "--base" in refusal.value.advice
    export_folder(client, last, tmp_path / "out", None, lambda _: None, base=snapshot)
    whole = ModelFolder.open(tmp_path / "out")
    assert not whole.model.external
    tensors = named_tensors(load(whole))
    theirs = ViTForImageClassification.from_pretrained(snapshot).state_dict()
    same = {name for name, tensor in theirs.items() if torch.equal(tensors.get(name, torch.zeros(0)), tensor)}
    adapted = {block.tensor for block in model.blocks if ".base_layer." in block.tensor}
    frozen = theirs.keys() - {name.replace(".base_layer.", ".") for name in adapted}
    assert frozen - same == {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(tensors[name], theirs[name.replace(".base_layer.", ".")]) for name in adapted)
    assert any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


def test_the_same_weights_are_learnt_as_with_a_base_that_travels(
    coordinator: LiveCoordinator, site: Callable[..., Site], snapshot: Path, start: ModelFolder, tmp_path: Path
) -> None:
    client = coordinator.client()
    words = ["init", str(tmp_path / "whole"), "--config", str(snapshot), "--head", "image-classification"]
    assert CliRunner().invoke(model_app, [*words, "--lora-rank", "2"]).exit_code == 0
    one = site(base_sources=(str(snapshot),))
    one.draws_alike = True
    digests = []
    for number, folder in enumerate((start, ModelFolder.open(tmp_path / "whole"))):
        run = begin(client, folder, name=f"run-{number}")
        one.task(client, run)
        until(lambda run=run: client.run(run.id).state == "completed")
        blocks = client.manifest(client.run(run.id).version.digest).blocks
        digests.append({block.name: blocks[block.name] for block in start.model.stored})
    assert digests[0] == digests[1]


def test_a_site_without_the_base_says_what_lacks_and_how_to_add_it(
    coordinator: LiveCoordinator, site: Callable[..., Site], start: ModelFolder
) -> None:
    client = coordinator.client()
    run = begin(client, start)
    task = site().task(client, run)
    assert task.problem
    count = len(set(start.model.external.values()))
    assert task.problem.detail.startswith(f"no-base: {count} of {count} blocks of the base are not at this site")
    assert "tessera worker cache add" in task.problem.remedy


def test_a_file_that_changed_is_named_without_its_folder(
    coordinator: LiveCoordinator, site: Callable[..., Site], snapshot: Path, start: ModelFolder, tmp_path: Path
) -> None:
    copy = tmp_path / "secret-place"
    copy.mkdir()
    for file in snapshot.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    one, client = site(), coordinator.client()
    worker("cache", "add", copy, "--config", one.config)
    (record,) = one.cache.records()
    place = record.places[start.model.external["vit.layernorm.weight"]]
    victim = Path(place.file)
    raw = bytearray(victim.read_bytes())
    raw[place.offset] ^= 1
    victim.write_bytes(raw)
    assert victim.name in worker("cache", "list", "--config", one.config)
    task = one.task(client, begin(client, start))
    assert task.problem
    assert f"{victim.name} changed since it was added" in task.problem.detail
    assert "secret-place" not in task.problem.model_dump_json()


def test_a_mirror_gives_what_was_copied_and_what_it_falsifies_is_refused(
    coordinator: LiveCoordinator, site: Callable[..., Site], snapshot: Path, start: ModelFolder, tmp_path: Path
) -> None:
    other = tmp_path / "other.toml"
    one = site()
    other.write_text(one.config.read_text().replace(str(tmp_path / "state"), str(tmp_path / "mirror")))
    worker("cache", "add", snapshot, "--config", other, "--copy")
    blobs = tmp_path / "mirror" / BASES_FOLDER / "blobs"
    victim = blobs / next(iter(sorted(start.model.external.values()))).replace(":", "-")
    good = victim.read_bytes()

    with serving(blobs) as (url, _):
        mirrored = site(base_sources=(url,))
        client = coordinator.client()
        victim.write_bytes(bytes(reversed(good)))
        run = begin(client, start)
        task = mirrored.task(client, run)
        assert task.problem
        assert "no-base" in task.problem.detail
        victim.write_bytes(good)
        mirrored.task(client, run)
        until(lambda: client.run(run.id).state == "completed")


def test_a_folder_may_be_added_again_for_a_run_with_another_dtype(
    site: Callable[..., Site], snapshot: Path, start: ModelFolder
) -> None:
    one = site()
    worker("cache", "add", snapshot, "--config", one.config, "--dtype", "bfloat16")
    (record,) = one.cache.records()
    worker("cache", "add", snapshot, "--config", one.config)
    both = {*record.places, *start.model.external.values()}
    assert BaseCache(one.cache.folder).find(both).spans.keys() == both
    worker("cache", "remove", snapshot, "--config", one.config)
    assert list(one.cache.blobs.iterdir()) == []


def test_what_was_verified_is_not_read_again_until_a_file_changes(
    site: Callable[..., Site], snapshot: Path, start: ModelFolder, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in snapshot.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    one, digests = site(), start.model.external.values()
    worker("cache", "add", copy, "--config", one.config)
    victim = min(copy.glob("*.safetensors"))
    # Another byte under the same size, time and inode is not noticed: nothing is read.
    stat, raw = victim.stat(), bytearray(victim.read_bytes())
    raw[-1] ^= 1
    with victim.open("r+b") as file:
        file.write(raw)
    os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    fresh = BaseCache(one.cache.folder)
    assert fresh.find(digests).spans.keys() == set(digests)
    # With a new time it is, and with the right bytes the file is verified anew.
    os.utime(victim)
    assert victim.resolve().as_posix() in fresh.find(digests).wrong
    raw[-1] ^= 1
    victim.write_bytes(raw)
    assert not fresh.find(digests).wrong
    (record,) = BaseCache(one.cache.folder).records()
    assert not fresh.changed(record)
    assert worker("cache", "remove", copy, "--config", one.config)
    assert not fresh.find(digests).spans
    assert victim.exists()


def test_a_model_that_does_not_fit_is_refused_before_anything_is_fetched(
    coordinator: LiveCoordinator, site: Callable[..., Site]
) -> None:
    """A terabyte and a half, of which no byte exists."""
    config = {
        **VIT, "model_type": "vit", "hidden_size": 1 << 16, "intermediate_size": 1 << 19, "num_hidden_layers": 10,
        "dtype": "bfloat16",
    }  # fmt: skip
    lora = Lora(rank=1, alpha=1, roles=("query",))
    with torch.device("meta"):
        table = block_table(instantiate(config, "image-classification", lora=lora, float32=("adapter",)))
    absent = {block.name: f"sha256:{number:064x}" for number, block in enumerate(table) if block.role != "adapter"}
    model = Model(
        config=config, head="image-classification", lora=lora, float32=("adapter",), blocks=table, external=absent
    )
    zeros = {block.name: np.zeros(block.shape, np.float32) for block in model.stored}
    client, one = coordinator.client(), site(policy={"max_model_bytes": 1 << 50})
    method = MethodSpec(name="lora", settings={"train_head": False})
    run = start_run(client, model, zeros, dataset="digits", method=method)
    task = one.task(client, run)
    assert task.problem
    found = re.search(
        r"too-little-memory: the task needs (\d+) bytes on cpu.*?(\d+) are free, (\d+) too few", str(task)
    )
    assert found
    needed, free, lacking = map(int, found.groups())
    assert needed > model.nbytes > 1 << 40
    assert needed - free == lacking
    assert "adapters" in task.problem.remedy


@pytest.fixture(scope="module")
def shared_coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    """For tests in which no worker takes part."""
    with LiveCoordinator(tmp_path_factory.mktemp("shared") / "coordinator") as live:
        yield live


@EACH_METHOD
def test_a_method_that_trains_the_base_is_refused_with_the_way_out(
    shared_coordinator: LiveCoordinator, start: ModelFolder, method: str
) -> None:
    spec = {"method": MethodSpec(name=method), "training": Training(optimizer="sgd", full_fine_tuning=True)}
    with pytest.raises(Invalid) as refusal:
        begin(shared_coordinator.client(), start, **spec)
    said = str(refusal.value.errors)
    assert any(remedy in said for remedy in ("full_fine_tuning", "prompts")), said


@pytest.mark.parametrize(
    "method", variants(["lora", "fedprox", "scaffold", "fedper", "local"], {"scaffold", "fedper"})
)
def test_a_method_trains_the_adapters_beside_an_external_base(
    shared_coordinator: LiveCoordinator, start: ModelFolder, method: str
) -> None:
    spec = {"method": MethodSpec(name=method), "training": Training(optimizer="sgd")}
    assert begin(shared_coordinator.client(), start, **spec).state == "running"


def test_only_the_head_of_a_model_without_adapters_is_in_its_versions(snapshot: Path, tmp_path: Path) -> None:
    model = made(snapshot, tmp_path / "headed", "--seed", "2").model
    assert {block.role for block in model.stored} == {"head"}
    assert len(model.external) == len(model.blocks) - 2


def test_a_document_of_a_base_names_blocks_of_the_model_and_leaves_some(start: ModelFolder) -> None:
    plain = start.model.model_dump()
    with pytest.raises(ValueError, match="that the model lacks"):
        Model.model_validate(plain | {"external": {"extra": "sha256:" + "0" * 64}})
    with pytest.raises(ValueError, match="versions need a block"):
        Model.model_validate(plain | {"external": {block.name: "sha256:" + "0" * 64 for block in start.model.blocks}})


def test_a_simulation_and_a_folder_that_is_no_base_are_refused(
    start: ModelFolder, snapshot: Path, tmp_path: Path
) -> None:
    with pytest.raises(Invalid, match="external"):
        simulate({"method": {"name": "lora"}, "rounds": 1}, start.path, {})
    found, missing = BaseFolder.open(snapshot).find(start.model.base, start.model.external)
    assert not missing
    assert {each.block for each in found} == set(start.model.base)
    assert load_file(start.path / "model.safetensors").keys() == {
        block.tensor.replace(".base_layer.", ".") for block in start.model.stored
    }
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Invalid, match="neither"):
        BaseFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("source", "said"), [("org/model@main", "NAME@COMMIT"), (".", "has no config.json: name a folder that")]
)
def test_a_source_that_is_no_snapshot_is_refused(site: Callable[..., Site], source: str, said: str) -> None:
    one = site()
    named = source if "@" in source else str(one.config.parent)
    result = CliRunner().invoke(worker_app, ["cache", "add", named, "--config", str(one.config)])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())

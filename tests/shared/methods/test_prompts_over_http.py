"""pFedDC and PromptFL over real HTTP: the bytes of a round, what stays at a site, and what a site refuses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, Training
from tessera.shared.api.tasks import Task, TaskView
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.methods.base import CoordinatorHalf, MethodSpec, Participant, Plan, State
from tessera.shared.methods.registry import methods
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import EVERYTHING, Match, Selector
from tessera.shared.model.spec import Model, Prompts
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import Array, ArrayTensor
from tessera.shared.updates.model_folder import ModelFolder
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.worker.agent import Agent
from tessera.worker.cli.model import app
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate, load
from tessera.worker.settings import WorkerSettings, token_of
from tessera.worker.state.vault import Vault
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.duals import CLASSES, START, dual
from tests.support.federation import start_run
from tests.support.tapping import Tap
from tests.support.tasks import untrained

BOTH = Prompts(vision=4, text=4)
COLOURS = ("red", "green", "blue")
HEADER = 400
"""More bytes than the header of an update of two blocks has."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Eight noisy pictures of each of three colours, and a tokenizer that starts, ends and pads as CLIP's does."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for channel, colour in enumerate(COLOURS):
        (folder / "images" / colour).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 120, (8, 8, 3), dtype=np.uint8)
            pixels[:, :, channel] += 120
            Image.fromarray(pixels).save(folder / "images" / colour / f"{number}.png")
    end = int(CLASSES.max())
    words = {word: 4 + number for number, word in enumerate((*COLOURS, "a", "photo", "of"))}
    tokenizer = Tokenizer(WordLevel({"?": 0, "<s>": START, "</s>": end, **words}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", START), ("</s>", end)]
    )  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    fast.save_pretrained(folder / "tokenizer")
    return {
        "kind": "imagetext", "folder": str(folder / "images"), "labels": COLOURS, "size": 8,
        "tokenizer": str(folder / "tokenizer"), "template": "{}",
    }  # fmt: skip


class Site:
    """A worker of one site, which does a task when it is told to."""

    def __init__(self, coordinator: LiveCoordinator, folder: Path, data: dict[str, Any], name: str = "a") -> None:
        self.folder = folder / name
        self._settings = WorkerSettings(
            url=coordinator.url, token=coordinator.token("site", name), name="w", state_dir=self.folder,
            datasets={"colours": data}, threads=1, poll_seconds=0,
        )  # fmt: skip
        self._agent: Agent | None = None

    def restarts(self) -> None:
        """From here on it knows what is on its disk and nothing else."""
        if self._agent:
            self._agent.close()
        self._agent = None

    def through(self, tap: Tap) -> None:
        self.restarts()
        self._settings = self._settings.model_copy(update={"url": tap.url})

    def does(self) -> Task | None:
        """Does a task if there is one."""
        self._agent = self._agent or Agent(self._settings, Stop())
        task = self._agent._next()
        if task is not None:
            self._agent._run_task(task)
        return task

    def kept(self, run: Run) -> dict[str, Array]:
        """The worker's kept tensors, once it knows the outcomes of its updates."""
        vault = Vault(self.folder / "vault")
        with Client(self._settings.url, token_of(self._settings)) as client:
            vault.settle(client.task)
        return vault.load(run.id)


Sites = Callable[[str], Site]


@pytest.fixture
def sites(coordinator: LiveCoordinator, tmp_path: Path, data: dict[str, Any]) -> Iterator[Sites]:
    made: dict[str, Site] = {}

    def site(name: str) -> Site:
        made[name] = made.get(name) or Site(coordinator, tmp_path, data, name)
        return made[name]

    yield site
    for each in made.values():
        each.restarts()


def begin(client: Client, method: str, settings: dict[str, Any] | None = None, **spec: Any) -> Run:
    document, start = untrained(dual("clip"), "contrastive", seed=2, prompts=BOTH)
    plain = Training(optimizer="sgd", learning_rate=0.01, weight_decay=0.0, batch_size=8)
    wanted = {
        "training": plain,
        "rounds": 3,
        "codec": "raw",
        "cohort": Cohort(max_attempts=1, max_task_attempts=1),
        **spec,
    }
    chosen = MethodSpec(name=method, settings=settings or {})
    return start_run(client, document, start, method=chosen, dataset="colours", **wanted)


def tasks(client: Client, run: Run) -> list[TaskView]:
    return [task for made in client.rounds(run.id) for task in made.tasks]


def manifests(client: Client, run: Run) -> list[Manifest]:
    return [client.manifest(version.digest) for version in client.versions(run.id)]


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        ("pfeddc", ("prompts.vision", "prompts.text")),
        pytest.param("promptfl", ("prompts.text",), marks=pytest.mark.long),
    ],
)
def test_from_the_second_round_on_only_prompts_travel(
    coordinator: LiveCoordinator, sites: Sites, method: str, sent: tuple[str, ...]
) -> None:
    client, site = coordinator.client(), sites("a")
    with Tap(coordinator.url) as tap:
        site.through(tap)
        run = begin(client, method, rounds=2)
        on_the_wire = []
        for number in range(1, 3):
            task = None
            while task is None:  # what goes over the wire before there is a task grows with the time that it takes
                up, down = len(tap.up), tap.down
                task = site.does()
            on_the_wire.append((len(tap.up) - up, tap.down - down))
            until(lambda number=number: client.run(run.id).version.number == number)
    model = client.model(run.spec.model)
    nbytes = sum(model.by_name[name].nbytes for name in sent)
    assert nbytes == len(sent) * 4 * 16 * 4  # four tokens, 16 wide, of four bytes a number
    versions = client.versions(run.id)
    for task, (up, down), version in zip(tasks(client, run), on_the_wire, versions, strict=False):
        manifest = len(client.read_blob(version.digest))
        print(
            f"{method} round {task.round}: prompts {nbytes}, up {task.upload_bytes}, down {task.download_bytes} "
            f"of which manifest {manifest}; with HTTP and all calls up {up}, down {down}"
        )
        assert nbytes < task.upload_bytes < nbytes + HEADER
        if task.round > 1:
            assert task.download_bytes == nbytes + manifest
            assert up < nbytes + 12_000
            assert down < nbytes + manifest + 12_000
        else:
            assert task.download_bytes > model.nbytes
    first, *_, last = manifests(client, run)
    assert {name for name in first.blocks if first.blocks[name] != last.blocks[name]} == set(sent)


def test_a_model_starts_from_the_vision_prompts_of_a_version_of_a_run(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = begin(client, "promptfl")
    (tmp_path / "config.json").write_text(json.dumps(dual("clip")))
    words = ["init", str(tmp_path / "made"), "--config", str(tmp_path), "--head", "contrastive", "--random"]
    environment = {"TESSERA_URL": coordinator.url, "TESSERA_TOKEN": coordinator.token("orchestrator")}
    named = ["--vision-prompt-from", f"{run.id}@0"]
    result = CliRunner().invoke(app, [*words, *named], env=environment)
    assert result.exit_code == 0, result.output
    made = load(ModelFolder.open(tmp_path / "made")).get_parameter("prompts.vision").detach().numpy()
    _, start = untrained(dual("clip"), "contrastive", seed=2, prompts=BOTH)
    assert np.array_equal(made, start["prompts.vision"])


def test_a_round_of_clip_vit_b_16_moves_kilobytes() -> None:
    vision = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16}
    config = {"model_type": "clip", "vision_config": {**vision, "intermediate_size": 3072}}
    with torch.device("meta"):
        table = block_table(instantiate(config, "contrastive", prompts=Prompts(vision=16, text=16)))
    prompts = [block for block in table if block.role == "prompt"]
    # 16 tokens of 768 and 16 of 512 numbers, of four bytes each: 80 KiB.
    assert sum(block.nbytes for block in prompts) == 16 * (768 + 512) * 4 == 80 * 1024
    file, noise = io.BytesIO(), np.random.default_rng(0)
    values = {block.name: noise.normal(size=block.shape).astype("f4") for block in prompts}
    write_update(
        file, "raw", [TrainedBlock(b, ArrayTensor(values[b.name]), ArrayTensor(values[b.name])) for b in prompts]
    )
    manifest = len(canonical(Manifest(blocks={block.name: f"sha256:{'0' * 64}" for block in table})))
    print(
        f"CLIP ViT-B/16, 16 + 16 prompts, a round: up {len(file.getvalue())}, down {80 * 1024 + manifest} bytes, of "
        f"which the manifest of {len(table)} blocks {manifest}; the model, once, {sum(b.nbytes for b in table)}"
    )
    assert len(file.getvalue()) < 80 * 1024 + HEADER
    assert manifest < 64 * 1024


# ---------------------------------------------------------------- what stays


def test_local_prompts_and_fusion_survive_restarts_missed_rounds_and_dropping_out(
    coordinator: LiveCoordinator, sites: Sites
) -> None:
    client = coordinator.client()
    # A rate so small that what was restored is still to be recognised. One update makes a round, whoever sends it.
    slow = Training(optimizer="sgd", learning_rate=1e-7, weight_decay=0.0, batch_size=8)
    turns = "abba"
    kept: dict[str, dict[str, Array]] = {"a": {}, "b": {}}
    # Both are known before a round is opened, and so are asked in each.
    assert [sites(name).does() for name in "ab"] == [None, None]
    run = begin(client, "pfeddc", rounds=len(turns), training=slow, cohort=Cohort(target_updates=1))
    for number, name in enumerate(turns, start=1):
        sites(name).restarts()
        until(sites(name).does)
        until(lambda number=number: client.run(run.id).version.number == number)
        now = {each: sites(each).kept(run) for each in kept}
        assert now[name]
        for each, before in kept.items():
            nearly = 1e-4 if each == name else 0
            for block, values in before.items():
                np.testing.assert_allclose(now[each][block], values, rtol=0, atol=nearly, err_msg=f"{each}'s {block}")
        kept = now
    # Each drew a fusion of its own, from its own first task.
    own = "fusion.text.query"
    assert np.abs(kept["a"][own] - kept["b"][own]).max() > 0.01
    names = {f"{kind}.{modality}" for kind in ("local", "fusion") for modality in ("vision", "text")}
    assert {".".join(name.split(".")[:2]) for name in kept["a"]} == names


# ---------------------------------------------------------------- hostile coordinators


@contextmanager
def asking(plan: Plan, honest_rounds: int = 0, method: str = "pfeddc") -> Iterator[None]:
    """The coordinator asks for more than the method has it ask; the worker's half is the method's own. Both run in
    this process."""
    own = methods()[method]

    def plan_for(half: CoordinatorHalf[Any], state: State, worker: Participant) -> Plan:
        return own.coordinator.plan_for(half, state, worker) if state.round < honest_rounds else plan

    asker = type("Asking", (own.coordinator,), {"plan_for": plan_for})
    methods()[method] = replace(own, coordinator=asker)
    try:
        yield
    finally:
        methods()[method] = own


def with_prompts(*names: str) -> Selector:
    """One condition that the prompts meet too, so that the coordinator's own table has something for it."""
    return Selector(include=(Match(names=("prompts.*", *names)),))


@pytest.mark.parametrize(
    ("method", "plan", "reason"),
    [
        (
            "pfeddc",
            Plan(upload=with_prompts("local.*")),
            "private: the method keeps these at the site: local.text, local.vision$",
        ),
        pytest.param(
            "pfeddc",
            Plan(upload=with_prompts("fusion.text.*")),
            "private: .* fusion.text.key, ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pfeddc",
            Plan(upload=with_prompts("*.output")),
            "private: .* fusion.text.output, ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pfeddc",
            Plan(upload=EVERYTHING),
            "private: .* fusion.text.key, .* more$",
            marks=pytest.mark.long,
        ),
        (
            "fedpgp",
            Plan(upload=with_prompts("local.*")),
            "private: the method keeps these at the site: local.u, local.v$",
        ),
        pytest.param(
            "fedotp",
            Plan(upload=EVERYTHING),
            "private: the method keeps these at the site: local.text$",
            marks=pytest.mark.long,
        ),
    ],
    ids=["local prompts", "fusion", "part of the fusion", "everything", "a low-rank term", "prompts of transport"],
)
def test_a_plan_that_asks_for_what_stays_here_is_refused_logged_and_reported_and_nothing_leaves(
    coordinator: LiveCoordinator, sites: Sites, method: str, plan: Plan, reason: str
) -> None:
    client, site = coordinator.client(), sites("a")
    with Tap(coordinator.url) as tap, asking(plan, method=method), capture_logs() as logged:
        site.through(tap)
        run = begin(client, method)
        until(site.does)
        until(lambda: tasks(client, run)[0].state == "failed")
    problem = tasks(client, run)[0].problem
    assert problem is not None
    assert re.search(f"policy-violation: {reason}", problem.detail), problem.detail
    refusal = next(entry for entry in logged if entry["event"] == "task-failed")
    assert (refusal["log_level"], refusal["code"]) == ("error", "policy-violation")
    assert_nothing_left(tap)
    assert site.kept(run) == {}


def test_the_same_holds_for_a_site_that_has_something_to_lose(coordinator: LiveCoordinator, sites: Sites) -> None:
    client, site = coordinator.client(), sites("a")
    plan = Plan(upload=with_prompts("local.*", "fusion.*"))
    with Tap(coordinator.url) as tap, asking(plan, honest_rounds=1):
        run = begin(client, "pfeddc")
        until(site.does)
        until(lambda: client.run(run.id).version.number == 1)
        before = site.kept(run)
        site.through(tap)
        until(site.does)
        until(lambda: client.run(run.id).state == "paused")
    after = site.kept(run)
    assert {"local.text", "local.vision"} < set(before) == set(after)
    assert all(np.array_equal(after[name], values) for name, values in before.items())
    assert all(values.tobytes() not in tap.up for values in before.values())
    assert_nothing_left(tap)


def test_a_document_that_names_what_stays_here_describes_no_model_and_is_refused(
    coordinator: LiveCoordinator, sites: Sites
) -> None:
    client, site = coordinator.client(), sites("a")
    model = instantiate(dual("clip"), "contrastive", seed=2, prompts=BOTH)
    local = Block(tensor="local.text", role="prompt", shape=(4, 16), dtype="F32")
    table = (*block_table(model), local)
    document = Model(config=dual("clip"), head="contrastive", prompts=BOTH, blocks=table)
    start = {block.name: np.zeros(block.shape, np.float32) for block in table}
    plan = Plan(fetch=EVERYTHING, upload=with_prompts("local.*"))
    with Tap(coordinator.url) as tap, asking(plan), capture_logs() as logged:
        site.through(tap)
        once = Cohort(max_attempts=1, max_task_attempts=1)
        run = start_run(client, document, start, method=MethodSpec(name="pfeddc"), dataset="colours", cohort=once)
        until(site.does)
        until(lambda: tasks(client, run)[0].state == "failed")
    problem = tasks(client, run)[0].problem
    assert problem is not None
    assert "local.text: missing from the model that the config builds" in problem.detail
    assert any(entry["event"] == "task-failed" for entry in logged)
    assert_nothing_left(tap)


def test_a_plan_that_would_fetch_what_stays_here_finds_no_such_block(
    coordinator: LiveCoordinator, sites: Sites
) -> None:
    client, site = coordinator.client(), sites("a")
    plan = Plan(fetch=with_prompts("local.*", "fusion.*"), upload=with_prompts("local.*"))
    with Tap(coordinator.url) as tap, asking(plan):
        site.through(tap)
        run = begin(client, "pfeddc")
        until(site.does)
        until(lambda: tasks(client, run)[0].state == "failed")
    assert "policy-violation: private: " in str(tasks(client, run)[0].problem)
    assert_nothing_left(tap)


def assert_nothing_left(tap: Tap) -> None:
    """The worker sent questions, its claim and its refusal: it began no upload and submitted no result."""
    asked = {path for verb, path in re.findall(rb"([A-Z]+) (/v1/\S+) HTTP/1", tap.up) if verb != b"GET"}
    assert any(path.endswith(b"/failure") for path in asked)
    # To read blobs, it posts their digests.
    assert all(path.endswith((b"/claim", b"/blobs/read", b"/heartbeat", b"/failure")) for path in asked), asked

"""What a coordinator that somebody has taken over may try, a row each: a worker refuses it by a rule that it names in
its log and tells, sends no byte of a tensor, keeps what it kept, and goes on with the next honest task."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.framing import MEDIA_TYPE as FRAMED
from tessera.shared.api.runs import Run, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.spec import Model
from tessera.shared.problems import MEDIA_TYPE, TaskCancelled
from tessera.worker.agent import Agent
from tessera.worker.faults.outage import MAX_WAIT_SECONDS
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.database import DATABASE_FILE, StateDatabase
from tessera.worker.state.privacy_ledger import noisy_in
from tessera.worker.task.heartbeat import Stop
from tests.support.captured import (
    CLAIM,
    HEARTBEAT,
    Answered,
    HostileCoordinator,
    Lie,
    answering,
    claiming,
    endless,
)
from tests.support.chain_rows import ledger_in
from tests.support.coordinator import until
from tests.support.datafiles import eighth_of_digits, key_file
from tests.support.federation import start_run
from tests.support.in_process import in_process
from tests.support.processes import peak_bytes
from tests.support.tasks import DIGITS_VIT as VIT
from tests.support.variants import variants

MIB = 1 << 20
BERT = {
    "model_type": "bert", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "intermediate_size": 8, "max_position_embeddings": 8,
}  # fmt: skip
LEVIT = {"model_type": "levit", "image_size": 4096}
KEEPS_HEAD = MethodSpec(name="fedper")
SENDS_VALUES = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, "scope": "v_only"})
PRIVACY = {"epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0}
BUDGET = {"epsilon": 8.0, "delta": 1e-5}
OTHER_RUN = {"run": "0" * 32}
"""Makes a task one of a run that the worker has never heard of, whose terms it cannot know."""

MAX_MEMORY = 400 * MIB
"""More than this no lie may make the process grow by, of which the coordinator's side is a part."""


class Hasty(Stop):
    """Waits for nothing, and remembers how long it was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        super().sleep(min(seconds, 0.02))


@dataclass(frozen=True)
class Site:
    """What a site says, and what run it takes part in."""

    settings: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    honest_rounds: int = 1
    """How many rounds the run has when the lies begin."""


SITES = {
    "open": Site(honest_rounds=2),
    "strict": Site(
        {
            "policy": {
                "models": ["vit"], "methods": ["fedper"], "datasets": ["digits"], "max_batch": 64, "max_attempts": 1,
                "max_task_seconds": 4, "min_evaluation_examples": 50,
            },
        },
        honest_rounds=2,
    ),
    "values": Site(
        {
            "policy": {"may_send": {"include": [{"roles": ["value"]}]}, "never_send": ["*embed*"]},
            "kinds": ("train",),
        },
        spec={"method": SENDS_VALUES},
    ),
    "private": Site(spec={"privacy": PRIVACY}),
    "budget": Site(source={"privacy": BUDGET}, spec={"privacy": PRIVACY}),
    "floor": Site({"policy": {"require_privacy": {"epsilon": 4.0, "delta": 1e-5}}}, spec={"privacy": PRIVACY}),
}  # fmt: skip
"""Six sites: one that allows whatever it can, one that allows what it needs, and so on."""


class Scene:
    """A worker of a site, and a run that it has taken part in."""

    def __init__(self, coordinator: HostileCoordinator, folder: Path, name: str) -> None:
        self.coordinator, self.client = coordinator, coordinator.client()
        self.around = folder
        self.state = folder / "state"
        site = SITES[name]
        self.stop = Hasty()
        self.done: str | None = None
        """The task that it did last."""
        digits = eighth_of_digits(folder, held_out=0.2)
        sets: Any = {"digits": {**digits, **site.source}, "clinic": digits}
        settings = WorkerSettings(
            url=coordinator.url, token=coordinator.token("site", name), name="w", state_dir=self.state,
            datasets=sets, threads=1, poll_seconds=0, held_out_key_file=key_file(folder), **site.settings,
        )  # fmt: skip
        executor = in_process(settings)
        executor.sandbox.memory_bytes = 128 * MIB
        self.agent = Agent(settings, self.stop, executor=executor)
        model = instantiate(VIT, "image-classification", seed=1)
        self.model = Model(config=VIT, head="image-classification", blocks=block_table(model))
        # The first call in a process imports for seconds, for which a site may not have the time.
        executor.sandbox.require(self.model, None, lambda: None)
        start = {block.name: read_block(named_tensors(model), block) for block in self.model.blocks}
        given = {
            "dataset": "digits", "rounds": 20, "training": Training(batch_size=64, learning_rate=0.01),
            "cohort": Cohort(max_attempts=100, sites=(name,)), "method": KEEPS_HEAD,
        }  # fmt: skip
        self.run: Run = start_run(self.client, self.model, start, **{"name": name, **given, **site.spec})
        for _ in range(site.honest_rounds):
            self.does_an_honest_task()

    def close(self) -> None:
        self.agent.close()

    def does(self) -> None:
        """Asks for a task, and does it if there is one."""
        task = self.agent._next()
        if task is not None:
            self.done = task.id
            self.agent._run_task(task)

    def does_an_honest_task(self) -> None:
        accepted = self.accepted()

        def one_more() -> bool:
            self.does()
            return self.accepted() > accepted

        until(one_more)
        until(lambda: self.client.run(self.run.id).version.number == accepted + 1)
        # Else the next task would begin by settling what came of this one.
        self.agent._runner.vault.settle(self.agent._client.task)

    def accepted(self) -> int:
        return sum(task.is_accepted for made in self.client.rounds(self.run.id) for task in made.tasks)

    def failed(self) -> TaskView | None:
        """The task that it did last, as the coordinator shows it once that has failed."""
        assert self.done
        task = self.client.task(self.done)
        return task if task.state == "failed" else None

    def kept(self) -> dict[str, str]:
        """What is on the worker's disk, by name, as a hash; beside what lies around it. Without the cache and
        the audit, which tells of each refusal; and of the ledgers, what was spent: that something began to train
        without privacy, or was taken back, is written there."""
        around = [path for path in self.around.rglob("*") if path.is_file() and "cache" not in path.parts]
        database = StateDatabase.of(self.state)
        tables = [name for (name,) in database.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: str(database.rows(f"SELECT * FROM {name}")) for name in tables if name != "entries"}
        left = [path for path in around if not path.name.startswith(("alive", "lock", DATABASE_FILE))]
        spent = {name: str(noisy_in(ledger_in(self.state).read(name))) for name in ("digits", "clinic")}
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in left} | spent | rows

    # ------------------------------------------------------------ what lies are made of

    def version(self, number: int) -> dict[str, Any]:
        """A true one."""
        made = next(version for version in self.client.versions(self.run.id) if version.number == number)
        return {"number": number, "digest": made.digest}

    def last_seed(self) -> int:
        record = json.loads(StateDatabase.of(self.state).rows("SELECT record FROM runs")[0][0])
        return int(record["handed"]["w"]["seed"])

    def manifest(self, **changes: Any) -> dict[str, Any]:
        """A version that differs from the latest in some of its parts, as a task names it."""
        latest = self.client.run(self.run.id).version
        made = {**self.client.manifest(latest.digest).model_dump(mode="json", exclude={"root"}), **changes}
        return self.document(json.dumps(made).encode())

    def document(self, raw: bytes) -> dict[str, Any]:
        number = self.client.run(self.run.id).version.number
        return {"version": {"number": number, "digest": self.coordinator.make(raw)}}

    def with_block(self, name: str, raw: bytes) -> dict[str, Any]:
        """A version that has other bytes for one block."""
        blocks = self.client.manifest(self.client.run(self.run.id).version.digest).blocks
        return self.manifest(blocks={**blocks, name: self.coordinator.make(raw)})

    def other_model(self, **changes: Any) -> dict[str, Any]:
        """The task of another run, whose model document has other parts."""
        raw = json.dumps({**self.model.model_dump(mode="json"), **changes}).encode()
        return {**OTHER_RUN, "model": self.coordinator.make(raw)}

    def config(self, **changes: Any) -> dict[str, Any]:
        return self.other_model(config={**VIT, **changes})

    def claimed(self, **changes: Any) -> dict[str, Any]:
        """The task of another run, whose model is as its table says, and of whose version there is nothing."""
        config = {**VIT, **changes}
        with torch.device("meta"):
            table = block_table(instantiate(config, "image-classification"))
        return self.other_model(config=config, blocks=[block.model_dump(mode="json") for block in table])

    def extra_block(self, name: str) -> dict[str, Any]:
        block = {"tensor": name, "role": "other", "shape": [4], "dtype": "F32"}
        return self.other_model(blocks=[*self.model.model_dump(mode="json")["blocks"], block])


Changes = Callable[[Scene], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    name: str
    rule: str
    """What the refusal says, as a regular expression: its code, and the rule or what is wrong."""
    task: Changes | None = None
    """What of the task is another; what is in `plan`, `training` or `privacy` goes over what is there."""
    lies: Callable[[Scene], Sequence[Lie]] | None = None
    """Any other lies."""
    at: str = "open"
    """The site that it happens to."""
    told: bool = True
    """Whether there is a task, whose failure the coordinator is told of."""

    def of(self, scene: Scene) -> list[Lie]:
        if self.lies:
            return list(self.lies(scene))
        assert self.task
        changes = self.task(scene)
        return [claiming(lambda task: merged(task, changes))]


def merged(task: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    over = {key: {**task[key], **value} for key, value in changes.items() if key in MERGED and value and key in task}
    return {**task, **changes, **over}


MERGED = {"plan", "training", "privacy"}


def says(**changes: Any) -> Changes:
    return lambda _: changes


def garbled(name: str, rule: str, **changes: Any) -> Case:
    """A task that is none, so that there is no failure to tell of."""
    return Case(name, f"answer-not-understood: the answer is not a valid Task.*{rule}", says(**changes), told=False)


def named(*names: str) -> dict[str, Any]:
    return {"include": [{"names": list(names)}]}


def answer(status: int, **headers: str) -> Answered:
    return Answered(status, {name.replace("_", "-"): value for name, value in headers.items()})


PATH = "../../../escaped"
LONG = {**OTHER_RUN, "training": {"epochs": 100, "batch_size": 1}, "lease_seconds": 2.4}
"""Minutes of training, whose lease is renewed all the while."""


CASES = [
    # ---------------------------------------------------------------- blocks
    Case(
        "more blocks than the method sends",
        "private: the method keeps these at the site: classifier",
        says(plan={"upload": {}}),
    ),
    Case(
        "a private block by its name",
        "policy-violation: private: .*: classifier.weight$",
        says(plan={"upload": named("classifier.weight", "*layernorm*")}),
    ),
    Case(
        "all blocks of a site that sends values only",
        "policy-violation: may_send: these blocks may not leave",
        says(plan={"upload": {"exclude": [{"names": ["*embed*"]}]}}),
        at="values",
    ),
    Case(
        "blocks that a pattern withholds",
        "policy-violation: never_send: .*patch_embeddings",
        says(plan={"upload": {}}),
        at="values",
    ),
    Case(
        "blocks without the base that a difference needs",
        "invalid-plan: .*does not fetch as a base",
        says(plan={"fetch": named("vit.layernorm*")}),
    ),
    Case("blocks that no model has", "invalid-plan: no block matches", says(plan={"upload": named(PATH)})),
    garbled(
        "a plan of names that would take hours to compare",
        "16384 conditions",
        plan={"upload": named(*["a*b*"] * 20_000)},
    ),
    garbled(
        "a plan of patterns that would take minutes to compare",
        "256 names with wildcards",
        plan={"upload": named(*["a*b*"] * 300)},
    ),
    garbled("a plan with a number that is none", "/plan/scalars", plan={"scalars": {"x": float("nan")}}),
    garbled("a plan with code in it", "/plan/code", plan={"code": "import os"}),
    garbled("a stage that writes to a terminal", "/plan/stage", plan={"stage": "\x1b[2J"}),
    # ---------------------------------------------------------------- models
    Case(
        "another model in the middle of a run",
        "policy-violation: run: .* has changed its model$",
        lambda scene: {"model": scene.config(num_hidden_layers=2)["model"]},
    ),
    Case(
        "a family of models that the site does not take",
        "policy-violation: models: .*'bert'",
        lambda scene: scene.other_model(config=BERT),
        at="strict",
    ),
    Case(
        "a model of terabytes",
        "policy-violation: max_model_bytes: a model of 4503",
        lambda scene: scene.other_model(
            blocks=[{"tensor": "w", "role": "mlp", "shape": [1 << 25, 1 << 25], "dtype": "F32"}]
        ),
    ),
    Case(
        "a model of gigabytes of which there is no version",
        "invalid-version: .*: the blob has \\d+ bytes, not",
        lambda scene: scene.claimed(hidden_size=8192, intermediate_size=8192),
    ),
    Case(
        "a model of two loops over all pairs of places",
        "model-refused: .*laying out its model takes more than",
        lambda scene: scene.other_model(config=LEVIT, head="features"),
    ),
    Case(
        "a model larger than its table",
        "model-mismatch: .*far larger than its table",
        lambda scene: scene.config(hidden_size=1 << 16, intermediate_size=1 << 18),
    ),
    Case(
        "a million layers",
        "model-mismatch: .*far larger than its table",
        lambda scene: scene.config(num_hidden_layers=1 << 20),
    ),
    Case(
        "a billion layers",
        "model-refused: .*num_hidden_layers: is more than",
        lambda scene: scene.config(num_hidden_layers=10**9),
    ),
    Case(
        "a model that names code",
        "model-refused: .*auto_map: names code to import",
        lambda scene: scene.config(auto_map={"AutoModel": "evil--modeling.Model"}),
    ),
    Case(
        "a model that asks to be trusted",
        "model-refused: .*trust_remote_code",
        lambda scene: scene.config(trust_remote_code=True),
    ),
    Case(
        "a model from a hub", "model-refused: .*_name_or_path", lambda scene: scene.config(_name_or_path="evil/model")
    ),
    Case(
        "a model from a path", "model-refused: .*gguf_file: names a file", lambda scene: scene.config(gguf_file=PATH)
    ),
    Case(
        "a kernel from a hub",
        "model-refused: .*attn_implementation",
        lambda scene: scene.config(attn_implementation="evil/kernel"),
    ),
    Case(
        "a backbone from a hub",
        "model-refused: .*backbone",
        lambda scene: scene.config(text_config={"backbone": "evil/backbone"}),
    ),
    Case(
        "a model type that is code",
        "model-refused: .*transformers has no model type",
        lambda scene: scene.config(model_type="__import__('os').system('id')"),
    ),
    Case(
        "a block under the vault's own prefix",
        "model-mismatch: .*feedback/rest/x: missing",
        lambda scene: scene.extra_block("feedback/rest/x"),
    ),
    Case("a block whose name is a path", "model-mismatch: .*escaped: missing", lambda scene: scene.extra_block(PATH)),
    Case(
        "a model document that is a pickle",
        "invalid-model: ",
        lambda scene: {**OTHER_RUN, "model": scene.coordinator.make(pickle.dumps({"config": VIT}))},
    ),
    Case(
        "a block of Python objects",
        "invalid-model: /blocks/0/dtype",
        lambda scene: scene.other_model(blocks=[{"tensor": "w", "role": "mlp", "shape": [4], "dtype": "O"}]),
    ),
    Case(
        "prompts without end",
        "invalid-model: /prompts/text",
        lambda scene: scene.other_model(prompts={"text": 10**9}),
    ),
    Case(
        "a model document that is a bomb",
        "invalid-model: a document of more than 1048576 values",
        lambda scene: {
            **OTHER_RUN,
            "model": scene.coordinator.make(b'{"config":{"x":[' + b"[]," * (5 * MIB) + b"[]]}}"),
        },
    ),
    Case(
        "a model document of too many blocks",
        "invalid-model: a document of more than 1048576 values",
        lambda scene: {**OTHER_RUN, "model": scene.coordinator.make(many_blocks(500_000))},
    ),
    Case(
        "a model document nested too deep",
        "invalid-model: a document nested too deep",
        lambda scene: {**OTHER_RUN, "model": scene.coordinator.make(b"[" * 500_000)},
    ),
    # ---------------------------------------------------------------- versions
    Case(
        "a version that is a pickle", "invalid-version: ", lambda scene: scene.document(pickle.dumps({"blocks": {}}))
    ),
    Case(
        "a version that says two things under one name",
        "invalid-version: .*names something twice",
        lambda scene: scene.document(b'{"blocks":{"a":"sha256:%s","a":"sha256:%s"}}' % (b"0" * 64, b"1" * 64)),
    ),
    Case(
        "a version whose root has a root",
        "invalid-version: .*has itself a root",
        lambda scene: scene.manifest(root=scene.manifest(root="sha256:" + "0" * 64)["version"]["digest"]),
    ),
    Case(
        "a version of other blocks",
        "invalid-version: .*have different blocks: \\['extra'\\]",
        lambda scene: scene.manifest(
            blocks={**scene.client.manifest(scene.run.version.digest).blocks, "extra": "sha256:" + "0" * 64}
        ),
    ),
    Case(
        "a version with values that are NaN",
        "invalid-version: vit.layernorm.weight holds values that are NaN",
        lambda scene: scene.with_block("vit.layernorm.weight", np.full(16, np.nan, np.float32).tobytes()),
    ),
    Case(
        "a version with values that are infinite",
        "invalid-version: vit.layernorm.bias holds",
        lambda scene: scene.with_block("vit.layernorm.bias", np.full(16, np.inf, np.float32).tobytes()),
    ),
    Case(
        "a block that is a pickle",
        "digest-mismatch: the bytes ended",
        lambda scene: scene.with_block("vit.layernorm.weight", pickle.dumps(0)),
    ),
    Case(
        "a block of more bytes than it has",
        "digest-mismatch: the bytes received",
        lambda scene: scene.with_block("vit.layernorm.weight", bytes(10 * MIB)),
    ),
    Case(
        "bytes that are not those of their digest",
        "digest-mismatch: ",
        lambda scene: scene.manifest(
            blocks=dict.fromkeys(
                scene.client.manifest(scene.run.version.digest).blocks,
                scene.coordinator.make(bytes(64), "sha256:" + "5" * 64),
            )
        ),
    ),
    Case(
        "server state of terabytes",
        "policy-violation: max_model_bytes: server state of",
        lambda scene: {
            **scene.manifest(
                server_state={"m": {"digest": "sha256:" + "0" * 64, "shape": [1 << 40, 1 << 40], "dtype": "F32"}}
            ),
            "plan": {"server_state": ["*"]},
        },
    ),
    Case(
        "server state of Python objects",
        "invalid-version: /server_state/m/dtype",
        lambda scene: scene.manifest(
            server_state={"m": {"digest": "sha256:" + "0" * 64, "shape": [4], "dtype": "O"}}
        ),
    ),
    Case(
        "server state of forty axes",
        "invalid-version: /server_state/m/shape",
        lambda scene: scene.manifest(
            server_state={"m": {"digest": "sha256:" + "0" * 64, "shape": [1] * 40, "dtype": "F32"}}
        ),
    ),
    Case(
        "server state that is not there",
        "invalid-plan: the version has no server state named",
        says(plan={"server_state": ["secrets*"]}),
    ),
    # ---------------------------------------------------------------- training
    Case(
        "more epochs than the site allows",
        "policy-violation: max_epochs: 101",
        says(**OTHER_RUN, training={"epochs": 101}),
    ),
    Case(
        "more epochs in steps",
        "policy-violation: max_epochs: 33334 epochs are more than the 100 allowed",
        says(**OTHER_RUN, training={"epochs": None, "steps": 100_000}),
    ),
    garbled("both epochs and steps", "only one can set the length", training={"epochs": 1, "steps": 1}),
    garbled("moments that never forget", "/training/betas", training={"betas": [1.0, 1.0]}),
    Case(
        "a weight for each of many classes that the model lacks",
        r"unsuited: training\.class_weights has 50000 weights, and the model has \d+ classes: give one for each",
        says(**OTHER_RUN, training={"class_weights": [1.0] * 50_000}),
    ),
    Case(
        "a rate for blocks that the model lacks",
        r"unsuited: training\.rates no block of the model has the role 'secrets'",
        says(**OTHER_RUN, training={"rates": {"secrets": 2.0}}),
    ),
    Case(
        "more epochs behind a method's setting",
        "policy-violation: max_epochs: 501",
        says(**OTHER_RUN, method={"name": "fedrep", "settings": {"head_epochs": 500}}),
    ),
    Case(
        "more epochs in the middle of a run",
        "policy-violation: run: .* has changed its training$",
        says(training={"epochs": 2}),
    ),
    Case(
        "a batch of everything",
        "policy-violation: max_batch: a batch of 147",
        says(**OTHER_RUN, training={"batch_size": 10**12}),
        at="strict",
    ),
    Case(
        "another number of steps than the run's",
        "invalid-plan: the plan has 2 steps; with cohort.work 'fixed'",
        says(**OTHER_RUN, plan={"steps": 2}),
    ),
    Case(
        "more steps than the factor of a run with fitted work allows",
        "invalid-plan: the plan has 13 steps; .*the run allows 1 to 12",
        says(**OTHER_RUN, cohort={"work": "fitted"}, plan={"steps": 13}),
    ),
    Case(
        "fewer steps than the factor of a run with fitted work allows",
        "invalid-plan: the plan has 9 steps; .*the run allows 10 to 90",
        says(**OTHER_RUN, cohort={"work": "fitted", "work_factor": 3}, training={"epochs": 10}, plan={"steps": 9}),
    ),
    Case(
        "more epochs of fitted work than the site's policy allows",
        "policy-violation: max_epochs: 134 epochs are more than the 100 allowed",
        says(**OTHER_RUN, cohort={"work": "fitted", "work_factor": 1000}, plan={"steps": 400}),
    ),
    Case(
        "fitted work in the middle of a run",
        "policy-violation: run: .* has changed its cohort$",
        says(cohort={"work": "fitted", "work_factor": 1000}, plan={"steps": 400}),
    ),
    garbled("more steps than any run has", "/plan/steps", plan={"steps": 10**7}),
    garbled("a learning rate that is no number", "/training/learning_rate", training={"learning_rate": float("nan")}),
    garbled("an infinite learning rate", "/training/learning_rate", training={"learning_rate": float("inf")}),
    garbled("a learning rate of a million", "/training/learning_rate", training={"learning_rate": 1e6}),
    garbled("more rounds than any run has", "/rounds", rounds=10**15),
    garbled("a round that the run does not have", "no round 999", round=999),
    garbled("dice that cannot be thrown", "/seed", seed=-1),
    Case("a method that is not installed", "unknown-method: ", says(**OTHER_RUN, method={"name": "steal"})),
    Case("a method that is code", "unknown-method: ", says(**OTHER_RUN, method={"name": "os.system('id')"})),
    Case(
        "a method that the site does not allow",
        "policy-violation: methods: ",
        says(**OTHER_RUN, method={"name": "fedavg"}),
        at="strict",
    ),
    Case(
        "a method in the middle of another's run, for what that one kept",
        "policy-violation: run: .* has changed its method$",
        says(method={"name": "fedavg"}),
    ),
    Case(
        "another idea of what is private in the middle of a run",
        "policy-violation: run: .* has changed its method$",
        says(method={"name": "fedper", "settings": {"private": [{"roles": ["norm"]}]}}),
    ),
    Case(
        "settings that the method does not take",
        "invalid-method: .*/code",
        says(**OTHER_RUN, method={"name": "fedper", "settings": {"code": "x"}}),
    ),
    Case("a codec that is not installed", "unknown-codec: ", says(**OTHER_RUN, codec="pickle")),
    Case(
        "a codec of a thousand stages",
        "unknown-codec: .*names a stage twice",
        says(**OTHER_RUN, codec="+".join(["zstd"] * 1000)),
    ),
    Case("a budget that no update keeps to", "over-budget: ", says(**OTHER_RUN, upload_budget=1, codec="delta+int4")),
    garbled("a kind of task that runs commands", "/kind", kind="shell"),
    Case(
        "a kind of task that this worker does not do", "policy-violation: kinds: ", says(kind="evaluate"), at="values"
    ),
    # ---------------------------------------------------------------- data and privacy
    Case("a data set that is not here", "unknown-dataset: ", says(**OTHER_RUN, dataset="everything")),
    Case(
        "a data set that runs may not use",
        "policy-violation: datasets: ",
        says(**OTHER_RUN, dataset="clinic"),
        at="strict",
    ),
    Case(
        "another data set in the middle of a run",
        "policy-violation: run: .* has changed its dataset$",
        says(dataset="clinic"),
    ),
    garbled("a data set whose name is a path", "/dataset", dataset=PATH),
    garbled("training on what is held out", "no task trains on held-out examples", held_out=True),
    Case(
        "figures of too few examples",
        "policy-violation: min_evaluation_examples: metrics of 33",
        says(kind="evaluate", held_out=True),
        at="strict",
    ),
    Case(
        "privacy switched off",
        "policy-violation: privacy: .*the run has no differential privacy",
        says(**OTHER_RUN, privacy=None),
        at="budget",
    ),
    Case(
        "privacy switched off where the site has no budget",
        "policy-violation: run: .* has changed its privacy$",
        says(privacy=None),
        at="private",
    ),
    Case(
        "another delta in the middle of a run",
        "policy-violation: run: .* has changed its privacy$",
        says(privacy={"delta": 1e-3}),
        at="budget",
    ),
    Case(
        "more epsilon in the middle of a run",
        "policy-violation: run: .* has changed its privacy$",
        says(privacy={"epsilon": 900}),
        at="budget",
    ),
    Case(
        "more epsilon than the site's budget has left",
        "policy-violation: privacy: this task would bring .*the site allows 8",
        says(**OTHER_RUN, privacy={"epsilon": 900}, rounds=2, round=2),
        at="budget",
    ),
    Case(
        "a delta that promises nothing",
        "policy-violation: privacy: a delta of 0.09",
        says(**OTHER_RUN, privacy={"delta": 0.09}),
        at="budget",
    ),
    garbled(
        "a noise of the coordinator's choosing",
        "/privacy/noise_multiplier",
        privacy={**PRIVACY, "noise_multiplier": 0.0},
    ),
    Case(
        "a choice of blocks that nothing covers",
        "policy-violation: privacy: .*no exact choice",
        says(**OTHER_RUN, privacy={"selection": "uncovered"}),
        at="budget",
    ),
    Case(
        "exact figures of data with a budget",
        "policy-violation: privacy: .* has a budget that does not allow evaluations",
        says(kind="evaluate", held_out=True),
        at="budget",
    ),
    Case("figures of examples that train", "policy-violation: use: the data set 'digits'", says(kind="evaluate")),
    Case(
        "exact figures of examples that train where privacy is required",
        "policy-violation: require_privacy: .*figures have no noise",
        says(kind="evaluate"),
        at="floor",
    ),
    Case(
        "fine-tuning without privacy where it is required",
        "policy-violation: require_privacy: .*figures have no noise",
        says(**OTHER_RUN, kind="evaluate", held_out=True, method={"name": "fedbabu"}, privacy=None),
        at="floor",
    ),
    Case(
        "privacy switched off where it is required",
        "policy-violation: require_privacy: the run has no differential privacy",
        says(**OTHER_RUN, privacy=None),
        at="floor",
    ),
    Case(
        "a choice of blocks that nothing covers where privacy is required",
        "policy-violation: require_privacy: .*no exact choice",
        says(**OTHER_RUN, privacy={"selection": "uncovered"}),
        at="floor",
    ),
    # ---------------------------------------------------------------- views
    Case(
        "two versions under one number",
        "policy-violation: version: version 0 of run .* has changed its digest",
        lambda scene: {
            "round": 1,
            "version": {"number": 0, "digest": scene.manifest(scalars={"x": 1.0})["version"]["digest"]},
        },
    ),
    Case(
        "two versions under one number, to measure",
        "policy-violation: version: version 0",
        lambda scene: {
            "kind": "evaluate",
            "round": 0,
            "version": {"number": 0, "digest": scene.manifest(scalars={"x": 1.0})["version"]["digest"]},
        },
    ),
    Case(
        "an earlier round again",
        "policy-violation: round: round 1 on version 0 does not come after round 2",
        lambda scene: {"round": 1, "version": scene.version(0)},
    ),
    Case(
        "a later round on a version that was trained before",
        "policy-violation: round: round 3 on version 0",
        lambda scene: {"round": 3, "version": scene.version(0)},
    ),
    Case(
        "the same round with other dice",
        "policy-violation: round: round 2 on version 1",
        lambda scene: {"round": 2, "seed": 7, "version": scene.version(1)},
    ),
    Case(
        "the same round again and again",
        "policy-violation: max_attempts: round 2 was already submitted 1 times",
        lambda scene: {"round": 2, "seed": scene.last_seed(), "version": scene.version(1)},
        at="strict",
    ),
    # ---------------------------------------------------------------- leases and names
    Case("a lease of a day", "policy-violation: max_lease_seconds: ", says(lease_seconds=86400)),
    garbled("a lease of a year", "/lease_seconds", lease_seconds=31536000),
    garbled("a lease that is over before it begins", "/lease_seconds", lease_seconds=-1),
    Case(
        "a task without end",
        "policy-violation: max_task_seconds: the task takes longer than the 4 s",
        says(**LONG),
        at="strict",
    ),
    Case(
        "a task that is cancelled whenever it has begun",
        "task-cancelled: ",
        told=False,
        lies=lambda _: [
            claiming(lambda task: merged(task, LONG)),
            answering(
                HEARTBEAT,
                Answered(
                    409, {"Content-Type": MEDIA_TYPE}, TaskCancelled("again").document().model_dump_json().encode()
                ),
            ),
        ],
    ),
    Case(
        "a renewal for a year",
        "lease-lost: the lease could not be renewed",
        lies=lambda _: [
            claiming(lambda task: merged(task, LONG)),
            answering(HEARTBEAT, Answered(body=b'{"lease_seconds": 31536000}')),
        ],
        told=False,
    ),
    garbled("a task whose name is a path", "/id", id=PATH),
    garbled("a run whose name is a path", "/run", run=PATH),
    garbled("a run whose name writes to a terminal", "/run_name", run_name="demo\x1b[2J\n2026 all is well"),
    # ---------------------------------------------------------------- HTTP
    Case(
        "an answer of a hundred megabytes",
        "answer-not-understood: .*longer than 4194304 bytes",
        told=False,
        lies=lambda _: [answering(CLAIM, lambda: Answered(body=endless(bytes(MIB), 100)))],
    ),
    Case(
        "an answer nested too deep",
        "answer-not-understood: the answer is not a valid Task",
        told=False,
        lies=lambda _: [answering(CLAIM, Answered(body=b"[" * MIB))],
    ),
    Case(
        "sizes of blobs nested too deep",
        "answer-not-understood: the answer is not a valid Task: a document of more than 1024 values",
        told=False,
        lies=lambda _: [answering(CLAIM, Answered(200, {"Content-Type": FRAMED}, b"{}\n" + b"[" * MIB))],
    ),
    Case(
        "an answer that is a bomb",
        "answer-not-understood: the answer is not a valid Task",
        told=False,
        lies=lambda _: [
            claiming(
                lambda task: {
                    **task,
                    "kind": "shell",
                    "method": {"name": "fedper", "settings": {"x": [[]] * 900_000}},
                }
            )
        ],
    ),
    Case(
        "headers without end",
        "unavailable: no answer",
        told=False,
        lies=lambda _: [answering(CLAIM, Answered(200, {f"x-{n}": "x" * 100 for n in range(10_000)}, b"{}"))],
    ),
    Case(
        "come back in a year",
        "intermediary-answer: .*HTTP 503",
        told=False,
        lies=lambda _: [answering(CLAIM, answer(503, Retry_After="31536000"))],
    ),
    Case(
        "come back never",
        "intermediary-answer: .*HTTP 503",
        told=False,
        lies=lambda _: [answering(CLAIM, answer(503, Retry_After="9" * 400))],
    ),
]


ALIKE = {
    "a private block by its name",
    "a plan with code in it",
    "a stage that writes to a terminal",
    "a model of two loops over all pairs of places",
    "a million layers",
    "a block whose name is a path",
    "a block of Python objects",
    "prompts without end",
    "a version with values that are infinite",
    "server state of Python objects",
    "moments that never forget",
    "an infinite learning rate",
    "a learning rate of a million",
    "more rounds than any run has",
    "dice that cannot be thrown",
    "a method that is code",
    "another idea of what is private in the middle of a run",
    "a kind of task that runs commands",
    "a data set whose name is a path",
    "privacy switched off where the site has no budget",
    "more epsilon in the middle of a run",
    "a noise of the coordinator's choosing",
    "fine-tuning without privacy where it is required",
    "two versions under one number, to measure",
    "a later round on a version that was trained before",
    "a lease of a year",
    "a lease that is over before it begins",
    "a task without end",
    "a task whose name is a path",
    "a run whose name writes to a terminal",
    "an answer that is a bomb",
    "come back never",
}
"""Take the path of another case, or show at length what a smaller test shows: of the two loops test_sandbox.py, of
time that is up test_settling.py, of bombs the model document that is one. The long tests run them too."""


def many_blocks(count: int) -> bytes:
    """A model's document of so many tiny blocks."""
    return b'{"blocks":[' + b'{"tensor":"w","role":"other","shape":[1],"dtype":"F32"},' * count + b"0]}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileCoordinator]:
    with HostileCoordinator(tmp_path_factory.mktemp("hostile")) as live:
        yield live


@pytest.fixture(scope="module")
def scene_of(
    hostile: HostileCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Scene]]:
    """Each site, which is there from when it is asked for first."""
    made: dict[str, Scene] = {}

    def scene(name: str) -> Scene:
        made[name] = made.get(name) or Scene(hostile, tmp_path_factory.mktemp(name), name)
        return made[name]

    yield scene
    for each in made.values():
        each.close()


def refusals(logged: Sequence[Any]) -> list[str]:
    """What a worker's log says of what it would not do: the code, and why."""
    events = {"task-failed": "code", "task-dropped": "reason", "coordinator-away": "reason"}
    return [
        f"{entry[events[entry['event']]]}: {entry['detail']} {' '.join(entry.get('errors', ()))}".strip()
        for entry in logged
        if entry["event"] in events
    ]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name.replace(" ", "-"), marks=pytest.mark.long if case.name in ALIKE else ())
        for case in CASES
    ],
)
def test_it_is_refused_by_a_rule_and_nothing_leaves(
    case: Case, hostile: HostileCoordinator, scene_of: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(case.at)
    monkeypatch.chdir(scene.around)
    before, asked = scene.kept(), len(hostile.asked)
    lies = case.of(scene)
    scene.stop.asked.clear()
    scene.done = None
    scene.agent._outage.over()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
    resident = peak_bytes(os.getpid())

    def refused() -> list[str]:
        scene.does()
        return refusals(logged)

    with capture_logs() as logged, hostile.lying(*lies):
        said = until(refused)
    assert re.search(case.rule, said[0]), said
    assert [sent for sent in hostile.asked[asked:] if sent.sends_tensors] == []
    assert scene.kept() == before
    assert max(scene.stop.asked, default=0) <= MAX_WAIT_SECONDS
    assert peak_bytes(os.getpid()) - resident < MAX_MEMORY
    if case.told:
        last = until(scene.failed)
        assert last.problem
        assert re.search(case.rule, last.problem.detail), last.problem.detail


@pytest.mark.parametrize("name", variants(SITES, set(SITES) - {"private"}))
def test_after_all_that_the_worker_goes_on_with_what_is_honest(name: str, scene_of: Callable[[str], Scene]) -> None:
    scene_of(name).does_an_honest_task()

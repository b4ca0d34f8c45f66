"""A site's own training script: real workers and coordinators over HTTP, and scripts that do what they should not."""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file
from structlog.testing import capture_logs
from transformers import BertConfig, LlamaConfig

from tessera.coordinator.domain import eligibility
from tessera.examples.llm.__main__ import LLAMA
from tessera.examples.llm.instructions import word_tokenizer
from tessera.examples.reports.__main__ import BERT
from tessera.examples.reports.notes import DEPARTMENTS, WORDINGS, notes, write_csv, write_tokenizer
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, RunSpec, Training
from tessera.shared.api.tasks import Task
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import beyond_script
from tessera.shared.model.spec import WEIGHTS_FILE, Lora
from tessera.shared.problems import OF_WORKERS
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.cli.model import init
from tessera.worker.executor import script
from tessera.worker.governance.approvals import ApprovalDecision
from tessera.worker.governance.descriptions import OWN_SCRIPT
from tessera.worker.stores import airlock_of, audit_of, inbox_of, ledger_of
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import exported, start_run
from tests.support.paths import ROOT
from tests.support.task_document import NO_DIGEST
from tests.support.task_document import task_of as task_document
from tests.support.tasks import DIGITS_VIT, untrained
from tests.worker.test_agent import begin, failed, settings_of, task_of, working

EXAMPLES = ROOT / "examples" / "script"
SGD = Training(optimizer="sgd", learning_rate=0.1, batch_size=None, steps=2, weight_decay=0.0)
COUNT = 24


def own_script(folder: Path, text: str, **more: Any) -> dict[str, Any]:
    """The settings of a worker with a script of this text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(text)
    return {"executor": {"command": [sys.executable, str(folder / "train.py")], **more}}


def bert(folder: Path) -> Path:
    """A model's folder with a tokenizer."""
    words = write_tokenizer(folder / "base")
    made = BertConfig.from_dict({**BERT, "vocab_size": words, "num_labels": len(DEPARTMENTS)})
    made.save_pretrained(folder / "base")
    init(folder / "model", str(folder / "base"), "text-classification", 1, pretrained=False)
    return folder / "model"


def version_of(
    coordinator: LiveCoordinator, folder: Path, model: Path, kind: str, **spec: Any
) -> dict[str, np.ndarray]:
    """Return the last version of a run of two sites, which train by the example's script or by the worker itself."""
    client = coordinator.client()
    uploaded = upload_model(client, ModelFolder.open(model))
    given = {"name": kind, "method": MethodSpec(name="fedavg"), "dataset": "notes", "training": SGD, "seed": 3}
    cohort = Cohort(quorum=2)
    found = RunSpec(model=uploaded.model, version=uploaded.version, cohort=cohort, **{**given, "rounds": 2, **spec})
    run = client.create_run(found)
    with ExitStack() as stack:
        for seed, site in enumerate("ab"):
            place = folder / kind / site
            place.mkdir(parents=True)
            write_csv(place / "notes.csv", notes(COUNT, WORDINGS[seed], Random(seed)))
            source = {"kind": "text", "file": str(place / "notes.csv"), "labels": DEPARTMENTS, "tokenizer": "run"}
            script = own_script(place, (EXAMPLES / "classify.py").read_text()) if kind == "script" else {}
            own = {"name": kind, "token": coordinator.token("site", site), "datasets": {"notes": source}, **script}
            stack.enter_context(working(coordinator, place, **own))
        until(lambda: client.run(run.id).state != "running", 400)
    assert client.run(run.id).state == "completed"
    return exported(client, run)


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "fedfrozen", "settings": {"warmup_rounds": 1}},
    ],
    ids=["fedavg", "fedfrozen"],
)
def test_the_examples_script_makes_the_versions_that_the_worker_itself_makes(
    coordinator: LiveCoordinator, tmp_path: Path, method: dict[str, Any]
) -> None:
    """Two rounds at two sites, with steps of SGD over all examples, which do not depend on their order."""
    model = bert(tmp_path)
    own, scripted = (
        version_of(coordinator, tmp_path, model, kind, method=MethodSpec(**method)) for kind in ("own", "script")
    )
    far = {name: float(np.abs(values - scripted[name]).max()) for name, values in own.items()}
    assert own.keys() == scripted.keys()
    assert max(far.values()) < 1e-5, far
    start = load_file(model / WEIGHTS_FILE)
    assert max(float(np.abs(values - start[name]).max()) for name, values in own.items()) > 1e-3


@pytest.mark.long
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_the_examples_script_with_trl_trains_adapters_alone(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    LlamaConfig.from_dict({**LLAMA, **special, "vocab_size": len(tokenizer)}).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    init(tmp_path / "model", str(tmp_path / "base"), "causal-lm", 1, pretrained=False, lora_rank=2)
    folder = ModelFolder.open(tmp_path / "model")
    client = coordinator.client()
    uploaded = upload_model(client, folder)
    spec = {"name": "sft", "method": MethodSpec(name="lora"), "dataset": "notes", "rounds": 1}
    training = Training(learning_rate=0.01, batch_size=4, steps=3)
    run = client.create_run(RunSpec(model=uploaded.model, version=uploaded.version, training=training, **spec))
    rows = [("prompt", "completion"), *(("count : old fox .", "answer two") for _ in range(COUNT))]
    (tmp_path / "rows.csv").write_text("\n".join(map(",".join, rows)))
    table = {"kind": "text", "file": str(tmp_path / "rows.csv"), "text": "completion", "head": "causal-lm"}
    script = own_script(tmp_path / "own", (EXAMPLES / "sft.py").read_text())
    with working(coordinator, tmp_path, datasets={"notes": {**table, "tokenizer": "run"}}, **script):
        until(lambda: client.run(run.id).state == "completed", 400)
    # In float32 the values of all tensors before, in the names of a file.
    before, after = load_file(folder.path / WEIGHTS_FILE), exported(client, run)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_" in name}
    (task,) = next(client.rounds(run.id)).tasks
    assert task.metrics["loss"] > 0


ADAPTS = """
import pathlib, tessera.site, torch
task = tessera.site.task()
model = task.model()
task.freeze(model)
layers = [module for module in model.modules() if hasattr(module, "lora_A")]
active = {name for layer in layers for name in layer.active_adapters}
pathlib.Path(__file__).with_name("active").write_text(" ".join(sorted(active)))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1.0, alpha=float(parameter.requires_grad))
task.submit(model)
"""


@pytest.mark.long
def test_a_script_trains_adapters_of_its_sites_rank(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    lora = Lora(rank=8, alpha=16, ranks=(2, 8))
    document, start = untrained(DIGITS_VIT, "image-classification", seed=1, lora=lora)
    client = coordinator.client()
    run = start_run(client, document, start, dataset="digits", rounds=1, method=MethodSpec(name="lora"))
    settings = {**own_script(tmp_path / "own", ADAPTS), "resources": {"lora_rank": 4}}
    with working(coordinator, tmp_path, **settings):
        until(lambda: client.run(run.id).state != "running", 400)
    assert client.run(run.id).state == "completed"
    assert (tmp_path / "own" / "active").read_text() == "rank_2"
    (task,) = next(client.rounds(run.id)).tasks
    assert task.metrics["lora_rank"] == 2
    first, last = (client.manifest(version.digest).blocks for version in client.versions(run.id))
    changed = {name for name in first if first[name] != last[name]}
    assert changed == {name for name in start if ".rank_2." in name or name.startswith("classifier.")}


def test_a_script_cannot_begin_new_adapters_in_each_round() -> None:
    for average in ("factors", "partition", "residual"):
        assert beyond_script(MethodSpec(name="lora", settings={"average": average})) is None
    refusal = beyond_script(MethodSpec(name="lora", settings={"average": "stack"}))
    assert refusal == "the method lora begins new adapters in each round, which a site's own script does not do"


# ---------------------------------------------------------------- scripts that do what they should not

SCRIPT = r"""
import json, os, pathlib, shutil, signal, struct, subprocess, sys, time

folder = pathlib.Path(os.environ["TESSERA_TASK"])
task = json.loads((folder / "task.json").read_text())
here = pathlib.Path(__file__).parent
weights = (folder / "model" / "model.safetensors").read_bytes()
made, blocks = folder / "made", folder / "made" / "blocks.safetensors"
made.mkdir()


def data(raw):
    return raw[8 + struct.unpack("<Q", raw[:8])[0] :]


def changed(change):
    header = json.loads(weights[8 : len(weights) - len(data(weights))])
    values = change(header) or data(weights)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + values


def renamed(header):
    header["not.planned"] = header.pop("classifier.bias")


def reshaped(header):
    header["classifier.bias"]["shape"] = [5, 2]


def removed(header):
    last = max(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])
    return data(weights)[: header.pop(last)["data_offsets"][0]]


blocks.write_bytes(weights)
figures = {"metrics": {"loss": 1.23456, "accuracy": 0.5}}
match task["run"]:
    case "crashes":
        print("a line of an example: patient 4711", file=sys.stderr)
        sys.exit(3)
    case "returns-nothing":
        sys.exit()
    case "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        (here / "pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    case "waits":
        (here / "pids").write_text(str(os.getpid()))
        time.sleep(600)
    case "sends-another-block":
        blocks.write_bytes(changed(renamed))
    case "reshapes":
        blocks.write_bytes(changed(reshaped))
    case "leaves-a-block-out":
        blocks.write_bytes(changed(removed))
    case "is-not-finite":
        blocks.write_bytes(changed(lambda header: b"\xff" * len(data(weights))))
    case "writes-too-much":
        os.truncate(blocks, 1 << 34)
    case "is-no-safetensors-file":
        blocks.write_bytes(b"pickle" * 100)
    case "links-its-blocks":
        blocks.unlink()
        blocks.symlink_to(folder / "model" / "model.safetensors")
    case "links-its-result":
        made.rename(here / "elsewhere")
        (folder / "result").symlink_to(here / "elsewhere")
        sys.exit()
    case "pipes-its-blocks":
        blocks.unlink()
        os.mkfifo(blocks)
    case "says-too-much":
        figures = {"metrics": {"loss": "x" * 100_000}}
    case "is-honest":
        (here / "environment").write_text(json.dumps(dict(os.environ)))
        (here / "task.json").write_text(json.dumps(task))
(made / "figures.json").write_text(json.dumps(figures))
made.rename(folder / "result")
"""

REFUSED = {
    "crashes": "script-failed: the site's own script ended with exit code 3",
    "returns-nothing": "script-failed: the site's own script ended without a result",
    "sends-another-block": "script-result: the result of the site's own script is refused: it has 1 tensors that are",
    "reshapes": "classifier.bias is F32 [5, 2], and the plan's is F32 [10]",
    "leaves-a-block-out": "it lacks 1 of ",
    "is-not-finite": "script-not-finite: ",
    "writes-too-much": "its files are missing, too large, or links",
    "is-no-safetensors-file": "blocks.safetensors is no safetensors file of ",
    "links-its-blocks": "its files are missing, too large, or links",
    "links-its-result": "its files are missing, too large, or links",
    "pipes-its-blocks": "its files are missing, too large, or links",
    "says-too-much": "its files are missing, too large, or links",
}


def test_what_a_script_does_wrong_fails_its_task_and_the_next_task_runs(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TESSERA_TOKEN", "MY_SERVICE_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "secret-4712")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    client = coordinator.client()
    settings = own_script(tmp_path / "own", SCRIPT)
    with capture_logs() as logs, working(coordinator, tmp_path, **settings):
        for name, said in REFUSED.items():
            task = task_of(client, begin(client, DIGITS_VIT, name=name), 1, failed)
            assert task.problem is not None
            assert said in task.problem.detail
            assert task.problem.remedy == OF_WORKERS[task.problem.detail.partition(":")[0]]
            assert "patient" not in task.problem.detail
            # The next one runs.
            run = begin(client, DIGITS_VIT, name="is-honest")
            until(lambda run=run: client.run(run.id).state == "completed")
        run = begin(client, DIGITS_VIT, name="is-honest", evaluation=Evaluation(dataset="held-out"))
        until(lambda: client.run(run.id).state == "completed" and client.measurements(run.id))
    (output,) = (log["output"] for log in logs if log["event"] == "script-failed" and log["exit_code"] == 3)
    assert "patient 4711" in output
    # Measured by the worker itself.
    assert {found.version for found in client.measurements(run.id)} >= {1}
    (task,) = next(client.rounds(run.id)).tasks
    assert task.metrics.items() >= {"loss": 1.23, "script_accuracy": 0.5}.items()
    assert task.examples == 180
    given = json.loads((tmp_path / "own" / "environment").read_text())
    assert "secret-4712" not in given.values()
    assert given["TOKENIZERS_PARALLELISM"] == "false"
    assert list((tmp_path / "state" / "script").iterdir()) == []
    # The ledger and the audit have each training, as that of the worker's own.
    own = settings_of(coordinator, tmp_path)
    assert len(ledger_of(own).read("digits")) == 2 * len(REFUSED) + 1
    begun = [entry.detail for entry in audit_of(own).read() if entry.action == "task.start"]
    assert [each.get("own_script") for each in begun if each["kind"] == "train"] == [True] * (2 * len(REFUSED) + 1)


def gone(pids: Path) -> bool:
    def ended(pid: str) -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
        return True

    return all(map(ended, pids.read_text().split()))


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """These scripts do not look whether their tasks are still wanted."""
    monkeypatch.setattr(script, "STOP_SECONDS", 0.1)


@pytest.mark.usefixtures("_soon")
def test_a_script_that_takes_too_long_ends_with_all_its_processes(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    """It ignores SIGTERM."""
    client = coordinator.client()
    with working(coordinator, tmp_path, **own_script(tmp_path / "own", SCRIPT, timeout_seconds=2.0)):
        task = task_of(client, begin(client, DIGITS_VIT, name="hangs"), 1, failed)
        assert task.problem is not None
        assert task.problem.detail.startswith("script-timeout: ")
        assert gone(tmp_path / "own" / "pids")
        run = begin(client, DIGITS_VIT, name="is-honest")
        until(lambda: client.run(run.id).state == "completed")


@pytest.mark.usefixtures("_soon")
def test_a_cancelled_run_and_a_stopped_worker_end_the_script(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client, pids = coordinator.client(), tmp_path / "own" / "pids"
    with working(coordinator, tmp_path, **own_script(tmp_path / "own", SCRIPT)):
        run = begin(client, DIGITS_VIT, name="waits")
        until(pids.exists)
        client.set_run_state(run.id, "cancelled")
        until(lambda: gone(pids))
        pids.unlink()
        run = begin(client, DIGITS_VIT, name="waits")
        until(pids.exists)
    assert gone(pids)
    # Given back, for this worker or another one.
    assert next(client.rounds(run.id)).tasks[0].state == "offered"


# ---------------------------------------------------------------- the site's rules


def test_the_sites_rules_hold_before_the_script_begins(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a coordinator has it that does not heed what it is shown.
    monkeypatch.setattr(eligibility, "_script_refusal", lambda _: None)
    monkeypatch.setattr(eligibility, "refused_plan", lambda *_, **__: None)
    client, mark = coordinator.client(), tmp_path / "own" / "mark"
    settings = own_script(tmp_path / "own", f"open({str(mark)!r}, 'x')")
    asked: dict[str, dict[str, Any]] = {
        "counts as not private": {"privacy": {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}},
        "the method fedprox has a loss of its own, which": {"method": MethodSpec(name="fedprox")},
        "the method safl has each site choose blocks, which": {"method": MethodSpec(name="safl")},
        "the method fedper keeps blocks at the sites, which": {"method": MethodSpec(name="fedper")},
        "never_send: these blocks never leave: classifier.bias": {},
    }
    with working(coordinator, tmp_path, policy={"never_send": ["classifier.bias"]}, **settings):
        for said, spec in asked.items():
            task = task_of(client, begin(client, DIGITS_VIT, **spec), 1, failed)
            assert task.problem is not None
            assert task.problem.detail.startswith("policy-violation: ")
            assert said in task.problem.detail
    assert not mark.exists()
    # Nothing was used.
    assert ledger_of(settings_of(coordinator, tmp_path)).read("digits") == ()


def test_an_airlock_shows_and_holds_what_a_script_made(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    settings = own_script(tmp_path / "own", SCRIPT)
    run = begin(client, DIGITS_VIT, name="is-honest")
    with working(coordinator, tmp_path, policy={"airlock": True, "approve_runs": True}, **settings):
        own = settings_of(coordinator, tmp_path, policy={"airlock": True, "approve_runs": True})
        (request,) = until(inbox_of(own).requests)
        assert OWN_SCRIPT in request.summary
        inbox_of(own).decide([request], ApprovalDecision(approved=True, by="ann", at=request.asked_at))
        (held,) = until(airlock_of(own).held)
        assert held.metrics == {"loss": 1.23, "script_accuracy": 0.5}
        assert "leased" in {task.state for made in client.rounds(run.id) for task in made.tasks}
        airlock_of(own).decide(held.id, "release", "ann")
        until(lambda: client.run(run.id).state == "completed")


def test_only_the_sites_own_settings_name_a_script() -> None:
    """Nothing that a coordinator sends can."""
    spec = {"name": "r", "model": NO_DIGEST, "version": NO_DIGEST, "dataset": "d", "rounds": 1}
    RunSpec.model_validate({**spec, "method": {"name": "fedavg"}})
    command = {"command": ["touch", "mark"]}
    for place in ({"executor": command}, {"training": {"executor": command}}):
        with pytest.raises(ValidationError, match="executor"):
            RunSpec.model_validate({**spec, "method": {"name": "fedavg"}, **place})
    task = task_document().model_dump(mode="json")
    # A worker of an earlier version passes over what it does not know.
    assert "executor" not in Task.model_validate({**task, "executor": command}).model_dump()


BUDGET = {"kind": "digits", "privacy": {"epsilon": 1, "delta": 1e-5}}
BUDGETS = {"seen": BUDGET, "test": {**BUDGET, "use": "evaluate"}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"executor": {"command": []}}, "executor.command"),
        ({"executor": {"command": ["there-is-none"]}}, "there is no program 'there-is-none'"),
        ({"executor": {"command": "python train.py"}}, "executor.command"),
        ({"policy": {"require_privacy": {"epsilon": 1}}}, "policy.require_privacy would refuse its training"),
        ({"policy": {"require_secure_sums": True}}, "policy.require_secure_sums would refuse"),
        ({"datasets": BUDGETS}, "so that datasets.seen.privacy would refuse its training: remove executor or"),
        ({"privacy": {"epsilon": 1, "delta": 1e-5}}, "privacy would refuse its training: remove executor"),
    ],
)
def test_settings_that_contradict_a_script_are_refused(
    coordinator: LiveCoordinator, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    given = {"executor": {"command": [sys.executable, "train.py"]}, **settings}
    with pytest.raises(ValidationError, match=re.escape(said)):
        settings_of(coordinator, tmp_path, **given)

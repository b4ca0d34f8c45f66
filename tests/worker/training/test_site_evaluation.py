"""A site measures each version as it is and as its own: a real coordinator, a real agent, real methods."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch.nn.modules.module import register_module_forward_pre_hook

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Measurement, Run, RunPatch, Training
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.metrics.classification import group_figures
from tessera.shared.metrics.rows import rows_of
from tessera.shared.metrics.site_spread import scores_by_version
from tessera.shared.model.spec import Prompts
from tessera.shared.run_settings import Budget, rho_of
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Subgroups
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.errors import TrainingDiverged
from tessera.worker.governance.approvals import ApprovalDecision
from tessera.worker.governance.departures import departures
from tessera.worker.governance.policy import Allowance, ClientPrivacyFloor, Policy, PolicyViolation, PrivacyFloor
from tessera.worker.inventory import datasets_of
from tessera.worker.model.build import instantiate
from tessera.worker.privacy.accountant import epsilon
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.audit import Audit
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.privacy_ledger import Ledger, NoisyFigures, noisy_in, of_training
from tessera.worker.state.vault import Vault
from tessera.worker.stores import inbox_of
from tessera.worker.task.heartbeat import Stop
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.batches import Batches
from tessera.worker.training.evaluate import evaluate
from tessera.worker.training.optimization.precision import multiplies_bfloat16, restore_scale, scale_of
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import LiveCoordinator, until
from tests.support.duals import dual, pairs
from tests.support.federation import ScriptedWorker, exported, start_run
from tests.support.in_process import in_process
from tests.support.runner import task_runner
from tests.support.tasks import DIGITS_VIT as VIT
from tests.support.tasks import untrained
from tests.support.variants import variants
from tests.worker.test_agent import succeed

CPU = torch.device("cpu")
GLOBAL = {"accuracy", "macro_f1", "loss", "calibration_error"}
Precision = Literal["float32", "bfloat16", "float16"]
PERSONAL = {f"personal_{name}" for name in GLOBAL}
ROUNDS = 2


def begin(
    client: Client,
    method: str,
    evaluation: Evaluation | None,
    dataset: str = "digits",
    precision: Precision = "float32",
    **settings: Any,
) -> Run:
    document, start = untrained(VIT, "image-classification", seed=0)
    return start_run(
        client,
        document,
        start,
        method=MethodSpec(name=method, settings=settings),
        dataset=dataset,
        rounds=ROUNDS,
        training=Training(optimizer="sgd", momentum=0, learning_rate=0.1, batch_size=64, precision=precision),
        cohort=Cohort(max_attempts=1, max_task_attempts=1),
        evaluation=evaluation,
    )


def settings(coordinator: LiveCoordinator, folder: Path, held_out: float | None = 0.25) -> WorkerSettings:
    part = {"scheme": "iid", "count": 8, "index": 0}
    digits = {"kind": "digits", "part": part} | ({"held_out": held_out} if held_out else {})
    token, key = coordinator.token("site", "a"), folder.parent / "held-out.key"
    key.write_text(key_of_seed(0).hex())
    given = {
        "held_out_key_file": key,
        "url": coordinator.url,
        "token": token,
        "name": "w",
        "state_dir": folder,
        "threads": 1,
        # A vault is settled once a claim has ended without a task.
        "poll_seconds": 1,
    }
    return WorkerSettings(**given, datasets={"digits": digits})


@contextmanager
def working(given: WorkerSettings, *, executes: bool = False) -> Iterator[None]:
    stop = Stop()
    thread = threading.Thread(target=Agent(given, stop, executor=in_process(given) if executes else None).run)
    thread.start()
    try:
        yield
    finally:
        stop.request()
        thread.join(20)


def measured(client: Client, run: Run) -> dict[int, Measurement]:
    until(lambda: client.run(run.id).state == "completed")
    return {found.version: found for found in client.measurements(run.id)}


@pytest.mark.parametrize(
    ("method", "chosen", "personal_from"),
    [
        # A vault that only steers training makes no model of the site's own.
        pytest.param("fedavg", {}, None, marks=pytest.mark.long),
        ("scaffold", {}, None),
        # The vault's content does, once there is any;
        pytest.param("fedper", {}, 1, marks=pytest.mark.long),
        ("ditto", {}, 1),
        pytest.param("local", {}, 1, marks=pytest.mark.long),
        # fine-tuning does from the beginning.
        ("fedbabu", {"tune_epochs": 1}, 0),
    ],
)
def test_a_site_measures_the_version_and_its_own_model_if_there_is_one(
    coordinator: LiveCoordinator, tmp_path: Path, method: str, chosen: dict[str, Any], personal_from: int | None
) -> None:
    client = coordinator.client()
    run = begin(client, method, Evaluation(sites=True), **chosen)
    with working(settings(coordinator, tmp_path / "state")):
        found = measured(client, run)
    assert sorted(found) == [0, 1, 2]
    for number, one in found.items():
        own = PERSONAL if personal_from is not None and number >= personal_from else set()
        assert set(one.metrics) == GLOBAL | own, number
    # About a quarter of the 180 images that are an eighth of the training part's 1437: those that the key says.
    assert {(one.worker, one.held_out, one.examples) for one in found.values()} == {("a/w", True, 43)}


def test_the_version_is_measured_without_what_the_site_keeps_and_its_own_model_with_it(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = begin(client, "fedper", Evaluation(sites=True))
    given = settings(coordinator, tmp_path / "state")
    with working(given):
        metrics = measured(client, run)[ROUNDS].metrics
    held_out = datasets_of(given.sources)["digits"].held_out
    assert held_out is not None
    model = instantiate(VIT, "image-classification", seed=1)
    version = {name: torch.from_numpy(values) for name, values in exported(client, run).items()}
    kept = load((tmp_path / "state" / "vault" / run.id / "current.safetensors").read_bytes())
    # The head of the version was never trained.
    for prefix, tensors in (("", version), ("personal_", version | kept)):
        model.load_state_dict(tensors)
        again = evaluate(model, "image-classification", Batches(held_out, 64, CPU), lambda: None)
        assert {name: metrics[prefix + name] for name in GLOBAL} == pytest.approx(again, rel=0.006)
    assert all(value == float(f"{value:.3g}") for value in metrics.values())
    assert any(metrics[f"personal_{name}"] != metrics[name] for name in GLOBAL)


@pytest.mark.parametrize("precision", variants(("float32", "bfloat16"), {"bfloat16"}))
def test_a_site_measures_in_the_precision_in_which_it_trains(
    coordinator: LiveCoordinator, tmp_path: Path, precision: Precision
) -> None:
    client, seen = coordinator.client(), set[tuple[bool, torch.dtype]]()

    def note(module: torch.nn.Module, _: object, output: object) -> None:
        if isinstance(module, torch.nn.Linear) and isinstance(output, torch.Tensor):
            seen.add((module.training, output.dtype))

    run = begin(client, "fedavg", Evaluation(sites=True), precision=precision)
    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        with working(settings(coordinator, tmp_path / "state"), executes=True):
            assert len(measured(client, run)) == ROUNDS + 1
    finally:
        hook.remove()
    # A CPU without instructions for bfloat16 computes in float32.
    computed = torch.bfloat16 if precision == "bfloat16" and multiplies_bfloat16() else torch.float32
    # Shapes of the task are tried without a pass in training mode.
    assert {dtype for training, dtype in seen if training} == {computed}
    assert computed in {dtype for training, dtype in seen if not training}


@pytest.mark.parametrize(
    "method", ["ditto", *(pytest.param(name, marks=pytest.mark.long) for name in ("fedper", "local", "fedbabu"))]
)
def test_measuring_changes_no_bit_of_what_is_trained(
    coordinator: LiveCoordinator, tmp_path: Path, method: str
) -> None:
    client, made = coordinator.client(), []
    for place, evaluation in enumerate((None, Evaluation(sites=True))):
        state = tmp_path / str(place)
        run = begin(client, method, evaluation)
        if place:
            succeed(tmp_path / "0", state)
        with working(settings(coordinator, state)):
            until(lambda run=run: client.run(run.id).state == "completed")
            vault = state / "vault" / run.id
            # FedBABU keeps nothing, for which there is no file.
            names = [] if method == "fedbabu" else ["current.safetensors"]
            until(lambda vault=vault, names=names: [path.name for path in vault.glob("*")] == names)
        kept = Vault(state / "vault").load(run.id)
        made.append((client.run(run.id).version.digest, {name: kept[name].tobytes() for name in kept}))
    assert made[0] == made[1]


def test_a_worker_that_holds_nothing_out_is_not_asked(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    run = begin(client, "fedavg", Evaluation(sites=True))
    with working(settings(coordinator, tmp_path / "state", held_out=None)):
        assert measured(client, run) == {}


def test_no_figure_of_examples_that_train_leaves_for_a_run_that_nobody_trains(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    """Exact losses of chosen versions would be the training data's gradients, by differences."""
    client, site = coordinator.client(), coordinator.client("site", "a")
    run = begin(client, "fedavg", Evaluation(dataset="digits"), dataset="elsewhere")
    with working(settings(coordinator, tmp_path / "state")):
        ended = until(lambda: [task for task in site.tasks() if task.state in ("accepted", "failed")])
    assert ended[0].problem
    assert "policy-violation: use: the data set 'digits' is for training" in ended[0].problem.detail
    assert list(client.measurements(run.id)) == []


@pytest.mark.parametrize("send_class_counts", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(require_privacy=PrivacyFloor(epsilon=4.0, evaluations=True)),
        Policy(require_client_privacy=ClientPrivacyFloor(epsilon=4.0, delta=1e-5, evaluations=True)),
        Policy(max_weekly_privacy=Allowance(epsilon=4.0, delta=1e-5, evaluations=True)),
        Policy(figures="rounded"),
    ],
    ids=["open", "private", "private as a whole", "private in a week", "rounded"],
)
def test_a_site_that_requires_privacy_makes_no_model_of_its_own_without_it_and_sends_no_counts(
    coordinator: LiveCoordinator, tmp_path: Path, policy: Policy, send_class_counts: bool
) -> None:
    is_open = policy == Policy()
    # Of ten classes, a site with so few examples has no more than a few of each.
    policy = policy.model_copy(update={"send_class_counts": send_class_counts, "min_subjects": 1})
    data = datasets_of(settings(coordinator, tmp_path / "state").sources)
    worker = ScriptedWorker(
        coordinator.client("site", "a"),
        kinds=("train", "evaluate"),
        datasets={"digits": 137},
        held_out={"digits": 43},
        methods=("fedbabu",),
    )
    cache, vault = Cache(tmp_path / "cache", 1 << 24), Vault(tmp_path / "vault")
    slept: list[float] = []
    runner = task_runner(
        worker.client, data, TrainingSetup(CPU), vault, cache, tmp_path, policy=policy,
        duration_quantum_seconds=64.0, clock=lambda: sum(slept), sleep=slept.append,
    )  # fmt: skip
    worker.enrol()
    client = coordinator.client()
    run = begin(client, "fedbabu", Evaluation(sites=True), tune_epochs=1)
    runner.run(worker.take(), lambda: None, Report())
    (found,) = client.measurements(run.id)
    # How long it took follows from the examples.
    assert sum(slept) == (0 if is_open else 64)
    # Of few examples no more is sent as rounded sums.
    assert set(found.metrics) == (GLOBAL | PERSONAL if is_open else {"accuracy", "loss"})
    # Nobody sends counts by class unless its rule says so.
    assert (found.class_counts is not None) == (is_open and send_class_counts)
    if found.class_counts:
        scores = {name: pytest.approx(value, abs=1e-3) for name, value in found.class_counts.scores().items()}
        assert {name: found.metrics[name] for name in scores} == scores
        assert "macro_f1" in scores_by_version([found])[0]
    elif is_open:
        assert "macro_f1 (mean of sites)" in scores_by_version([found])[0]
    else:
        assert round(found.metrics["accuracy"] * 43, 6) % 5 == 0


def test_figures_with_noise_leave_a_data_set_with_a_budget_until_it_is_spent(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    worker = ScriptedWorker(
        coordinator.client("site", "a"),
        kinds=("train", "evaluate"),
        datasets={"digits": 137},
        held_out={"digits": 43},
        methods=("fedavg",),
    )
    ledger, privacy = Ledger(tmp_path / "ledger"), Budget(epsilon=3.0, delta=1e-5)
    audit = Audit(tmp_path, "w")
    rules: list[tuple[Policy, Allowance]] = [
        (Policy(), Allowance(epsilon=3.5, delta=1e-5)),
        # Noise of single examples does not hide a patient with several.
        (Policy(figures_privacy=privacy), Allowance(epsilon=4.0, delta=1e-5, unit="group")),
        (Policy(figures_privacy=privacy), Allowance(epsilon=3.5, delta=1e-5)),
        (Policy(figures_privacy=privacy), Allowance(epsilon=3.5, delta=1e-5)),
    ]
    worker.enrol()
    client, found = coordinator.client(), list[Any]()
    for policy, budget in rules:
        runner = task_runner(
            worker.client, datasets_of(settings(coordinator, tmp_path / "state").sources), TrainingSetup(CPU),
            Vault(tmp_path / "vault"), Cache(tmp_path / "cache", 1 << 24), tmp_path, policy=policy, ledger=ledger,
            audit=audit,
            allowances={"digits": budget},
        )  # fmt: skip
        run = begin(client, "fedavg", Evaluation(sites=True))
        try:
            runner.run(worker.take(), lambda: None, Report())
        except PolicyViolation as refusal:
            found.append(str(refusal))
        else:
            found.append({name for each in client.measurements(run.id) for name in each.metrics})
        client.patch_run(run.id, RunPatch(state="cancelled"))
        # The conductor cancels the run's tasks, one of which the next round of this loop would take otherwise.
        until(lambda: not {task.state for task in worker.client.tasks()} & {"offered", "leased"})
    assert "does not allow evaluations without noise" in found[0]
    assert "does not allow evaluations without noise of whole groups" in found[1]
    assert found[2] == {"accuracy", "loss"}
    assert "this task would bring 'digits' to an epsilon of 3.99" in found[3]
    # Nothing was used without noise, so that the budget still bounds what runs find out.
    (entry,) = ledger.read("digits")
    assert entry.events == (NoisyFigures(rho=rho_of(privacy)),)
    assert 2.5 < epsilon(noisy_in([entry]), 1e-5) <= 3.0
    (left,) = departures(audit.read(), None, None)
    assert (left.sent, left.epsilon) == ("figures", 3.0)
    # Training has a target for itself.
    assert of_training([entry]) == []


def test_versions_are_measured_on_a_data_set_so_often_and_no_more(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client, site = coordinator.client(), coordinator.client("site", "a")
    given = settings(coordinator, tmp_path / "state").model_copy(update={"policy": Policy(max_evaluations=2)})
    with working(given):
        for _ in range(2):
            run = begin(client, "fedavg", Evaluation(sites=True, every=ROUNDS))
            until(lambda run=run: client.run(run.id).state == "completed")
    # Two runs asked twice each, for their first and last versions.
    evaluated = [task for task in site.tasks() if task.kind == "evaluate"]
    assert [task.state for task in evaluated] == ["accepted", "accepted", "failed", "failed"]
    assert evaluated[2].problem
    assert "max_evaluations: 2 versions were measured on the data set 'digits'" in evaluated[2].problem.detail


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pfeddc", {}),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("fedpgp", {"private_learning_rate": 50.0}), ("fedotp", {}))
        ),
    ],
)
def test_a_dual_encoder_is_measured_with_the_shared_prompts_and_with_the_site_s_own(
    coordinator: LiveCoordinator, tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    data = pairs("clip")
    data = Dataset(data.tensors, data.common, held_out=pairs("clip", 6))
    worker = ScriptedWorker(
        coordinator.client("site", "a"),
        kinds=("train", "evaluate"),
        datasets={"data": 24},
        held_out={"data": 6},
        methods=(method,),
    )
    cache = Cache(tmp_path / "cache", 1 << 24)
    few = Policy(min_evaluation_examples=6)
    runner = task_runner(
        worker.client, {"data": data}, TrainingSetup(CPU), Vault(tmp_path / "vault"), cache, tmp_path, policy=few
    )
    worker.enrol()
    document, start = untrained(dual("clip"), "contrastive", seed=0, prompts=Prompts(vision=2, text=2))
    client = coordinator.client()
    run = start_run(
        client,
        document,
        start,
        method=MethodSpec(name=method, settings=settings),
        training=Training(optimizer="sgd", momentum=0, learning_rate=0.5, batch_size=8),
        evaluation=Evaluation(sites=True),
    )
    for _ in range(3):
        runner.run(worker.take(), lambda: None, Report())
    found = measured(client, run)
    assert {number: set(one.metrics) for number, one in found.items()} == {0: GLOBAL, 1: GLOBAL | PERSONAL}
    assert found[1].metrics["personal_loss"] != found[1].metrics["loss"]


def test_micro_batch_bounds_the_passes_that_measure_a_version_and_that_choose_its_layers(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    worker = ScriptedWorker(
        coordinator.client("site", "a"),
        kinds=("train", "evaluate"),
        datasets={"digits": 16},
        held_out={"digits": 22},
        methods=("safl",),
    ).enrol()
    generator = torch.Generator().manual_seed(5)
    data, held_out = (
        Dataset(
            {
                "pixel_values": torch.randn(count, 1, 8, 8, generator=generator),
                "labels": torch.randint(0, 10, (count,), generator=generator),
            }
        )
        for count in (16, 22)
    )
    data = Dataset(data.tensors, held_out=held_out)
    sizes, metrics = {None: set[int](), 3: set[int]()}, []
    for micro_batch, seen in sizes.items():
        folder = tmp_path / str(micro_batch)
        setup, cache = TrainingSetup(CPU, micro_batch), Cache(folder / "cache", 1 << 24)
        runner = task_runner(worker.client, {"digits": data}, setup, Vault(folder / "vault"), cache, folder)
        run = begin(client, "safl", Evaluation(sites=True))

        def watch(module: torch.nn.Module, args: Any, seen: set[int] = seen) -> None:
            if isinstance(module, torch.nn.Conv2d):
                seen.add(len(args[0]))

        watching = register_module_forward_pre_hook(watch)
        for _ in range(2 * ROUNDS + 1):
            runner.run(worker.take(), lambda: None, Report())
        watching.remove()
        metrics.append({number: one.metrics for number, one in measured(client, run).items()})
    assert sizes == {None: {16, 22}, 3: {1, 3}}
    whole, pieces = metrics
    assert {number: pytest.approx(each, rel=0.01) for number, each in whole.items()} == pieces


def digits_runner(coordinator: LiveCoordinator, folder: Path) -> tuple[TaskRunner, ScriptedWorker]:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(16, 1, 8, 8, generator=generator)
    data = Dataset({"pixel_values": pixels, "labels": torch.randint(0, 10, (16,), generator=generator)})
    worker = ScriptedWorker(coordinator.client("site", "a"), datasets={"digits": 16})
    cache = Cache(folder / "cache", 1 << 24)
    worker.enrol()
    return task_runner(
        worker.client, {"digits": data}, TrainingSetup(CPU), Vault(folder / "vault"), cache, folder
    ), worker


def test_a_worker_trains_each_round_of_a_run_at_the_scale_that_the_last_one_found(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    runner, worker = digits_runner(coordinator, tmp_path)
    run = begin(coordinator.client(), "fedavg", None)
    # As a GPU has one for float16, at a scale that overflows even float32.
    runner.executor.cache.scalers[run.id] = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scales = []
    for _ in range(ROUNDS):
        runner.run(worker.take(), lambda: None, Report())
        scales.append(runner.executor.cache.scalers[run.id].get_scale())
    assert scales[0] == scales[1] < 2.0**127
    # A worker that starts again finds it in the vault, whose update waits for the round's end.
    restarted = torch.amp.GradScaler("cpu")
    kept = Vault(tmp_path / "vault").load_scale(run.id)
    restore_scale(restarted, {name: float(value) for name, value in kept.items()})
    assert restarted.get_scale() == scales[-1]
    assert (
        restarted.state_dict()["_growth_tracker"]
        == runner.executor.cache.scalers[run.id].state_dict()["_growth_tracker"]
        > 0
    )


def test_training_that_diverges_leaves_no_scale_for_the_next_round(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    runner, worker = digits_runner(coordinator, tmp_path)
    run = begin(coordinator.client(), "fedavg", None)
    runner.executor.cache.scalers[run.id] = torch.amp.GradScaler("cpu", init_scale=2.0**-30)
    scale = scale_of(runner.executor.cache.scalers[run.id])
    runner.vault.keep_scale(run.id, {name: np.array(value) for name, value in scale.items()})
    with pytest.raises(TrainingDiverged, match="gradients are not finite"):
        runner.run(worker.take(), lambda: None, Report())
    assert run.id not in runner.executor.cache.scalers
    assert not runner.vault.load_scale(run.id)


def of_two_classes(counts: dict[tuple[int, int], int]) -> Dataset:
    """Images with so many examples of each class and sex."""
    cells = [cell for cell, count in counts.items() for _ in range(count)]
    classes, sexes = (torch.tensor(each) for each in zip(*cells, strict=True))
    images = torch.rand(len(cells), 1, 8, 8, generator=torch.Generator().manual_seed(len(cells)))
    columns = {"sex": Subgroups.of(("f", "m"), ["fm?"[sex] for sex in sexes.tolist()])}
    return Dataset({"pixel_values": images, "labels": classes}, subgroups=columns)


@pytest.mark.parametrize("hidden", [0, 9])
def test_a_subgroup_of_few_looks_like_one_of_none(coordinator: LiveCoordinator, tmp_path: Path, hidden: int) -> None:
    held_out = of_two_classes({(0, 0): 12, (0, 1): 15, (1, 0): 11, (1, 1): hidden, (2, 2): hidden})
    data = replace(of_two_classes({(0, 0): 40}), held_out=held_out)
    worker = ScriptedWorker(
        coordinator.client("site", "a"), kinds=("evaluate",), datasets={"digits": 40}, held_out={"digits": 56}
    )
    audit = Audit(tmp_path, "w")
    runner = task_runner(
        worker.client, {"digits": data}, TrainingSetup(CPU), Vault(tmp_path / "vault"),
        Cache(tmp_path / "cache", 1 << 24), tmp_path, policy=Policy(send_class_counts=True), audit=audit,
    )  # fmt: skip
    worker.enrol()
    client = coordinator.client()
    document, start = untrained(VIT, "image-classification", seed=0)
    evaluation = Evaluation(sites=True, subgroups="sex", specificity=(0.5,))
    run = start_run(client, document, start, dataset="digits", rounds=0, evaluation=evaluation)
    runner.run(worker.take(), lambda: None, Report())
    (found,) = client.measurements(run.id, counts=True)
    labels = {name: counts.labels[:3] for name, counts in found.subgroup_counts.items()}
    assert (found.examples, labels) == (38, {"f": (12, 11, 0), "m": (15, 0, 0)})
    assert found.class_counts is not None
    assert found.class_counts.labels[:3] == (27, 11, 0)
    # Every figure is of these counts, to three digits.
    (whole, *_) = group_figures([found])
    assert found.metrics["accuracy"] == pytest.approx(whole.found.figures["accuracy"].value, abs=1e-3)
    (left,) = departures(audit.read(), None, None)
    assert "a confusion matrix and binned scores" in left.figures
    # Without being asked, no list of measurements has them.
    (plain,) = client.measurements(run.id)
    assert plain.subgroup_counts == {}
    until(lambda: client.run(run.id).state == "completed")
    rows = {row.metric: row.value for row in rows_of(run, [], [], [found]) if row.stage == "figures" and not row.site}
    assert rows["accuracy"] == whole.found.figures["accuracy"].value
    assert {"sex/f/recall.1", "sex/f/recall.1.low", "auroc.1.error", "sensitivity_at_0.5.0"} <= rows.keys()


def test_a_person_approves_the_measurement_of_a_given_model_as_what_it_is(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    document, start = untrained(VIT, "image-classification", seed=0)
    run = start_run(client, document, start, dataset="digits", rounds=0, evaluation=Evaluation(sites=True))
    given = settings(coordinator, tmp_path / "state").model_copy(update={"policy": Policy(approve_runs=True)})
    with working(given):
        inbox = inbox_of(given)
        (request,) = until(inbox.requests)
        assert request.summary.startswith("Measures versions of a ViT")
        assert "rounds" not in request.summary
        # The run waits for the person, and not only for its cohort.
        assert client.run(run.id).state == "running"
        inbox.decide([request], ApprovalDecision(approved=True, by="Kim", at=datetime.now(UTC)))
        until(lambda: client.run(run.id).state == "completed")
    assert [one.site for one in client.measurements(run.id)] == ["a"]

"""Receipts over HTTP: a site learns whether its update was merged, by block, and nothing more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run
from tessera.shared.api.tasks import Task
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import from_bytes
from tessera.worker.data.dataset import Dataset
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.vault import Vault
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.runner import task_runner
from tests.support.tasks import VIT, images, untrained

MODEL = small_model()
START = values(MODEL)
_names = itertools.count()


def begun(live: LiveCoordinator, sites: str, **spec: object) -> tuple[Client, Run, list[tuple[ScriptedWorker, Task]]]:
    """A run in which all of these sites have taken their first task."""
    client, name = live.client(), f"receipts{next(_names)}"
    workers = [
        ScriptedWorker(
            live.client("site", site), name=name, datasets={name: 10}, held_out={name: 5}, kinds=("train", "evaluate")
        ).enrol()
        for site in sites
    ]
    cohort = Cohort(size=len(sites), quorum=len(sites), max_attempts=3, max_task_attempts=1)
    run = start_run(client, MODEL, START, **{"dataset": name, "cohort": cohort, "rounds": 2, **spec})
    return client, run, [(worker, worker.take()) for worker in workers]


def test_what_an_abandoned_attempt_accepted_is_left_out_and_the_next_task_says_so(standing: LiveCoordinator) -> None:
    client, run, [(one, first), (other, failing)] = begun(standing, "ab")
    assert first.receipt is None
    one.train(first)
    waiting = one.client.task(first.id)
    assert waiting.receipt is not None
    assert waiting.receipt.state == "accepted"
    other.fail(failing)
    again = one.take()
    assert again.receipt is not None
    assert (again.receipt.task, again.receipt.token, again.receipt.state) == (first.id, first.token, "left_out")
    # The site of the other has handed nothing in that there could be a receipt of.
    assert other.take().receipt is None
    attempts = list(client.rounds(run.id))
    assert [task.state for task in attempts[0].tasks] == ["left_out", "failed"]


def test_the_receipt_of_a_merged_update_comes_with_the_next_task_of_any_kind(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, "a", evaluation=Evaluation(sites=True), rounds=1)
    ((worker, measuring),) = taken
    assert (measuring.kind, measuring.receipt) == ("evaluate", None)
    worker.evaluate(measuring, accuracy=0.5)
    training = worker.take()
    worker.train(training)
    measuring = worker.take()
    assert (measuring.kind, measuring.receipt and measuring.receipt.state) == ("evaluate", "merged")
    assert measuring.receipt == worker.client.task(training.id).receipt
    worker.evaluate(measuring, accuracy=0.5)
    until(lambda: client.run(run.id).state == "completed")
    # It can be asked for after the run's end, and after many rounds; of a measurement there is none.
    assert worker.client.task(training.id).receipt == measuring.receipt
    assert worker.client.task(measuring.id).receipt is None
    assert [task.state for task in client.round(run.id, 1).tasks] == ["merged"]


def test_what_was_accepted_when_a_run_is_cancelled_is_left_out(standing: LiveCoordinator) -> None:
    client, run, [(one, first), _] = begun(standing, "ab")
    one.train(first)
    client.set_run_state(run.id, "cancelled")
    until(lambda: client.round(run.id, 1).state == "abandoned")
    receipt = one.client.task(first.id).receipt
    assert receipt is not None
    assert receipt.state == "left_out"


def test_a_site_whose_update_was_left_out_for_its_norm_learns_that_and_no_score(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, "abcd", max_norm_of_median=3.0)
    for (worker, task), step in zip(taken, (100.0, 1.0, 2.0, 3.0), strict=True):
        worker.train(task, step)
    until(lambda: client.round(run.id, 1).state == "committed")
    assert [task.state for task in client.round(run.id, 1).tasks] == ["left_out", "merged", "merged", "merged"]
    receipts = [worker.take().receipt for worker, _ in taken]
    assert [receipt and receipt.state for receipt in receipts] == ["left_out", "merged", "merged", "merged"]
    liar, task = taken[0]
    shown = liar.client.task(task.id)
    assert set(shown.metrics) == {"update_norm"}
    # The bit is all that the site's view of an update that was left out has more than that of one under way.
    assert (shown.state, shown.unmerged) == ("accepted", ())


def test_blocks_that_too_few_sent_for_a_robust_rule_are_named_to_those_who_sent_them(
    standing: LiveCoordinator,
) -> None:
    client, run, taken = begun(standing, "abcd", robust={"rule": "median"})
    head, mlp = "head.weight", "layer.0.mlp.weight"
    for (worker, task), names in zip(taken, ([head, mlp], [head], [head], [mlp]), strict=True):
        worker.submit(task, worker.upload(task, {name: START[name] + np.float32(1) for name in names}))
    until(lambda: client.round(run.id, 1).state == "committed")
    found = [(task.state, task.unmerged) for task in client.round(run.id, 1).tasks]
    # The median wants three senders: the head has them, the MLP two. Of the last site nothing was merged.
    assert found == [("merged", (mlp,)), ("merged", ()), ("merged", ()), ("left_out", ())]
    receipts = [worker.client.task(task.id).receipt for worker, task in taken]
    assert [(receipt.state, receipt.unmerged) for receipt in receipts if receipt] == found


# ---------------------------------------------------------------- with what sites keep


def labelled(seed: int) -> Dataset:
    labels = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(seed))
    return Dataset({"pixel_values": images(12).tensors["pixel_values"], "labels": labels})


# In short, tests/shared/methods/test_receipts_in_rounds.py shows the same without HTTP.
@pytest.mark.long
@pytest.mark.parametrize(("method", "prefix"), [("scaffold", "control/"), ("feddyn", "gradient/")])
def test_the_server_remembers_the_mean_of_what_sites_keep_after_a_quorum_failure_and_an_exclusion(
    standing: LiveCoordinator, tmp_path: Path, method: str, prefix: str
) -> None:
    document, start = untrained(VIT, "image-classification", seed=1)
    client, name = standing.client(), f"receipts{next(_names)}"
    workers = [
        ScriptedWorker(standing.client("site", site), name=name, datasets={name: 12}, methods=(method,))
        for site in "abc"
    ]
    runners = [runner(tmp_path, worker, labelled(seed)) for seed, worker in enumerate(workers)]
    for worker in workers:
        worker.enrol()
    run = start_run(
        client, document, start, dataset=name, rounds=3, max_norm_of_median=1.001,
        method=MethodSpec(name=method),
        cohort=Cohort(size=3, quorum=3, max_attempts=3, max_task_attempts=1),
        training=Training(optimizer="sgd", momentum=0, learning_rate=0.05, batch_size=4),
    )  # fmt: skip

    def attempt(failing: Sequence[int] = ()) -> None:
        taken = [worker.take() for worker in workers]
        # Those that fail do so last: without them the attempt is abandoned at once.
        for place in sorted(range(3), key=failing.__contains__):
            if place in failing:
                workers[place].fail(taken[place])
            else:
                runners[place].run(taken[place], lambda: None, Report())

    attempt()
    attempt(failing=[2])
    attempt()
    attempt(failing=[0])
    attempt()
    until(lambda: client.run(run.id).state == "completed")
    states = [sorted(task.state for task in made.tasks) for made in client.rounds(run.id)]
    excluded, abandoned = ["left_out", "merged", "merged"], ["failed", "left_out", "left_out"]
    assert states[:2] == [excluded, abandoned]
    # Later steps may all be shorter than those of the first round.
    assert states[3] == abandoned
    assert {*states[2], *states[4]} <= {"left_out", "merged"}
    for own, worker in zip(runners, workers, strict=True):
        own.vault.settle(worker.client.task)
    server_state = client.manifest(client.run(run.id).version.digest).server_state
    # Of those of which an update was ever merged; all have as many examples.
    vaults = [kept for own in runners if (kept := own.vault.load(run.id))]
    largest = furthest = 0.0
    for entry_name, entry in server_state.items():
        if not entry_name.startswith(prefix):
            continue
        server = from_bytes(client.read_blob(entry.digest), entry.dtype).reshape(entry.shape)
        mean = sum(vault.get(entry_name, np.zeros_like(server)) for vault in vaults) / len(vaults)
        largest, furthest = max(largest, np.abs(server).max()), max(furthest, np.abs(server - mean).max())
    assert 0 <= furthest < 1e-5 * largest


def runner(folder: Path, worker: ScriptedWorker, data: Dataset) -> TaskRunner:
    home = folder / str(id(worker))
    home.mkdir()
    (name,) = worker.datasets
    return task_runner(
        worker.client,
        {name: data},
        TrainingSetup(torch.device("cpu")),
        Vault(home / "vault"),
        Cache(home / "cache", 1 << 24),
        home,
    )

"""Whole rounds over HTTP, with workers that follow a script."""

from __future__ import annotations

from itertools import count, pairwise

import numpy as np
import pytest

from tessera.coordinator.conductor.liveness import Liveness
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.workers import LiveWorker
from tessera.shared.aggregation.server_optimizer import Momentum, NoOptimizer
from tessera.shared.api.admin import StudyMember
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation
from tessera.shared.methods.base import MethodSpec
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, exported, head_of, small_model, start_run, values

pytestmark = pytest.mark.both_databases(long="postgresql")


def test_a_round_commits_the_weighted_mean_of_its_updates(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    start = values(model)
    run = start_run(client, model, start, cohort=Cohort(size=2, quorum=2))
    light = ScriptedWorker(coordinator.client("site", "a"), datasets={"data": 10})
    heavy = ScriptedWorker(coordinator.client("site", "b"), datasets={"data": 30})
    light.enrol()
    heavy.enrol()

    light.train(light.take(), step=1.0)
    heavy.train(heavy.take(), step=2.0)

    until(lambda: client.run(run.id).state == "completed")
    merged = exported(client, run)
    # (10 * 1 + 30 * 2) / 40 = 1.75
    np.testing.assert_allclose(merged["head.weight"], start["head.weight"] + 1.75, rtol=1e-6)
    fused = np.concatenate([start[f"layer.0.qkv.weight#{role}"] for role in ("query", "key", "value")])
    np.testing.assert_allclose(merged["layer.0.qkv.weight"], fused + 1.75, rtol=1e-6)


@pytest.mark.parametrize("leaves", [False, True], ids=["suspended", "leaves the study"])
def test_a_site_that_leaves_while_a_round_opens_gets_no_task(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    client, model, willing, looks = coordinator.client(), small_model(), Liveness.willing, count()

    def suspending(self: Liveness, run_id: str, invited: RunTerms) -> list[LiveWorker]:
        found = willing(self, run_id, invited)
        if next(looks) == 0:
            admin = coordinator.client()
            site_id = next(site.id for site in admin.sites() if site.name == "b")
            if leaves:
                admin.remove_from_study("default", StudyMember(kind="site", member=site_id))
            else:
                admin.suspend_site(site_id)
        return found

    staying = ScriptedWorker(coordinator.client("site", "a"))
    staying.enrol()
    ScriptedWorker(coordinator.client("site", "b")).enrol()
    monkeypatch.setattr(Liveness, "willing", suspending)
    run = start_run(client, model, values(model), cohort=Cohort(size=2, quorum=1))
    staying.train(staying.take())
    until(lambda: client.run(run.id).state == "completed")
    (done,) = client.rounds(run.id)
    assert [task.worker for task in done.tasks] == ["a/w"]


def test_frozen_blocks_keep_their_digest_and_are_neither_sent_nor_asked_for(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    frozen = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1, "scope": "v_head"})
    run = start_run(client, model, values(model), method=frozen, rounds=3)
    worker = ScriptedWorker(coordinator.client("site", "a"))

    for _ in range(3):
        worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")

    manifests = [client.manifest(version.digest).blocks for version in client.versions(run.id)]
    changed = [{n for n in after if after[n] != before[n]} for before, after in pairwise(manifests)]
    value_and_head = {"layer.0.qkv.weight#value", "head.weight"}
    assert changed == [set(model.by_name), value_and_head, value_and_head]
    rounds = list(client.rounds(run.id))
    assert [r.stage for r in rounds] == ["warm-up", "frozen", "frozen"]
    assert rounds[1].tasks[0].upload_bytes < rounds[0].tasks[0].upload_bytes


def test_every_due_version_is_evaluated_once(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    run = start_run(client, model, values(model), rounds=3, evaluation=Evaluation(dataset="held-out", every=2))
    judge = ScriptedWorker(coordinator.client("site", "judge"), kinds=("evaluate",), datasets={"held-out": 5})
    worker = ScriptedWorker(coordinator.client("site", "a"))

    judge.enrol()
    for _ in range(3):
        worker.train(worker.take())
    for number in (0, 2, 3):
        task = judge.take()
        assert task.version.number == number
        judge.evaluate(task, accuracy=number / 10)

    until(lambda: client.run(run.id).state == "completed")
    measured = [(m.version, m.metrics["accuracy"], m.worker) for m in client.measurements(run.id)]
    assert measured == [(0, 0.0, "judge/w"), (2, 0.2, "judge/w"), (3, 0.3, "judge/w")]


@pytest.mark.both_databases(long="sqlite")
def test_the_order_of_arrival_does_not_change_a_bit(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    workers = [
        ScriptedWorker(coordinator.client("site", s), datasets={"data": 7 + i}).enrol() for i, s in enumerate("abc")
    ]
    digests = set()
    # A sum of two is the same in either order: which of three comes last is all that may matter.
    for order in ((0, 1, 2), (2, 0, 1), (2, 1, 0)):
        run = start_run(client, model, values(model), cohort=Cohort(size=3, quorum=3))
        tasks = [worker.take() for worker in workers]
        for index in order:
            workers[index].train(tasks[index], step=0.1 * (index + 1))
        until(lambda run=run: client.run(run.id).state == "completed")
        digests.add(client.run(run.id).version.digest)
    assert len(digests) == 1


def test_a_server_optimizer_steps_what_was_merged_and_leaves_what_is_frozen_and_its_moments(
    coordinator: LiveCoordinator,
) -> None:
    client, model = coordinator.client(), small_model()
    frozen = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1, "scope": "v_head"})
    heavy = Momentum(learning_rate=0.5, momentum=0.9)
    run = start_run(client, model, values(model), method=frozen, rounds=2, server_optimizer=heavy)
    worker = ScriptedWorker(coordinator.client("site", "a"))
    for _ in range(2):
        worker.train(worker.take(), step=1.0)
    until(lambda: client.run(run.id).state == "completed")

    first, second = (client.manifest(version.digest) for version in list(client.versions(run.id))[1:])
    # Two rounds of 1: m = -1, w + 0.5; then m = -1.9, w + 0.5 + 0.95
    head = values(model)["head.weight"] + 1.45
    np.testing.assert_allclose(head_of(client, run), head, rtol=1e-6)
    held = {name for name in first.server_state if first.server_state[name] == second.server_state[name]}
    moved = {"server/m/layer.0.qkv.weight#value", "server/m/head.weight"}
    assert set(first.server_state) == {f"server/m/{name}" for name in model.by_name}
    assert held == set(first.server_state) - moved
    assert all(first.blocks[name.removeprefix("server/m/")] == second.blocks[name[9:]] for name in held)


def test_a_neutral_server_optimizer_makes_the_very_version_that_none_makes(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    workers = [
        ScriptedWorker(coordinator.client("site", s), datasets={"data": 7 + i}).enrol() for i, s in enumerate("ab")
    ]
    digests = set()
    for optimizer in (NoOptimizer(), Momentum(learning_rate=1.0, momentum=0.0)):
        cohort = Cohort(size=2, quorum=2)
        run = start_run(client, model, values(model), cohort=cohort, server_optimizer=optimizer)
        for index, worker in enumerate(workers):
            worker.train(worker.take(), step=0.1 * (index + 1))
        until(lambda run=run: client.run(run.id).state == "completed")
        digests.add(client.run(run.id).version.digest)
    assert len(digests) == 1

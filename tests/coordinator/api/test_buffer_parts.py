"""What people see of a run that buffers updates: whose updates made a version, and which sites count too little."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tessera.coordinator.db.coverage import MIN_VERSIONS
from tessera.coordinator.db.stats import tasks_in_hand
from tessera.shared.api.runs import BufferedPart, Run
from tessera.shared.api.tasks import AdvertisedPolicy
from tessera.shared.client.client import Client
from tests.coordinator.api.test_buffer import buffered, reach, sites
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker

pytestmark = pytest.mark.both_databases(long="postgresql")


def parts(client: Client, run: Run) -> dict[str, BufferedPart]:
    return {one.site: one.buffered for one in client.coverage(run.id) if one.buffered}


def shown(coordinator: LiveCoordinator, *arguments: str) -> str:
    about = {"TESSERA_URL": coordinator.url, "TESSERA_TOKEN": coordinator.token("orchestrator")}
    return str(tessera(*arguments, **about).stdout)


def page(coordinator: LiveCoordinator, path: str) -> str:
    text = signed_in(coordinator).http.get(f"/page{path}").text
    return " ".join(re.sub("<[^>]+>", " ", text.replace("<wbr>", "")).split())


def codes(coordinator: LiveCoordinator) -> list[str]:
    services = coordinator.services
    with services.database.snapshot() as session:
        return [alert.code for alert in services.alerts(session, services.database.now())]


def test_updates_of_a_version_are_counted_whichever_round_asked_for_them(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, b, slow = sites(coordinator, "a", "b", "slow")
    run = buffered(client)
    late = slow.take()
    for worker in (a, b):
        worker.train(worker.take())
    reach(client, run, 1)
    held = a.take()
    slow.train(late)
    until(lambda: client.round(run.id, 2).updates == 1)
    # Version 1 has two updates of the three that round 1 asked for; the third waits, and a is at work.
    assert [(round_.number, round_.updates) for round_ in client.rounds(run.id)] == [(1, 2), (2, 1)]
    at_work = {(task.worker, task.round, task.state) for task in client.round(run.id, 2).tasks}
    assert at_work == {("a/w", 2, "leased"), ("b/w", 2, "offered"), ("slow/w", 1, "accepted")}
    assert {site: part.doing for site, part in parts(client, run).items()} == {
        "a": "at work, from version 1",
        "b": "",
        "slow": "its update waits, from version 0",
    }
    with coordinator.services.database.snapshot() as session:
        counts = {(kind, state): count for kind, state, count in tasks_in_hand(session)}
    assert counts == {("train", "leased"): 1, ("train", "offered"): 1, ("train", "accepted"): 1}
    (live,) = client.status().live_runs
    assert live.round
    assert live.round.tasks == {"leased": 1, "offered": 1, "accepted": 1}
    a.train(held)
    reach(client, run, 2)
    second = client.round(run.id, 2)
    assert (second.updates, [task.worker for task in second.tasks if task.merged_in == 2]) == (2, ["a/w"])
    assert next(task.merged_in for task in client.round(run.id, 1).tasks if task.worker == "slow/w") == 2
    assert slow.client.task(late.id).merged_in is None
    exported = shown(coordinator, "run", "metrics", run.id)
    assert re.search(r"^\w+,1,1,1,\w+,data,slow,w,staleness,1\.0$", exported, re.MULTILINE)
    text = page(coordinator, f"/runs/{run.id}/rounds/2")
    assert re.search("Updates 2 2 asked for in this round", text)
    assert re.search("slow/w from version 0", text)
    assert re.search(r"^ *2 .*committed +2 ", shown(coordinator, "run", "show", run.id), re.MULTILINE)


def test_a_site_that_counts_less_than_half_of_its_weight_is_named(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, slow = (
        ScriptedWorker(coordinator.client("site", name), datasets={"data": count}).enrol()
        for name, count in (("a", 10), ("slow", 30))
    )
    run = buffered(client, updates=1, rounds=MIN_VERSIONS + 5, max_staleness=100)
    late = slow.take()
    for number in range(1, MIN_VERSIONS):
        a.train(a.take())
        reach(client, run, number)
    slow.train(late)
    reach(client, run, MIN_VERSIONS)
    found = parts(client, run)
    # Nine versions of a alone, and one of slow, whose nine predecessors were made while it trained.
    assert (found["a"].share, found["a"].weight, found["a"].is_behind) == (0.9, 0.25, False)
    assert found["slow"].model_dump(exclude={"base", "waits"}) == {
        "updates": 1, "staleness": 9.0, "most_stale": 9, "share": 0.1, "weight": 0.75, "is_behind": True,
    }  # fmt: skip
    text = shown(coordinator, "run", "show", run.id)
    assert re.search(r"^slow .*1 +9 +9 +10\.0% +75\.0% +below half", text, re.MULTILINE)
    made = json.loads(shown(coordinator, "run", "show", run.id, "--json"))["coverage"]
    assert [one["buffered"]["is_behind"] for one in made] == [True, False]
    text = page(coordinator, f"/runs/{run.id}")
    assert "the share of slow in the latest versions is below half of their share of the examples" in text
    assert "Versions by time" in text
    assert "run-behind" in codes(coordinator)


def test_few_versions_judge_no_site(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, _ = sites(coordinator, "a", "slow")
    run = buffered(client, updates=1)
    for number in (1, 2):
        a.train(a.take())
        reach(client, run, number)
    assert not any(part.is_behind for part in parts(client, run).values())
    assert "run-behind" not in codes(coordinator)


def test_people_see_why_no_idle_site_is_asked(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    (a,) = sites(coordinator, "a")
    run = buffered(client, updates=2, quorum=1)
    held = a.take()
    about: dict[str, Any] = {"advertised_policy": AdvertisedPolicy(never_send=("*",))}
    sites(coordinator, "refuses", **about)
    until(lambda: client.round(run.id, 1).reason)
    why = str(client.round(run.id, 1).reason)
    assert why.startswith("0 sites would do what the round asks: refuses/w: never_send: ")
    assert f"No idle site is asked: {why[:60]}" in page(coordinator, f"/runs/{run.id}")
    assert re.search("no site asked +0 sites would do what", shown(coordinator, "run", "show", run.id))
    # A site that would do it is asked beside, and nothing is left to explain.
    (b,) = sites(coordinator, "b")
    b.train(b.take())
    until(lambda: client.round(run.id, 1).updates == 1)
    a.train(held)
    reach(client, run, 1)

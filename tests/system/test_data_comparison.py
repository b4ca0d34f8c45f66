"""A data manager compares the data of three hospitals before anything trains, with the commands that people use."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from PIL import Image

from tessera.worker.agent import Agent
from tessera.worker.governance.approvals import ApprovalDecision
from tessera.worker.governance.policy import Policy
from tessera.worker.settings import WorkerSettings
from tessera.worker.stores import airlock_of, audit_of, inbox_of, ledger_of
from tessera.worker.task.heartbeat import Stop
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.cli import tessera
from tests.support.coordinator import WAIT_SECONDS, LiveCoordinator, until

NAMES = ["benign", "malignant", "unclear"]


def wards(folder: Path, patients: Mapping[str, int], labels: list[str] = NAMES) -> dict[str, Any]:
    """A data set of two images of each patient, in the folders of their classes."""
    for name, count in patients.items():
        (folder / name).mkdir(parents=True)
        for patient in range(count):
            for number in range(2):
                shade = (patient * 7 + number * 40 + len(name)) % 256
                Image.new("L", (60, 40), shade).save(folder / name / f"patient{name}{patient}_{number}.png")
    absent = [name for name in labels if not patients.get(name)]
    given = {"kind": "images", "folder": str(folder), "labels": labels, "size": 8, "group": "(patient[a-z]+[0-9]+)"}
    return {**given, **({"absent": absent} if absent else {})}


@contextmanager
def hospital(
    coordinator: LiveCoordinator, folder: Path, site: str, data: dict[str, Any], **more: Any
) -> Iterator[WorkerSettings]:
    """A worker of a site, in a thread."""
    given = {
        "url": coordinator.url, "token": coordinator.token("site", site), "name": "w", "threads": 1,
        "state_dir": folder / site / more.get("name", "w"), "datasets": {"wards": data}, **more,
    }  # fmt: skip
    (folder / site).mkdir(exist_ok=True)
    settings, stop = WorkerSettings(**given), Stop()
    thread = threading.Thread(target=Agent(settings, stop).run)
    thread.start()
    try:
        yield settings
    finally:
        stop.request()
        thread.join(WAIT_SECONDS)


def compare(coordinator: LiveCoordinator, *options: str) -> Any:
    token = coordinator.token("orchestrator")
    return tessera(
        "data", "compare", "wards", "--url", coordinator.url, "--wait", "60", *options, TESSERA_TOKEN=token
    )


def test_a_data_manager_finds_the_faults_of_three_hospitals_before_training(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    sites = {
        "north": wards(tmp_path / "n", {"benign": 12, "unclear": 10}),
        "south": wards(
            tmp_path / "s", {"benign": 12, "malignant": 11, "unclear": 10}, ["malignant", "benign", "unclear"]
        ),
        "west": wards(tmp_path / "w", {"benign": 12, "malignant": 9, "unclear": 10}),
    }
    with ExitStack() as stack:
        settings = {
            name: stack.enter_context(hospital(coordinator, tmp_path, name, data)) for name, data in sites.items()
        }
        until(lambda: len(list(coordinator.client().workers())) == 3)
        done = compare(coordinator)
        again = compare(coordinator, "--json")
    assert done.returncode == 0, done.stderr
    assert "south has the classes in another order: 'malignant' is class 0 there, and class 1 at" in done.stdout
    # The one has none, and the other 9.
    assert "class 'malignant': fewer than 10 subjects at north, west; only south has it" in done.stdout
    assert "32 to 63" in done.stdout
    told = json.loads(again.stdout)
    assert told["sites"]["west"]["counts"] == {"classes": [10, 0, 10], "pixels": [0, 0, 0, 0, 0, 20]}
    entries = audit_of(settings["west"]).read()
    assert [entry.action for entry in entries].count("figures.leave") == 2
    # A line a day.
    assert len(ledger_of(settings["west"]).read("wards")) == 1


def test_a_description_waits_for_approval_and_for_release_as_an_update_does(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    data, policy = wards(tmp_path / "n", {"benign": 12, "unclear": 12}), Policy(approve_runs=True, airlock=True)
    with hospital(coordinator, tmp_path, "north", data, policy=policy) as settings, ThreadPoolExecutor() as pool:
        until(lambda: list(coordinator.client().workers()))
        asked = pool.submit(compare, coordinator, "--json")
        inbox = inbox_of(settings)
        (request,) = until(inbox.requests)
        assert request.summary.startswith("Describes `wards`, and trains nothing. Sends to orchestrator")
        inbox.decide([request], ApprovalDecision(approved=True, by="Kim", at=datetime.now(UTC)))
        airlock = airlock_of(settings)
        (held,) = until(airlock.held)
        assert held.metrics == {"classes benign": 10, "classes unclear": 10, "pixels 32 to 63": 25}
        assert "figures.leave" not in [entry.action for entry in audit_of(settings).read()]
        airlock.decide(held.id, "release", "Kim")
        told = json.loads(asked.result().stdout)
    assert told["sites"]["north"]["counts"]["classes"] == [10, 0, 10]


def test_a_second_worker_of_a_site_does_not_count_its_patients_again(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    data = wards(tmp_path / "n", {"benign": 12, "unclear": 12})
    with hospital(coordinator, tmp_path, "north", data), hospital(coordinator, tmp_path, "north", data, name="v"):
        until(lambda: len(list(coordinator.client().workers())) == 2)
        told = json.loads(compare(coordinator, "--json").stdout)
    (run,) = coordinator.client().runs()
    assert len(coordinator.client().reports(run.id)) == 1
    assert told["sites"]["north"]["counts"]["classes"] == [10, 0, 10]


def test_the_page_of_the_run_shows_tables_and_faults(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    with hospital(coordinator, tmp_path, "north", wards(tmp_path / "n", {"benign": 12, "unclear": 12})):
        until(lambda: list(coordinator.client().workers()))
        compare(coordinator)
    (run,) = coordinator.client().runs()
    page = signed_in(coordinator).http.get(f"/page/runs/{run.id}").text
    for part in ("Longer side of an image", "&lt; 10", "fewer than 10 subjects at north"):
        assert part in page


def test_a_data_set_that_no_site_has_is_refused_with_the_reasons(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    with hospital(coordinator, tmp_path, "north", wards(tmp_path / "n", {"benign": 12, "unclear": 12})):
        until(lambda: list(coordinator.client().workers()))
        about = ("--url", coordinator.url)
        done = tessera("data", "compare", "ward", *about, TESSERA_TOKEN=coordinator.token("orchestrator"))
    assert done.returncode == 2
    assert "no site can describe a data set 'ward' (north: it has no data set ward" in done.stderr
    assert list(coordinator.client().runs()) == []

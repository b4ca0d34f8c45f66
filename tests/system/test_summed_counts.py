"""Sites that require secure sums count together: the coordinator learns their totals alone."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.runs import RunSpec
from tessera.shared.client.model_upload import upload_model
from tessera.shared.rounds.count_table import CountTable
from tessera.shared.secure_sums.messages import fingerprint
from tessera.worker.governance.policy import Policy
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.site_keys import KEYS_FOLDER, Keyring
from tessera.worker.stores import audit_of, ledger_of
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.coordinator import LiveCoordinator, until
from tests.system.test_data_comparison import compare, hospital, wards

PATIENTS = {
    "north": {"benign": 12, "malignant": 23},
    "south": {"benign": 31, "malignant": 9},
    "west": {"benign": 10, "malignant": 18},
}
WEIGHTS = {"north": 3, "south": 7, "west": 1}


def in_sums(folder: Path, stack: ExitStack, coordinator: LiveCoordinator, **policy: Any) -> dict[str, WorkerSettings]:
    """Three sites that have compared their fingerprints, all of them helpers, and require sums."""
    roster = {}
    for name in PATIENTS:
        keys = folder / name / "w" / KEYS_FOLDER
        keys.parent.mkdir(parents=True)
        roster[name] = fingerprint(Keyring(keys).identity().public)
    found = {}
    for name, patients in PATIENTS.items():
        about = {"site": name, "quorum": 3, "helper": True, "weight": WEIGHTS[name], "roster": roster}
        rules = Policy(require_secure_sums=True, **policy)
        data = wards(folder / f"of-{name}", patients)
        found[name] = stack.enter_context(hospital(coordinator, folder, name, data, secure_sums=about, policy=rules))
    until(lambda: len(list(coordinator.client().workers())) == 3)
    return found


def other_table(coordinator: LiveCoordinator) -> list[str]:
    """The reasons for which sites refuse to count from a table that would hide an earlier sum."""
    client = coordinator.client()
    uploaded = upload_model(client, CountTable("hidden"))
    about = {"name": "other", "dataset": "wards", "rounds": 1, "describe": True, "method": {"name": "fedavg"}}
    rules = {"cohort": {"quorum": 3}, "secure_sums": {"helpers": list(PATIENTS), "quorum": 3}}
    run = client.create_run(RunSpec(model=uploaded.model, version=uploaded.version, **about, **rules))
    until(lambda: client.run(run.id).state == "paused")
    tasks = [task for round_ in client.rounds(run.id) for task in round_.tasks]
    return [task.problem.detail for task in tasks if task.problem and task.state == "failed"]


SUMS = ("--secure-sums", "north,south,west", "--quorum", "3", "--json")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--secure-sums", "north, south"), "secure_sums/helpers: "),
        (("--secure-sums", "north,north,south"), "a site is named twice"),
        (("--secure-sums", "north,south,west", "--quorum", "2000"), "secure_sums/quorum: "),
        (("--quorum", "3"), "--quorum and --repeat are for --secure-sums"),
    ],
)
def test_a_sum_that_cannot_be_is_refused_at_once(
    coordinator: LiveCoordinator, options: tuple[str, ...], told: str
) -> None:
    done = compare(coordinator, *options)
    assert done.returncode == 2
    assert told in done.stderr
    assert list(coordinator.client().runs()) == []


def test_the_coordinator_learns_totals_of_rounded_counts_and_no_site_s(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        settings = in_sums(tmp_path, stack, coordinator)
        done = compare(coordinator, *SUMS)
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        # The difference of two sums could be a site's own counts.
        again = compare(coordinator, *SUMS)
        other = other_table(coordinator)
        few = compare(coordinator, *SUMS[:2], "--quorum", "4")
        # A second sum waits for a person at each site.
        late = compare(coordinator, *SUMS, "--repeat", "--wait", "3")
    # Of the 9 patients at one site none count there.
    assert told["totals"]["classes"] == [50, 45]
    assert told["sites"] == told["silent"] == {}
    entries = [entry.action for entry in audit_of(settings["south"]).read()]
    assert entries.count("update.leave") == 1
    (line,) = ledger_of(settings["south"]).read("wards")
    assert [event.use for event in line.events] == ["description"]
    page = signed_in(coordinator).http.get(f"/page/runs/{told['run']}").text
    assert "Totals of 3 sites in a secure sum" in page
    assert "3 sites can count 'wards' together, and a sum takes 4" in few.stderr
    asked = json.loads(late.stdout)
    assert late.returncode == 1
    assert "approv" in asked["silent"]["north"], asked
    assert coordinator.client().run(asked["run"]).state == "cancelled"
    assert again.returncode == 1
    assert "had sums from a model with the same values" in json.loads(again.stdout)["silent"]["north"]
    # Three times, and then the run pauses.
    assert other
    assert all("the run does not start from the table for counts of 'wards': begin it by" in one for one in other)

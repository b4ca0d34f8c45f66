"""Rounds merged again from the kept updates: bit for bit with all sites, and without one as the others moved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tessera.coordinator.operations.remerge import remerge
from tessera.shared.api.audit_chain import named
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, RunPatch, Training
from tessera.shared.client.run_versions import new_run
from tessera.shared.methods.registry import methods
from tessera.shared.problems import Gone, Invalid
from tessera.shared.rounds.aggregate import Aggregation, NextVersion
from tessera.shared.run_settings import ClientPrivacy
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.vault import Vault
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.shared.methods.test_methods_in_rounds import sites_of, start_of
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, exported, small_model, start_run, values
from tests.support.runner import task_runner
from tests.support.tasks import quick

SHORT = {"fedavg", "scaffold", "fedproto", "pfeddc"}
"""The methods that stand for the others: plain, with server state, with extra arrays, with prompts."""


def merged(coordinator: LiveCoordinator, folder: Path, method: str, rounds: int = 2, **spec: Any) -> Run:
    """A run of real training at two sites, in this process, that is completed."""
    client, start = coordinator.client(), start_of(method)
    run = start_run(
        client, start.model, start.values, method=quick(method), rounds=rounds, keep_updates="run", dataset="d",
        cohort=Cohort(size=2, quorum=2), training=Training(optimizer="sgd", learning_rate=0.05, batch_size=8), **spec,
    )  # fmt: skip
    workers = {}
    for site, data in sites_of(method, 2).items():
        worker = ScriptedWorker(
            coordinator.client("site", site), datasets={"d": data.examples}, methods=(method,),
            schemas={"d": data.schema},
        )  # fmt: skip
        place = folder / site
        place.mkdir()
        setup, vault = TrainingSetup(torch.device("cpu")), Vault(place / "vault")
        runner = task_runner(worker.client, {"d": data}, setup, vault, Cache(place / "cache", 1 << 26), place)
        workers[worker.enrol().client] = worker, runner
    for _ in range(rounds):
        for worker, runner in workers.values():
            runner.run(worker.take(), lambda: None, Report())
    until(lambda: client.run(run.id).state == "completed")
    return client.run(run.id)


@pytest.mark.parametrize(
    "method", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in sorted(methods())]
)
def test_merging_again_with_all_sites_gives_the_same_bits(
    coordinator: LiveCoordinator, tmp_path: Path, method: str
) -> None:
    run = merged(coordinator, tmp_path, method)
    found = remerge(coordinator.services, run.id)
    assert (found.first, len(found.digests), found.same) == (1, 2, True)


@pytest.mark.parametrize(
    "spec",
    [
        {"server_optimizer": {"kind": "adam", "learning_rate": 0.01}},
        {"download_codec": "int8"},
        {"normalization": "cohort", "signals": {"drift": True}},
    ],
)
def test_the_same_holds_with_what_else_decides_a_version(
    coordinator: LiveCoordinator, tmp_path: Path, spec: dict[str, Any]
) -> None:
    run = merged(coordinator, tmp_path, "fedavg", rounds=3, **spec)
    assert remerge(coordinator.services, run.id).same


# ---------------------------------------------------------------- without a site

MODEL = small_model()
START = values(MODEL)


def begun(coordinator: LiveCoordinator, **spec: Any) -> tuple[Run, dict[str, ScriptedWorker]]:
    client = coordinator.client()
    workers = {site: ScriptedWorker(coordinator.client("site", site)).enrol() for site in ("north", "south")}
    run = start_run(
        client, MODEL, START, rounds=3,
        **{"cohort": Cohort(quorum=1, max_attempts=2, deadline_seconds=600), "keep_updates": "run",
           "max_norm_of_median": "unlimited", **spec},
    )  # fmt: skip
    return run, workers


def trained(
    coordinator: LiveCoordinator, run: Run, workers: dict[str, ScriptedWorker], number: int, **steps: float | None
) -> None:
    """A round in which these sites add these steps, and a site without one fails."""
    for site, step in steps.items():
        # A run that was cancelled may still offer one for a moment.
        while (task := workers[site].take()).run != run.id:
            pass
        workers[site].train(task, step) if step is not None else workers[site].fail(task)
    until(lambda: coordinator.client().run(run.id).version.number == number)


@pytest.fixture
def done(coordinator: LiveCoordinator) -> Run:
    """A run into whose second and third versions an update of the site `north` was merged."""
    run, workers = begun(coordinator)
    trained(coordinator, run, workers, 1, north=None, south=1.0)
    trained(coordinator, run, workers, 2, north=7.0, south=3.0)
    trained(coordinator, run, workers, 3, north=5.0, south=1.0)
    until(lambda: coordinator.client().run(run.id).state == "completed")
    return run


def test_versions_without_a_site_are_those_that_the_others_steps_make(
    coordinator: LiveCoordinator, done: Run
) -> None:
    client = coordinator.client()
    found = remerge(coordinator.services, done.id, "north")
    assert (found.first, len(found.digests), found.same) == (2, 2, False)
    assert found.run
    new = client.run(found.run)
    assert (new.state, new.version.number, new.spec.cohort.sites) == ("completed", 3, ("south",))
    old, again = ({one.number: one.digest for one in client.versions(run)} for run in (done.id, new.id))
    assert (again[0], again[1]) == (old[0], old[1])
    assert {again[2], again[3]}.isdisjoint(old.values())
    # The steps of `south`: 1 + 3 + 1.
    np.testing.assert_allclose(exported(client, new)["head.weight"], START["head.weight"] + 5.0, rtol=1e-6)
    np.testing.assert_allclose(exported(client, done)["head.weight"], START["head.weight"] + 9.0, rtol=1e-6)
    entry = list(client.audit())[-1]
    assert "north" not in entry.model_dump_json()
    assert named(client.audit_names(), entry).detail["without"] == ["north"]
    assert remerge(coordinator.services, done.id).same


def test_rounds_are_merged_again_without_a_site_that_withdrew(coordinator: LiveCoordinator, done: Run) -> None:
    client = coordinator.client()
    (site,) = (one for one in client.sites() if one.name == "north")
    name = client.withdraw_site(site.id).name
    with pytest.raises(Gone, match="2 of 5 updates are no longer kept"):
        remerge(coordinator.services, done.id)
    found = remerge(coordinator.services, done.id, name)
    assert found.run
    np.testing.assert_allclose(
        exported(client, client.run(found.run))["head.weight"], START["head.weight"] + 5.0, rtol=1e-6
    )


def test_a_live_run_goes_on_from_the_versions_that_were_merged_again(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run, workers = begun(coordinator)
    trained(coordinator, run, workers, 1, north=7.0, south=3.0)
    client.patch_run(run.id, RunPatch(state="cancelled"))
    found = remerge(coordinator.services, run.id, "north")
    assert found.run
    assert client.run(found.run).state == "paused"
    again = client.patch_run(found.run, RunPatch(state="running"))
    for number in (2, 3):
        trained(coordinator, again, workers, number, south=1.0)
    until(lambda: client.run(again.id).state == "completed")
    np.testing.assert_allclose(exported(client, again)["head.weight"], START["head.weight"] + 5.0, rtol=1e-6)


def test_updates_of_other_runs_are_removed_and_cannot_be_merged_again(coordinator: LiveCoordinator) -> None:
    run, workers = begun(coordinator, keep_updates="round")
    trained(coordinator, run, workers, 1, north=7.0, south=3.0)
    kept, others = begun(coordinator)
    coordinator.client().patch_run(run.id, RunPatch(state="cancelled"))
    trained(coordinator, kept, others, 1, north=2.0, south=4.0)
    retention = coordinator.services.retention
    object.__setattr__(retention, "updates_seconds", -1e6)
    retention.collect()
    with pytest.raises(Gone, match="2 of 2 updates"):
        remerge(coordinator.services, run.id)
    assert remerge(coordinator.services, kept.id).same


def test_a_run_that_was_merged_again_hides_no_site_s_influence(coordinator: LiveCoordinator, done: Run) -> None:
    client = coordinator.client()
    again = remerge(coordinator.services, done.id, "north").run
    assert again
    with refusing("invalid", "merged again from another"):
        new_run(client, None, None, again, without="south")
    with pytest.raises(Invalid, match="no round of its own made"):
        remerge(coordinator.services, again)
    with pytest.raises(Invalid, match="cannot go on without north, south"):
        remerge(coordinator.services, done.id, "north", "south")


def test_rounds_that_cannot_be_merged_again_are_refused_with_the_reason(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match="keep_updates: rounds with client_privacy"):
        begun(coordinator, client_privacy=ClientPrivacy(clip_norm=1.0, epsilon=4.0, delta=1e-3, expected_sites=2))
    run = merged(coordinator, tmp_path, "scaffold")
    with pytest.raises(Invalid, match="the server's memory of all sites"):
        remerge(coordinator.services, run.id, "a")
    with pytest.raises(Invalid, match="no update of nowhere"):
        remerge(coordinator.services, run.id, "nowhere")


def test_no_version_of_fewer_sites_than_the_quorum_is_made(coordinator: LiveCoordinator) -> None:
    run, workers = begun(coordinator, cohort=Cohort(quorum=2, deadline_seconds=600))
    trained(coordinator, run, workers, 1, north=7.0, south=3.0)
    with pytest.raises(Invalid, match="version 1 would rest on 1 sites"):
        remerge(coordinator.services, run.id, "north")
    assert remerge(coordinator.services, run.id).same


def test_a_process_that_is_killed_leaves_no_run_and_another_begins_anew(
    coordinator: LiveCoordinator, done: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge, calls = Aggregation.merge, list[int]()

    def killed(*given: Any, **latest: Any) -> NextVersion:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return merge(*given, **latest)

    with monkeypatch.context() as patch:
        patch.setattr(Aggregation, "merge", killed)
        with pytest.raises(KeyboardInterrupt):
            remerge(coordinator.services, done.id, "north")
    assert [run.id for run in coordinator.client().runs()] == [done.id]
    assert remerge(coordinator.services, done.id, "north").run


def test_the_command_compares_and_creates(coordinator: LiveCoordinator, done: Run) -> None:
    places = coordinator.settings
    settings = {
        "TESSERA_DATABASE_URL": places.database_url,
        "TESSERA_BLOB_URL": places.blob_url,
        "TESSERA_STAGING_DIR": str(places.staging_dir),
    }
    checked = tessera("coordinator", "remerge", done.id, **settings)
    assert (checked.returncode, checked.stdout) == (0, "3 versions have the same digests\n"), checked.stderr
    made = tessera("coordinator", "remerge", done.id, "--without", "north", **settings)
    assert made.returncode == 0, made.stderr
    assert "versions 2 and later are merged again without north" in made.stdout

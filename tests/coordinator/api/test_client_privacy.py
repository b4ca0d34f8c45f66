"""Client-level privacy over HTTP: what is measured, what is secret, and what people are shown."""

from __future__ import annotations

import base64
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from tessera.coordinator.dashboard.runs import facts_of
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import RoundRow
from tessera.coordinator.maintenance import backup
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.privacy.gaussian import epsilon_of
from tessera.shared.rounds.client_privacy import NOISE
from tessera.shared.run_settings import ClientPrivacy
from tests.support import databases
from tests.support.coordinator import LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.storage import blobs_in

MODEL = small_model()
START = values(MODEL)
CLIP = 0.5
LITTLE_NOISE = ClientPrivacy(epsilon=1000.0, delta=1e-5, clip_norm=CLIP, expected_sites=4)


def begin(live: LiveCoordinator, terms: ClientPrivacy | None = LITTLE_NOISE, **spec: Any) -> tuple[Client, Run]:
    client = live.client()
    cohort = spec.pop("cohort", Cohort(size=1))
    return client, start_run(
        client, MODEL, START, normalization="cohort", client_privacy=terms, cohort=cohort, **spec
    )


def worker_of(live: LiveCoordinator, site: str, dataset: str = "data") -> ScriptedWorker:
    return ScriptedWorker(live.client("site", site), datasets={dataset: 10})


def keys(live: LiveCoordinator, run: Run) -> list[bytes | None]:
    """The keys of a run's rounds, as they are in the table."""
    with live.services.database.snapshot() as session:
        return list(session.scalars(select(RoundRow.noise_key).where(RoundRow.run_id == run.id)))


def length_of_step(client: Client, run: Run) -> float:
    """The l2 norm of the latest version's difference from the first."""
    manifest = Manifest.read(client.read_blob(client.run(run.id).version.digest), client.read_blob)
    ends = {name: np.frombuffer(client.read_blob(digest), "<f4") for name, digest in manifest.blocks.items()}
    return float(np.sqrt(sum(np.square(end - START[name].reshape(-1)).sum() for name, end in ends.items())))


def reached(client: Client, run: Run, number: int) -> None:
    until(lambda: client.run(run.id).version.number == number)


def test_a_worker_that_reports_a_small_norm_is_clipped_by_the_measured_one(standing: LiveCoordinator) -> None:
    client, run = begin(standing, dataset="lied-about")
    worker = worker_of(standing, "a", "lied-about")
    view = worker.train(worker.take(), 100.0, update_norm=1e-9)
    until(lambda: client.run(run.id).state == "completed")
    assert view.metrics["update_norm"] == pytest.approx(100 * np.sqrt(sum(v.size for v in START.values())), rel=1e-5)
    # The noise adds up to about a third of the clip norm, over 136 values.
    assert length_of_step(client, run) < 1.2 * CLIP / 4


def test_a_round_s_key_is_secret_and_gone_once_the_round_ended(standing: LiveCoordinator) -> None:
    client, run = begin(standing, rounds=2, dataset="secret")
    worker, seen = worker_of(standing, "a", "secret"), set()
    for number in (1, 2):
        task = worker.take()
        (key,) = [key for key in keys(standing, run) if key]
        assert len(key) == 32
        with standing.http() as http:
            paths = (
                f"/v1/runs/{run.id}",
                f"/v1/runs/{run.id}/rounds",
                f"/v1/runs/{run.id}/versions",
                "/v1/admin/audit",
            )
            told = "".join(http.get(path).raise_for_status().text for path in paths) + task.model_dump_json()
        assert all(form not in told for form in (key.hex(), base64.b64encode(key).decode(), "noise_key"))
        worker.train(task)
        reached(client, run, number)
        seen.add(key)
    assert len(seen) == 2
    assert keys(standing, run) == [None, None]


def test_an_abandoned_round_releases_nothing_and_loses_its_key(standing: LiveCoordinator) -> None:
    client, run = begin(standing, dataset="abandoned")
    worker = worker_of(standing, "a", "abandoned")
    worker.take()
    assert keys(standing, run) != [None]
    client.set_run_state(run.id, "cancelled")
    until(lambda: [round_.state for round_ in client.rounds(run.id)] == ["abandoned"])
    assert keys(standing, run) == [None]
    assert client.run(run.id).client_epsilon == 0
    assert client.run(run.id).version.number == 0


def test_a_restored_round_draws_other_noise_unless_its_updates_are_fixed(
    standing: LiveCoordinator, tmp_path: Path
) -> None:
    services, restored = standing.services, list[tuple[str, bytes | None]]()
    _, run = begin(standing, dataset="restored")
    worker_of(standing, "a", "restored").take()
    (key,) = keys(standing, run)
    for state in ("open", "merging"):
        backup.back_up(services.database, services.blobs, tmp_path / state)
        with closing(Database(f"sqlite:///{tmp_path}/{state}/tessera.db")) as copy, copy.transaction() as session:
            session.execute(update(RoundRow).where(RoundRow.run_id == run.id).values(state=state))
        with closing(Database(databases.url_in(tmp_path, state))) as database:
            backup.restore(tmp_path / state, database, blobs_in(tmp_path / f"of-{state}", database, 1))
            with database.snapshot() as session:
                restored += [
                    (round_.state, round_.noise_key)
                    for round_ in session.scalars(select(RoundRow).where(RoundRow.run_id == run.id))
                ]
    (opened, merging) = restored
    assert merging == ("merging", key)
    assert opened[0] == "open"
    assert len(opened[1] or b"") == 32
    assert opened[1] != key


def test_a_run_without_client_level_privacy_has_no_key_and_no_epsilon_of_sites(standing: LiveCoordinator) -> None:
    client, run = begin(standing, None, dataset="plain")
    worker_of(standing, "a", "plain").take()
    assert keys(standing, run) == [None]
    assert client.run(run.id).client_epsilon is None


def test_what_sites_have_spent_is_shown_apart_from_what_examples_have(standing: LiveCoordinator) -> None:
    terms = ClientPrivacy(epsilon=2.0, delta=1e-5, clip_norm=CLIP, expected_sites=4)
    client, run = begin(standing, terms, rounds=2, dataset="shown")
    worker, spent = worker_of(standing, "a", "shown"), [client.run(run.id).client_epsilon]
    for number in (1, 2):
        worker.train(worker.take(), epsilon=7.5)
        reached(client, run, number)
        spent.append(client.run(run.id).client_epsilon)
    noise = list(client.versions(run.id))[-1].scalars[NOISE]
    assert spent == [0, epsilon_of(noise, 1, 1e-5), epsilon_of(noise, 2, 1e-5)]
    assert 1.99 < (spent[-1] or 0) <= 2.0 * (1 + 1e-9)
    assert next(iter(client.rounds(run.id))).tasks[0].metrics["epsilon"] == 7.5
    assert worker.client.run(run.id).client_epsilon == spent[-1]
    assert dict(facts_of(run.spec, client.run(run.id)))["Privacy of a site"] == "2 spent of epsilon 2 at delta 1e-05"


def test_a_method_that_remembers_sites_is_refused_when_the_run_is_created(standing: LiveCoordinator) -> None:
    with refusing("invalid", "choose a method such as fedavg"):
        begin(standing, method=MethodSpec(name="fednova"))

"""One run that cannot go on does not hold up the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import Connection, event, select, text, update
from structlog.testing import capture_logs

from tessera.coordinator.blobs.store import StagingOnOtherDisk
from tessera.coordinator.conductor import wakeups as wakeups_module
from tessera.coordinator.conductor.wakeups import ConductorWakeups
from tessera.coordinator.db.snapshots import run_snapshot
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow
from tessera.coordinator.domain.round_moves import Merge
from tessera.coordinator.services import assemble
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.tasks import Claim
from tessera.shared.client.client import Client
from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    MethodSpec,
    Participant,
    Plan,
    State,
)
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import roles
from tests.support.coordinator import Clock, LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.storage import add_run, statements


def test_a_run_that_cannot_be_read_pauses_and_the_others_go_on(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    spoilt = start_run(client, model, values(model), name="spoilt")
    with coordinator.services.database.transaction() as session:
        unreadable = {**spoilt.spec.model_dump(mode="json"), "codec": "from-the-future"}
        session.execute(update(RunRow).where(RunRow.id == spoilt.id).values(spec=unreadable))
    sound = start_run(client, model, values(model), name="sound")

    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.train(worker.take())

    until(lambda: client.run(sound.id).state == "completed")
    with coordinator.services.database.snapshot() as session:
        row = session.get_one(RunRow, spoilt.id)
        assert row.state == "paused"
        assert "from-the-future" in (row.reason or "")


def test_what_only_a_newer_version_can_read_or_remove_is_left_to_it(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    sound = start_run(client, model, values(model), name="sound")
    with coordinator.services.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999_from_0100'")
    newer = start_run(client, model, values(model), name="newer")
    with coordinator.services.database.transaction() as session:
        unreadable = {**newer.spec.model_dump(mode="json"), "novelty": 1}
        session.execute(update(RunRow).where(RunRow.id == newer.id).values(spec=unreadable))

    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.train(worker.take())

    until(lambda: client.run(sound.id).state == "completed")
    with coordinator.services.database.snapshot() as session:
        assert session.get_one(RunRow, newer.id).state == "running"
    admin = coordinator.http()
    (site,) = client.sites()
    for answer in (
        admin.get(f"/v1/runs/{newer.id}"),
        admin.get("/v1/runs"),
        admin.post(f"/v1/sites/{site.id}/withdraw"),
    ):
        assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "1"), answer.text
        assert "older than another, which can" in answer.json()["detail"]
    client.put_bytes(b"what only a newer version refers to")
    retention = replace(coordinator.services.retention, unused_seconds=-60.0)
    assert not retention.collect()
    # Without a newer version beside this one, it is a fault like any other.
    with coordinator.services.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0100'")
    assert admin.get("/v1/runs").status_code == 500
    assert retention.collect()
    with coordinator.services.database.snapshot() as session:
        assert session.get_one(SiteRow, site.id).withdrawn_at is None


class Faulty(CoordinatorHalf[MethodSettings]):
    """A method with a bug that no one foresaw, in its second round."""

    def plan_for(self, state: State, worker: Participant) -> Plan:
        if state.round:
            raise TypeError("a bug")
        return Plan()


class Misnaming(CoordinatorHalf[MethodSettings]):
    """A method whose second round selects blocks that few models have."""

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(train=roles("prompt")) if state.round else Plan()


@pytest.fixture(params=[Faulty, Misnaming])
def faulty(request: pytest.FixtureRequest) -> Iterator[str]:
    """A method that is installed while the test lasts."""
    name = request.param.__name__.lower()
    methods()[name] = Method(name, coordinator=request.param, source="a test")
    yield name
    del methods()[name]


def test_a_method_that_fails_pauses_its_run_and_the_others_go_on(coordinator: LiveCoordinator, faulty: str) -> None:
    client, model = coordinator.client(), small_model()
    worker = ScriptedWorker(coordinator.client("site", "a"), methods=("fedavg", faulty))
    bad = start_run(client, model, values(model), method=MethodSpec(name=faulty), rounds=2)
    good = start_run(client, model, values(model))
    for _ in range(2):
        worker.train(worker.take())
    until(lambda: client.run(good.id).state == "completed")
    until(lambda: client.run(bad.id).state == "paused")
    reason = {"faulty": "a bug", "misnaming": "no block matches {'roles': ['prompt']}"}[faulty]
    assert (client.run(bad.id).reason or "").startswith(f"open failed: {reason}")


# A trigger of SQLite's.
@pytest.mark.sqlite
@pytest.mark.parametrize("faulty", [Faulty], indirect=True)
def test_a_run_that_fails_while_it_cannot_be_paused_pauses_later(coordinator: LiveCoordinator, faulty: str) -> None:
    client, model = coordinator.client(), small_model()
    worker = ScriptedWorker(coordinator.client("site", "a"), methods=("fedavg", faulty))
    bad = start_run(client, model, values(model), method=MethodSpec(name=faulty), rounds=2)
    with coordinator.services.database.transaction() as session:
        refusal = "begin select raise(abort, 'not now'); end"
        session.execute(text(f"create trigger t before update on runs when new.state = 'paused' {refusal}"))
    with capture_logs() as logs:
        worker.train(worker.take())
        until(lambda: "conductor.step_failed" in {line["event"] for line in logs})
    with coordinator.services.database.transaction() as session:
        session.execute(text("drop trigger t"))
    until(lambda: client.run(bad.id).state == "paused")


def test_a_look_from_before_the_last_merge_merges_nothing(coordinator: LiveCoordinator) -> None:
    client, model, conductor = coordinator.client(), small_model(), coordinator.services.conductor
    run = start_run(client, model, values(model))
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
    until(lambda: not conductor._merging.locked())
    with coordinator.services.database.snapshot() as session:
        old = run_snapshot(session, run.id, [], absent_are_gone=True)
        (merged,) = session.scalars(select(RoundRow.id))
    with capture_logs() as logs:
        conductor._merge_aside(old, Merge(merged))
        until(lambda: not conductor._merging.locked())
    assert "conductor.acted" not in {line["event"] for line in logs}
    assert [round_.state for round_ in client.rounds(run.id)] == ["committed"]


def test_what_the_disk_has_spoilt_is_not_merged(tmp_path: Path) -> None:
    model = small_model(width=256)
    with LiveCoordinator(tmp_path, inline_bytes=16) as live:
        run = start_run(live.client(), model, values(model))
        worker = ScriptedWorker(live.client("site", "a"))
        task = worker.take()
        digest = worker.upload(task, {"layer.0.mlp.weight": values(model, seed=1)["layer.0.mlp.weight"]})
        secret = live.token("site", "a")
    stored = live.services.states.manifest(task.version.digest).blocks["layer.0.mlp.weight"].removeprefix("sha256:")
    path = tmp_path / "blobs" / stored[:2] / stored
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    # What a process has written or hashed itself it trusts; the next one looks again.
    with LiveCoordinator(tmp_path, inline_bytes=16) as live:
        worker.client = Client(live.url, secret)
        with refusing("store-spoilt", stored), worker.client:
            worker.submit(task, digest)
        assert live.client().run(run.id).version.number == 0


def test_no_task_is_leased_to_a_caller_that_has_hung_up(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    token = coordinator.token("site", "a")
    claim = Claim(worker="w", instance="0" * 16, datasets={"data": 10}, methods=("fedavg",)).model_dump_json()
    host, port = coordinator.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as gone:
        gone.sendall(
            f"POST /v1/tasks/claim HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nPrefer: wait=5\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(claim)}\r\n\r\n{claim}".encode()
        )
        until(lambda: coordinator.services.waiters.workers)
    until(lambda: not coordinator.services.waiters.workers)
    run = start_run(client, model, values(model))
    until(lambda: list(client.rounds(run.id)))
    ((task,),) = [round_.tasks for round_ in client.rounds(run.id)]
    assert task.state == "offered"


def test_a_staging_folder_on_another_file_system_is_refused(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one file system only")
    settings = CoordinatorSettings(
        database_url=f"sqlite:///{tmp_path}/tessera.db", blob_url=str(tmp_path / "blobs"), staging_dir=elsewhere
    )
    with pytest.raises(StagingOnOtherDisk, match="different file systems"):
        assemble(settings)


def test_a_conductor_touches_its_file_at_every_look(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    with LiveCoordinator(tmp_path / "coordinator", heartbeat_file=alive):
        before = until(lambda: alive.exists() and alive.stat().st_mtime_ns)
        until(lambda: alive.stat().st_mtime_ns > before)


def test_each_pass_over_the_runs_touches_the_file(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    services = assemble(LiveCoordinator(tmp_path / "coordinator", heartbeat_file=alive).settings)
    services.conductor.step()
    services.database.close()
    assert alive.exists()


def test_a_heartbeat_file_that_cannot_be_touched_stops_no_round(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator", heartbeat_file=tmp_path / "missing" / "alive") as live:
        client, model = live.client(), small_model()
        run = start_run(client, model, values(model))
        worker = ScriptedWorker(live.client("site", "a"))
        worker.train(worker.take())
        until(lambda: client.run(run.id).state == "completed")


@pytest.mark.sqlite
def test_a_round_waits_while_the_database_s_disk_is_full(tmp_path: Path) -> None:
    clock, pages = Clock(), [1 << 30]
    with LiveCoordinator(tmp_path, clock=clock) as live:
        client, model = live.client(), small_model(width=64)
        workers = [ScriptedWorker(live.client("site", site)).enrol() for site in "ab"]
        run = start_run(client, model, values(model), cohort=Cohort(size=2, quorum=1, deadline_seconds=100))
        workers[0].train(workers[0].take())

        @event.listens_for(live.services.database.engine, "begin")
        def _limit(connection: Connection) -> None:
            # With 1, the file grows no more.
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages[0]}")

        with capture_logs() as logs:
            pages[0] = 1
            clock.advance(101)
            until(lambda: "conductor.disk_full" in {line["event"] for line in logs})
            pages[0] = 1 << 30
            clock.advance(11)
            until(lambda: client.run(run.id).state == "completed")
        found = [line["event"] for line in logs]
        # Tried once while there was no room, and not again at every look.
        assert (found.count("conductor.disk_full"), found.count("conductor.action_failed")) == (1, 0)


SPEC = {"name": "run", "method": {"name": "fedavg"}, "model": f"sha256:{'0' * 64}", "version": f"sha256:{'0' * 64}",
        "dataset": "data", "rounds": 2}  # fmt: skip


def test_a_wakeup_that_names_its_run_costs_as_much_with_many_live_runs_as_with_few(tmp_path: Path) -> None:
    services = assemble(LiveCoordinator(tmp_path / "coordinator").settings)
    counts = []
    for runs in (range(2), range(2, 20)):
        with services.database.transaction() as session:
            for number in runs:
                add_run(session, f"run-{number}").spec = SPEC
        services.conductor.step(["run-0"])
        with statements(services.database) as asked:
            services.conductor.step(["run-0"])
        counts.append(len(asked))
    with statements(services.database) as every:
        services.conductor.step()
    services.database.close()
    assert counts[0] == counts[1] < len(every)


def test_wakeups_for_one_run_keep_no_tick_from_the_others(coordinator: LiveCoordinator) -> None:
    client, model, ended = coordinator.client(), small_model(), threading.Event()
    busy = start_run(client, model, values(model), dataset="none")

    def call() -> None:
        while not ended.wait(0.01):
            coordinator.services.conductor.wakeups.call(busy.id)

    threading.Thread(target=call, daemon=True).start()
    with coordinator.services.database.transaction() as session:
        # Of a change that no wakeup told of.
        row = add_run(session, "other")
        row.spec = {**SPEC, "codec": "from-the-future"}
    until(lambda: _state(coordinator, "other") == "paused")
    ended.set()


def _state(coordinator: LiveCoordinator, run_id: str) -> str:
    with coordinator.services.database.snapshot() as session:
        return session.get_one(RunRow, run_id).state


def test_a_conductor_is_seen_to_be_alive_before_it_asks_the_database(tmp_path: Path) -> None:
    wakeups = ConductorWakeups(0.01, tmp_path / "alive")
    # What the loop does with it may fail while the database is away.
    assert next(wakeups.looks()) is None
    assert wakeups.heartbeat_file.exists()


def test_calls_while_the_loop_rests_are_followed_by_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that took 0.04 s is followed by a rest of 0.04 s, one that took 5 s by a rest of 0.1 s."""
    now, rested = [0.0], []

    class Resting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rested.append(timeout)
            wakeups.call("during")
            return False

    monkeypatch.setattr(wakeups_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    wakeups = ConductorWakeups(600, tmp_path / "heartbeat", Resting())
    looks = wakeups.looks()
    for seconds in (0.04, 5.0, 0.0):
        wakeups.call("before")
        assert next(looks) == ({"before", "during"} if rested else {"before"})
        now[0] += seconds
    assert rested == pytest.approx([0.04, 0.1])

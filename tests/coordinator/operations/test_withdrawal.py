"""A site that withdraws: nothing of what it sent is left, and everybody else goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tessera.coordinator.db.tables import AUDIT_SINK, NoticeRow, Table
from tessera.coordinator.operations import withdrawal
from tessera.shared.api.admin import StudyMember
from tessera.shared.api.audit_chain import first_broken
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunPatch
from tessera.shared.api.tasks import Task
from tessera.shared.client.run_versions import new_run
from tessera.shared.problems import Invalid
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

NORTH, SOUTH = "hospital-north", "hospital.south"
SECRET = 0.123456789


class Federation:
    """Two sites, of which the first sends steps that no other sends, and a run in the second of two rounds."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.live = LiveCoordinator(folder, **settings)

    def begin(self) -> None:
        self.admin = self.live.client()
        self.workers = {
            site: ScriptedWorker(
                self.live.client("site", site), f"gpu-{site}", ("train", "evaluate"), held_out={"data": 40}
            ).enrol()
            for site in (NORTH, SOUTH)
        }
        model = small_model(32)
        self.sent: list[bytes] = []
        self.run = start_run(
            self.admin, model, values(model), rounds=2, evaluation=Evaluation(sites=True),
            cohort=Cohort(sites=(NORTH, SOUTH), quorum=1, deadline_seconds=600),
        )  # fmt: skip
        for site in (NORTH, SOUTH):
            self.train(site, 1)
        self.until_version(1)

    def train(self, site: str, number: int) -> None:
        worker = self.workers[site]
        while True:
            task = worker.take()
            if task.kind == "evaluate":
                worker.evaluate(task, loss=SECRET if site == NORTH else 0.5)
            elif task.round == number:
                own = SECRET if site == NORTH else 0.25
                assert worker.train(task, own, loss=own).state == "accepted"
                return

    def until_version(self, number: int) -> None:
        until(lambda: self.admin.run(self.run.id).version.number == number)

    def update_bytes(self, site: str) -> list[bytes]:
        """The stored bytes of a site's updates."""
        tasks = [task for round_ in self.admin.rounds(self.run.id) for task in round_.tasks]
        digests = [task.update for task in tasks if task.worker.startswith(f"{site}/") and task.update]
        return [self.live.services.blobs.read(digest) for digest in digests]

    def withdraw(self, name: str = NORTH) -> Any:
        (site,) = (one for one in self.admin.sites() if one.name == name)
        return self.admin.withdraw_site(site.id)

    def found(self, *wanted: bytes) -> list[str]:
        """The files of the coordinator, and the columns of its tables, in which any of these bytes are."""
        files = [
            str(path)
            for path in self.folder.rglob("*")
            if path.is_file() and any(w in path.read_bytes() for w in wanted)
        ]
        with self.live.services.database.snapshot() as session:
            for table in Table.metadata.sorted_tables:
                for row in session.execute(select(table)).mappings():
                    for name, value in row.items():
                        raw = value if isinstance(value, bytes) else json.dumps(value, default=str).encode()
                        files += [f"{table.name}.{name}"] * any(w in raw for w in wanted)
        return files


@pytest.fixture(params=[64, 65_536], ids=["files", "inline"])
def federation(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Federation]:
    federation = Federation(tmp_path / "here", inline_bytes=request.param, keep_updates_seconds=1e6)
    with federation.live:
        federation.begin()
        yield federation


def windows(updates: list[bytes]) -> list[bytes]:
    """Pieces of updates that no other bytes have: from behind their headers."""
    return [
        update[start : start + 24] for update in updates for start in range(len(update) // 2, len(update) - 24, 97)
    ]


def test_no_byte_of_a_site_that_withdrew_is_left(federation: Federation) -> None:
    federation.train(NORTH, 2)
    updates = federation.update_bytes(NORTH)
    assert len(updates) == 2
    others = federation.update_bytes(SOUTH)
    theirs = [piece for piece in windows(updates) if not any(piece in other for other in others)]
    assert theirs
    assert federation.found(*theirs)
    done = federation.withdraw()
    assert [(one.run, one.first_version) for one in done.runs] == [(federation.run.id, 1)]
    assert federation.found(*theirs) == []
    assert federation.found(NORTH.encode(), str(SECRET).encode()) == []
    assert federation.update_bytes(SOUTH) == others


def test_the_others_go_on_and_the_run_completes(federation: Federation) -> None:
    federation.train(NORTH, 2)
    federation.withdraw()
    federation.train(SOUTH, 2)
    federation.until_version(2)
    south = federation.workers[SOUTH]
    south.evaluate(south.take(), loss=0.5)
    until(lambda: federation.admin.run(federation.run.id).state == "completed")
    with refusing("unauthenticated"):
        federation.workers[NORTH].claim(0)
    second = next(round_ for round_ in federation.admin.rounds(federation.run.id) if round_.number == 2)
    states = {task.worker.partition("/")[0]: task.state for task in second.tasks}
    assert states.pop(SOUTH) == "merged"
    assert [*states.values()] == ["left_out"]


def test_the_audit_still_holds_and_names_the_site_no_more(federation: Federation) -> None:
    before = list(federation.admin.audit())
    federation.withdraw()
    after = list(federation.admin.audit())
    assert after[: len(before)] == before
    assert first_broken(after) is None
    assert not any(name.startswith(NORTH) for name in federation.admin.audit_names().values())
    assert [one.action for one in after].count("site.withdraw") == 1


def test_withdrawing_again_changes_nothing_and_a_new_site_may_have_the_name(federation: Federation) -> None:
    done = federation.withdraw()
    assert federation.withdraw(done.name) == done
    assert [one.action for one in federation.admin.audit()].count("site.withdraw") == 1
    with refusing("conflict", "withdrawn"):
        federation.admin.resume_site(done.id)
    assert federation.admin.create_site(NORTH).id != done.id


def test_a_withdrawal_that_was_killed_behind_its_commit_is_finished_by_the_next(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = windows(federation.update_bytes(NORTH))
    blobs = type(federation.live.services.blobs)

    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    (site,) = (one for one in federation.admin.sites() if one.name == NORTH)
    caller = withdrawal.Principal.person("ann", "admin")
    with monkeypatch.context() as patch:
        patch.setattr(blobs, "discard", killed)
        patch.setattr(type(federation.live.services.database), "vacuum", killed)
        with pytest.raises(KeyboardInterrupt):
            withdrawal.withdraw(federation.live.services, caller, site.id)
    withdrawal.withdraw(federation.live.services, caller, site.id)
    assert federation.found(*theirs) == []


def test_a_withdrawal_that_was_killed_before_its_commit_has_changed_nothing(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    (site,) = (one for one in federation.admin.sites() if one.name == NORTH)
    caller = withdrawal.Principal.person("ann", "admin")
    for step in ("_end_tasks", "_erase_site", "_erase_blobs", "_influenced"):
        with monkeypatch.context() as patch:
            patch.setattr(withdrawal, step, killed)
            with pytest.raises(KeyboardInterrupt):
                withdrawal.withdraw(federation.live.services, caller, site.id)
    assert [one.withdrawn_at for one in federation.admin.sites()] == [None, None]
    assert "site.withdraw" not in {one.action for one in federation.admin.audit()}
    federation.train(NORTH, 2)
    assert federation.withdraw().runs


def test_an_administrator_withdraws_a_site_on_the_dashboard_by_typing_its_name(federation: Federation) -> None:
    (site,) = (one for one in federation.admin.sites() if one.name == NORTH)
    person, path = signed_in(federation.live), f"/page/sites/{site.id}/withdraw"
    assert "does not undo training" in person.see(path.removeprefix("/page")).text
    assert person.send(path, name=SOUTH).status_code == 422
    assert next(one for one in federation.admin.sites() if one.id == site.id).withdrawn_at is None
    assert person.send(path, name=NORTH).status_code == 303
    run = f"/runs/{federation.run.id}"
    for shown in ("/", "/sites", "/audit", "/failures", run, f"{run}/rounds/1", f"{run}/rounds/2"):
        assert NORTH not in person.see(shown).text, shown


def test_the_command_says_which_runs_keep_the_influence(federation: Federation) -> None:
    token = {"TESSERA_URL": federation.live.url, "TESSERA_TOKEN": federation.live.token("admin")}
    asked = tessera("admin", "site", "withdraw", NORTH, **token)
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    done = tessera("admin", "site", "withdraw", NORTH, "--yes", **token)
    assert done.returncode == 0, done.stderr
    assert f"tessera run create --from {federation.run.id} --without withdrawn-" in done.stderr


def test_a_run_without_a_site_starts_before_its_first_merged_update(federation: Federation) -> None:
    federation.train(NORTH, 2)
    federation.train(SOUTH, 2)
    federation.until_version(2)
    client, run = federation.admin, federation.run
    digests = {version.number: version.digest for version in client.versions(run.id)}
    update = next(
        t.update for r in client.rounds(run.id) if r.number == 1 for t in r.tasks if t.worker.startswith(NORTH)
    )
    child, _ = new_run(client, None, None, f"{run.id}@2")
    later = client.create_run(child)
    for start in (run.id, f"{run.id}@1", later.id):
        spec, said = new_run(client, None, None, start, without=NORTH)
        assert (spec.version, spec.cohort.sites) == (digests[0], (SOUTH,))
        assert digests[0] in said
        assert str(update) in said
    name = federation.withdraw().name
    spec, _ = new_run(client, None, None, later.id, without=name)
    assert (spec.version, spec.cohort.sites) == (digests[0], (SOUTH,))


def test_versions_before_a_site_s_first_merged_update_are_kept(federation: Federation) -> None:
    client = federation.admin
    client.patch_run(federation.run.id, RunPatch(state="cancelled"))
    run = client.create_run(federation.run.spec.model_copy(update={"evaluation": None}))
    north, south = (federation.workers[site] for site in (NORTH, SOUTH))
    north.fail(_task_of(north, run))
    south.train(_task_of(south, run))
    until(lambda: client.run(run.id).version.number == 1)
    for worker in (north, south):
        worker.train(_task_of(worker, run))
    until(lambda: client.run(run.id).version.number == 2)
    digests = {version.number: version.digest for version in client.versions(run.id)}
    assert new_run(client, None, None, run.id, without=NORTH)[0].version == digests[1]
    assert new_run(client, None, None, run.id, without=SOUTH)[0].version == digests[0]


def _task_of(worker: ScriptedWorker, run: Run) -> Task:
    while (task := worker.take()).run != run.id:
        pass
    return task


def test_a_site_with_the_name_of_a_data_set_leaves_the_runs_on_the_data_set(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    leaving, staying = (ScriptedWorker(coordinator.client("site", site)).enrol() for site in ("data", "stays"))
    run = start_run(
        client, model, values(model), rounds=2, cohort=Cohort(sites=("data", "stays"), deadline_seconds=60)
    )
    for worker in (leaving, staying):
        worker.train(worker.take())
    until(lambda: client.run(run.id).version.number == 1)
    (site,) = (one for one in client.sites() if one.name == "data")
    name = client.withdraw_site(site.id).name
    spec = client.run(run.id).spec
    assert (spec.dataset, spec.cohort.sites) == ("data", (name, "stays"))
    staying.train(staying.take())
    until(lambda: client.run(run.id).state == "completed")


def test_a_run_without_a_required_site_requires_the_others(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    for site in ("leaves", "stays"):
        client.create_site(site)
    run = start_run(client, model, values(model), cohort=Cohort(require=("leaves", "stays")))
    spec, _ = new_run(client, None, None, run.id, without="leaves")
    assert (spec.cohort.sites, spec.cohort.require) == (("stays",), ("stays",))
    alone = start_run(client, model, values(model), cohort=Cohort(quorum=2))
    with pytest.raises(Invalid, match="without leaves: cohort"):
        new_run(client, None, None, alone.id, without="leaves")


def test_a_required_site_is_not_named_any_more_and_a_sink_keeps_its_place(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    site, database = client.create_site("leaves"), coordinator.services.database
    run = start_run(client, model, values(model), cohort=Cohort(require=("leaves",)))
    with database.transaction() as session:
        content = {"seq": 7, "reason": "leaves: no route to host"}
        session.add(NoticeRow(channel=AUDIT_SINK, key="https://sink", content=content, seen_at=0.0, attempts=0))
    name = client.withdraw_site(site.id).name
    assert client.run(run.id).spec.cohort.require == (name,)
    with database.snapshot() as session:
        assert session.get_one(NoticeRow, (AUDIT_SINK, "https://sink")).content["seq"] == 7


def test_a_site_that_leaves_one_study_goes_on_in_another(federation: Federation) -> None:
    client = federation.admin
    (site,) = (one for one in client.sites() if one.name == NORTH)
    client.create_study("other")
    client.add_to_study("other", StudyMember(kind="site", member=site.id))
    updates, others = federation.update_bytes(NORTH), federation.update_bytes(SOUTH)
    theirs = [piece for piece in windows(updates) if not any(piece in other for other in others)]
    done = client.withdraw_site(site.id, "default")
    assert (done.name, [one.first_version for one in done.runs]) == (NORTH, [1])
    assert federation.found(*theirs, str(SECRET).encode()) == []
    federation.workers[NORTH].enrol()
    assert next(one for one in client.sites() if one.id == site.id).withdrawn_at is None
    assert client.withdraw_site(site.id, "default") == done
    assert client.withdraw_site(site.id, "other").name != NORTH
    assert federation.found(NORTH.encode()) == []

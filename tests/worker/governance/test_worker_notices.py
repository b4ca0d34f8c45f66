"""A site's people hear of what waits for them, and a worker never waits for their receiver."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tessera.shared.client.notice_channels import Command
from tessera.worker.governance.airlock import Airlock, HeldTask
from tessera.worker.governance.approvals import ApprovalDecision, Inbox, Request
from tessera.worker.governance.notices import PAUSE_SECONDS, RETRY_SECONDS, Notices
from tessera.worker.state.database import StateDatabase
from tests.worker.governance.test_airlock import BYTES, DIGEST, summary


class Site:
    """An inbox and an airlock, and a command that writes each notice into a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inbox, self.airlock = Inbox(folder), Airlock(folder)
        self.out = folder / "out"

    def notices(self, command: str = "cat >> out; echo >> out") -> Notices:
        channel = Command(["/bin/sh", "-c", f"cd {self.folder}; {command}"])
        return Notices(channel, "w", self.inbox, self.airlock, self.folder)

    def ask(self, name: str, worker: str = "w") -> Request:
        request = Request(
            run=f"run-{name}", run_name=name, terms=f"{name:0<64}", orchestrator=None, dataset="d", examples=9,
            worker=worker, asked_at=datetime.now(UTC), summary="x",
        )  # fmt: skip
        self.inbox._write(request)
        return request

    def hold(self) -> None:
        (self.folder / "made").write_bytes(BYTES)
        self.airlock.hold(self.folder / "made", summary(), HeldTask(work=DIGEST, blocks=()))

    @property
    def titles(self) -> list[str]:
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return [json.loads(line)["title"].removeprefix("Worker w waits for: ") for line in lines]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_what_waits_for_a_person_is_told_once_also_after_a_restart(site: Site) -> None:
    site.ask("demo")
    site.ask("theirs", worker="other")
    decided = site.ask("old")
    site.inbox.decide([decided], ApprovalDecision(approved=True, by="ann", at=datetime.now(UTC)))
    notices = site.notices()
    notices.look(0.0)
    notices.look(1000.0)
    assert site.titles == ["approval of demo"]
    site.hold()
    site.notices().look(0.0)
    assert site.titles[1:] == ["release of an update of demo, round 1"]
    # One that was decided before anybody was told needs nobody.
    site.airlock.decide("abcdef", "release", "ann")
    StateDatabase.of(site.folder).set_note("notices-command", None)
    site.notices().look(0.0)
    assert site.titles[2:] == ["approval of demo"]


def test_a_coordinator_that_starts_many_runs_floods_nobody(site: Site) -> None:
    notices = site.notices()
    for number in range(40):
        site.ask(f"a{number:02}")
        notices.look(float(number))
    assert site.titles == ["approval of a00"]
    notices.look(PAUSE_SECONDS)
    assert site.titles[1:] == ["; ".join(f"approval of a0{n}" for n in range(1, 6)) + "; and 34 more"]


def test_a_receiver_that_fails_is_tried_again_and_given_up(site: Site) -> None:
    site.ask("demo")
    notices = site.notices("cat >> out; echo >> out; exit 3")
    with capture_logs() as logged:
        now = 0.0
        for pause in (*RETRY_SECONDS, 1e6):
            notices.look(now)
            notices.look(now + pause - 1)
            now += pause
        notices.look(now)
    sent = [json.loads(line) for line in site.out.read_text().splitlines()]
    assert (len(sent), len({notice["id"] for notice in sent})) == (1 + len(RETRY_SECONDS), 1)
    assert [line["event"] for line in logged] == ["notice-not-sent"] * len(RETRY_SECONDS) + ["notice-given-up"]
    assert logged[0]["detail"] == "/bin/sh ended with 3"


def test_a_command_gets_no_secret_of_the_worker(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_WORKER_TOKEN", "secret")
    monkeypatch.setenv("OTHER", "value")
    site.ask("demo")
    site.notices("env > found").look(0.0)
    found = (site.folder / "found").read_text()
    assert "OTHER=value" in found
    assert "TESSERA" not in found


def test_a_command_that_is_not_there_says_so(site: Site) -> None:
    site.ask("demo")
    notices = Notices(Command(["/no/such"]), "w", site.inbox, site.airlock, site.folder)
    with capture_logs() as logged:
        notices.look(0.0)
    assert "/no/such cannot be started" in logged[0]["detail"]

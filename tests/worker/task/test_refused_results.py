"""Finished results that the coordinator refuses for a while: they are sent again, and nothing is trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete
from structlog.testing import capture_logs

from tessera.coordinator.db.tables import AnnouncedRow
from tessera.shared.api.runs import Training
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import MEDIA_TYPE, SiteSuspended
from tessera.shared.run_settings import Privacy
from tessera.worker.state.vault import Vault
from tessera.worker.stores import audit_of, ledger_of
from tessera.worker.task import environment
from tests.support.captured import Answered, Asked, HostileCoordinator
from tests.support.coordinator import LiveCoordinator, until
from tests.support.datafiles import eighth_of_digits
from tests.support.tapping import Tap
from tests.worker.test_agent import begin, settings_of, working

PRIVATE = {"privacy": Privacy(epsilon=4.0, delta=1e-5, clip_norm=1.0), "training": Training(batch_size=32)}


@pytest.mark.parametrize(
    ("limits", "spec"),
    [
        pytest.param({}, PRIVATE, id="inline-private"),
        pytest.param({"submission_bytes": 1}, {}, id="streamed-exact"),
        pytest.param({}, {}, marks=pytest.mark.long, id="inline-exact"),
        pytest.param({"submission_bytes": 1}, PRIVATE, marks=pytest.mark.long, id="streamed-private"),
    ],
)
def test_an_update_that_is_refused_for_a_while_is_sent_again_and_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], limits: dict[str, Any]
) -> None:
    # The refusal names the hours until bytes of the day are free.
    monkeypatch.setattr(environment, "MAX_REFUSED_SECONDS", 0.1)
    with (
        LiveCoordinator(tmp_path / "coordinator", site_bytes_per_day=1 << 30, **limits) as coordinator,
        Tap(coordinator.url) as tap,
        capture_logs() as logged,
    ):
        client, services = coordinator.client(), coordinator.services
        with working(coordinator, tmp_path, url=tap.url, datasets={"digits": eighth_of_digits(tmp_path)}):
            (site,) = client.sites()
            with services.database.transaction() as session:
                services.uploads.quota.note_bytes(session, services.database.now(), site.id, 1 << 30)
            run = begin(client, **spec)
            until(lambda: tap.up.count(b"/update HTTP/1.1") >= 3)
            with services.database.transaction() as session:
                session.execute(delete(AnnouncedRow))
            until(lambda: client.run(run.id).state != "running")
        assert client.run(run.id).state == "completed"
        (task,) = next(client.rounds(run.id)).tasks
        settings = settings_of(coordinator, tmp_path)
    entries = audit_of(settings).read()
    assert [entry.action for entry in entries if entry.action.startswith("task.")] == ["task.start"]
    assert [entry.action for entry in entries].count("update.leave") == 1
    assert task.attempts == 1
    assert len(ledger_of(settings).read("digits")) == 1
    (told,) = [log for log in logged if log["event"] == "result-refused"]
    assert (told["reason"], told["remedy"][:6]) == ("quota-exceeded", "Finish")


def test_values_of_an_accepted_update_are_kept_if_its_repetition_is_refused(tmp_path: Path) -> None:
    answers: list[int] = []
    suspended = SiteSuspended("an administrator suspended the site").document().model_dump_json().encode()

    def lost_then_refused(asked: Asked, answer: Answered) -> Answered | None:
        if not asked.path.endswith("/update"):
            return None
        answers.append(answer.status)
        return Answered(504) if len(answers) == 1 else Answered(403, {"Content-Type": MEDIA_TYPE}, suspended)

    with HostileCoordinator(tmp_path / "coordinator", submission_bytes=1 << 19) as coordinator:
        client = coordinator.client()
        with coordinator.lying(lost_then_refused), working(coordinator, tmp_path, poll_seconds=1):
            run = begin(client, method=MethodSpec(name="fedper"))
            kept = tmp_path / "state" / "vault" / run.id
            # The worker that finds nothing to claim settles what is pending.
            until(lambda: client.run(run.id).state == "completed")
            until(lambda: [path.name for path in kept.glob("*")] == ["current.safetensors"])
    assert answers == [200, 200]
    assert "classifier.weight" in Vault(kept.parent).load(run.id)

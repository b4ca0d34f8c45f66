"""The first administrator's token, and secrets that stand in files."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import select
from structlog.testing import capture_logs

from tessera.coordinator.cli import _hand_over_first_token
from tessera.coordinator.db.tables import TokenRow
from tessera.coordinator.settings import CoordinatorSettings
from tests.support.coordinator import Clock, LiveCoordinator, refused


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_first_token_goes_to_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveCoordinator(tmp_path) as live:
        monkeypatch.setattr(sys, "stderr", journal := io.StringIO())
        _hand_over_first_token(live.services)
        assert "tessera_admin_" not in journal.getvalue()
        with live.services.database.snapshot() as session:
            assert not session.scalars(select(TokenRow)).all()
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        _hand_over_first_token(live.services)
        assert "tessera_admin_" in terminal.getvalue()


def test_the_first_token_lives_a_day_and_another_start_issues_the_next(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "token"
    with LiveCoordinator(tmp_path, clock=clock, admin_token_file=file) as live:

        def started() -> str:
            _hand_over_first_token(live.services)
            return file.read_text().strip()

        first = started()
        assert started() == first
        asked = live.bare({"Authorization": f"Bearer {first}"})
        assert asked.get("/v1/runs").status_code == 200
        clock.advance(86_401)
        refused(asked.get("/v1/runs"), 401, "unauthenticated")
        assert live.bare({"Authorization": f"Bearer {started()}"}).get("/v1/runs").status_code == 200


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("postgresql://tessera:secret@db/tessera\n")
    assert CoordinatorSettings(database_url_file=file).database_url == "postgresql://tessera:secret@db/tessera"
    with pytest.raises(ValidationError, match="are both set"):
        CoordinatorSettings(database_url_file=file, database_url="sqlite:///x")
    with pytest.raises(ValidationError, match="cannot be read"):
        CoordinatorSettings(database_url_file=tmp_path / "absent")


def test_a_token_file_that_a_second_start_does_not_write_is_told_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "admin.token"
    with LiveCoordinator(tmp_path, admin_token_file=file) as coordinator:
        coordinator.token("admin")
        with capture_logs() as told:
            _hand_over_first_token(coordinator.services)
            file.touch()
            _hand_over_first_token(coordinator.services)
    (line,) = told
    assert (line["event"], line["path"]) == ("coordinator.admin_token_not_written", str(file))
    assert "`tessera coordinator token` issues another" in line["remedy"]

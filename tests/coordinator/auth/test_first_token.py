"""The first administrator's token, and a file for it."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from tessera.coordinator.cli import _hand_over_first_token
from tests.support.coordinator import LiveCoordinator


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

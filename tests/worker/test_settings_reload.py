"""A settings file that changes under a running worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.settings_reload import SettingsFile, differing, reloaded

TEXT = """
url = "http://127.0.0.1:9"
token = "tsr_secret"
name = "w"
state_dir = "state"
[datasets.a]
kind = "digits"
[datasets.b]
kind = "digits"
[policy]
max_epochs = 3
"""


def opened(folder: Path) -> tuple[Path, SettingsFile]:
    path = folder / "worker.toml"
    path.write_text(TEXT)
    return path, SettingsFile(path)


def no_wait(_: float) -> None:
    """For files that nobody is writing."""


def test_it_is_read_anew_when_it_changes_and_not_otherwise(tmp_path: Path) -> None:
    path, file = opened(tmp_path)
    assert file.reread(no_wait) is None
    path.write_text(TEXT.replace("3", "4"))
    again = file.reread(no_wait)
    assert again
    assert again.policy.max_epochs == 4
    assert file.reread(no_wait) is None


def test_settings_that_do_not_suit_the_data_are_refused_until_the_file_changes(tmp_path: Path) -> None:
    path, file = opened(tmp_path)

    def check(settings: WorkerSettings) -> None:
        if settings.policy.max_epochs > 3:
            raise SettingsError("too many")

    path.write_text(TEXT.replace("3", "4"))
    for _ in range(2):
        with pytest.raises(SettingsError, match="too many"):
            file.reread(no_wait, check)
    path.write_text(TEXT)
    assert file.reread(no_wait, check) is None


def test_a_file_that_somebody_is_writing_is_left_to_be_finished(tmp_path: Path) -> None:
    path, file = opened(tmp_path)
    path.write_text(TEXT.partition("[policy]")[0])
    rest = [TEXT.replace("3", "4"), TEXT.replace("3", "5")]

    def go_on(_: float) -> None:
        if rest:
            path.write_text(rest.pop(0))

    again = file.reread(go_on)
    assert again
    # Half of it would have let runs train for as long as the default has it.
    assert again.policy.max_epochs == 5


def test_one_that_cannot_be_used_is_refused_until_it_can(tmp_path: Path) -> None:
    path, file = opened(tmp_path)
    for broken in ("[policy", TEXT.replace("max_epochs", "max_epoch"), None):
        path.unlink() if broken is None else path.write_text(broken)
        for _ in range(2):
            with pytest.raises(SettingsError):
                file.reread(no_wait)
    path.write_text(TEXT)
    assert file.reread(no_wait) is None


def test_the_environment_still_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, file = opened(tmp_path)
    monkeypatch.setenv("TESSERA_WORKER_POLICY__MAX_EPOCHS", "2")
    path.write_text(TEXT.replace("3", "4") + "max_attempts = 6\n")
    again = file.reread(no_wait)
    assert again
    assert (again.policy.max_epochs, again.policy.max_attempts) == (2, 6)


def test_of_what_changed_only_the_policy_and_the_budgets_are_taken_up(tmp_path: Path) -> None:
    path, file = opened(tmp_path)
    changed = TEXT.replace("3", "4").replace('"w"', '"v"').replace("datasets.b", "datasets.c")
    budget = "{ epsilon = 1.0, delta = 1e-6 }"
    changed = changed.replace('[datasets.a]\nkind = "digits"', f'[datasets.a]\nkind = "text"\nprivacy = {budget}')
    path.write_text(changed)
    told = file.reread(no_wait)
    assert told
    now = reloaded(file.settings, told)
    assert differing(file.settings, now) == {"policy", "datasets.a"}
    assert now.datasets["a"].privacy
    assert (now.datasets["a"].kind, now.name) == ("digits", "w")
    assert differing(now, told) == {"name", "datasets.a", "datasets.b", "datasets.c"}

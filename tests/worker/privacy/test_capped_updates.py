"""A cap of updates per site fixes a run's epsilon before it begins, whatever its coordinator asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.shared.api.tasks import CohortTerms
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.accountant import epsilon
from tessera.worker.state.privacy_ledger import NoisySteps
from tests.worker.privacy.test_private_task import PRIVACY, account, spent

CAPPED = CohortTerms(mode="buffer", max_updates_per_site=2)
STEPS = 5


def asked(folder: Path, number: int, token: int = 1) -> PrivacyAccount:
    """A task of a capped run of nine rounds."""
    return account(folder, round=number, token=token, rounds=9, cohort=CAPPED)


def test_the_noise_is_that_of_as_many_rounds_as_the_site_trains_in(tmp_path: Path) -> None:
    capped = asked(tmp_path / "capped", 4)
    whole = account(tmp_path / "whole", round=1, rounds=2)
    assert capped.begin(STEPS) == whole.begin(STEPS)
    assert capped.forecast(STEPS) == whole.forecast(STEPS) <= PRIVACY.epsilon
    # Without a cap it would be for nine rounds.
    without = account(tmp_path / "without", round=4, rounds=9).begin(STEPS)
    assert without.noise_multiplier > capped.begin(STEPS).noise_multiplier


def test_the_epsilon_announced_before_a_run_is_never_exceeded(tmp_path: Path) -> None:
    announced = asked(tmp_path, 1).forecast(STEPS)
    assert 0.9 * PRIVACY.epsilon < announced <= PRIVACY.epsilon
    asked(tmp_path, 3).begin(STEPS)
    asked(tmp_path, 7).begin(STEPS)
    assert epsilon(spent(tmp_path), PRIVACY.delta) == pytest.approx(announced, rel=1e-6)
    with pytest.raises(PolicyViolation, match="it has trained from the 2 versions that the run allows a site") as no:
        asked(tmp_path, 9)
    assert no.value.rule == "max_updates_per_site"
    assert epsilon(spent(tmp_path), PRIVACY.delta) <= announced


def test_a_task_that_is_tried_again_after_a_lapse_costs_again_and_stays_below_it(tmp_path: Path) -> None:
    announced = asked(tmp_path, 1).forecast(STEPS)
    for number, token in ((2, 1), (2, 2), (2, 3), (6, 4), (6, 5)):
        asked(tmp_path, number, token).begin(STEPS)
    events = [event for event in spent(tmp_path) if isinstance(event, NoisySteps)]
    assert len(events) == 5
    # What attempts cost is made up for by the noise of later ones.
    assert events[1].noise_multiplier > events[0].noise_multiplier
    assert epsilon(events, PRIVACY.delta) <= PRIVACY.epsilon
    assert announced <= PRIVACY.epsilon
    with pytest.raises(PolicyViolation, match="it has trained from the 2 versions"):
        asked(tmp_path, 8, 6)


def test_a_task_that_was_taken_back_before_it_read_data_counts_for_none(tmp_path: Path) -> None:
    ended = asked(tmp_path, 2)
    ended.begin(STEPS)
    ended.void()
    for number in (3, 4):
        asked(tmp_path, number).begin(STEPS)
    assert epsilon(spent(tmp_path), PRIVACY.delta) <= PRIVACY.epsilon


@pytest.mark.parametrize("made", [(5, 20, 1, 10), (20, 1, 1, 40)])
def test_fitted_work_that_changes_from_round_to_round_stays_below_the_epsilon_of_the_run(
    tmp_path: Path, made: tuple[int, ...]
) -> None:
    for number, steps in enumerate(made, start=1):
        task = account(tmp_path, round=number, rounds=len(made), cohort=CohortTerms(work="fitted"))
        task.begin(steps)
    events = spent(tmp_path)
    assert [event.steps for event in events if isinstance(event, NoisySteps)] == [*made]
    assert 0.8 * PRIVACY.epsilon < epsilon(events, PRIVACY.delta) <= PRIVACY.epsilon

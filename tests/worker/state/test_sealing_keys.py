"""A site's sealing keys: one a week, erased five weeks later, whatever the clock says for a while."""

from __future__ import annotations

from pathlib import Path

from tessera.worker.state.site_keys import Keyring

DAY = 86400.0
NOON = 1_790_000_000.0
YEARS = 3650 * DAY


class Site:
    """A site whose clock stands where a test puts it."""

    def __init__(self, folder: Path) -> None:
        self.now = NOON
        self.keys = Keyring(folder, lambda: self.now)

    def claim(self, days: float = 0.0) -> str:
        """The sealing key that a claim shows so many days later."""
        self.now += days * DAY
        return self.keys.public("north").sealing_key

    def kept(self) -> set[str]:
        return set(self.keys.sealing_keys())


def test_a_key_is_used_for_a_week_and_erased_five_weeks_later(tmp_path: Path) -> None:
    site = Site(tmp_path)
    first = site.claim()
    assert [site.claim(3.5), site.claim(3.5)] == [first, first]
    later = [site.claim(7.1) for _ in range(5)]
    assert len({first, *later}) == 6
    assert site.kept() == {first, *later}
    newest = site.claim(7.1)
    site.claim()
    assert site.kept() == {*later, newest}


def test_a_clock_that_is_years_ahead_for_one_claim_erases_no_key_and_does_not_end_their_renewal(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    keys = [site.claim(7.1) for _ in range(6)]
    site.now += YEARS
    future = site.claim()
    assert site.kept() == {*keys, future}
    site.now -= YEARS
    assert site.claim(1) == keys[-1]
    renewed = site.claim(7)
    assert renewed not in {*keys, future}
    site.claim()
    # What was sealed to the key of the wrong clock can still be opened.
    assert site.kept() == {*keys[1:], renewed, future}


def test_a_clock_that_is_years_behind_for_one_claim_erases_no_key(tmp_path: Path) -> None:
    site = Site(tmp_path)
    keys = [site.claim(7.1) for _ in range(6)]
    site.now -= YEARS
    assert site.claim() not in keys
    site.now += YEARS
    assert site.claim() == keys[-1]
    assert site.kept() == {*keys}

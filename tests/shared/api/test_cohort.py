"""How many sites a round asks."""

from __future__ import annotations

import pytest

from tessera.shared.api.cohort import Cohort


@pytest.mark.parametrize(
    ("size", "share", "asked"), [(10, 0.3, 13), (100, 0.1, 110), (100, 0.07, 107), (50, 0.14, 57), (3, 0.1, 4)]
)
def test_over_selection_asks_a_share_of_sites_more_rounded_up(size: int, share: float, asked: int) -> None:
    # 100 * 1.1 is 110.00000000000001 in binary fractions.
    assert Cohort(size=size, over_selection=share).asked == asked

"""Seeds that claims need."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from common.document import block, tidied
from evidence import store
from evidence.plan import Plan
from evidence.power import COMMAND, equal_power, found_power, least_found, lines, needed
from tessera.simulation.comparison.statistics import equivalence_p


def test_power_is_how_often_the_tests_find_what_is_there() -> None:
    random = np.random.default_rng(0)
    drawn = random.normal(1.0, 1.3, (4000, 10))
    found = np.mean([ttest_1samp(each, 0).pvalue < 0.05 for each in drawn])
    assert found_power(1.0, 1.3, 10, 0.05) == pytest.approx(found, abs=0.025)
    equal = np.mean([equivalence_p(each, 1.0) < 0.05 for each in 0.8 * (drawn - 1.0)])
    assert equal_power(1.0, 0.8 * 1.3, 10, 0.05) == pytest.approx(equal, abs=0.03)


def test_the_least_seeds_have_the_power_and_one_less_has_not() -> None:
    for test, power in (("greater", found_power), ("equivalent", equal_power)):
        seeds = needed(0.8, test, 1.0, 1.2, 0.05)
        assert seeds is not None
        assert power(1.0, 1.2, seeds, 0.05) >= 0.8 > power(1.0, 1.2, seeds - 1, 0.05)
    assert needed(0.8, "equivalent", 1.0, 50.0, 0.05) is None
    least = least_found(0.8, 1.2, 10, 0.05)
    assert found_power(least, 1.2, 10, 0.05) >= 0.8 > found_power(least - 0.05, 1.2, 10, 0.05)


def test_the_document_has_the_power_of_the_saved_runs(full: Plan) -> None:
    assert block(COMMAND) == tidied(lines(full, store.of_plan(full, store.loaded())))

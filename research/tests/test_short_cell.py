"""The cell that runs again for its digest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evidence.plan import Plan
from evidence.short_cell import check, digest_of, shortened


@pytest.mark.usefixtures("benchmark_methods")
def test_a_short_cell_has_one_digest_and_another_at_another_rate(tiny: Plan, prepared: Path) -> None:
    table = tiny.tables["T"]
    few = {**table.options, "examples_per_wording": 40}
    plan, job = shortened(tiny.model_copy(update={"tables": {"T": table.model_copy(update={"options": few})}}), "T")
    plan.tables["T"].options.update({"unseen_tests": 40, "seen_tests": 20})
    found = digest_of(plan, job, prepared)
    assert found.startswith("sha256:")
    assert digest_of(plan, job, prepared) == found
    other = replace(job, rate=1e-2)
    assert digest_of(plan, other, prepared) != found


def test_a_digest_is_compared_with_that_of_its_kind_of_cpu(tmp_path: Path) -> None:
    file = tmp_path / "digests.json"
    assert check("a", "one", file, save=False)[1].startswith("not compared: no digest is saved for one")
    assert check("a", "one", file, save=True)[0]
    assert check("a", "one", file, save=False) == (True, "the saved digest on one: a")
    is_same, sentence = check("b", "one", file, save=False)
    assert not is_same
    assert "another digest than the saved one on one: b, not a" in sentence
    assert check("b", "two", file, save=False)[0]

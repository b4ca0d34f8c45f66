"""The mutants can still be made; `make mutants` says whether they are caught."""

from __future__ import annotations

from tests.mutants.catalogue import MUTANTS
from tests.support.paths import ROOT


def test_each_mutant_changes_one_line_that_is_there_and_names_tests_that_are() -> None:
    assert len(MUTANTS) >= 30
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        assert (text.count(mutant.old), "\n" in mutant.old + mutant.new) == (1, False), mutant
        for path in mutant.tests:
            file, _, test = path.partition("::")
            assert f"def {test}" in (ROOT / file).read_text(), path

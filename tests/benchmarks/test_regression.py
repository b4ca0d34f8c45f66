"""The guard against regressions compares CPU seconds and bytes, and refuses a commit that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.regression import Cost, commit_of, faults, main, unpack
from tests.support.paths import ROOT

BASE = Cost(coordinator=1.0, workers=3.0, nbytes=1000)


def test_the_same_cost_is_no_regression() -> None:
    assert faults("10 MB", BASE, BASE) == []


def test_a_quarter_more_cpu_passes_and_more_does_not() -> None:
    assert faults("10 MB", BASE, Cost(1.25, 3.75, 1000)) == []
    (fault,) = faults("10 MB", BASE, Cost(1.5, 3.0, 1000))
    assert fault == "10 MB: 1.50 CPU s of the coordinator, 1.50 times the commit's, at most 1.25"


def test_one_byte_more_is_a_regression_and_fewer_are_not() -> None:
    assert faults("10 MB", BASE, Cost(1.0, 3.0, 1001)) == ["10 MB: 1001 bytes, 1 more than the commit's"]
    assert faults("10 MB", BASE, Cost(0.5, 1.0, 10)) == []


def test_all_faults_are_named() -> None:
    assert len(faults("10 MB", BASE, Cost(9.0, 9.0, 2000))) == 3


def test_the_median_leaves_out_a_turn_that_was_disturbed() -> None:
    turns = [Cost(1.0, 2.0, 10), Cost(9.0, 9.0, 10), Cost(1.2, 2.4, 10)]
    assert Cost.of(turns) == Cost(1.2, 2.4, 10)


@pytest.mark.parametrize("revision", ["no-such-commit", "", "--help", "HEAD:README.md"])
def test_an_unknown_commit_is_refused(revision: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--", revision])
    assert ended.value.code == 2
    assert f"{revision!r} is no commit of the repository" in capsys.readouterr().err


def test_a_commit_is_unpacked_with_its_links(tmp_path: Path) -> None:
    commit = commit_of("HEAD")
    assert commit is not None
    root = unpack(commit, tmp_path / "checkout")
    assert (root / "tessera" / "shared").samefile(root / "shared")
    assert not (root / "shared").samefile(ROOT / "shared")

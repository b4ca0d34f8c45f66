"""The measures of client drift by hand, and its study on a tiny federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.document import block, tidied
from evidence.client_drift.__main__ import (
    COMMAND,
    SAVED,
    begin_with_saved,
    depends_on,
    finished,
    main,
    read,
    work,
)
from evidence.client_drift.report import lines
from evidence.client_drift.study import ALL, ARMS, EQUAL, MEASURES, TABLE, OneRun, Study, distance, run
from evidence.federations import source
from evidence.plan import Plan
from evidence.results_folder import RUNS, keep
from evidence.runs import inputs_of

STUDY = Study(seeds=(1,), rounds=3, warmup=1, learning_rate=1e-2, probes=8, every=1)


def test_the_distance_of_attention_leaves_padding_out() -> None:
    mask = torch.tensor([[1, 1, 0]])
    one, other = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3)
    one[0, 0, :2, :2] = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    other[0, 0, :2, :2] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert distance(other, other, mask) == 0
    # The squares of the difference sum to 0.25 + 0.25, and those of the second to 2.
    assert distance(one, other, mask) == pytest.approx(0.5)
    one[0, 0, 2], other[0, 0, :, 2] = 7.0, 9.0
    assert distance(one, other, mask) == pytest.approx(0.5)


@pytest.fixture
def small(full: Plan, tiny: Plan) -> Plan:
    """The whole plan, whose table has the options of a tiny one."""
    alphas = {"alpha-0.1": {}, "alpha-1000": {"alpha": 1000.0}}
    settings = tuple(
        each.model_copy(update={"federation": alphas.get(each.name, {})}) for each in full.tables[TABLE].settings
    )
    changes = {"options": tiny.tables["T"].options, "training": tiny.tables["T"].training, "settings": settings}
    return full.model_copy(
        update={"tables": {TABLE: full.tables[TABLE].model_copy(update={**changes, "sites_a_round": 3})}}
    )


def test_what_is_frozen_no_longer_moves_and_arms_share_the_warm_up(
    small: Plan, prepared: Path, tmp_path: Path
) -> None:
    on = depends_on(small, STUDY, "phrases.npz 123")
    for arm in ARMS:
        one = OneRun(arm, 1)
        keep(tmp_path, one.name, {**on, **run(small, STUDY, one, prepared, tmp_path)})
    found = finished(tmp_path, STUDY, on)
    assert [*found] == [*ARMS]
    frozen: dict[str, set[str]] = {"fedfrozen": {"query", "key"}, "values-frozen": {"value"}}
    for arm, (figures,) in found.items():
        assert {"query", "key", "value", "mlp", "embedding", "head"} <= figures["movement"].keys()
        for measure in MEASURES:
            assert {role for role, each in figures[measure].items() if not each[-1]} == frozen.get(arm, set())
            assert all(each[0] > 0 for each in figures[measure].values())
        assert [*figures["attention"]] == ["0", "1", "2", "3"]
        assert [number for number, moved in figures["attention"].items() if not any(moved)] == ["1"]
    (first,) = found[ALL]
    for arm in frozen:
        for measure in MEASURES:
            shared, own = ({role: each[0] for role, each in of[measure].items()} for of in (first, found[arm][0]))
            assert own == shared
    assert found[EQUAL][0]["movement"] != first["movement"]
    assert not list((tmp_path / "scratch").iterdir())
    table = small.tables[TABLE].model_copy(update={"training": {"steps": 9}})
    other = small.model_copy(update={"tables": {TABLE: table}})
    assert not any(finished(tmp_path, STUDY, depends_on(other, STUDY, "phrases.npz 123")).values())
    assert not any(finished(tmp_path, STUDY, depends_on(small, STUDY, "phrases.npz 4")).values())
    assert not any(finished(tmp_path, STUDY, {**on, "also": "that"}).values())
    report = "\n".join(lines(STUDY, found))
    assert [line.count("frozen |") for line in report.splitlines() if line.startswith("| query |")] == [1, 1]


def test_the_report_has_means_of_the_rounds_and_differences_of_the_last_version() -> None:
    study = Study(seeds=(1,), rounds=12, warmup=4, every=4)

    def figures(after: float, attention: float) -> dict[str, Any]:
        measured = {name: {"query": [0.1, after, 0.3]} for name in MEASURES}
        # In the order of a file's sorted keys.
        by_version = {number: [0.1, 0.3] for number in ("0", "4", "8")}
        return {**measured, "attention": {"12": [attention, 0.4], **by_version}, "machine": "m", "code": "c"}

    found = {arm: [figures(0.5, 0.2)] for arm in ARMS} | {"fedfrozen": [figures(0.1, 0.1)]}
    report = list(lines(study, found))
    disagreement, _ = (line for line in report if line.startswith("| query |"))
    assert disagreement.split(" | ")[1:4] == ["10.00", "40.00", "20.00"]
    assert "-50.00 (one seed)" in disagreement
    attention, by_layer = (line for line in report if line.startswith("| fedfrozen |"))
    assert attention == "| fedfrozen | 20.0 | 20.0 | 20.0 | 25.0 | -5.0 (one seed) |"
    assert by_layer == "| fedfrozen | 10.0 | 40.0 |"


# Processes that import torch take most of its time.
@pytest.mark.long
def test_only_runs_that_are_not_finished_run(small: Plan, prepared: Path, tmp_path: Path) -> None:
    on = depends_on(small, STUDY, inputs_of(source(small.tables[TABLE].federation), prepared))
    assert work(small, STUDY, on, prepared, tmp_path, processes=2) == {}
    first = finished(tmp_path, STUDY, on)
    assert all(len(each) == 1 for each in first.values())
    kept, again = (tmp_path / RUNS / name for name in ("fedavg-1.json", "fedfrozen-1.json"))
    before = kept.stat().st_mtime_ns
    again.unlink()
    assert work(small, STUDY, on, prepared, tmp_path, processes=1) == {}
    assert kept.stat().st_mtime_ns == before
    assert finished(tmp_path, STUDY, on) == first


def test_the_document_has_the_report_of_the_saved_study() -> None:
    assert block(COMMAND) == tidied(lines(*read()))


def test_a_folder_begins_with_the_saved_runs_and_keeps_its_own(full: Plan, tmp_path: Path) -> None:
    study, results = read()
    assert study == Study()
    on = depends_on(full, study, json.loads(SAVED.read_bytes())["inputs"])
    keep(tmp_path, OneRun(ALL, 1).name, {**on, "own": True})
    keep(tmp_path, OneRun(ALL, 2).name, {"study": "an older one"})
    begin_with_saved(tmp_path, on)
    own = {ALL: [{"own": True}, *results[ALL][1:]]}
    # The plan has not changed what they depend on.
    assert finished(tmp_path, study, on) == {**results, **own}
    # Runs of another plan stay.
    other = {**on, "inputs": "phrases.npz 4"}
    keep(tmp_path, OneRun(ALL, 1).name, {**other, "own": True})
    begin_with_saved(tmp_path, other)
    assert finished(tmp_path, study, other)[ALL] == [{"own": True}]


def test_without_prepared_files_the_command_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--prepared", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "python -m evidence.sources.prepare" in capsys.readouterr().err

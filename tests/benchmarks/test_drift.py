"""The measures of client drift by hand, and its study on a tiny federation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.document import block, tidied
from benchmarks.evidence import drift
from benchmarks.evidence.drift import ALL, ARMS, TABLE, Figures, Study, lines, read, write
from benchmarks.evidence.plan import Plan
from benchmarks.evidence.pool import METHODS
from benchmarks.methods.measured_drift import MeasuredDriftCoordinator
from tessera.shared.methods.base import RunInfo, State, Update
from tessera.shared.methods.fedfrozen import FedFrozenSettings
from tessera.shared.methods.registry import methods
from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import ArrayTensor

STUDY = Study(seeds=(1,), rounds=3, warmup=1, learning_rate=1e-2, probes=8, every=1)


def test_steps_are_measured_by_role_against_its_length() -> None:
    blocks = tuple(
        Block(tensor=name, role=role, shape=(2,), dtype="F32")
        for name, role in (("q", "query"), ("k", "key"), ("k2", "key"))
    )
    half = MeasuredDriftCoordinator(FedFrozenSettings(warmup_rounds=9), RunInfo(blocks, rounds=9))
    start = {"q": (3.0, 4.0), "k": (0.0, 2.0), "k2": (0.0, 0.0)}
    # One step for each sender, of q, k and k2; the weights are 1 and 3.
    steps = {"a": ((1.0, 0.0), (0.0, 4.0), (0.0, 0.0)), "b": ((1.0, 0.0), (0.0, 0.0), (0.0, 0.0))}
    model = {name: ArrayTensor(np.array(values, "f4")) for name, values in start.items()}
    updates = [
        Update(
            name,
            examples,
            {
                each: ArrayTensor(np.array(start[each], "f4") + np.array(step, "f4"))
                for each, step in zip(start, steps[name], strict=True)
            },
        )
        for name, examples in (("a", 1), ("b", 3))
    ]
    found = half.merge(State(0, model), updates).scalars
    # Both steps of q are (1, 0), and its length is 5. The keys' mean step is 1 long, and they are 2. Sender a is 3
    # away from the mean and b 1, so that the mean square is (9 + 3 * 1) / 4.
    assert found["movement.query"] == pytest.approx(1 / 5)
    assert found["disagreement.query"] == pytest.approx(0, abs=1e-6)
    assert found["movement.key"] == pytest.approx(1 / 2)
    assert found["disagreement.key"] == pytest.approx(3**0.5 / 2)


@pytest.fixture
def small(full: Plan, tiny: Plan) -> Plan:
    """The whole plan, whose table has the options of a tiny one."""
    settings = tuple(each.model_copy(update={"federation": {}}) for each in full.tables[TABLE].settings)
    changes = {"options": tiny.tables["T"].options, "training": tiny.tables["T"].training, "settings": settings}
    return full.model_copy(
        update={"tables": {TABLE: full.tables[TABLE].model_copy(update={**changes, "sites_a_round": 3})}}
    )


def test_what_is_frozen_no_longer_moves_and_arms_share_the_warm_up(
    small: Plan, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_METHODS", str(METHODS))
    methods.cache_clear()
    try:
        found = {arm: drift.run(small, STUDY, arm, 1, prepared, tmp_path / "out") for arm in ARMS}
    finally:
        methods.cache_clear()
    frozen = {ALL: set(), "fedfrozen": {"query", "key"}, "values-frozen": {"value"}}
    for arm, figures in found.items():
        assert {"query", "key", "value", "mlp", "embedding", "head"} <= figures.movement.keys()
        for measured in (figures.movement, figures.disagreement):
            assert {role for role, each in measured.items() if not each[-1]} == frozen[arm]
            assert all(min(curve[: STUDY.warmup]) > 0 for curve in measured.values())
        assert [*figures.attention] == ["0", "1", "2", "3"]
        assert [number for number, moved in figures.attention.items() if not moved] == ["1"]
    for name in ("movement", "disagreement"):
        first = [{role: each[0] for role, each in getattr(figures, name).items()} for figures in found.values()]
        assert first[0] == first[1] == first[2]
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["models"]
    # The report has each role, and says what was frozen.
    report = "\n".join(lines(STUDY, {arm: [figures] for arm, figures in found.items()}, "a machine"))
    assert sum("frozen |" in line for line in report.splitlines() if line.startswith("| query |")) == 2


def test_a_saved_study_is_read_as_it_was(tmp_path: Path) -> None:
    figures = Figures({"query": [0.1, 0.0]}, {"query": [0.2, 0.0]}, {"0": 0.5})
    results = {arm: [figures] for arm in ARMS}
    write(tmp_path / "drift.json", STUDY, "phrases.npz 123", results)
    assert read(tmp_path / "drift.json")[:2] == (STUDY, results)


def test_the_document_has_the_report_of_the_saved_study() -> None:
    assert block(drift.COMMAND) == tidied(lines(*read()))

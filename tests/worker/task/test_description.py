"""What a site says of a data set, asked again and again while the data change a little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.shared.api.descriptions import Description, bin_name
from tessera.shared.run_settings import Budget
from tessera.worker.data.dataset import Dataset
from tessera.worker.executor.stages.describe import subject_tables
from tessera.worker.governance.described_data import DescribedData
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation, PrivacyFloor
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import ExactUse, Ledger
from tessera.worker.state.vault import Vault
from tessera.worker.task.description import describe
from tessera.worker.task.environment import Journal, TaskRun
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.runner import task_runner
from tests.support.task_document import task_of


def patients(classes: Mapping[str, int] | Sequence[int], sides: int = 100) -> Dataset:
    """Images of patients, each with two, and each of a class: the patients' names are the keys."""
    named = dict(classes) if isinstance(classes, Mapping) else {f"p{n}": each for n, each in enumerate(classes)}
    names = [name for name in sorted(named) for _ in range(2)]
    count = len(names)
    return Dataset(
        {"pixel_values": torch.zeros(count, 1, 2, 2), "labels": torch.tensor([named[name] for name in names])},
        groups=[name.encode() for name in names],
        sources=[f"{name} {n % 2}".encode() for n, name in enumerate(names)],
        sides=np.full(count, sides, np.int32),
    )


def described(folder: Path, dataset: Dataset, policy: Policy | None = None, **env: Any) -> Description:
    """The description that leaves of a data set."""
    ledger = Ledger(folder)
    runner = task_runner(
        None, {"wards": dataset}, TrainingSetup(torch.device("cpu")), Vault(folder / "vault"), None, folder,  # type: ignore[arg-type]
        policy=policy or Policy(), described=DescribedData(folder), ledger=ledger, **env,
    )  # fmt: skip
    task = task_of(kind="describe")
    journal = Journal(TaskRef.of(task), task.dataset, None, ledger, runner.limits)
    return describe(TaskRun(runner, task, lambda: None, Report(), journal))


def test_patients_are_counted_and_few_of_them_look_like_none(tmp_path: Path) -> None:
    found = described(tmp_path, patients([0] * 23 + [1] * 9 + [2] * 10))
    assert found == described(tmp_path / "other", patients([0] * 23 + [2] * 10))
    assert found.counts == {"classes": (25, 0, 10), "pixels": (0,) * 6 + (35,)}
    assert (found.unit, found.minimum, found.step) == ("group", 10, 5)
    assert bin_name(6) == "64 to 127"


def test_the_earlier_answer_is_repeated_while_fewer_patients_than_the_minimum_have_changed(tmp_path: Path) -> None:
    first = described(tmp_path, patients([0] * 20 + [1] * 12))
    assert described(tmp_path, patients([0] * 20 + [1] * 21)) == first
    # One more than before is the tenth that changed.
    assert described(tmp_path, patients([0] * 20 + [1] * 22)).counts["classes"] == (20, 20)


@given(
    start=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=30, max_size=60),
    changes=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 3)), max_size=12),
    least=st.integers(10, 14),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_beside_each_other_differ_by_no_fewer_patients_than_the_minimum(
    tmp_path_factory: pytest.TempPathFactory, start: list[int], changes: list[tuple[int, int]], least: int
) -> None:
    """A patient is added, leaves or gets another class between two requests. An answer is a new one only once as many
    as the minimum have changed since the last new one."""
    folder, policy = tmp_path_factory.mktemp("site"), Policy(min_subjects=least)
    now = {f"p{n}": each for n, each in enumerate(start)}
    last, answer = dict(now), described(folder, patients(now), policy)
    for place, cell in changes:
        now.pop(f"p{place}", None) if cell == 3 else now.update({f"p{place}": cell})
        found = described(folder, patients(now), policy)
        changed = {name for name in now.keys() | last.keys() if now.get(name) != last.get(name)}
        if len(changed) < least:
            assert found == answer
        else:
            last, answer = dict(now), found


def test_a_change_of_one_image_of_a_patient_is_a_change_of_the_patient(tmp_path: Path) -> None:
    few = described(tmp_path, patients([0] * 30))
    moved = patients({f"p{n}": int(n < 9) for n in range(30)})
    assert described(tmp_path, moved) == few
    assert described(tmp_path, patients({f"p{n}": int(n < 10) for n in range(30)})).counts["classes"] == (20, 10)


def test_a_raised_minimum_holds_for_the_repeated_answer_too(tmp_path: Path) -> None:
    described(tmp_path, patients([0] * 20 + [1] * 12))
    with pytest.raises(PolicyViolation, match="lower minimum"):
        described(tmp_path, patients([0] * 20 + [1] * 13), Policy(min_subjects=20))
    assert described(tmp_path, patients([0] * 20 + [1] * 12), Policy(min_subjects=20)).counts["classes"] == (20,)


def test_requests_are_limited(tmp_path: Path) -> None:
    policy = Policy(max_descriptions=2)
    for _ in range(2):
        described(tmp_path, patients([0] * 20), policy)
    with pytest.raises(PolicyViolation, match="described 2 times"):
        described(tmp_path, patients([0] * 20), policy)


@pytest.mark.parametrize(
    "rules",
    [
        {"policy": Policy(require_privacy=PrivacyFloor(epsilon=1))},
        {"policy": Policy(require_secure_sums=True)},
        {"allowances": {"wards": Allowance(epsilon=1, delta=1e-6)}},
        {"allowances": {"wards": Allowance(epsilon=1, delta=1e-6, unit="group")},
         "policy": Policy(figures_privacy=Budget(epsilon=1, delta=1e-6))},
    ],
    ids=["privacy", "sums", "budget", "groups"],
)  # fmt: skip
def test_exact_counts_do_not_leave_a_site_with_a_rule_of_privacy(tmp_path: Path, rules: dict[str, Any]) -> None:
    with pytest.raises(PolicyViolation, match=r"^describe: "):
        described(tmp_path, patients([0] * 30), **rules)
    assert not Ledger(tmp_path).read("wards")


def test_noise_is_charged_once_to_the_budget_and_repeated_with_the_answer(tmp_path: Path) -> None:
    policy = Policy(figures_privacy=Budget(epsilon=1, delta=1e-6))
    rules: dict[str, Any] = {"policy": policy, "allowances": {"wards": Allowance(epsilon=1.2, delta=1e-6)}}
    first = described(tmp_path, patients([0] * 200), **rules)
    assert described(tmp_path, patients([0] * 201), **rules) == first
    assert first.epsilon == 1
    assert len(Ledger(tmp_path).read("wards")) == 1
    # The second answer would cost as much again.
    with pytest.raises(PolicyViolation):
        described(tmp_path, patients([0] * 220), **rules)


def test_the_ledger_says_that_exact_data_were_described(tmp_path: Path) -> None:
    described(tmp_path, patients([0] * 20))
    (entry,) = Ledger(tmp_path).read("wards")
    assert entry.events == (ExactUse(use="description"),)


def test_examples_without_a_patient_count_each(tmp_path: Path) -> None:
    dataset = Dataset({"pixel_values": torch.zeros(30, 1), "labels": torch.zeros(30, dtype=torch.int64)})
    found = described(tmp_path, dataset)
    assert (found.unit, found.counts["classes"]) == ("example", (30,))
    # All of them are alike.
    assert len(np.unique(subject_tables(dataset).digests, axis=0)) == 30


def test_held_out_patients_count_too(tmp_path: Path) -> None:
    whole = patients([0] * 40)
    rows = torch.arange(80)
    split = replace(whole.rows(rows[:40]), held_out=whole.rows(rows[40:]))
    assert described(tmp_path, split) == described(tmp_path / "whole", whole)

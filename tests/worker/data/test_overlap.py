"""The same examples under two names have no two budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from tessera.worker.data.content import CHECKED, digests_of
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.overlap import share_of, sketch_of
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import LIMITED, SKETCHED, ExactUse, Ledger, LedgerError
from tessera.worker.state.vault import Vault
from tessera.worker.stores import ledger_of
from tessera.worker.task.admission import check_overlap
from tessera.worker.task.environment import Journal, TaskRun
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.chain_rows import ChainRows
from tests.support.runner import task_runner
from tests.support.tables import on_disk
from tests.worker.privacy.test_private_task import task as task_of

KEY = b"k" * 32


def images(places: range, labels: int = 0) -> Dataset:
    """Images of which each place stands for one, whatever its label."""
    pixels = torch.tensor(list(places), dtype=torch.float32)[:, None, None, None].expand(-1, 1, 2, 2).contiguous()
    return Dataset({"pixel_values": pixels, "labels": torch.full((len(places),), labels)})


def prints(places: range) -> np.ndarray:
    return digests_of(images(places)).keyed(KEY)


def test_a_share_is_exact_for_few_examples_and_close_for_many() -> None:
    assert share_of(sketch_of(prints(range(100))), prints(range(95, 300))) == 0.05
    # 5 % of 3,000: 1,024 of them are kept, so that one standard deviation of the estimate is 0.7 %.
    assert share_of(sketch_of(prints(range(3000))), prints(range(2850, 6000))) == pytest.approx(0.05, abs=0.021)
    assert share_of(sketch_of(prints(range(3000))), prints(range(3000, 6000))) == 0.0


def test_a_sketch_holds_what_was_ever_used_and_is_bounded() -> None:
    first, second = prints(range(2000)), prints(range(1000, 3000))
    both = sketch_of(second, sketch_of(first))
    assert both == sketch_of(prints(range(3000)))
    assert len(both) == SKETCHED
    assert sketch_of(second, both) == both


def test_neither_the_label_nor_what_is_held_out_hides_an_example() -> None:
    other = images(range(50), labels=1)
    other = Dataset(other.rows(torch.arange(25)).tensors, held_out=other.rows(torch.arange(25, 50)))
    assert (digests_of(other).keyed(KEY) == prints(range(50))).all()
    assert not set(digests_of(other).keyed(b"o" * 32)) & set(prints(range(50)))


def of_file(file: Path, first: int, dtype: torch.dtype = torch.int64, group: bool = True) -> np.ndarray:
    """Of 40 texts whose tokens are numbers from `first` on, of 20 patients."""
    made = {"input_ids": torch.arange(first, first + 40, dtype=dtype)[:, None], "labels": torch.zeros(40)}
    save_file({**made, "group": torch.arange(40) // 2} if group else made, file)
    return digests_of(load("arrays", {"file": str(file)}, held_out=0.5, key=KEY)).keyed(KEY)


def test_a_group_number_is_not_taken_for_an_example(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    assert share_of(sketch_of(of_file(file, 0)), of_file(file, 40)) == 0.0
    assert len(of_file(file, 0)) == 40


@pytest.mark.parametrize("hidden", [{"group": True}, {"dtype": torch.int32}, {"dtype": torch.float32}])
def test_neither_a_group_nor_another_type_of_number_hides_an_example(tmp_path: Path, hidden: Any) -> None:
    file = tmp_path / "notes.safetensors"
    plain, other = of_file(file, 0, group=False), of_file(file, 0, **{"group": False, **hidden})
    assert share_of(sketch_of(plain), other) == 1.0


def test_a_stop_need_not_wait_for_all_examples_to_be_hashed() -> None:
    checks = iter(range(CHECKED))

    def check() -> None:
        if next(checks) == 1:
            raise Stopped

    with pytest.raises(Stopped):
        digests_of(images(range(2 * CHECKED)), check)
    assert next(checks) == 2


BUDGET = {"wards": Allowance(epsilon=3.0, delta=1e-5)}


def data_sets() -> dict[str, Dataset]:
    return {"wards": images(range(200)), "again": images(range(190, 400)), "others": images(range(1000, 1200))}


def runner(folder: Path, shared: dict[str, str] | None = None, **settings: Any) -> TaskRunner:
    return task_runner(
        None,  # type: ignore[arg-type]  (nothing is fetched or sent)
        settings.pop("datasets", data_sets()), TrainingSetup(torch.device("cpu")), Vault(folder / "vault"),
        Cache(folder / "cache", 1 << 20), folder,
        ledger=Ledger(folder / "ledger", KEY, shared), **{"allowances": BUDGET, **settings},
    )  # fmt: skip


def uses(made: TaskRunner, dataset: str) -> None:
    task = task_of(dataset=dataset)
    journal = Journal(TaskRef.of(task), dataset, made.audit, made.ledger)
    run = TaskRun(made, task, lambda: None, Report(), journal)
    check_overlap(run, made.datasets[dataset])


@pytest.mark.parametrize("order", [("wards", "again"), ("again", "wards")])
def test_the_same_examples_under_another_name_are_refused_where_one_has_a_budget(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    made = runner(tmp_path)
    uses(made, "others")
    uses(made, order[0])
    # 10 of 200 are the same.
    with pytest.raises(PolicyViolation, match="have examples in common") as refusal, capture_logs() as logged:
        uses(made, order[1])
    assert "share a ledger" in refusal.value.remedy
    # How many is not for the coordinator.
    assert "%" not in refusal.value.detail
    assert [line["shared"] for line in logged if line["event"] == "data-sets-overlap"] == ["5%"]
    uses(made, "others")
    # Without any budget there is nothing to get around.
    free = runner(tmp_path / "free", allowances={})
    for name in order:
        uses(free, name)


@pytest.mark.parametrize("order", [("wards", "again"), ("again", "wards")])
def test_another_worker_s_budget_is_not_got_around_by_a_name_of_this_one(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    def worker_of(name: str) -> TaskRunner:
        """A worker that shares the ledgers, and has this name alone with the budget of its own settings."""
        budgets = {name: BUDGET[name]} if name in BUDGET else {}
        return runner(tmp_path, datasets={name: data[name]}, allowances=budgets)

    data = data_sets()
    uses(worker_of(order[0]), order[0])
    with pytest.raises(PolicyViolation, match="have examples in common"):
        uses(worker_of(order[1]), order[1])


def test_a_weekly_limit_is_one_of_each_name(tmp_path: Path) -> None:
    week = Policy(max_weekly_privacy=Allowance(epsilon=1.0, delta=1e-6))
    limited, free = runner(tmp_path, allowances={}, policy=week), runner(tmp_path, allowances={})
    uses(limited, "wards")
    for made in (limited, free):
        with pytest.raises(PolicyViolation, match="have examples in common"):
            uses(made, "again")
        uses(made, "others")


def test_a_name_stays_limited_where_another_worker_has_no_limit(tmp_path: Path) -> None:
    limited, free = runner(tmp_path), runner(tmp_path, allowances={})
    for made in (free, limited, free, limited):
        uses(made, "wards")
    # One line for the examples, and one for the limit.
    assert len(ChainRows(tmp_path / "ledger", "ledger wards").read_bytes().splitlines()) == 2
    with pytest.raises(PolicyViolation, match="have examples in common"):
        uses(free, "again")


def test_a_ledger_has_no_limit_until_it_is_used_under_one(tmp_path: Path) -> None:
    uses(runner(tmp_path, allowances={}), "wards")
    assert b'"limited":true' not in ChainRows(tmp_path / "ledger", "ledger wards").read_bytes()
    free = runner(tmp_path, allowances={})
    uses(free, "again")
    with pytest.raises(PolicyViolation, match="have examples in common"):
        uses(runner(tmp_path), "wards")
    with pytest.raises(PolicyViolation, match="have examples in common"):
        uses(free, "again")


def test_no_name_that_a_coordinator_chooses_makes_a_ledger_limited(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, KEY)
    with ledger.page("wards") as page:
        page.know(TaskRef("r", LIMITED, 1, LIMITED, 1), 200, (1,), limited=False)
    assert ledger.limited() == set()
    with ledger.page("wards") as page:
        page.know(TaskRef.of(task_of()), 200, (1,), limited=True)
    assert ledger.limited() == {"wards"}


def test_names_that_share_a_ledger_share_what_is_spent(tmp_path: Path) -> None:
    made = runner(tmp_path, {"wards": "people", "again": "people"})
    uses(made, "wards")
    uses(made, "again")
    assert made.ledger
    with made.ledger.page("wards") as page:
        page.exact(TaskRef.of(task_of(dataset="wards")), 200, "training")
    assert made.ledger.read("again") == made.ledger.read("wards") != ()
    assert made.ledger.besides([]) == ["people"]


def test_names_that_had_ledgers_of_their_own_share_one_from_then_on(tmp_path: Path) -> None:
    """The remedy of the refusal, with nothing of what was spent lost."""
    before = runner(tmp_path)
    assert before.ledger
    uses(before, "wards")
    with before.ledger.page("wards") as page:
        page.exact(TaskRef.of(task_of(dataset="wards")), 200, "training")
    with pytest.raises(PolicyViolation, match="have examples in common"):
        uses(before, "again")
    after = runner(tmp_path, {"wards": "people", "again": "people"})
    assert after.ledger
    # The audit knows how the ledger of wards was when something last left.
    head = before.ledger.leaving("wards")
    assert head
    after.ledger.expect({"wards": head})
    with pytest.raises(LedgerError, match="lacks what was spent under the name 'wards' alone: `tessera worker adopt"):
        uses(after, "wards")
    assert after.ledger.adopt("again")
    assert after.ledger.adopt("wards")
    assert after.ledger.adopt("wards") is None
    for name in ("wards", "again", "others"):
        uses(after, name)
    (spent,) = after.ledger.read("again")
    assert (spent.run, spent.events) == (task_of().run, (ExactUse(use="training"),))
    assert after.ledger.besides([]) == ["others", "people"]
    with pytest.raises(LedgerError, match="was moved into the ledger 'people'"):
        uses(runner(tmp_path), "wards")


def test_a_name_is_not_free_of_limits_because_another_ledger_is_lost(tmp_path: Path) -> None:
    made = runner(tmp_path)
    assert made.ledger
    uses(made, "wards")
    assert made.ledger.leaving("wards")
    ChainRows(tmp_path / "ledger", "ledger wards").unlink()
    with pytest.raises(LedgerError, match="ledger wards has 0 entries"):
        uses(made, "again")


def test_settings_say_which_names_share_a_ledger(tmp_path: Path) -> None:
    sources = {"wards": {"kind": "digits", "ledger": "people"}, "again": {"kind": "digits"}}
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": tmp_path / "state"}
    ledger = ledger_of(WorkerSettings.model_validate({**given, "datasets": sources}))
    assert [ledger.name(name) for name in sources] == ["people", "again"]


def test_which_examples_there_are_is_written_once_and_spends_nothing(tmp_path: Path) -> None:
    made = runner(tmp_path)
    for _ in range(3):
        uses(made, "wards")
    assert len(ChainRows(tmp_path / "ledger", "ledger wards").read_bytes().splitlines()) == 1
    assert made.ledger
    assert made.ledger.read("wards") == ()


def test_a_ledger_that_cannot_be_relied_on_stops_no_task_without_a_budget(tmp_path: Path) -> None:
    uses(runner(tmp_path, allowances={}), "wards")
    ChainRows(tmp_path / "ledger", "ledger wards").rename(ChainRows(tmp_path / "ledger", "ledger old"))
    made = runner(tmp_path)
    # Neither "others" nor "old" has a budget.
    uses(made, "others")
    with pytest.raises(LedgerError, match="ledger old"):
        uses(made, "wards")


def test_a_ledger_under_a_limit_that_cannot_be_relied_on_stops_every_task(tmp_path: Path) -> None:
    uses(runner(tmp_path), "wards")
    ChainRows(tmp_path / "ledger", "ledger wards").rename(ChainRows(tmp_path / "ledger", "ledger old"))
    with pytest.raises(LedgerError, match="ledger old"):
        uses(runner(tmp_path, allowances={}), "others")


# ---------------------------------------------------------------- examples that cannot be read


def on_broken_disk(unreadable: set[int], first: int = 0) -> Dataset:
    """20 examples in a file of which some rows cannot be read."""

    def read(places: Sequence[int]) -> torch.Tensor:
        if unreadable & set(places):
            raise DataError("the file was removed")
        return torch.tensor(places, dtype=torch.float32)[:, None] + first

    return on_disk({"labels": torch.zeros(20, dtype=torch.int64)}, read, (1,))


@pytest.mark.parametrize("unreadable", [{0}, {7, 8}, set(range(20))])
def test_no_example_that_cannot_be_read_stops_a_task(tmp_path: Path, unreadable: set[int]) -> None:
    made = runner(tmp_path, datasets={"wards": on_broken_disk(unreadable)})
    uses(made, "wards")
    # It does not resume a task that began with other examples, and nothing else depends on it.
    assert made.contents["wards"] != runner_contents(tmp_path / "whole", on_broken_disk(set()))
    assert made.contents["wards"] == runner_contents(tmp_path / "same", on_broken_disk(unreadable))
    assert len(made.fingerprints["wards"]) == 20 - len(unreadable)


def runner_contents(folder: Path, data: Dataset) -> str:
    made = runner(folder, datasets={"wards": data})
    uses(made, "wards")
    return made.contents["wards"]


def test_examples_that_cannot_be_read_are_not_like_each_other(tmp_path: Path) -> None:
    data = {"wards": on_broken_disk({0, 7}), "again": on_broken_disk({0, 7}, first=100)}
    made = runner(tmp_path, datasets=data)
    uses(made, "wards")
    uses(made, "again")
    # 18 of 20 can be compared.
    with pytest.raises(PolicyViolation, match="have examples in common"):
        uses(runner(tmp_path, datasets={"others": on_broken_disk({0, 7})}, allowances={}), "others")

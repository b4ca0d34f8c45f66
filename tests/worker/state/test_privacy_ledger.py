"""The ledger: written before anything is spent, never rewritten, and not to be relied on once it was."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from tessera.shared.run_settings import Budget
from tessera.worker.state.hash_chain import BEGINNING, TaskRef
from tessera.worker.state.privacy_ledger import Ledger, LedgerError, NoisyChoice, NoisySteps
from tests.support.chain_rows import ChainRows
from tests.support.task_document import task_of

TARGET = Budget(epsilon=3.0, delta=1e-5)
STEPS = NoisySteps(noise_multiplier=1.5, sampling_rate=0.1, steps=10)


def spend(ledger: Ledger, **more: object) -> None:
    with ledger.page("wards") as page:
        page.spend(TaskRef.of(task_of(**more)), 100, TARGET, [STEPS])


def file_of(folder: Path) -> ChainRows:
    return ChainRows(folder, "ledger wards")


def test_what_was_spent_is_there_for_the_next_process(tmp_path: Path) -> None:
    assert Ledger(tmp_path).read("wards") == ()
    with Ledger(tmp_path).page("wards") as page:
        page.spend(TaskRef.of(task_of(round=3, rounds=3, token=7)), 100, TARGET, [NoisyChoice(rho=0.01), STEPS])
    (entry,) = Ledger(tmp_path).read("wards")
    assert (entry.run, entry.round, entry.token, entry.examples) == ("r", 3, 7, 100)
    assert entry.events == (NoisyChoice(rho=0.01), STEPS)
    assert (entry.target, entry.previous) == (TARGET, BEGINNING)


def test_every_try_at_a_task_spends_anew(tmp_path: Path) -> None:
    # The noise of a second try is another, so the two together tell more than one.
    ledger = Ledger(tmp_path)
    spend(ledger, token=1)
    spend(ledger, token=2)
    first, second = ledger.read("wards")
    assert second.previous == first.digest
    assert [entry.token for entry in (first, second)] == [1, 2]


def test_data_sets_have_ledgers_of_their_own(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    spend(ledger)
    assert ledger.read("clinics") == ()


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda lines: [lines[0].replace(b'"steps":10', b'"steps":1 '), *lines[1:]], 1),
        (lambda lines: [lines[0].replace(b'"steps":10', b'"steps":11'), *lines[1:]], 1),
        (lambda lines: [*lines[:2], lines[2].replace(b'"steps":10', b'"steps":1')], 3),
        (lambda lines: [lines[0], lines[2]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [*lines, lines[2]], 4),
        (lambda lines: [lines[0], b'{"entry":{},"digest":""}\n'], 2),
    ],
    ids=["spaced", "changed", "last changed", "removed", "beheaded", "swapped", "repeated", "foreign"],
)
def test_a_ledger_that_was_rewritten_is_not_relied_on(tmp_path: Path, damage: object, line: int) -> None:
    ledger = Ledger(tmp_path)
    for token in (1, 2, 3):
        spend(ledger, token=token)
    lines = file_of(tmp_path).lines()
    file_of(tmp_path).write_bytes(b"".join(damage(lines)))  # type: ignore[operator]
    with pytest.raises(LedgerError, match=rf"ledger wards, entry {line}:"):
        ledger.read("wards")
    with pytest.raises(LedgerError), ledger.page("wards"):
        pass


def test_an_entry_is_one_line_of_json(tmp_path: Path) -> None:
    spend(Ledger(tmp_path))
    entry = json.loads(file_of(tmp_path).read_bytes())["entry"]
    assert entry["events"] == [{"kind": "noisy-steps", "noise_multiplier": 1.5, "sampling_rate": 0.1, "steps": 10}]
    assert entry["at"].endswith("Z")


def _spend_often(folder: Path) -> None:
    for _ in range(10):
        spend(Ledger(folder))


def test_workers_that_share_a_ledger_take_turns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spend_often, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [entry.seq for entry in Ledger(tmp_path).read("wards")] == list(range(20))

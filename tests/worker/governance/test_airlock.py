"""Updates that wait for a person: nothing leaves unreleased, whatever ends first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.shared.problems import RoundClosed
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.governance.airlock import (
    Airlock,
    AirlockError,
    BlockOut,
    ReleaseDecision,
    Summary,
    UpdateWithheld,
    summary_of,
)
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.task.upload import Egress
from tests.support.coordinator import until

DIGEST = f"sha256:{'0' * 64}"
BYTES = b"an update"


def summary(token: int = 1, update: bytes = BYTES) -> Summary:
    task = TaskRef(run="r", run_name="demo", round=1, task="abcdef0123456789", token=token)
    return summary_of(
        task, orchestrator=None, dataset="wards", examples=10, held_at=datetime.now(UTC), update=digest_of(update),
        nbytes=len(update),
        blocks={"a": BlockOut(nbytes=4, norm=3.0), "b": BlockOut(nbytes=5, norm=4.0)}, metrics={}, epsilon=None,
    )  # fmt: skip


class Holding:
    """An update that is held, in a thread, as the worker that made it does."""

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None, token: int = 1) -> None:
        self.airlock = Airlock(folder / "airlock", pause=0.01)
        self.file = folder / "made"
        self.file.write_bytes(BYTES)
        self.ended: list[ReleaseDecision | Exception] = []

        def hold() -> None:
            try:
                self.ended.append(self.airlock.hold(self.file, summary(token), check))
            except (RoundClosed, UpdateWithheld) as fault:
                self.ended.append(fault)

        self.thread = threading.Thread(target=hold)
        self.thread.start()

    def outcome(self) -> ReleaseDecision | Exception:
        self.thread.join(10)
        return self.ended[0]


def test_an_update_leaves_once_it_is_released(tmp_path: Path) -> None:
    holding, desk = Holding(tmp_path), Airlock(tmp_path / "airlock")
    (held,) = until(desk.held)
    assert (held.id, held.norm, held.update) == ("abcdef012345-1", 5.0, digest_of(BYTES))
    assert desk.path(held).read_bytes() == BYTES
    assert holding.ended == []
    desk.decide("abcdef", "release", "ann")
    outcome = holding.outcome()
    assert isinstance(outcome, ReleaseDecision)
    assert (outcome.update, outcome.by) == (digest_of(BYTES), "ann")
    assert desk.held() == []


def test_what_is_withheld_does_not_leave_and_says_why(tmp_path: Path) -> None:
    holding, desk = Holding(tmp_path), Airlock(tmp_path / "airlock")
    until(desk.held)
    desk.decide("abcdef", "withhold", "ann", "norm too large")
    outcome = holding.outcome()
    assert isinstance(outcome, UpdateWithheld)
    assert str(outcome) == "norm too large"


def test_a_round_that_closes_meanwhile_ends_the_wait(tmp_path: Path) -> None:
    closed = threading.Event()

    def check() -> None:
        if closed.is_set():
            raise RoundClosed("too late")

    holding, desk = Holding(tmp_path, check), Airlock(tmp_path / "airlock")
    until(desk.held)
    closed.set()
    assert isinstance(holding.outcome(), RoundClosed)
    with pytest.raises(AirlockError, match="no held updates have an id beginning with 'abcdef'"):
        desk.decide("abcdef", "release", "ann")


def test_a_decision_is_made_once_and_on_one_update(tmp_path: Path) -> None:

    (tmp_path / "airlock").mkdir()
    desk = Airlock(tmp_path / "airlock")
    # No thread looks: what is decided first stands.
    place = tmp_path / "airlock" / "abcdef012345-1"
    place.mkdir()
    (place / "summary.json").write_text(summary().model_dump_json())
    desk.decide("abcdef", "withhold", "ann")
    with pytest.raises(AirlockError, match="was already decided"):
        desk.decide("abcdef", "release", "bob")


def test_a_release_of_other_bytes_lets_nothing_leave(tmp_path: Path) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise RoundClosed("over")

    holding, desk = Holding(tmp_path, check), Airlock(tmp_path / "airlock")
    (held,) = until(desk.held)
    other = ReleaseDecision(update=digest_of(b"other"), verdict="release", by="eve", at=datetime.now(UTC))
    (tmp_path / "airlock" / held.id / "decision.json").write_text(other.model_dump_json())
    holding.thread.join(0.2)
    assert holding.ended == []
    stop.set()
    assert isinstance(holding.outcome(), RoundClosed)


def test_what_a_killed_process_held_is_gone_and_cannot_be_released(tmp_path: Path) -> None:
    place = tmp_path / "airlock" / "abcdef012345-1"
    place.mkdir(parents=True)
    (place / "summary.json").write_text(summary().model_dump_json())
    desk = Airlock(tmp_path / "airlock")
    desk.decide("abcdef", "release", "ann")
    # The next process clears what nobody will send, and its own update waits for a decision of its own.
    desk.clear()
    assert desk.held() == []
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise RoundClosed("over")

    holding = Holding(tmp_path, check, token=2)
    (held,) = until(desk.held)
    assert held.id == "abcdef012345-2"
    assert holding.ended == []
    stop.set()
    holding.outcome()


def test_what_was_changed_after_its_release_does_not_leave(tmp_path: Path) -> None:
    path, told = tmp_path / "update", summary()
    path.write_bytes(b"another")
    released = ReleaseDecision(update=told.update, verdict="release", by="a person", at=datetime.now(UTC))
    airlock: Any = SimpleNamespace(hold=lambda *_: released)
    run: Any = SimpleNamespace(journal=SimpleNamespace(note=lambda *_, **__: None), check=lambda: None)
    with pytest.raises(PolicyViolation, match="the file changed after its release"):
        Egress(run)._hold(airlock, path, told)

"""What a site wrote down, beside what the coordinator says it counts: each difference by its name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tessera.shared.api.tasks import TaskView
from tessera.worker.governance.audit_compare import compare
from tessera.worker.state.audit import SiteAuditEntry

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
DIGEST = f"sha256:{'a' * 64}"


def entry(action: str, task: str = "t", token: int = 1, **detail: Any) -> SiteAuditEntry:
    given = {"seq": 0, "at": NOON, "previous": "", "worker": "w", "action": action, "detail": detail}
    return SiteAuditEntry.model_validate(
        {**given, "run": "r", "run_name": "demo", "round": 1, "task": task, "token": token}
    )


def sent(task: str = "t", token: int = 1, **detail: Any) -> list[SiteAuditEntry]:
    given = {"update": DIGEST, "bytes": 100, "examples": 10, **detail}
    return [entry("task.start", task, token), entry("update.leave", task, token, **given)]


def view(task: str = "t", **more: Any) -> TaskView:
    given = {
        "id": task, "run": "r", "round": 1, "worker": "a/w", "kind": "train", "state": "accepted", "token": 1,
        "attempts": 1, "examples": 10, "upload_bytes": 100, "update": DIGEST, "created_at": NOON + timedelta(hours=1),
    }  # fmt: skip
    return TaskView.model_validate({**given, **more})


def kinds(entries: list[SiteAuditEntry], *tasks: TaskView) -> list[str]:
    return [found.kind for found in compare(entries, tasks).differences]


def test_what_both_have_the_same_agrees() -> None:
    found = compare([*sent(), entry("update.count")], [view()])
    assert (found.agreed, found.earlier, found.differences) == (1, 0, ())


def test_what_is_counted_and_was_never_sent_is_named() -> None:
    found = compare(sent(), [view(), view("forged")])
    assert [(one.kind, one.task) for one in found.differences] == [("counted-never-sent", "forged")]
    # Also of a task that was claimed here and failed.
    assert kinds([entry("task.start"), entry("task.refuse")], view()) == ["counted-never-sent"]


def test_what_was_sent_and_is_not_counted_is_named_with_what_became_of_it() -> None:
    (found,) = compare([*sent(), entry("update.count")], [view(state="rejected")]).differences
    assert found.kind == "sent-not-counted"
    assert found.detail.endswith("the coordinator says that its task is rejected")
    assert kinds(sent(), view(token=2, state="expired")) == ["sent-not-counted"]
    assert kinds(sent()) == ["sent-not-counted"]


def test_what_both_know_to_have_come_to_nothing_is_no_difference() -> None:
    assert kinds([*sent(), entry("task.drop", code="round-closed")], view(state="cancelled")) == []
    # A second try under another token is another update.
    retried = [*sent(), entry("task.drop"), *sent(token=2), entry("update.count", token=2)]
    assert kinds(retried, view(token=2)) == []
    # Nor is what is being handed in at this moment.
    assert kinds(sent(), view(state="leased")) == []


def test_another_digest_size_or_weight_is_named() -> None:
    assert kinds(sent(), view(update=f"sha256:{'b' * 64}")) == ["other-digest"]
    assert kinds(sent(), view(upload_bytes=99)) == ["other-bytes"]
    assert kinds(sent(), view(examples=11)) == ["other-examples"]


def test_figures_are_compared_too() -> None:
    measured = [entry("task.start"), entry("figures.leave", examples=10), entry("figures.count")]
    assert kinds(measured, view(kind="evaluate", update=None, upload_bytes=0)) == []
    assert kinds([entry("task.start")], view(kind="evaluate")) == ["counted-never-sent"]


def test_what_a_helper_sent_is_compared_too() -> None:
    signed, opened = entry("sums.agree", senders=DIGEST), entry("sums.open", "o", masks=DIGEST, bytes=100)
    agree = view(kind="agree", examples=None, update=None, upload_bytes=0)
    summed = view("o", kind="open", examples=None)
    assert kinds([signed, opened], agree, summed) == []
    assert kinds([signed, opened], agree, summed.model_copy(update={"update": None, "upload_bytes": 99})) == [
        "other-digest",
        "other-bytes",
    ]
    assert kinds([entry("task.start")], agree) == ["counted-never-sent"]
    assert kinds([signed], view(kind="agree", state="failed")) == ["sent-not-counted"]


def test_what_a_helper_signed_counts_as_no_update() -> None:
    assert kinds([entry("sums.agree", senders=DIGEST)], view()) == ["counted-never-sent", "sent-not-counted"]


def test_nothing_is_said_of_what_is_older_than_the_chain_or_written_elsewhere() -> None:
    found = compare(sent(), [view(), view("old", created_at=NOON - timedelta(days=1)), view("x", worker="a/other")])
    assert (found.agreed, found.earlier, found.differences) == (1, 2, ())

"""What `tessera run watch` prints of an open round, from literals."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tessera.shared.api.runs import Round, Run
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.round_outcomes import RoundOutcome, RunProgress, outcomes
from tessera.shared.terminal import output, watch
from tessera.shared.terminal.watch import Estimates, open_lines, open_view, print_ended, watch_as_text
from tests.support.literals import AT, measured, round_of, run_of, view_of

TRAINING = {"phase": "training", "step": 5, "steps": 10, "loss": 0.5}


def run(state: str = "running", made: int = 1) -> Run:
    return run_of("trial", state, made, rounds=5)


def task(worker: str, state: str = "leased", progress: dict[str, Any] | None = None) -> TaskView:
    return view_of(worker, state, round=2, progress=progress)


def round_(
    number: int, tasks: Sequence[TaskView] = (), *, seconds: float | None = None, stage: str = "train"
) -> Round:
    """Return an open round, or one that was committed after these seconds."""
    ended = {"state": "open"} if seconds is None else {"closed_at": AT + timedelta(seconds=seconds)}
    return round_of(*tasks, number=number, stage=stage, deadline_at=AT + timedelta(hours=1), **ended)


def lines(*tasks: TaskView, past: Sequence[float] = (), stage: str = "train", at_seconds: float = 0) -> list[str]:
    estimates = Estimates()
    estimates.add(RoundOutcome(round_(1, seconds=seconds, stage=stage)) for seconds in past)
    glimpse = RunProgress(run(), (), round_(2, tasks))
    return list(open_lines(glimpse, estimates, AT + timedelta(seconds=at_seconds)))


def test_each_worker_is_shown_with_its_phase_step_and_loss() -> None:
    fetching = {"phase": "fetching", "bytes": 2000, "total_bytes": 4000}
    assert lines(
        task("a/w", "offered"),
        task("b/w", progress=TRAINING),
        task("c/w", progress=fetching),
        task("d/w"),
        task("e/w", "merged"),
        task("f/w", "expired"),
        task("g/w", progress={"phase": "training", "activity": "calibrating noise"}),
    ) == [
        "round 2 of 5, train",
        "  b/w: training, step 5 of 10, loss 0.5",
        "  c/w: fetching, 2.0 kB of 4.0 kB",
        "  d/w: started",
        "  g/w: calibrating noise",
        "  a/w: waiting",
        "  f/w: not heard of in time",
        "  e/w: done",
    ]


def test_a_worker_that_waits_for_a_person_is_not_shown_as_slow() -> None:
    since = datetime.now(UTC) - timedelta(hours=2)
    held = task("a/w", progress={"phase": "held", "held_since": since.isoformat()})
    # When a person decides cannot be estimated.
    assert lines(held, past=[60], at_seconds=30) == ["round 2 of 5, train", "  a/w: held for release, 2 h ago"]


def test_time_is_estimated_once_a_round_of_the_stage_has_ended() -> None:
    working = task("b/w", progress=TRAINING)
    assert "left" not in "".join(lines(working, at_seconds=30))
    assert "left" not in "".join(lines(working, past=[60], stage="warm-up", at_seconds=30))
    # Training is the middle 0.8 of a task: half of it is a share of 0.1 + 0.8 / 2 = 0.5. Its own pace gives 60 s in
    # all, as the past round does: 30 s are left, and 3 rounds of 60 s follow.
    assert lines(working, past=[60], at_seconds=30) == [
        "round 2 of 5, train, about 4 min left",
        "  b/w: training, step 5 of 10, loss 0.5, about 30 s left",
    ]


def test_a_private_task_that_reports_no_steps_is_estimated_by_past_rounds_alone() -> None:
    working = task("b/w", progress={"phase": "training", "activity": "training (private: no progress)"})
    assert lines(working, at_seconds=30) == ["round 2 of 5, train", "  b/w: training (private: no progress)"]
    # As a share of 0.1 of its task, 30 s would make it one of 300 s.
    assert lines(working, past=[60], at_seconds=30) == [
        "round 2 of 5, train, about 4 min left",
        "  b/w: training (private: no progress), about 30 s left",
    ]


def test_in_the_first_round_the_steps_that_are_left_are_estimated_by_their_own_pace() -> None:
    # Two of eight steps took an hour, so the other six take three.
    progress = {"phase": "training", "step": 2, "steps": 8, "phase_seconds": {"fetching": 60.0, "training": 3600.0}}
    assert lines(task("b/w", progress=progress)) == [
        "round 2 of 5, train",
        "  b/w: training, step 2 of 8, about 3 h of training left",
    ]


def test_of_many_workers_a_few_are_shown_and_all_are_counted() -> None:
    found = lines(*(task(f"s{n}/w", "offered") for n in range(20)), task("x/w", progress=TRAINING))
    assert len(found) == 2 + watch.MAX_WORKERS
    assert found[1].startswith("  x/w: training")
    assert found[-1] == "  and 9 more workers; of all: waiting 20, training 1"


def test_without_a_terminal_the_open_round_is_printed_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    states = [task("a/w", "offered"), task("a/w", progress=TRAINING), task("a/w", progress=TRAINING), task("a/w")]
    glimpses = [RunProgress(run(), (), round_(2, [one])) for one in states]
    seconds = iter([0, 5, 10, 20, 30])
    last = watch_as_text([*glimpses, RunProgress(run("completed", 5))], lambda: AT + timedelta(seconds=next(seconds)))
    assert last.state == "completed"
    assert capsys.readouterr().out.splitlines() == [
        "round 2 of 5, train",
        "  a/w: waiting",
        "round 2 of 5, train",
        "  a/w: training, step 5 of 10, loss 0.5",
        "round 2 of 5, train",
        "  a/w: started",
        "trial is completed",
    ]


def test_a_terminal_shows_a_bar_and_a_table() -> None:
    glimpse = RunProgress(run(), (), round_(2, [task("a[b]/w", progress=TRAINING)]))
    console = output.out()
    with console.capture() as captured:
        console.print(open_view(glimpse, Estimates(), AT))
    assert "round 2 of 5, train ━━━" in captured.get()
    assert "a[b]/w  training  step 5 of 10  loss 0.5" in " ".join(captured.get().split("\n"))


def test_scores_over_different_sites_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    ended = round_(1, seconds=1.0).model_copy(update={"version": 1})
    found = [measured("a/w", accuracy=0.5, macro_f1=0.2, personal_accuracy=0.9)]
    found += [measured(f"{site}/w", accuracy=0.5, macro_f1=0.4) for site in "bc"]
    central = measured("lab/w", held_out=False, accuracy=0.7)
    for more in ([], [central]):
        (outcome,) = outcomes([ended], run().spec, [*found, *more])
        print_ended(output.out(), outcome)
    at_sites, centrally = capsys.readouterr().out.splitlines()
    assert (
        "accuracy 0.500 over 3 sites, macro_f1 (mean of sites) 0.333, personal_accuracy 0.900 over 1 site" in at_sites
    )
    assert "accuracy 0.700, personal_accuracy 0.900 over 1 site, worst site a: personal_accuracy 0.900" in centrally
    of_notes = [measured(f"{site}/w", entity_f1=score, loss=1 - score) for site, score in (("a", 0.5), ("b", 0.25))]
    (outcome,) = outcomes([ended], run().spec, of_notes)
    print_ended(output.out(), outcome)
    assert "loss 0.625, worst site b: entity_f1 0.250" in capsys.readouterr().out

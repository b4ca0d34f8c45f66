"""Runs of the tables of evidence that are repeated over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.evidence import store
from benchmarks.evidence.over_http import NotComparable, compared, jobs, repeat, simulated_here
from benchmarks.evidence.plan import Job, Plan
from benchmarks.evidence.report.lines import repeated_line
from benchmarks.evidence.report.section import section
from benchmarks.evidence.runs import machine
from tests.benchmarks.test_evidence_report import found_of, raw

JOB = Job("T", "K-1", "one", 1, 1e-3)


@pytest.mark.long
def test_a_run_over_http_has_the_digest_of_the_simulation(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    elsewhere = {"digest": "d", "machine": "another"}
    simulated = simulated_here(tiny, JOB, prepared, tmp_path / "out", {JOB: elsewhere})
    assert simulated_here(tiny, JOB, prepared, tmp_path / "out", {JOB: simulated}) == simulated
    over_http = repeat(tiny, JOB, prepared, tmp_path / "out" / "models", tmp_path / "federation")
    found = compared(JOB, over_http, simulated)
    assert found["digest"] == found["simulated"] == simulated["digest"]
    # Blocks travel, and little else.
    assert 1 < found["received_bytes"] / sum(simulated["upload_bytes"]) < 1.5
    for arm in ("local", "central"):
        with pytest.raises(NotComparable, match="is central, personal or has absent sites: choose another arm"):
            repeat(tiny, Job("T", "K-1", arm, 1, 1e-3), prepared, tmp_path, tmp_path)


def test_runs_whose_learning_rate_is_chosen_are_compared(tiny: Plan, tmp_path: Path) -> None:
    curve = [0.1, 0.5, 0.5, 0.5]
    arms = [("T", "one")]
    with pytest.raises(NotComparable, match=r"rate of T/one is not chosen: run .* --tables T --arms one` first"):
        jobs(tiny, {}, arms)
    found = found_of(tiny, raw("one", 0, curve), raw("one", 1, curve))
    assert jobs(tiny, found, arms) == [JOB]
    here = found_of(tiny, raw("one", 2, curve) | {"machine": machine("cpu")})
    assert jobs(tiny, found | here, arms) == list(here)
    made = {"digest": "d", "received_bytes": 2e6, "sent_bytes": 3e6, "seconds": 4.0, "machine": "m"}
    simulated = found_of(tiny, raw("one", 1, curve))[JOB]
    found = compared(JOB, made, simulated)
    assert repeated_line(found).startswith(
        "- T/K-1/one/seed-1-rate-0.001: the same digest, d; 2 MB received and 3 MB sent"
    )
    assert ": another digest than d, e;" in repeated_line({**found, "digest": "e"})
    assert repeated_line(found) in list(section(tiny, {}, "0123", [found]))
    with pytest.raises(NotComparable, match="diverged, and has no last version: choose another arm"):
        compared(JOB, made, {name: value for name, value in simulated.items() if name != "digest"})
    # Results of an older plan are left out.
    store.save_repeated([found, {**found, "setup": "other"}], tmp_path)
    assert store.repeated(tiny, tmp_path) == [found]

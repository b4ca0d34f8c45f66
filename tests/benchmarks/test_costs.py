"""That the benchmarks of costs run, in their quick form. Nothing here looks at how long anything takes."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.federation import ineligibilities
from benchmarks.measuring import (
    Results,
    Target,
    faulted_bytes,
    forget_peak,
    machine_speeds,
    peak_bytes,
    resident_bytes,
    table,
)
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import small_model, start_run, values
from tests.test_architecture import ROOT


def quickly(name: str, out: Path, *options: str, file: str | None = None) -> dict[str, Any]:
    """What a benchmark writes, in its quick form or with these options. It is a process of its own: it takes over
    signals and limits."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *(options or ["--quick"]), "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / (file or f"{name}.json")).read_text())
    return found


@pytest.mark.long
@pytest.mark.timeout(300)  # five processes that import much, twice
@pytest.mark.parametrize("options", [(), ("--tls",)])
def test_rounds_are_measured_beside_the_bare_loop_with_the_same_bytes(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = "rounds-tls.json" if options else "rounds.json"
    rows = quickly("rounds", tmp_path, "--quick", *options, file=file)["rows"]
    assert [(row["side"], row["exchange"]) for row in rows] == [
        ("tessera", "full"),
        ("bare loop", "full"),
        ("tessera", "prompts"),
        ("bare loop", "prompts"),
    ]
    for ours, bare in zip(rows[::2], rows[1::2], strict=True):
        assert ours["round_s"] > 0
        assert bare["down_MB"] == pytest.approx(ours["down_MB"], abs=1e-5)
        assert bare["up_MB"] == pytest.approx(ours["up_MB"], abs=1e-5)


@pytest.mark.long
def test_waiting_workers_are_all_given_their_task(tmp_path: Path) -> None:
    (row,) = quickly("idle", tmp_path)["rows"]
    assert (row["workers"], row["refused"]) == (20, 0)
    assert row["polls_per_s"] > 0
    assert row["last_claim_s"] > 0


@pytest.mark.long
@pytest.mark.timeout(300)  # it measures after half a minute
def test_a_crowd_sends_updates_that_are_accepted(tmp_path: Path) -> None:
    (row,) = quickly("crowd", tmp_path)["rows"]
    assert (row["workers"], row["refused"]) == (20, 0)
    assert row["accepted_per_s"] > 0
    assert row["statements"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)  # 42,000 images are read twice
def test_memory_does_not_grow_with_images_on_disk(tmp_path: Path) -> None:
    rows = quickly("images", tmp_path, "--examples", "2000", "20000", "--side", "64")["rows"]
    assert [(row["examples"], row["pixels"], row["loaders"]) for row in rows] == [
        (2000, "memory", None),
        (2000, "disk", 0),
        (2000, "disk", 2),
        (20000, "disk", 0),
        (20000, "disk", 2),
    ]
    # The pixels of 18,000 images are 840 MiB.
    assert rows[3]["pss_MiB"] - rows[1]["pss_MiB"] < 100
    assert rows[4]["pss_MiB"] - rows[2]["pss_MiB"] < 100
    assert rows[4]["pss_MiB"] < 2048


@pytest.mark.long
def test_steps_are_timed_by_what_trains(tmp_path: Path) -> None:
    rows = {row["trains"]: row for row in quickly("steps", tmp_path)["rows"]}
    assert rows["full"]["of_full"] == 1
    assert all(row["ms"] > 0 for row in rows.values())


@pytest.mark.long
@pytest.mark.timeout(300)  # ten processes that import much
def test_chosen_layers_are_measured_beside_all(tmp_path: Path) -> None:
    rows = quickly("chosen_layers", tmp_path)["rows"]
    (whole,) = (row for row in rows if row["trains"] == "all adapters")
    half = [row for row in rows if row["layers"] == 2 and row["trains"] in ("last", "spread")]
    # Two of four layers have half of the adapters' bytes, whatever else the model has.
    assert [row["upload_kB"] for row in half] == [pytest.approx(whole["upload_kB"] / 2)] * 2
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.long
def test_a_cut_upload_arrives(tmp_path: Path) -> None:
    (row,) = quickly("uploads", tmp_path)["rows"]
    assert row["cuts"] == 3
    assert row["sent_MB"] >= row["without_MB"] >= 4.0


@pytest.mark.long
@pytest.mark.timeout(300)  # three processes that import much
def test_simulated_clients_are_counted_beside_training_alone(tmp_path: Path) -> None:
    rows = quickly("simulations", tmp_path)["rows"]
    assert [(row["side"], row["processes"]) for row in rows] == [("bare", 1), ("tessera", 1), ("tessera", 2)]
    assert all(row["clients_per_s"] > 0 and row["pss_MB"] > 0 for row in rows)


def test_a_table_has_every_column_that_a_row_has() -> None:
    rows: list[dict[str, Any]] = [{"side": "a", "s": 0.125}, {"side": "long", "MB": 3}]
    assert table(rows).splitlines() == ["side      s  MB", "a     0.125   -", "long      -   3"]


def test_a_target_is_missed_above_its_limit() -> None:
    assert Target("share", 0.3, 0.3).met
    assert not Target("share", 0.31, 0.3).met
    assert str(Target("share", 0.31, 0.3)).startswith("MISSED")


def test_results_are_written_with_what_the_machine_was(tmp_path: Path) -> None:
    results = Results("some", "about", out=tmp_path)
    results.add(side="a", seconds=1.5)
    # An interrupted benchmark keeps its rows.
    assert json.loads((tmp_path / "some.json").read_text())["rows"] == [{"side": "a", "seconds": 1.5}]
    results.aim("share", 2.0, 1.5)
    results.speeds |= {"copy_GB_s": 5.0}
    written = json.loads(results.write(tmp_path).read_text())
    assert written["rows"] == [{"side": "a", "seconds": 1.5}]
    assert written["targets"][0]["met"] is False
    assert written["machine"]["cores"] == os.cpu_count()
    assert written["machine"]["copy_GB_s"] == 5.0


def test_the_speeds_of_the_machine_are_measured() -> None:
    speeds = machine_speeds(1 << 22)
    assert list(speeds) == [
        f"{name}_GB_s" for name in ("first_touch", "touch_again", "copy", "sha256", "new_file", "loopback")
    ]
    assert min(speeds.values()) > 0


def test_a_peak_is_forgotten() -> None:
    pid = os.getpid()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
    high = peak_bytes(pid)
    del block
    forget_peak(pid)
    assert high > resident_bytes([pid])
    assert peak_bytes(pid) < high


def test_memory_that_is_touched_for_the_first_time_is_counted() -> None:
    pid, nbytes = os.getpid(), 4 << 20
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    before = faulted_bytes([pid])
    memory[:: mmap.PAGESIZE] = b"x" * (nbytes // mmap.PAGESIZE)
    assert faulted_bytes([pid]) - before >= nbytes
    # Of a process that has ended, nothing is known.
    assert faulted_bytes([1 << 30]) == 0


def test_a_run_that_cannot_start_is_reported_with_the_reasons(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    run = start_run(client, model, values(model))
    assert ineligibilities(client, run) == "0 of 1 sites are eligible: no worker is live"


@pytest.mark.long
def test_a_secure_sum_has_small_envelopes_and_a_right_mean(tmp_path: Path) -> None:
    found = quickly("secure_sums", tmp_path)
    sizes = {row["helpers"]: row["envelope_bytes"] for row in found["rows"] if row["what"] == "sender"}
    assert sizes[4] < 2_000 < sizes[7] < 6_000
    errors = {row["what"]: row["relative_error"] for row in found["rows"] if row["what"].startswith("mean")}
    later = [error for what, error in errors.items() if what.startswith("mean, 32 bits") and what.endswith("later")]
    assert len(later) == 6
    assert all(0 < error < 1e-3 for error in later)

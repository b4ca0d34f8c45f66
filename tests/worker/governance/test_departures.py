"""A person reads from the audit what left, when and to whom, whatever texts are in it."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tessera.worker.cli.worker import app
from tessera.worker.governance.departures import as_csv, as_html, block_names, departures, totals
from tessera.worker.settings import read_settings
from tessera.worker.state.audit import Audit
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.stores import audit_of
from tests.support.chain_rows import ChainRows

HOSTILE = "<script>alert(1)</script>\"'&{style}\u202eevil\n"


def audit(folder: Path, asked_by: str = "trial-office", by: str = "Dr. Ann Lee (user root)") -> Audit:
    """Two rounds of one run that a person approved, and one evaluation."""
    found = Audit(folder / "audit", "w", b"k" * 32)
    found.record_of_run("run.approve", "r1", "lungs", by=by, terms="t")
    for number in (1, 2):
        task = TaskRef("r1", "lungs", number, f"t{number}", 1)
        found.record("task.start", task, kind="train", orchestrator=asked_by)
        found.record("update.release", task, update=f"sha256:{number}", by="bob")
        found.record(
            "update.leave", task, dataset="wards", examples=180, update=f"sha256:{number}", bytes=1000 * number,
            blocks=5, sent="all head and 4 of 12 value blocks", epsilon=1.5 * number,
            figures={"loss": 0.25, "steps": 12}, **found.named(["head.weight", "v.0"]),
        )  # fmt: skip
    found.record("update.count", TaskRef("r1", "lungs", 1, "t1", 1), update="sha256:1")
    task = TaskRef("r1", "lungs", 2, "t3", 1)
    found.record("task.start", task, kind="evaluate", orchestrator=asked_by)
    counts = {"labels": [1, 2], "predictions": [2, 1], "hits": [1, 1]}
    found.record("figures.leave", task, dataset="wards", examples=45, figures={"accuracy": 0.9}, class_counts=counts)
    return found


def test_each_departure_says_what_left_when_to_whom_and_who_approved_it(tmp_path: Path) -> None:
    entries = audit(tmp_path).read()
    first, second, figures = departures(entries, None, None)
    assert (first.sent, first.study, first.round, first.asked_by) == ("update", "lungs", 1, "trial-office")
    assert first.approved_by == f"Dr. Ann Lee (user root) ({entries[0].at:%Y-%m-%d}); released by bob"
    assert (first.dataset, first.examples, first.bytes, first.epsilon) == ("wards", 180, 1000, 1.5)
    assert (first.blocks, first.figures) == ("5: all head and 4 of 12 value blocks", "loss 0.25, steps 12")
    assert (first.counted, second.counted) == ("yes", "no")
    assert (figures.sent, figures.figures, figures.bytes) == ("figures", "accuracy 0.9, counts by class", 0)
    # Both updates have a cost of privacy for the whole run: the last one holds.
    assert totals([first, second, figures]) == [("lungs", "wards", 2, 1, 3000, 3.0)]
    assert block_names(entries) == {"lungs, 5: all head and 4 of 12 value blocks": ["head.weight", "v.0"]}


def test_a_period_has_its_first_and_last_day_and_knows_earlier_approvals(tmp_path: Path) -> None:
    entries = audit(tmp_path).read()
    today = datetime.now(UTC).date()
    later = [
        entry.model_copy(update={"at": entry.at + timedelta(days=2)}) if entry.action == "figures.leave" else entry
        for entry in entries
    ]
    assert len(departures(later, entries[0].at.date(), today)) == 2
    (figures,) = departures(later, today + timedelta(days=1), None)
    assert figures.approved_by.startswith("Dr. Ann Lee")
    assert departures(later, date(2020, 1, 1), date(2020, 12, 31)) == []


def test_a_text_of_a_coordinator_is_no_part_of_the_page_and_no_formula(tmp_path: Path) -> None:
    entries = audit(tmp_path, asked_by=HOSTILE, by="=HYPERLINK(1)").read()
    found = departures(entries, None, None)
    page = as_html(found, {HOSTILE: [HOSTILE]}, {"site": HOSTILE, "period": "p", "head": "h"}, datetime.now(UTC))
    assert "<script" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;" in page
    assert len(re.findall("<tr>", page)) == 2 + 1 + len(found)
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert len(rows) == len(found)
    assert rows[0]["approved_by"].startswith("'=HYPERLINK")
    assert "\u202e" not in rows[0]["asked_by"]


def test_a_report_is_made_of_an_intact_audit_alone(tmp_path: Path) -> None:
    config = tmp_path / "w.toml"
    config.write_text(
        f'url = "https://localhost:9"\ntoken = "x"\nname = "w"\nstate_dir = "{tmp_path}/state"\n'
        '[datasets.digits]\nkind = "digits"\n'
    )
    site = audit_of(read_settings(config))
    left = TaskRef("r1", "lungs", 1, "t1", 1)
    head = site.record("update.leave", left, dataset="wards", examples=9, bytes=7, blocks=1).digest

    def say(out: str, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["report", "--config", str(config), "--out", str(tmp_path / out), *arguments])

    assert say("page.html").exit_code == 0
    assert head in (tmp_path / "page.html").read_text()
    assert say("table.CSV", "--from", "2020-01-01", "--until", "2020-12-31").exit_code == 0
    assert len((tmp_path / "table.CSV").read_text().splitlines()) == 1
    assert "ends in .html or .csv" in say("page.pdf").stderr
    shown = CliRunner().invoke(app, ["report", "--config", str(config), "--json"])
    assert json.loads(shown.stdout)["departures"][0]["study"] == "lungs"
    assert "before the first" in say("page.html", "--from", "2020-01-02", "--until", "2020-01-01").stderr
    file = ChainRows(tmp_path / "state", "audit")
    file.write_bytes(file.read_bytes().replace(b'"bytes":7', b'"bytes":8'))
    broken = say("other.html")
    assert (broken.exit_code, (tmp_path / "other.html").exists()) == (1, False)

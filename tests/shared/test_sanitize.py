"""Texts of others in tables: no spreadsheet computes any part of them."""

from __future__ import annotations

import csv
import re
from io import StringIO

import pytest

from tessera.coordinator.dashboard.records import as_csv
from tessera.shared.metrics.rows import MetricRow, write_csv
from tessera.shared.sanitize import fit_for_table, no_formula

PAYLOAD = "=cmd|' /C calc'!A0"


@pytest.mark.parametrize("separator", [",", ";", "|", "\t", "\r", "\n", "\r\n", '";"', "; ", ';" '])
@pytest.mark.parametrize("begin", "=+-@")
def test_no_piece_of_a_text_begins_a_formula(separator: str, begin: str) -> None:
    cell = no_formula(f"x{separator}{begin}2+3{separator}y")
    assert cell == f"x{separator}'{begin}2+3{separator}y"
    assert no_formula(f"{begin}2+3") == f"'{begin}2+3"


@pytest.mark.parametrize(
    "cell",
    [
        -1.5, -3, None, True, "-3", "+4.5e-07", "1;-2", "[-1, -2.5]", '{"at": -3}', "a-b=c+d@e",
        "2026-07-01T12:00:00+00:00", "", "x;", "no site; 2 of 3",
    ],
)  # fmt: skip
def test_numbers_dates_and_other_texts_stay_as_they_are(cell: object) -> None:
    assert no_formula(cell) == cell


def test_a_cell_of_a_table_has_no_escapes() -> None:
    assert fit_for_table("=a\x1b[2Jb\u202ec") == "'=a\ufffd[2Jb\ufffdc"


def test_a_table_split_at_any_separator_has_no_formula() -> None:
    text = f"x;{PAYLOAD}\n{PAYLOAD}"
    rows = [MetricRow("run", 1, None, None, "sites", text, "a", "w", f"loss;{PAYLOAD}", -0.5)]
    write_csv(rows, written := StringIO(newline=""))
    for table in (written.getvalue(), bytes(as_csv("failures", ("detail",), [(text,)]).body).decode()):
        for separator in ",;|\t":
            cells = [cell for row in csv.reader(StringIO(table), delimiter=separator) for cell in row]
            pieces = [piece for cell in cells for piece in re.split(r"[,;|\t\r\n]", cell)]
            assert [piece for piece in pieces if re.match(r"""["\s]*[=+@]""", piece)] == []
    (row,) = csv.DictReader(StringIO(written.getvalue()))
    assert row["value"] == "-0.5"

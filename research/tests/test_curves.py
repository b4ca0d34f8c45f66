"""What saved curves tell, recomputed from the rows, and what the guide says of it."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import pytest

from common.document import block, tidied
from evidence import store
from evidence.curves import COMMAND, lines, reached, stays_from
from evidence.plan import Plan
from evidence.report.rows import Row, row
from tests.paths import ROOT


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    """The saved runs as the file has them, by arm, without the report's code."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in store.loaded():
        if run["seed"] and (run["table"], run["setting"]) in (("S-a", "K-2"), ("F-t", "alpha-0.1")):
            found.setdefault(f"{run['table']} {run['arm']}", []).append(run)
    return found


def pair(full: Plan, table: str, arm: str, reference: str) -> list[Row]:
    of, found = full.tables[table], store.of_plan(full, store.loaded())
    return [row(full, found, table, of.concluding, of.arm(name)) for name in (arm, reference)]


def curve_of(run: dict[str, Any]) -> list[float]:
    scores = [each for each in run["scores"] if each["part"] == "unseen" and each["curve"]]
    return [each["macro_f1"] for each in sorted(scores, key=lambda each: each["version"])]


def test_a_curve_stays_from_its_last_version_below_the_aim_on() -> None:
    assert stays_from([0.1, 0.5, 0.4, 0.5, 0.6], 0.5) == 3
    assert stays_from([0.5, 0.6], 0.5) == 0
    assert stays_from([0.5, 0.4], 0.5) is None


@pytest.mark.parametrize(
    ("table", "arm", "reference"), [("S-a", "attention", "full"), ("F-t", "values-alone", "fedavg")]
)
def test_rounds_and_bytes_to_an_accuracy_are_those_of_the_saved_rows(
    full: Plan, rows: dict[str, list[dict[str, Any]]], table: str, arm: str, reference: str
) -> None:
    own, base = rows[f"{table} {arm}"], rows[f"{table} {reference}"]
    ends = {run["seed"]: fmean(curve_of(run)[-5:]) for run in base}
    means = [fmean(values) for values in zip(*map(curve_of, own), strict=True)]
    aim = 0.95 * fmean(ends.values())
    rounds = next(version for version in range(81) if all(score >= aim for score in means[version:]))
    made = reached(*pair(full, table, arm, reference), 0.95)
    assert made.rounds == rounds
    assert made.up == pytest.approx(fmean(sum(run["upload_bytes"][:rounds]) for run in own) / 1e6)
    moved = [sum(run["upload_bytes"][:rounds]) + sum(run["download_bytes"][:rounds]) for run in own]
    assert made.both == pytest.approx(fmean(moved) / 1e6)
    firsts = [next(v for v, score in enumerate(curve_of(run)) if score >= 0.95 * ends[run["seed"]]) for run in own]
    assert made.median_seed == median(firsts)


def test_attention_never_picks_the_first_and_the_last_layer() -> None:
    counts = [
        {pick["layer"]: pick["count"] for pick in run["picks"]}
        for run in store.loaded()
        if (run["table"], run["arm"]) == ("S-a", "attention") and run["seed"]
    ]
    assert len(counts) == 13
    assert all(of_run["picks.0"] == of_run["picks.5"] == 0 < of_run["picks.1"] for of_run in counts)


def test_the_guide_says_what_adapters_and_freezing_save_at_equal_accuracy(full: Plan) -> None:
    guide = " ".join((ROOT.parent / "docs/which-method.md").read_text(encoding="utf-8").split())

    def shares(table: str, arm: str, reference: str, share: float) -> tuple[int, int, float, float]:
        own, base = pair(full, table, arm, reference)
        one, other = reached(own, base, share), reached(base, base, share)
        assert one.rounds is not None
        assert other.rounds is not None
        return one.rounds, other.rounds, 100 * one.up / other.up, 100 * one.both / other.both

    rounds, whole, up, both = shares("S-a", "lora", "full", 0.9)
    assert (
        f"takes {rounds} rounds in place of {whole}, with {up:.0f} % of the bytes up and {both:.0f} % both" in guide
    )
    assert reached(*pair(full, "S-a", "lora", "full"), 0.95).rounds is None
    saved = [
        round(100 - shares("F-t", arm, "fedavg", 0.95)[2]) for arm in ("values-alone", "fedfrozen", "dropped-rate")
    ]
    assert f"it saves {saved[0]} % of the uploads until 95 %, and the default {saved[1]} %" in guide
    assert f"which freezes nothing, saves {saved[2]} % until there (exploratory)" in guide


def test_the_document_has_what_the_command_prints(full: Plan) -> None:
    assert block(COMMAND) == tidied(lines(full, store.of_plan(full, store.loaded())))

"""The report of the tables of evidence, from raw rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

from common.document import block, tidied, write_block
from common.names import DISAGREEMENT, FROZEN_FROM, MOVEMENT
from evidence import store
from evidence.__main__ import passed
from evidence.federations import SEEN, UNSEEN
from evidence.jobs import Job, choice, setup_of
from evidence.plan import Plan, Question, SecondRules, digest_of
from evidence.report.findings import Direction, Finding, directed, directions, findings
from evidence.report.lines import lines
from evidence.report.pictures import drawable
from evidence.report.rows import row, void
from evidence.report.section import COMMAND, section, write
from tessera.simulation.comparison.statistics import equivalence_p, interval, paired, sign_flip_p
from tests.paths import ROOT


def raw(arm: str, seed: int, curve: list[float], accuracy: float = 0.6, rate: float = 1e-3) -> dict[str, Any]:
    """A run's figures, with these scores by version, of which the last two count."""
    rows = [
        {"part": part, "site": "", "version": version, "curve": is_curve, "examples": 400,
         "accuracy": accuracy, "macro_f1": value}
        for part in (UNSEEN, SEEN)
        for version, value in enumerate(curve)
        for is_curve in (True, False)
        if is_curve or version >= 2
    ]  # fmt: skip
    rows += [
        {"part": "sites", "site": site, "version": version, "curve": False, "examples": 10,
         "accuracy": value, "macro_f1": value}
        for site, value in (("a", 0.5), ("b", 0.7))
        for version in (2, 3)
    ]  # fmt: skip
    most = [{"part": part, "examples": 400, "accuracy": 0.13, "macro_f1": 0.01} for part in (UNSEEN, SEEN, "sites")]
    return {
        "table": "T", "setting": "K-1", "arm": arm, "seed": seed, "rate": rate, "inputs": "x", "machine": "m",
        "seconds": 2.0, "cpu_seconds": 1.0, "score": curve[-1], "digest": "d", "upload_bytes": [2_000_000] * 3,
        "download_bytes": [1_000_000] * 3, "picks": [], "majority": most, "scores": rows,
    }  # fmt: skip


def found_of(tiny: Plan, *figures: dict[str, Any]) -> dict[Job, dict[str, Any]]:
    jobs = {store.job_of(each): each for each in figures}
    return {job: {**each, "setup": setup_of(tiny, job)} for job, each in jobs.items()}


FLAT = [0.1, 0.5, 0.5, 0.5]


def flat(level: float) -> list[float]:
    return [0.1, level, level, level]


def test_report_of_raw_rows(tiny: Plan) -> None:
    seeds = {1: (0.50, 0.53), 2: (0.52, 0.54)}
    figures = [raw(arm, seed, flat(pair[n])) for seed, pair in seeds.items() for n, arm in enumerate(("full", "one"))]
    tables = "\n".join(lines(tiny, found_of(tiny, *figures)))
    # The mean over both seeds, and the interval of differences of 3 and 2 points: 2.5 +- 12.706 * 0.7071 / sqrt(2).
    assert (
        "| full | 2 | 51.0 ± 1.4 | 51.0 ± 1.4 | 60.0 ± 0.0 | 50.0 ± 0.0 | 10.0 ± 0.0 |  |  "
        "| +0.00 ± 0.00 | 0.00 ± 0.00 | 6 ± 0 | 3 ± 0 | 51.0 ± 1.4 |  |" in tables
    )
    # On unseen and on seen examples, and at the bytes of `one`.
    assert "| 10.0 ± 0.0 | +2.5 [-3.9, +8.9] | +2.5 [-3.9, +8.9] | +0.00" in tables
    assert "| 53.5 ± 0.7 | +2.5 [-3.9, +8.9] |" in tables
    assert "| **T.1 One layer gains** | +2.5 [-3.9, +8.9] | 2 | 2 of 2 | - | 0.5 | interval alone |" in tables
    assert "| most frequent class of all sites | | 1.0 | 1.0 | 13.0 |" in tables
    assert "**Void**" not in tables
    assert "4 runs took 2 ± 0 seconds each, 1 ± 0 of a core, on m." in tables
    assert "Arms that were not run: lora, wide, local, central." in tables
    assert "Settings that were not run: away, dropout." in tables


def test_report_of_selections_and_warm_ups(tiny: Plan) -> None:
    chosen = {"turnover": 0.5, "overlap": 0.4, "chance": 0.2, "union": None}
    moved = [
        {"name": name, "version": version, "value": value}
        for version in (1, 2)
        for name, value in ((MOVEMENT, 2.0), (DISAGREEMENT, 2.0 + version))
    ]
    frozen = [*moved, {"name": FROZEN_FROM, "version": 2, "value": 2.0}]
    found = found_of(
        tiny,
        raw("full", 1, FLAT),
        {**raw("one", 1, FLAT), "selections": chosen, "signals": moved},
        {**raw("one", 2, FLAT), "selections": chosen, "signals": frozen},
    )
    tables = "\n".join(lines(tiny, found))
    assert "| one | 0.50 ± 0.00 | 0.40 ± 0.00 | 0.20 ± 0.00 | - |" in tables
    # One warm-up of all 3 rounds and one of 2; steps of length 2 that differ by 3 and by 4.
    assert "| one | 2 ± 1 | 1.8 ± 0.0 | 1.8 ± 0.0 |" in tables
    assert "| full | 0." not in tables


def test_questions_are_answered_by_claims(tiny: Plan) -> None:
    asked = [
        Question(paper="One", text="Does one gain?", claims=("T.1",)),
        Question(paper="One", text="Why?", answer="Unknown."),
    ]
    plan = tiny.model_copy(update={"questions": tuple(asked)})
    assert "- *Does one gain?* T.1: not run." in list(lines(plan, {}))
    assert "\nNot run: T.1 One layer gains." in list(lines(plan, {}))
    figures = [raw(arm, seed, flat(value)) for seed in (1, 2) for arm, value in (("full", 0.5), ("one", 0.53))]
    shown = list(lines(plan, found_of(plan, *figures)))
    assert "- *Does one gain?* T.1: +3.0 [+3.0, +3.0], interval alone." in shown
    assert "- *Why?* Unknown." in shown
    with pytest.raises(ValidationError, match=r"no claim is called T.9; there are T.1"):
        Plan.model_validate({**tiny.model_dump(), "questions": [{"paper": "One", "text": "Who?", "claims": ["T.9"]}]})
    with pytest.raises(ValidationError, match="give claims or an answer: Who"):
        Question(paper="One", text="Who?")


def test_headline_differences_are_shown_at_other_times(tiny: Plan) -> None:
    curves = {"full": [0.1, 0.3, 0.4, 0.6], "one": [0.1, 0.5, 0.6, 0.6]}
    shown = "\n".join(lines(tiny, found_of(tiny, *(raw(name, 1, curve) for name, curve in curves.items()))))
    # Versions 2 and 3; versions 0 and 1; and versions about their line, which needs more of them.
    assert "| T.1 | one less full | +10.0 (one seed) | +10.0 (one seed) | -" in shown


def test_a_seed_that_the_plan_does_not_ask_for_is_in_no_difference(tiny: Plan) -> None:
    values = {1: 0.03, 2: 0.03, 3: 0.30}
    runs = [raw("full", seed, flat(0.5)) for seed in values]
    runs += [raw("one", seed, flat(0.5 + value)) for seed, value in values.items()]
    assert findings(tiny, found_of(tiny, *runs))[0].differences == pytest.approx([3.0, 3.0])


def test_equal_bytes_end_the_dearer_run_early(tiny: Plan) -> None:
    cheap = {**raw("one", 1, [0.1, 0.2, 0.3, 0.4]), "upload_bytes": [1_000_000] * 3, "download_bytes": [0] * 3}
    found = found_of(tiny, cheap, raw("full", 1, [0.1, 0.3, 0.5, 0.6]))
    table = tiny.tables["T"]
    rows = {name: row(tiny, found, "T", table.settings[0], table.arm(name)) for name in ("one", "full")}
    budgets = {seed: totals[-1] for seed, totals in rows["one"].moved().items()}
    # Three megabytes are all of the one's rounds, and one round of the other's.
    assert budgets == {1: 3.0}
    assert rows["one"].at_bytes(budgets) == pytest.approx({1: 40.0})
    assert rows["full"].at_bytes(budgets) == pytest.approx({1: 30.0})


def test_less_than_a_megabyte_is_shown_to_the_kilobyte(tiny: Plan) -> None:
    sent = {"full": [1_400_000, 0, 0], "one": [7_400, 0, 0]}
    found = found_of(tiny, *({**raw(name, 1, FLAT), "upload_bytes": each} for name, each in sent.items()))
    shown = list(lines(tiny, found))
    place = next(line for line in shown if line.startswith("| arm | seeds")).split(" | ").index("MB up")
    of_arm = {name: next(line for line in shown if line.startswith(f"| {name} | 1 |")) for name in sent}
    assert {name: line.split(" | ")[place] for name, line in of_arm.items()} == {"full": "1", "one": "0.007"}


def test_table_whose_reference_does_not_learn_is_void(tiny: Plan) -> None:
    # Five standard errors at 400 examples: 0.13 + 5 sqrt(0.13 * 0.87 / 400) = 0.214.
    figures = [raw("full", 1, FLAT, accuracy=0.21), raw("one", 1, FLAT)]
    tables = "\n".join(lines(tiny, found_of(tiny, *figures)))
    assert "**Void**: `full` has accuracy 21.0 with seed 1, less than 5 standard errors above" in tables
    assert "| void; 1 of 2 seeds |" in tables
    setting = tiny.tables["T"].settings[0]
    assert void(tiny, found_of(tiny, raw("full", 1, FLAT, accuracy=0.22)), "T", setting) is None


def test_nothing_is_concluded_from_rows_that_still_rise(tiny: Plan) -> None:
    rising = [0.1, 0.500, 0.502, 0.504]
    figures = [raw(arm, seed, curve) for seed in (1, 2) for arm, curve in (("full", FLAT), ("one", rising))]
    tables = "\n".join(lines(tiny, found_of(tiny, *figures)))
    assert "| +0.20 ± 0.00, not flat |" in tables
    assert "| not flat: one |" in tables
    # All that speaks against a conclusion is named.
    assert "| 1 of 2 seeds; not flat: one |" in "\n".join(lines(tiny, found_of(tiny, figures[0], figures[1])))


def test_differences_to_a_row_that_still_rises_say_so(tiny: Plan) -> None:
    rising = [0.1, 0.500, 0.502, 0.504]
    for curve, shown in ((rising, "| unseen less full, not flat |"), (FLAT, "| unseen less full |")):
        figures = [raw("full", 1, curve), raw("one", 1, FLAT)]
        assert any(shown in line for line in lines(tiny, found_of(tiny, *figures)))


def test_a_claim_says_which_learning_rate_is_at_an_end(tiny: Plan) -> None:
    protocol = tiny.protocol.model_copy(update={"factors": (1.0, 3.0)})
    plan = tiny.model_copy(update={"protocol": protocol})
    figures = [raw(arm, seed, FLAT) for seed in (1, 2) for arm in ("full", "one")]
    # The better one of two is at an end.
    tuned = [raw("one", 0, flat(0.4)), raw("one", 0, flat(0.3), rate=3e-3)]
    shown = "\n".join(lines(plan, found_of(plan, *tuned, *figures)))
    assert "rate at an end: one |" in shown
    assert "| one | K-1 | 0.001, at an end | 0.001: 40.0, 0.003: 30.0 |" in shown
    assert "rate at an end: one" not in "\n".join(lines(plan, found_of(plan, *figures)))


def test_what_sites_fetch_to_measure_their_own_models_is_not_compared(tiny: Plan) -> None:
    found = found_of(tiny, raw("full", 1, FLAT), raw("local", 1, FLAT), raw("central", 1, FLAT))
    table = tiny.tables["T"]
    rows = {name: row(tiny, found, "T", table.settings[0], table.arm(name)) for name in ("full", "local", "central")}
    assert {name: (each.megabytes("upload"), each.megabytes("download")) for name, each in rows.items()} == {
        "full": ([6.0], [3.0]),
        "local": ([6.0], []),
        "central": ([], []),
    }


def test_headline_differences_are_shown_by_machine(tiny: Plan) -> None:
    machines = {1: "A, x86_64", 2: "A, x86_64", 3: "B, x86_64"}
    figures = [
        {**raw(arm, seed, flat(value + seed / 100 * (arm == "one"))), "machine": machine}
        for seed, machine in machines.items()
        for arm, value in (("full", 0.5), ("one", 0.5))
    ]
    protocol = tiny.protocol.model_copy(update={"headline_seeds": (1, 2, 3)})
    plan = tiny.model_copy(update={"protocol": protocol})
    shown = "\n".join(lines(plan, found_of(plan, *figures)))
    assert "| T.1 | one less full | A | 2 | +1.5 [-4.9, +7.9] |" in shown
    assert "| T.1 | one less full | B | 1 | +3.0 (one seed) |" in shown
    # Of one machine there is nothing to compare, and a pair from two machines is of neither.
    mixed = [figures[0], {**figures[1], "machine": "B"}, *figures[2:4]]
    assert "by machine" not in "\n".join(lines(plan, found_of(plan, *mixed)))


def verdict(tiny: Plan, differences: list[float], **changes: Any) -> str:
    claim = tiny.tables["T"].claims[0].model_copy(update=changes)
    p = sign_flip_p(differences) if claim.kind == "greater" else equivalence_p(differences, claim.margin)
    return Finding(claim, "T", differences, p, None).verdict(0.05)


def test_sites_that_missed_rounds_are_compared_apart_and_leave_no_slope(tiny: Plan) -> None:
    def sites(arm: str, late: float) -> dict[str, Any]:
        run = {**raw(arm, 1, FLAT), "setting": "away", "absent": ["b"]}
        rows = [
            {"part": "sites", "site": site, "version": version, "curve": False, "examples": 10,
             "accuracy": value, "macro_f1": value}
            for site, value, first in (("a", 0.5, 0), ("b", late, 2))
            for version in range(first, 4)
        ]  # fmt: skip
        return {**run, "scores": rows}

    found = found_of(tiny, sites("local", 0.9))
    table = tiny.tables["T"]
    local = row(tiny, found, "T", table.setting("away"), table.arm("local"))
    assert local.final("sites", absent=True) == pytest.approx({1: 90.0})
    assert local.final("sites") == pytest.approx({1: 70.0})
    assert local.curves("sites") == {1: [50.0] * 4}
    assert not local.is_rising


def test_a_setting_without_the_reference_has_that_of_the_conclusion(full: Plan) -> None:
    table = full.tables["S-a"]
    assert {name: table.reference_of(table.setting(name)).name for name in ("K-2", "K-1")} == {
        "K-2": "K-2", "K-1": "K-2",
    }  # fmt: skip
    # Where other sites answer, FedAvg runs again.
    other = table.setting("K-1").model_copy(update={"name": "dropout", "dropout": 0.3})
    assert table.reference_of(other).name == "dropout"


def test_verdicts(tiny: Plan) -> None:
    assert verdict(tiny, [2.0, 3.0, 2.5, 2.0, 3.0, 2.2, 1.9]) == "supported"
    assert verdict(tiny, [-2.0, -3.0, -2.5, -2.0, -3.0, -2.2, -1.9]) == "refuted: the other way round"
    assert verdict(tiny, [0.1, -0.1, 0.0, 0.1, -0.2, 0.1]) == "refuted: equal within 1"
    assert verdict(tiny, [0.5, 0.6, 0.7, 0.6, 0.5, -0.1]) == "undecided: above 0, within 1"
    assert verdict(tiny, [3.0, -2.0, 1.0, 0.5, -1.0, 0.2]) == "undecided"
    # Of five differences no sign-flip test has a p below 0.0625, however large they are.
    assert verdict(tiny, [20.0, 21.0, 19.0, 20.0, 22.0]) == "interval alone"
    assert verdict(tiny, [0.1, -0.1, 0.0, 0.1, -0.2], kind="equivalent") == "supported"
    assert verdict(tiny, [-3.0, -3.1, -2.9, -3.2], kind="equivalent") == "refuted: worse"
    assert verdict(tiny, [3.0, 3.1, 2.9, 3.2], kind="equivalent") == "not equal: better"
    # The mean 0.3, and 2.132 standard errors of 0.860.
    assert verdict(tiny, [3.0, -2.0, 1.0, 0.5, -1.0], kind="equivalent") == "undecided: 90 % interval [-1.5, +2.1]"


def test_nothing_is_concluded_before_all_seeds_have_run_nor_from_a_seed_that_diverged(tiny: Plan) -> None:
    figures = [raw(arm, seed, flat(0.5)) for seed in (1, 2) for arm in ("full", "one")]
    assert "| 1 of 2 seeds |" in "\n".join(lines(tiny, found_of(tiny, *figures[:3])))
    burst = {**figures[3], "scores": [], "diverged": "diverged: the loss"}
    tables = "\n".join(lines(tiny, found_of(tiny, *figures[:3], burst)))
    assert "| one | 2, 1 diverged |" in tables
    assert "| diverged: one |" in tables


def test_a_table_whose_reference_stays_at_its_first_version_is_void(tiny: Plan) -> None:
    pretrained = [raw("full", seed, [0.5, 0.5, value, value]) for seed, value in ((1, 0.51), (2, 0.49))]
    reason = void(tiny, found_of(tiny, *pretrained), "T", tiny.tables["T"].settings[0])
    assert reason == "`full` does not gain over its first version: +0.0 [-12.7, +12.7]"


def test_a_table_whose_reference_stays_at_zero_shot_is_void(tiny: Plan) -> None:
    before = {"zero_shot": [{"part": UNSEEN, "examples": 400, "accuracy": 0.5, "macro_f1": 0.5}]}
    found = found_of(tiny, *({**raw("full", seed, flat(0.5)), **before} for seed in (1, 2)))
    reason = void(tiny, found, "T", tiny.tables["T"].settings[0])
    assert reason == "`full` does not gain over zero-shot, without prompts: +0.0 [+0.0, +0.0]"
    assert "| zero-shot, without prompts | 2 | 50.0 ± 0.0 | - | - | | |" in "\n".join(lines(tiny, found))


def test_a_slope_is_that_of_half_of_the_rounds_and_of_three_versions_at_least(tiny: Plan) -> None:
    table = tiny.tables["T"].model_copy(update={"rounds": 9})
    plan = tiny.model_copy(update={"tables": {"T": table}})
    run = raw("full", 1, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6])
    # Of the last four versions; half of nine is rounded to an even number.
    assert row(plan, found_of(plan, run), "T", table.settings[0], table.arm("full")).trend.slope == pytest.approx(0)


def test_families_are_adjusted_as_large_as_they_were_written(full: Plan) -> None:
    made = {each.claim.name: each for each in findings(full, {})}
    assert {name for name, each in made.items() if each.adjusted is not None} >= {"S-a.1", "S-a.2", "S-a.3"}
    assert made["S-a.1"].verdict(0.05) == "not run"


def pairs(*levels: tuple[float, float]) -> list[dict[str, Any]]:
    """Runs of `full` and `one` at these levels, seed by seed."""
    return [
        raw(arm, seed, flat(level))
        for seed, pair in enumerate(levels, 1)
        for arm, level in zip(("full", "one"), pair, strict=True)
    ]


def early(*levels: tuple[float, float]) -> list[dict[str, Any]]:
    """The same, in the two rounds of the short check."""
    return [
        {**each, "scores": [score for score in each["scores"] if score["version"] < 3]} for each in pairs(*levels)
    ]


def test_the_short_check_fails_if_a_direction_flips_or_a_run_diverges(
    tiny: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    short, known = tiny.shortened(), directed(tiny, found_of(tiny, *pairs((0.5, 0.6), (0.5, 0.6))))

    def checked(*figures: dict[str, Any]) -> tuple[bool, str]:
        return passed(known, short, found_of(short, *figures)), capsys.readouterr().out

    there = "and +10.0 [+10.0, +10.0] in the full runs\n"
    assert checked(*early((0.3, 0.31))) == (True, f"\nSame direction: T.1: one less full is +1.0 here, {there}")
    assert checked(*early((0.3, 0.29))) == (False, f"\nFLIPPED: T.1: one less full is -1.0 here, {there}")
    # One seed may differ.
    assert checked(*early((0.3, 0.29), (0.3, 0.4)))[0]
    assert not checked(*early((0.3, 0.3)))[0]
    one, two = early((0.3, 0.31))
    assert checked(one) == (True, "\nNot compared: T.1, without runs of both arms\n")
    assert (
        "DIVERGED: T/K-1/one/seed-1-rate-0.001\n" in checked(one, {**two, "scores": [], "diverged": "too large"})[1]
    )
    assert not checked(one, {**two, "scores": [], "diverged": "too large"})[0]


def test_a_direction_that_the_full_runs_left_open_cannot_flip(tiny: Plan) -> None:
    assert directed(tiny, found_of(tiny, *pairs((0.5, 0.6)))) == []
    assert directed(tiny, found_of(tiny, *pairs((0.5, 0.6), (0.5, 0.4)))) == []


def test_the_saved_runs_show_each_known_direction_in_the_rounds_and_seeds_of_the_short_check(full: Plan) -> None:
    found, short = store.of_plan(full, store.loaded()), full.shortened()
    # An arm with other settings in the short check has no curve of it in the saved runs.
    other = {(name, arm.name) for name, table in full.tables.items() for arm in table.arms if arm.short}
    known = [
        each
        for each in directed(full, found)
        if not other & {(each.table, each.claim.arm), (each.table, each.claim.against)}
    ]
    ended_early = {
        job: {**run, "scores": [each for each in run["scores"] if each["version"] <= short.tables[job.table].rounds]}
        for job, run in found.items()
        if job.table in short.tables and job.seed in short.protocol.seeds
    }
    shown = directions(known, short, ended_early)
    assert [each.known for each in shown] == known
    for each in shown:
        assert len(each.here) == len(short.protocol.seeds)
        assert all(Direction(each.known, [value]).is_kept for value in each.here)


def test_row_has_the_runs_of_the_chosen_rate(tiny: Plan) -> None:
    found = found_of(tiny, raw("full", 0, FLAT), raw("full", 1, flat(0.4), rate=1e-2), raw("full", 2, FLAT))
    scores = {job: figures["score"] for job, figures in found.items()}
    assert choice(tiny, scores, ("T", "K-1", "full")) == 1e-3
    table = tiny.tables["T"]
    assert [*row(tiny, found, "T", table.settings[0], table.arm("full")).runs] == [2]


def test_plot_of_raw_rows(tiny: Plan, tmp_path: Path) -> None:
    found = found_of(tiny, *(raw(arm, seed, FLAT) for seed in (1, 2) for arm in ("full", "one")))
    assert drawable(tiny, found, "T")
    assert not drawable(tiny, {}, "T")
    document = tmp_path / "evidence.md"
    begin = f"<!-- begin: {COMMAND} -->"
    document.write_text(f"before\n{begin}\nbygone\n<!-- end -->\nafter\n<!-- end -->\n", encoding="utf-8")
    write(tiny, found, "0123", document)
    written = document.read_text(encoding="utf-8")
    assert written.startswith(f"before\n{begin}\n\nPlan: ")
    assert written.endswith(")\n\n<!-- end -->\nafter\n<!-- end -->\n")
    assert "bygone" not in written
    assert "SHA-256 0123" in block(COMMAND, document)
    assert (tmp_path / "evidence-t.png").stat().st_size > 0
    # An empty block ends where it begins, and not where the next one does.
    document.write_text(f"<!-- begin: ls -->\n<!-- end -->\nbetween\n{begin}\n<!-- end -->\n", encoding="utf-8")
    write_block("ls", ["a"], document)
    assert document.read_text(encoding="utf-8").startswith("<!-- begin: ls -->\n\na\n\n<!-- end -->\nbetween\n")
    with pytest.raises(ValueError, match=r"evidence.md has no block of this command: add the lines <!-- begin: rm"):
        write_block("rm", [], document)


def test_the_document_has_the_report_of_the_saved_runs(full: Plan) -> None:
    found = store.of_plan(full, store.loaded())
    assert block(COMMAND) == tidied(section(full, found, digest_of(), store.repeated(full)))


def test_the_guide_splits_the_dropped_rate_by_machine_and_has_all_seeds_of_the_worst_site(full: Plan) -> None:
    found = store.of_plan(full, store.loaded())

    def pairs(table: str, setting: str, arms: tuple[str, str], part: str, *, worst: bool = False) -> list[float]:
        (where,) = (each for each in full.tables[table].settings if each.name == setting)
        one, other = (
            row(full, found, table, where, full.tables[table].arm(arm)).final(part, worst=worst) for arm in arms
        )
        return paired(one, other)

    gains = pairs("F-t", "alpha-0.1", ("dropped-rate", "fedavg"), UNSEEN)
    worst = pairs("P-a", "32-rounds", ("pfeddc", "nothing-averaged"), "sites", worst=True)
    least, most = interval(worst)
    guide = (ROOT.parent / "docs/which-method.md").read_text(encoding="utf-8")
    assert (
        f"{fmean(gains[:5]):+.1f} with seeds 1 to 5, all on CPUs, and {fmean(gains[5:]):+.1f} with seeds 6 to"
        in guide
    )
    assert len(worst) == 10
    assert f"give {fmean(worst):+.1f}, from {least:+.1f} to {most:+.1f}" in " ".join(guide.split())


def test_the_guide_counts_bytes_at_equal_accuracy_as_the_saved_runs_do(full: Plan) -> None:
    """Until the mean curve stays at 95 % of what all layers end with: rounds, and what is saved up and both ways."""
    table, found = full.tables["S-a"], store.of_plan(full, store.loaded())
    (setting,) = (each for each in table.settings if each.name == "K-2")
    rows = {arm: row(full, found, "S-a", setting, table.arm(arm)) for arm in ("full", "random", "attention", "last")}
    curves = {
        arm: [fmean(values) for values in zip(*each.curves(table.part).values(), strict=True)]
        for arm, each in rows.items()
    }
    aim = 0.95 * fmean(curves["full"][-5:])
    rounds = {
        arm: 1 + max(version for version, score in enumerate(curve) if score < aim) for arm, curve in curves.items()
    }
    up = {
        arm: fmean(sum(run["upload_bytes"][: rounds[arm]]) for run in each.runs.values())
        for arm, each in rows.items()
    }
    both = {arm: fmean(moved[rounds[arm]] for moved in each.moved().values()) for arm, each in rows.items()}
    saved = [
        round(100 * (1 - moved[arm] / moved["full"]))
        for moved in (up, both)
        for arm in ("random", "attention", "last")
    ]
    said = (
        f"these take {rounds['full']} rounds, random layers that all sites share {rounds['random']}, attention "
        f"{rounds['attention']} and the last ones {rounds['last']}, so that uploads are lower by {saved[0]}, "
        f"{saved[1]} and {saved[2]} %, and bytes both ways by {saved[3]}, {saved[4]} and {saved[5]} %"
    )
    assert said in (ROOT.parent / "docs/which-method.md").read_text(encoding="utf-8")


# ---------------------------------------------------------------- the second rules


SECOND = {"seeds": (11, 12, 13, 14, 15, 16), "headline_seeds": (11, 12, 13, 14, 15, 16), "drift_points": 3.0}


def again(tiny: Plan, **changes: Any) -> Plan:
    """The tiny plan by the second rules, with a setting that is its drift gate's."""
    table = tiny.tables["T"]
    alike = table.settings[0].model_copy(update={"name": "alike"})
    new = {"rules": 2, "alike": "alike", "settings": (table.settings[0], alike), **changes}
    protocol = tiny.protocol.model_copy(update={"second": SecondRules(**SECOND)})
    return tiny.model_copy(update={"protocol": protocol, "tables": {"T": table.model_copy(update=new)}})


def second_rows(plan: Plan, ones: list[float], alike: float = 0.6) -> dict[Job, dict[str, Any]]:
    """Rows of `full` at 0.5, of `one` at these levels, and of `full` without skew, from seed 11 on."""
    levels = [("K-1", "one", one) for one in ones] + [
        (s, "full", v) for s, v in (("K-1", 0.5), ("alike", alike)) for _ in ones
    ]
    found = {}
    for place, (setting, arm, level) in enumerate(levels):
        run = {**raw(arm, 11 + place % len(ones), flat(level)), "setting": setting}
        found[store.job_of(run)] = {**run, "setup": setup_of(plan, store.job_of(run))}
    return found


def test_by_the_second_rules_a_final_figure_is_of_the_second_half_and_only_its_part(tiny: Plan) -> None:
    plan = again(tiny)
    table = plan.tables["T"]
    assert plan.final_count(table, 40, UNSEEN) == 20
    assert plan.final_count(table, 3, UNSEEN) == 2
    assert plan.final_count(table, 40, SEEN) == plan.protocol.final_versions == 2
    assert plan.final_count(tiny.tables["T"], 40, UNSEEN) == 2
    longer = again(tiny, rounds=5)
    # As many versions as the table's part is measured on in whole.
    run = raw("full", 11, [0.1, 0.2, 0.3, 0.4, 0.5, 0.9])
    found = {store.job_of(run): run}
    of = row(longer, found, "T", longer.tables["T"].settings[0], longer.tables["T"].arm("full"))
    assert of.final(UNSEEN) == pytest.approx({11: 60.0})
    assert of.final(SEEN) == pytest.approx({11: 70.0})
    job = Job("T", "K-1", "full", 11, 1e-3)
    assert setup_of(plan, job) != setup_of(tiny, job)


def test_without_drift_nothing_is_concluded(tiny: Plan) -> None:
    plan = again(tiny)
    gains = [0.52, 0.53, 0.52, 0.54, 0.52, 0.53]

    def first(found: dict[Job, dict[str, Any]]) -> str:
        return findings(plan, found)[0].verdict(0.05)

    assert first(second_rows(plan, gains)) == "supported"
    assert first(second_rows(plan, gains, alike=0.52)) == "drift gate not passed"
    ungated = {job: run for job, run in second_rows(plan, gains).items() if job.setting != "alike"}
    assert first(ungated) == "drift gate not passed"
    shown = "\n".join(lines(plan, second_rows(plan, gains, alike=0.52)))
    assert "Drift gate: `full` loses +2.0 [+2.0, +2.0] to the same runs in alike: shut, so that nothing" in shown
    assert "**Void**: `full` loses 2.0 points to the same runs without skew, less than 3" in shown


def test_refutations_are_adjusted_as_support_is_by_the_second_rules(tiny: Plan) -> None:
    level = [0.504, 0.497, 0.506, 0.496, 0.506, 0.498]
    claim = tiny.tables["T"].claims[0]
    several = tuple(claim.model_copy(update={"name": f"T.{number}"}) for number in range(1, 4))

    def found(claims: tuple[Any, ...]) -> Finding:
        plan = again(tiny, claims=claims)
        return findings(plan, second_rows(plan, level))[0]

    alone, one_of_three = found((claim,)), found(several)
    assert alone.equal == pytest.approx(equivalence_p(alone.differences, 1.0))
    assert one_of_three.equal == pytest.approx(3 * alone.equal)
    assert alone.verdict(0.05) == "refuted: equal within 1"
    within = replace(one_of_three, equal=0.06)
    assert within.verdict(0.05) == "undecided"
    # A loss beyond the margin, by an interval for the whole family.
    worse = replace(alone, claim=claim.model_copy(update={"kind": "equivalent"}), adjusted=1.0)
    far = replace(worse, differences=[-1.0, -2.0, -3.0, -2.5, -2.4, -2.0])
    assert far.verdict(0.05) == "refuted: worse"
    assert replace(far, family=20).verdict(0.05).startswith("undecided")


def test_deleted_headline_claims_still_count_in_the_family(tiny: Plan) -> None:
    found = found_of(tiny, *pairs((0.5, 0.6), (0.5, 0.61)))
    alone = findings(tiny, found)[0]
    assert findings(tiny.model_copy(update={"unrun": {"None": 1}}), found)[0].adjusted == 2 * (alone.adjusted or 0)

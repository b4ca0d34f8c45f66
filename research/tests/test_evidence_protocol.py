"""The protocol of the tables of evidence: statistics, rates and runs on a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import f1_score

from controls.dropped_rate import DroppedRateSettings, DroppedRateWorker
from controls.random_frozen import RandomFrozenCoordinator, RandomFrozenSettings
from evidence import store
from evidence.__main__ import main, prepared_tables, time_left, work
from evidence.federations import SEEN, SOURCES, UNSEEN, NotPrepared, source
from evidence.jobs import Job, Selection, left, rows, setup_of, startable, whole_rounds
from evidence.plan import FILE, Away, Plan, UnusablePlan, read
from evidence.rates import Ladder, best
from evidence.report.lines import lines
from evidence.results_folder import RUNS, keep
from evidence.runs import _moved, divergence, method_settings, missed, run, spec_of
from evidence.scores import predictions, scored
from evidence.statistics import trend
from tessera.shared.api.cohort import Cohort
from tessera.shared.methods.base import Participant, RunInfo, State
from tessera.shared.methods.registry import methods
from tessera.shared.run_settings import Training
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tests.paths import ROOT, variants
from tests.test_evidence import TINY, made_up
from tests.test_evidence_report import pairs

LEVELS = ("alpha-0.1", "alpha-0.5")
"""The settings of F-t in which rates are chosen."""


# ---------------------------------------------------------------- statistics


def test_line_through_the_last_rounds() -> None:
    found = trend([1.0, 3.0, 2.0, 4.0])
    expected = stats.linregress(range(4), [1.0, 3.0, 2.0, 4.0])
    # The residuals of 1.3, 2.1, 2.9 and 3.7 are -0.3, 0.9, -0.9 and 0.3: their squares sum to 1.8.
    assert (found.slope, found.jitter) == pytest.approx((expected.slope, (1.8 / 2) ** 0.5))


# ---------------------------------------------------------------- the rule for rates


def test_rates_go_outward_while_the_best_is_at_an_end() -> None:
    ladder = Ladder((1.0, 3.0, 10.0, 30.0, 100.0), first=(3.0, 10.0), outward=1)
    assert ladder.wanted({}) == (3.0, 10.0)
    assert ladder.wanted({3.0: 0.5, 10.0: 0.6}) == (30.0,)
    assert ladder.wanted({3.0: 0.5, 10.0: 0.6, 30.0: 0.7}) == ()
    assert ladder.wanted({3.0: 0.6, 10.0: 0.6}) == (1.0,)
    assert best({3.0: 0.6, 10.0: 0.6}) == 3.0


# ---------------------------------------------------------------- the plan


def test_the_plan_names_rates_as_numbers_that_people_write(full: Plan) -> None:
    ladder = full.ladder(full.tables["S-a"].arm("full"))
    assert ladder.first == (1e-4, 3e-4, 1e-3)
    assert {1e-5, 3e-5, 3e-3, 1e-2} <= {*ladder.rungs}


@pytest.mark.usefixtures("benchmark_methods")
def test_every_arm_has_a_method_and_valid_training(full: Plan) -> None:
    for name, table in full.tables.items():
        for setting in table.settings:
            for arm in table.arms_of(setting):
                spec = spec_of(full, Job(name, setting.name, arm.name, 1, 1e-3), sites=12)
                Training.model_validate(spec["training"])
                Cohort.model_validate(spec["cohort"])
                methods()[arm.method].settings.model_validate(method_settings(arm, setting, 1))


def test_arms_of_two_layers_become_arms_of_one(full: Plan) -> None:
    table = full.tables["S-a"]
    assert method_settings(table.arm("attention"), table.setting("K-1"), 1)["layers"] == 1
    assert "full" not in {arm.name for arm in table.arms_of(table.setting("K-1"))}


def test_runs_that_choose_rates_come_first_and_headline_arms_have_ten_seeds(full: Plan) -> None:
    selection = Selection(tables=["S-a"], arms=["attention", "head"])
    first = list(startable(full, selection, {}, ()))
    assert {(job.arm, job.seed, job.setting) for job in first} == {("attention", 0, "K-2"), ("head", 0, "K-2")}
    scores = {job: {1e-4: 0.1, 3e-4: 0.5, 1e-3: 0.2}[job.rate] for job in first}
    rows = list(startable(full, selection, scores, ()))
    assert {job.rate for job in rows} == {3e-4}
    assert [job.seed for job in rows if (job.arm, job.setting) == ("attention", "K-2")] == [*range(1, 11)]
    # Fewer in the core, and only of the arms of headline claims.
    table = full.tables["S-a"]
    for scope, setting, arm, count in (
        ("full", "K-2", "attention", 10),
        ("full", "K-2", "head", 5),
        ("full", "K-1", "attention", 5),
        ("core", "K-2", "attention", 5),
        ("headlines", "K-2", "attention", 10),
    ):
        chosen = Selection(scope).seeds(full, table, table.setting(setting), table.arm(arm))  # type: ignore[arg-type]
        assert len(chosen) == count
    # The other numbers of layers take the rate of the first one.
    assert [job.seed for job in rows if job.setting == "K-1"] == [*range(1, 6)]
    core = list(startable(full, replace(selection, scope="core"), scores, {rows[0]}))
    assert [(job.arm, job.seed) for job in core[:2]] == [("head", 1), ("attention", 2)]
    assert left(full, replace(selection, scope="core"), scores) == {("S-a", True): 0, ("S-a", False): 10}
    headlines = startable(full, replace(selection, scope="headlines"), scores, ())
    assert [(job.arm, job.setting, job.seed) for job in headlines] == [
        ("attention", "K-2", seed) for seed in range(1, 11)
    ]


def test_variants_of_an_arm_take_its_learning_rate(full: Plan) -> None:
    selection = Selection(tables=["D-t"], arms=["warmup-8"])
    first = list(startable(full, selection, {}, ()))
    assert {(job.arm, job.setting, job.seed) for job in first} == {("fedfrozen", "alpha-0.05", 0)}
    scores = {job: {1e-4: 0.1, 3e-4: 0.5, 1e-3: 0.2}[job.rate] for job in first}
    rows = list(startable(full, selection, scores, ()))
    assert {(job.arm, job.rate) for job in rows} == {("warmup-8", 3e-4)}
    table = full.tables["D-t"]
    arms = [arm.model_copy(update={"rate_of": None}) if arm.name == "warmup-8" else arm for arm in table.arms]
    other = full.model_copy(update={"tables": {"D-t": table.model_copy(update={"arms": tuple(arms)})}})
    assert setup_of(other, rows[0]) == setup_of(full, rows[0])


def test_the_short_check_reaches_the_rounds_after_a_warm_up(full: Plan) -> None:
    short = full.shortened()
    lengths = [
        (table.rounds, arm.settings["warmup_rounds"])
        for table in short.tables.values()
        for arm in table.arms
        if "warmup_rounds" in arm.settings
    ]
    assert lengths
    assert all(warmup < rounds / 2 for rounds, warmup in lengths)


def test_the_short_check_runs_all_tables_in_the_settings_that_their_claims_are_about(full: Plan) -> None:
    short = full.shortened()
    found = {(name, setting, arm) for (name, setting, arm), _ in rows(short, Selection("core"))}
    assert {name for (name, *_), _ in rows(short, Selection("core"))} == {"F-t", "S-a", "P-a"}
    for name, table in ((name, table) for name, table in full.tables.items() if table.check):
        assert {arm for of, _, arm in found if of == name} == {*table.check}
        assert {setting for of, setting, _ in found if of == name} == {table.concluding.name}
        rounds = {whole_rounds(short, Job(*cell, 1, 0.1)) for cell in found if cell[0] == name}
        assert rounds == {table.check_rounds or full.protocol.check_rounds}


def test_sites_that_are_away_are_drawn_by_the_seed_alone() -> None:
    sites = [f"s{number}" for number in range(12)]
    away = Away(share=0.25, first=5, last=7)
    drawn = missed(away, sites, 1)
    assert len(drawn) == 3
    assert {*drawn.values()} == {(5, 6, 7)}
    assert missed(away, sites[::-1], 1) == drawn != missed(away, sites, 2)
    assert missed(None, sites, 1) == missed(away, ["all"], 1) == {}


def test_a_change_of_an_arm_makes_other_runs(full: Plan) -> None:
    job, other = Job("S-a", "K-2", "attention", 1, 1e-3), Job("S-a", "K-2", "last", 1, 1e-3)
    table = full.tables["S-a"]
    arms = [arm.model_copy(update={"settings": {"layers": 3}}) if arm.name == "last" else arm for arm in table.arms]
    changed = full.model_copy(update={"tables": {"S-a": table.model_copy(update={"arms": tuple(arms)})}})
    assert setup_of(changed, job) == setup_of(full, job)
    assert setup_of(changed, other) != setup_of(full, other)


def test_plans_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8")
    for old, new, reason in (
        ("seeds = [1, 2, 3, 4, 5]", "seeds = [0, 1]", "seed 0 chooses rates and must be in no table"),
        ('reference = "full"', 'reference = "whole"', "no arm is called whole; there are attention"),
        ('grid = "sgd"', 'grid = "momentum"', "no grid is called momentum; there are adamw"),
        ("margin = 1.0", "margins = 1.0", "margin"),
        ("[protocol]", "[protocol", "is no TOML"),
        (
            '{ name = "32-rounds", ',
            '{ name = "32-rounds", away = { share = 0.2, first = 9, last = 5 }, ',
            "sites come back after round 5 and leave in round 9",
        ),
        (
            'warmup_rounds = 32 }, rate_of = "fedfrozen"',
            'warmup_rounds = 32 }, rate_of = "warmup-8"',
            "takes the rate of warmup-8, which chooses none in the grid",
        ),
        ("seeds = [11, 12, 13, 14, 15]", "seeds = [5, 11]", "seeds of the second rules are in earlier tables"),
        ('alike = "alpha-1000"', 'alike = "alpha-9"', "no setting is called alpha-9"),
    ):
        assert old in text
        (tmp_path / "plan.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(UnusablePlan, match=reason.replace("[", r"\[")):
            read(tmp_path / "plan.toml")


def test_a_federation_without_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NotPrepared, match=r"no federation is called cards; there are .*phrases.* leave its table out"
    ):
        source("cards")
    with pytest.raises(NotPrepared, match=r"run `python -m evidence.sources.prepare --only text`"):
        SOURCES["phrases"].inputs(tmp_path)


def test_time_left_is_estimated_by_the_runs_of_each_kind() -> None:
    counts = {("S-a", True): 2, ("S-a", False): 10}
    assert time_left(counts, {}, 2, 0.5) == ""
    # (2 * 150 + 10 * 330) / 2 = 1,800 seconds.
    seconds = {("S-a", True): [100.0, 200.0], ("S-a", False): [330.0]}
    assert time_left(counts, seconds, 2, 0.5) == ", about 0.5 hours on 2 processes"
    # Without a whole run: (2 * 360 + 10 * 720) / 2 = 3,960 seconds.
    assert time_left(counts, {("S-a", True): [360.0]}, 2, 0.5) == ", about 1.1 hours on 2 processes"


# ---------------------------------------------------------------- controls of FedFrozen


def tiny_run(rounds: int = 4) -> RunInfo:
    return RunInfo(
        block_table(instantiate({**TINY, "model_type": "bert", "vocab_size": 9}, "text-classification")),
        rounds=rounds,
    )


def test_random_frozen_blocks_have_the_size_of_queries_and_keys() -> None:
    run = tiny_run()
    frozen = {}
    for draw in (1, 2):
        half = RandomFrozenCoordinator(RandomFrozenSettings(warmup_rounds=2, draw=draw), run)
        assert half.plan_for(State(1, {}), Participant("a", 8)).train.resolve(run.blocks) == run.blocks
        trained = {block.name for block in half.plan_for(State(2, {}), Participant("a", 8)).train.resolve(run.blocks)}
        frozen[draw] = {block.name for block in run.blocks} - trained
    size = sum(block.nbytes for block in run.blocks if block.role in ("query", "key"))
    for names in frozen.values():
        assert 0.9 * size < sum(block.nbytes for block in run.blocks if block.name in names) <= size
    assert frozen[1] != frozen[2]


class Steps:
    """What a worker's half sees of a model that takes two steps."""

    def __init__(self, dropped: float) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.plan = type("Plan", (), {"scalars": {"dropped": dropped}})


def test_a_dropped_rate_shortens_each_step() -> None:
    for dropped, expected in ((1.0, 1.5), (0.0, 4.0)):
        half = DroppedRateWorker(DroppedRateSettings(factor=0.25), tiny_run())
        steps: Any = Steps(dropped)
        weight = steps.model.weight
        weight.data.fill_(1.0)
        half.phases(steps, None)  # type: ignore[arg-type]
        half._shorten(steps)
        weight.data += 2.0
        half._shorten(steps)
        # From 1 by a quarter of 2 to 1.5; then a step of nothing.
        weight.data += 0.0 if dropped else 1.0
        half._shorten(steps)
        assert weight.item() == pytest.approx(expected)


# ---------------------------------------------------------------- runs


def test_no_phrase_is_in_two_parts_of_the_federation(prepared: Path, tiny: Plan) -> None:
    federation = SOURCES["phrases"].federation(prepared, 1, tiny.tables["T"].options)
    assert len(federation.sites) == 6
    held = [data.held_out for data in federation.sites.values()]
    parts = [*federation.sites.values(), *held, *federation.validation.values(), *federation.tests.values()]
    rows = [row.tobytes() for part in parts if part for row in part.tensors["input_ids"].numpy()]
    assert len(rows) == len(set(rows)) == 3 * 60 + 100
    assert {name: data.examples for name, data in federation.tests.items()} == {UNSEEN: 60, SEEN: 40}
    again = SOURCES["phrases"].federation(prepared, 1, tiny.tables["T"].options)
    other = SOURCES["phrases"].federation(prepared, 2, tiny.tables["T"].options)

    def tokens(of: Any) -> list[list[int]]:
        return of.tests[UNSEEN].tensors["input_ids"].tolist()

    assert tokens(federation) == tokens(again) != tokens(other)
    # Rates are chosen on the validation parts, not on what is reported.
    site = next(iter(federation.sites))
    assert federation.tuning()[site].held_out is federation.validation[site]


def test_sites_that_hold_back_too_few_phrases_get_others_like_theirs(prepared: Path, tiny: Plan) -> None:
    options = tiny.tables["T"].options
    few = SOURCES["phrases"].federation(prepared, 1, options)
    more = SOURCES["phrases"].federation(prepared, 1, {**options, "site_validation": 6, "site_tests": 5})
    rows: list[bytes] = []
    for name, site in more.sites.items():
        held, validation = site.held_out, more.validation[name]
        assert held is not None
        assert validation.examples >= 6
        assert held.examples >= 5
        # What a site trains on is the same, and it tests on no other chapters.
        assert torch.equal(site.tensors["input_ids"], few.sites[name].tensors["input_ids"])
        before = (few.sites[name], few.sites[name].held_out, few.validation[name])
        chapters = {label for part in before if part for label in part.tensors["labels"].tolist()}
        assert {*held.tensors["labels"].tolist(), *validation.tensors["labels"].tolist()} <= chapters
        rows += [row.tobytes() for part in (site, held, validation) for row in part.tensors["input_ids"].numpy()]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("arm", variants(["one", "central", "wide", "local"], {"one"}))
def test_running_an_arm_and_seed_again_gives_the_same_bits(
    prepared: Path, tiny: Plan, tmp_path: Path, arm: str
) -> None:
    first, again = (run(tiny, Job("T", "K-1", arm, 1, 1e-3), prepared, tmp_path / name, "cpu") for name in "ab")
    clocks = {"seconds": 0, "cpu_seconds": 0}
    assert {**first, **clocks} == {**again, **clocks}
    parts = {row["part"] for row in first["scores"]}
    assert parts == ({"sites"} if arm == "local" else {UNSEEN, SEEN, "sites"})
    if arm == "one":
        curve = [row["version"] for row in first["scores"] if row["curve"] and row["part"] == UNSEEN]
        assert curve == [0, 1, 2, 3]
        whole = [row for row in first["scores"] if not row["curve"] and row["part"] == UNSEEN]
        assert [(row["version"], row["examples"]) for row in whole] == [(2, 60), (3, 60)]
        assert len({row["site"] for row in first["scores"] if row["part"] == "sites"}) == 6
    assert not (tmp_path / "a" / "scratch").exists() or not any((tmp_path / "a" / "scratch").iterdir())


@pytest.mark.long
def test_sites_miss_rounds(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    away = run(tiny, Job("T", "away", "local", 1, 1e-3), prepared, tmp_path, "cpu")
    measured = [row["version"] for row in away["scores"]]
    # Two of six sites miss the first round, and so do not measure the version that it makes of theirs.
    assert measured.count(2) == measured.count(3) == 6
    assert measured.count(1) < 6
    silent = run(tiny, Job("T", "dropout", "one", 1, 1e-3), prepared, tmp_path, "cpu")
    whole = run(tiny, Job("T", "K-1", "one", 1, 1e-3), prepared, tmp_path, "cpu")
    of_site = whole["upload_bytes"][0] / 3
    counts = [round(sent / of_site) for sent in silent["upload_bytes"]]
    assert max(counts) <= 5
    assert sum(counts) < 15
    assert 0 <= silent["selections"]["overlap"] <= 1
    assert 0 < silent["selections"]["union"] <= 1


class Outcome:
    """What the report of a run reads of an attempt at a round."""

    def __init__(self, sent: int, version: int | None) -> None:
        self.upload_bytes, self.download_bytes, self.evaluation_bytes = sent, 2 * sent, sent
        self.round = type("Round", (), {"version": version})


def test_the_bytes_of_an_abandoned_attempt_are_those_of_the_round_that_is_repeated() -> None:
    result: Any = type("Result", (), {"versions": [type("Version", (), {"scalars": {}})]})
    result.outcomes = [Outcome(1, 1), Outcome(10, None), Outcome(100, 2)]
    moved = _moved(result)
    assert (moved["upload_bytes"], moved["download_bytes"]) == ([1, 110], [1, 110])


def test_a_task_that_failed_is_no_drop_out() -> None:
    def task(state: str, detail: str | None) -> Any:
        problem = detail and type("Problem", (), {"detail": detail})
        return type("Task", (), {"state": state, "problem": problem})

    job = Job("T", "dropout", "one", 1, 1e-3)
    assert divergence(job, [task("merged", None), task("expired", "no answer")]) is None
    assert divergence(job, [task("failed", "diverged: nan")]) == "diverged: nan"
    for state in ("failed", "rejected"):
        with pytest.raises(ValueError, match=r"/one/seed-1-rate-0.001: a task failed: too large"):
            divergence(job, [task("failed", "diverged: nan"), task(state, "too large")])


def test_rates_are_chosen_on_the_validation_parts(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    figures = run(tiny, Job("T", "K-1", "full", 0, 1e-3), prepared, tmp_path, "cpu")
    assert {(row["part"], row["version"]) for row in figures["scores"]} == {("validation", 2)}
    # A fifth of 180 phrases, rounded at each of six sites.
    assert 30 <= figures["scores"][0]["examples"] <= 42
    assert figures["score"] == figures["scores"][0]["macro_f1"]


@pytest.mark.long
def test_a_study_resumes_with_what_it_had(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    out, first = tmp_path / "out", Job("T", "K-1", "full", 0, 1e-3)
    keep(out, first.name, run(tiny, first, prepared, out, "cpu"))
    # As a kill leaves it.
    unfinished = out / "scratch" / "T--K-1--full--seed-1-rate-0.001" / "blobs"
    unfinished.mkdir(parents=True)
    (unfinished / "half").write_bytes(b"half")
    resume(tiny, prepared, out)
    assert not (out / "scratch").exists() or not any((out / "scratch").iterdir())
    # Results travel through the repository's files to another machine.
    saved = tmp_path / "saved"
    assert store.save(out, tiny, saved) == [saved / "T.parquet"]
    store.begin_with_saved(tmp_path / "other", tiny, saved)
    assert store.finished(tmp_path / "other", tiny) == store.finished(out, tiny)
    assert "full" in "\n".join(lines(tiny, store.finished(tmp_path / "other", tiny)))


def resume(plan: Plan, prepared: Path, out: Path) -> None:
    """Run the rest of a study, which must leave the runs that it has as they are."""
    kept = {file: file.read_bytes() for file in (out / RUNS).rglob("*.json")}
    assert kept
    selection = Selection(arms=["full"])
    assert work(plan, selection, prepared, out) == {}
    assert {file: file.read_bytes() for file in kept} == kept
    found = store.finished(out, plan)
    assert sorted(job.seed for job in found) == [0, 1, 2]
    # Nothing is left to run.
    assert list(startable(plan, selection, {job: figures["score"] for job, figures in found.items()}, ())) == []


# Each of its processes imports torch.
@pytest.mark.long
def test_a_killed_study_resumes_with_what_it_had(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "evidence", "--plan", str(tmp_path / "tiny.toml"), "--arms", "full"]
    command += ["--prepared", str(prepared), "--out", str(out), "--saved", str(tmp_path / "none")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = next(line for line in process.stderr if line.startswith("T/"))
        os.kill(process.pid, signal.SIGKILL)
    assert first.startswith("T/K-1/full/seed-0-rate-0.001: ")
    resume(tiny, prepared, out)


@pytest.mark.long
def test_the_short_check_takes_no_run_of_other_code(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    out, short = tmp_path / "out", tiny.shortened()
    stale = Job("T", "K-1", "full", 1, 3e-4)
    keep(out, stale.name, {**asdict(stale), "setup": setup_of(short, stale)})
    given = ["--plan", str(tmp_path / "tiny.toml"), "--prepared", str(prepared), "--out", str(out)]
    assert main(["--check", *given, "--saved", str(tmp_path / "none")]) == 0
    found = store.finished(out, short)
    assert {(job.arm, job.seed, job.rate) for job in found} == {
        (arm, seed, 1e-3) for arm in ("full", "one") for seed in (1, 2)
    }


@pytest.mark.long
def test_the_short_check_fails_without_a_direction_that_the_saved_runs_have(
    prepared: Path, tiny: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for figures in pairs((0.5, 0.6), (0.5, 0.6)):
        job = store.job_of(figures)
        keep(tmp_path / "full", job.name, {**figures, "setup": setup_of(tiny, job)})
    store.save(tmp_path / "full", tiny, tmp_path / "saved")
    given = ["--plan", str(tmp_path / "tiny.toml"), "--prepared", str(prepared), "--out", str(tmp_path / "out")]
    # The labels are made up, so that no arm learns them: both are level.
    assert main(["--check", *given, "--saved", str(tmp_path / "saved")]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "FLIPPED: T.1: one less full is +0.0 here, and +10.0 [+10.0, +10.0] in the full runs" in shown


@pytest.mark.usefixtures("tiny")
def test_a_table_that_the_gate_makes_void_is_a_result_and_one_without_its_gate_is_not(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    # No model of this name is ever compared.
    clothes, tiny = 'gate = ["fashion", "vit6"]\nfederation = "phrases"', (tmp_path / "tiny.toml").read_text()
    gpu_setting = '  { name = "large", scope = "gpu", gate = ["fashion", "unscored"] },\n  { name = "away"'
    file.write_text(tiny.replace('federation = "phrases"', clothes, 1).replace('  { name = "away"', gpu_setting, 1))
    plan, core, gpu = read(file), Selection("core", ["T"]), Selection("gpu", ["T"])
    assert prepared_tables(plan, core, prepared) == ([], [])
    assert "T is void: `vit6`, trained in one place, is" in capsys.readouterr().err
    assert prepared_tables(plan, gpu, prepared) == ([], ["T"])
    assert "T cannot run: `unscored` was not compared with a plain baseline: run" in capsys.readouterr().err
    given = ["--plan", str(file), "--tables", "T", "--out", str(tmp_path / "out"), "--prepared", str(prepared)]
    assert main(["--scope", "core", *given]) == 0
    assert main(["--scope", "gpu", *given]) == 2


def test_runs_on_other_files_are_not_mixed(tiny: Plan) -> None:
    found = {Job("T", "K-1", "full", 1, 1e-3): {"inputs": "phrases.npz 123"}}
    store.check_inputs(found, "T", "phrases.npz 123")
    with pytest.raises(
        store.OtherInputs, match=r"T has runs on other files: phrases.npz 123. Here are phrases.npz 4"
    ):
        store.check_inputs(found, "T", "phrases.npz 4")


def test_table_that_is_not_prepared_is_refused_with_the_command(
    tmp_path: Path, tiny: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--plan", str(tmp_path / "tiny.toml"), "--prepared", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*given, "--saved", str(tmp_path)]) == 2
    assert "T: not prepared: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*given, "--arms", "fool"])
    assert "no arm is called fool; there are full, one" in capsys.readouterr().err


def test_scores_are_those_of_scikit_learn_and_padding_does_not_matter() -> None:
    true, predicted = np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 2, 0])
    found = scored(true, predicted)
    assert found["macro_f1"] == pytest.approx(f1_score(true, predicted, average="macro"), abs=1e-5)
    assert (found["examples"], found["accuracy"]) == (5, 0.6)
    model = instantiate({**TINY, "model_type": "bert", "vocab_size": 40}, "text-classification").eval()
    phrases = made_up(pieces=40)
    data = phrases.dataset(np.arange(50))
    with torch.inference_mode():
        expected = model(**{name: tensor for name, tensor in data.tensors.items() if name != "labels"}).logits
    assert predictions(model, "text-classification", data, 40, "cpu").tolist() == expected[:40].argmax(1).tolist()

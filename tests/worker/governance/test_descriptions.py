"""What a person is shown of a run is true of it, and in words."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.model.preprocessing import FileName, FileRef
from tessera.shared.model.selectors import roles
from tessera.shared.run_settings import ClientPrivacy, Privacy
from tessera.shared.units import size
from tessera.worker.governance.descriptions import in_words, policy_in_words, summary
from tessera.worker.governance.policy import Policy
from tessera.worker.governance.run_history import TaskStatement
from tests.support.federation import small_model
from tests.support.task_document import task_of

MODEL = small_model()
DIGEST = f"sha256:{'0' * 64}"
FILE, REF = "tokenizer.json", FileRef(digest=DIGEST, nbytes=2)
PRIVATE = Privacy(epsilon=4.0, delta=1e-6, clip_norm=1.0)


def task(**more: object) -> Task:
    given = {
        "rounds": 20, "method": MethodSpec(name="fedfrozen"), "dataset": "notes", "training": Training(epochs=3),
        "plan": Plan(train=roles("value"), upload=roles("value")), "orchestrator": "trial-office",
    }  # fmt: skip
    return task_of(**{**given, **more})


def test_a_run_of_a_study_names_it() -> None:
    assert "to orchestrator trial-office of the study stroke; later" in summary(task(study="stroke"), MODEL, 10)
    assert "study" not in summary(task(study="default"), MODEL, 10)
    assert "Runs of any orchestrator, of the studies stroke, may ask." in policy_in_words(Policy(studies=("stroke",)))


def test_a_run_is_told_in_full() -> None:
    # The value block has 4 x 4 float32.
    assert summary(task(), MODEL, 1204) == (
        "Trains all value blocks of a BERT with 1 layer on `notes` (1,204 examples) for 3 epochs a round, 20 rounds, "
        "by the method fedfrozen. Sends 1 blocks (all value blocks), 64 bytes a round before coding, to orchestrator "
        "trial-office; later rounds may ask for other blocks and arrays, within the site's policy. Versions may also "
        "be measured on the examples held out here, which sends figures. Figures are exact, to three digits. With "
        "updates leave the mean loss, and what the method measures in training. A round asks all sites of the "
        "coordinator; it needs updates of 1 within 3600 seconds. A site weighs as many examples as it has, up to "
        "four times the median site's. The sum of a block is divided by the weight of the sites that sent it. No "
        "differential privacy: anyone who sees the updates, such as the coordinator's operator, may learn about "
        "single examples."
    )


def test_a_run_that_measures_versions_on_first_examples_says_so() -> None:
    watched = task(method=MethodSpec(name="fedfrozen", settings={"kernel_drift": True}))
    said = "measures the model on the first {} examples."
    assert said.format(20) in summary(watched, MODEL, 1204)
    assert said.format(50) in summary(watched, MODEL, 1204, Policy(min_evaluation_examples=50))
    assert "on the first" not in summary(watched, MODEL, 1204, rounds_figures=True) + summary(task(), MODEL, 1204)


def test_a_run_that_trains_the_base_beside_adapters_says_so() -> None:
    said = "Its base trains too, beside adapters or prompts."
    assert said in summary(task(training=Training(full_fine_tuning=True)), MODEL, 1204)
    assert said not in summary(task(), MODEL, 1204)


def test_a_run_that_learns_preferences_says_so() -> None:
    said = "Learns which of two answers is better (dpo), beside the run's first version."
    assert said in summary(task(training=Training(loss="dpo")), MODEL, 1204)
    assert said not in summary(task(), MODEL, 1204)


def test_a_run_is_told_with_what_each_rule_of_the_site_keeps_back() -> None:
    policy = Policy(never_send=("*mlp*",), never_send_if_present=("prompts.*",), may_send=roles("value", "head"))
    told = summary(task(), MODEL, 1204, policy)
    assert "The site's may_send allows all value, all head blocks." in told.replace(" and ", ", ")
    assert "Of the blocks that never leave, '*mlp*' keeps 1 of 6 blocks (layer.0.mlp.weight)" in told
    assert "; 'prompts.*' keeps 0 of " in told
    assert "never leave" not in summary(task(kind="evaluate", plan=Plan()), MODEL, 1204, policy)


def test_steps_are_told_with_the_epochs_that_they_are_at_this_site() -> None:
    # 1,204 examples in batches of 32 are 38 steps.
    told = summary(task(training=Training(steps=100)), MODEL, 1204)
    assert "for 100 steps (at most 3 epochs) a round, 20 rounds, by" in told


@pytest.mark.parametrize(
    ("files", "raw_texts", "told"),
    [
        ({FILE: REF}, True, f" `notes` is converted with the run's own tokenizer, {DIGEST}. Sends "),
        ({FILE: REF}, False, f" The run brings its own tokenizer, {DIGEST}, which `notes` does not use. Sends "),
        ({}, True, " `notes` takes the run's own tokenizer, and the run has none: its tasks will fail. Sends "),
        ({"preprocessor_config.json": REF}, False, " by the method fedfrozen. Sends "),
    ],
)
def test_a_run_with_its_own_tokenizer_says_so(files: dict[FileName, FileRef], raw_texts: bool, told: str) -> None:
    assert told in summary(task(), MODEL.model_copy(update={"preprocessing": files}), 10, raw_texts=raw_texts)


def test_secure_sums_name_who_opens_them() -> None:
    wanted = task(secure_sums={"helpers": ["north", "south", "east"], "quorum": 5})
    shown = summary(wanted, MODEL, 10, least_in_sum=3)
    assert (
        " Updates leave under masks: the coordinator learns sums over at least 5 sites, which north, south and east "
        "open together. Weights and block names are not masked. A round asks all sites of the coordinator; it needs "
        "updates of 1 within 3600 seconds. This site weighs 1 by its own settings, in each sum. The sum of a block "
        "is divided by the weight of the sites that sent it. No differential privacy: anyone who sees the sums of "
        "updates, " in shown
    )

    assert "subtract them" not in shown
    repeating = task(secure_sums={"helpers": ["north", "south", "east"], "quorum": 5, "repeat_model": True})
    told = summary(repeating, MODEL, 10, least_in_sum=3)
    assert (
        "A person with both sums can subtract them: if this site is in one of them alone, the difference is" in told
    )
    assert "This site takes part in no secure sum: its tasks will fail." in summary(wanted, MODEL, 10)
    assert "masks" not in summary(task(), MODEL, 10)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_examples", [40, 90, 200, "unlimited", None]),
        ("normalization", ["participants", "cohort", "inverse-probability"]),
        ("robust", [{"rule": "mean"}, {"rule": "median"}, {"rule": "median", "attackers": 2}, {"rule": "clip"}]),
        ("server_optimizer", [{"kind": "none"}, {"kind": "adam"}, {"kind": "adam", "learning_rate": 0.5}]),
        ("max_update_norm", [None, 1.0, 2.0]),
        ("max_norm_of_median", [None, "unlimited", 2.0]),
        (
            "cohort",
            [
                {},
                {"quorum": 2},
                {"size": 3},
                {"size": 3, "target_updates": 2},
                {"workers_per_site": 2},
                {"deadline_seconds": 60},
                Cohort(sites=("north", "south")).terms,
                Cohort(sites=("north", "east")).terms,
            ],
        ),
    ],
)
def test_runs_that_merge_updates_otherwise_are_other_requests_in_other_words(name: str, values: list[Any]) -> None:
    """A person who approves three runs that seem alike lets their versions be compared."""
    tasks = [task(**{name: value}) for value in values]
    assert len({summary(each, MODEL, 10) for each in tasks}) == len(values)
    assert len({TaskStatement.of(each).terms_digest() for each in tasks}) == len(values)


def test_privacy_is_told_with_what_it_does_not_cover() -> None:
    told = summary(task(privacy=PRIVATE), MODEL, 10)
    assert told.endswith("reveal of one example at most epsilon 4 at delta 1e-06.")
    uncovered = summary(task(privacy=PRIVATE.model_copy(update={"selection": "uncovered"})), MODEL, 10)
    assert uncovered.endswith("; the choice of blocks is not covered.")


def test_an_epsilon_that_protects_nothing_is_approved_in_these_words() -> None:
    for epsilon, said in ((10.0, "at most epsilon 10 at delta 1e-06."), (900.0, "(epsilon 900: no protection).")):
        assert said in summary(task(privacy=PRIVATE.model_copy(update={"epsilon": epsilon})), MODEL, 10)
    weak = ClientPrivacy(epsilon=900.0, delta=1e-5, clip_norm=1.0)
    assert "(epsilon 900: no protection)" in summary(task(client_privacy=weak), MODEL, 10)


def test_client_privacy_is_described_as_a_statement_of_the_coordinator() -> None:
    described = summary(task(client_privacy=ClientPrivacy(epsilon=4.0, delta=1e-5, clip_norm=1.0)), MODEL, 10)
    assert described.endswith(
        "reveal at most epsilon 4 at delta 1e-05 of all data of one site; this site cannot verify it."
    )


def test_a_measurement_is_told_apart_from_training() -> None:
    told = summary(task(kind="evaluate", held_out=True, plan=Plan(), orchestrator=None), MODEL, 300)
    assert told.startswith(
        "Measures versions of a BERT with 1 layer on the held-out examples of `notes` (300 examples)."
    )
    assert (
        "Sends figures such as its accuracy, of how many examples and labels they are, and no blocks, to an" in told
    )


def test_a_run_that_measures_first_says_all_that_it_will_do() -> None:
    first = task(kind="evaluate", held_out=True, plan=Plan())
    told = summary(first, MODEL, 1204, Policy(never_send=("*mlp*",)), measured=300)
    nbytes = size(sum(block.nbytes for block in MODEL.blocks))
    assert told.startswith(
        "Trains blocks of a BERT with 1 layer, which each round names, on `notes` (1,204 examples) for 3 epochs a "
        "round, 20 rounds, by the method fedfrozen. Measures its versions on the data set's 300 held-out examples. "
        "Sends the blocks and arrays that each round asks for within the site's policy, at most "
        f"{len(MODEL.blocks)} blocks with {nbytes} a round before coding, and figures of versions, to orchestrator "
        "trial-office. Arrays are computed from the examples, such as the mean features and the number of each "
        "class. A row of them over fewer than 20 examples leaves as zeros."
    )
    # As the request of a task that trains.
    rest = told[told.index("Of the blocks that never leave") :]
    assert summary(task(), MODEL, 1204, Policy(never_send=("*mlp*",))).endswith(rest)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"client_privacy": ClientPrivacy(epsilon=4.0, delta=1e-5, clip_norm=1.0)},
        {"secure_sums": {"helpers": ["a", "b", "c"], "quorum": 5}},
    ],
)
def test_a_measurement_speaks_of_no_update(more: dict[str, Any]) -> None:
    assert "update" not in summary(task(kind="evaluate", plan=Plan(), **more), MODEL, 300)


def test_a_person_reads_whether_figures_are_exact_or_rounded() -> None:
    policy = Policy(send_class_counts=True)
    exact, rounded = (
        summary(task(held_out=True, kind="evaluate", plan=Plan()), MODEL, 300, policy, rounds_figures=rounds)
        for rounds in (False, True)
    )
    assert (
        "Figures are exact, to three digits. With figures, counts by class and by subgroups in the settings" in exact
    )
    assert "rounded sums, each of which one example moves by at most one step" in rounded
    assert "a step hides no example" in rounded
    assert "by class" not in rounded
    rules = [" ".join(policy_in_words(each)) for each in (Policy(), Policy(figures="rounded"))]
    assert ["Figures leave as rounded sums" in words for words in rules] == [False, True]
    assert "at most 100 times for a run and 1,000 times for a data set" in rules[0]


def test_blocks_and_bytes_are_counted_as_people_do() -> None:
    blocks = MODEL.blocks
    assert in_words(blocks, blocks) == "all blocks"
    assert in_words(blocks[:2], blocks) == "all query and all key blocks"
    assert in_words(blocks[:3], blocks) == "all query, all key and all value blocks"
    halves = [*blocks, blocks[2].model_copy(update={"tensor": "layer.1.qkv.weight"})]
    assert in_words(halves[2:3], halves) == "1 of 2 value blocks"
    assert in_words([], blocks) == "no blocks"
    assert [size(count) for count in (64, 1500, 28_300_000)] == ["64 bytes", "1.5 kB", "28.3 MB"]


def test_a_run_that_protects_groups_says_so_and_counts_its_epochs_by_them() -> None:
    privacy = PRIVATE.model_copy(update={"unit": "group", "max_per_group": 5})
    # 320 groups in batches of 32 are 10 steps.
    told = summary(task(training=Training(steps=25), privacy=privacy), MODEL, 1204, groups=320)
    assert "on `notes` (1,204 examples of 320 groups) for 25 steps (at most 3 epochs) a round" in told
    assert told.endswith(
        "all updates together reveal of all examples of one group, of which a step uses 5 at most, at most epsilon 4 "
        "at delta 1e-06."
    )


def test_a_run_that_keeps_updates_says_so_and_asks_anew() -> None:
    kept = task_of(keep_updates="run")
    assert "keeps each update as long as the run" in summary(kept, MODEL, 100)
    assert "keeps each update" not in summary(task_of(), MODEL, 100)
    asked, before = (TaskStatement.of(one).terms_digest() for one in (kept, task_of()))
    assert asked != before


def test_a_buffered_run_is_told_as_such() -> None:
    terms = Cohort(
        mode="buffer", target_updates=4, quorum=4, staleness="none", memory=True, max_updates_per_site=7
    ).terms
    said = summary(task(cohort=terms), MODEL, 10)
    assert "for 3 epochs a round, at most 7 of 20 rounds, by" in said
    assert (
        "Versions are made of the first updates of 4 of all sites of the coordinator; updates may start from "
        "versions up to 10 older; each site's latest update is kept, and moves later versions too." in said
    )
    mixed = Cohort(mode="buffer", target_updates=1, mixing=0.5).terms
    assert "a version moves 0.5 of the way to the values of its update." in summary(task(cohort=mixed), MODEL, 10)

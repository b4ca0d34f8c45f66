"""The site's policy: what it forbids is refused before it happens, and the rule is named."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import ExtraArray
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import roles
from tessera.shared.run_settings import Privacy
from tessera.worker.governance.policy import (
    REMEDIES,
    Allowance,
    ClientPrivacyFloor,
    Policy,
    PolicyViolation,
    PrivacyFloor,
    check_use,
)
from tests.support.task_document import task_of

TABLE = tuple(
    Block(tensor=name, role=role, shape=(4,), dtype="F32")
    for name, role in (("embed", "embedding"), ("layer.0.query", "query"), ("layer.0.value", "value"), ("fc", "head"))
)


def task(**more: object) -> Task:
    return task_of(**{"round": 0, **more})


def private(**more: object) -> Privacy:
    return Privacy(**{"epsilon": 4.0, "delta": 1e-6, "clip_norm": 1.0, **more})


FLOOR = PrivacyFloor(epsilon=4.0, delta=1e-5, noise_multiplier=0.7)


def test_what_meets_the_floor_and_comes_from_a_trusted_orchestrator_is_taken() -> None:
    policy = Policy(orchestrators=("trial",), require_privacy=FLOOR)
    policy.check_task(task(orchestrator="trial", privacy=private()), ("train",))
    FLOOR.check_noise(0.7)
    with pytest.raises(PolicyViolation, match=r"noise of 0\.69 clip norms; this site requires 0\.7"):
        FLOOR.check_noise(0.69)


def test_every_violation_says_what_to_do() -> None:
    rules = {*REMEDIES, *Policy.model_fields}
    remedies = {rule: PolicyViolation(rule, "").remedy for rule in rules}
    assert [rule for rule, said in remedies.items() if not said.endswith(".")] == []
    assert PolicyViolation("max_epochs", "").remedy == (
        "Have the run ask for less, or change policy.max_epochs in the settings."
    )


def test_the_defaults_allow_an_ordinary_task() -> None:
    policy = Policy()
    policy.check_task(task(), ("train",))
    policy.check_upload(TABLE)
    policy.check_egress([block.name for block in TABLE], 1000, TABLE, kept=[])


@pytest.mark.parametrize(
    ("rule", "policy", "asked"),
    [
        ("methods", Policy(methods=("fedfrozen",)), task()),
        ("datasets", Policy(datasets=("clinics",)), task()),
        ("max_lease_seconds", Policy(max_lease_seconds=30), task()),
        ("kinds", Policy(), task(kind="evaluate")),
        ("orchestrators", Policy(orchestrators=("trial",)), task(orchestrator="other")),
        ("orchestrators", Policy(orchestrators=("trial",)), task()),
        ("studies", Policy(studies=("stroke",)), task()),
        ("studies", Policy(studies=("default",)), task(study="stroke")),
        ("require_privacy", Policy(require_privacy=FLOOR), task()),
        ("require_privacy", Policy(require_privacy=FLOOR), task(privacy=private(epsilon=4.1))),
        ("require_privacy", Policy(require_privacy=FLOOR), task(privacy=private(delta=1e-4))),
        ("require_privacy", Policy(require_privacy=FLOOR), task(privacy=private(selection="uncovered"))),
    ],
)
def test_a_task_that_breaks_a_rule_is_refused_by_its_name(rule: str, policy: Policy, asked: Task) -> None:
    with pytest.raises(PolicyViolation) as violation:
        policy.check_task(asked, ("train",))
    assert violation.value.rule == rule


@pytest.mark.parametrize(
    ("rule", "floor"),
    [("require_privacy", FLOOR), ("require_client_privacy", ClientPrivacyFloor(epsilon=4.0, delta=1e-5))],
)
def test_a_site_that_requires_privacy_is_measured_only_if_it_says_so(rule: str, floor: BaseModel) -> None:
    measuring = task(kind="evaluate", held_out=True, privacy=private())
    with pytest.raises(PolicyViolation, match="a version's figures have no noise") as violation:
        Policy.model_validate({rule: floor}).check_task(measuring, ("evaluate",))
    assert violation.value.rule == rule
    allowing = floor.model_copy(update={"evaluations": True})
    Policy.model_validate({rule: allowing}).check_task(measuring, ("evaluate",))


@pytest.mark.parametrize(
    ("asked", "for_evaluation", "said"),
    [
        (task(kind="evaluate"), False, "no version is evaluated on it"),
        (task(kind="evaluate", held_out=True), False, None),
        (task(kind="evaluate"), True, None),
        (task(), True, "is for evaluation only"),
        (task(), False, None),
    ],
)
def test_a_data_set_is_for_training_or_for_evaluation(asked: Task, for_evaluation: bool, said: str | None) -> None:
    if said is None:
        check_use(asked, for_evaluation=for_evaluation)
        return
    with pytest.raises(PolicyViolation, match=said) as violation:
        check_use(asked, for_evaluation=for_evaluation)
    assert violation.value.rule == "use"


@pytest.mark.parametrize(
    "asked",
    [
        task(),
        task(privacy=Privacy(epsilon=1.0, delta=1e-6, clip_norm=1.0, selection="uncovered")),
        task(kind="evaluate"),
        task(kind="evaluate", held_out=True),
    ],
    ids=["exact", "uncovered", "measured", "held out"],
)
def test_a_budget_refuses_what_it_does_not_cover(asked: Task) -> None:
    with pytest.raises(PolicyViolation, match="'wards'") as violation:
        Allowance(epsilon=8.0, delta=1e-6).check(asked)
    assert violation.value.rule == "privacy"


@pytest.mark.parametrize(
    "asked",
    [
        task(privacy=Privacy(epsilon=1.0, delta=1e-6, clip_norm=1.0, selection="noisy")),
        task(kind="evaluate", held_out=True),
    ],
    ids=["private", "held out"],
)
def test_a_budget_lets_pass_what_it_covers_or_its_site_allows(asked: Task) -> None:
    Allowance(epsilon=8.0, delta=1e-6, evaluations=True).check(asked)


def test_a_model_larger_than_allowed_is_refused() -> None:
    policy = Policy(max_model_bytes=100)
    policy.check_model(100)
    with pytest.raises(PolicyViolation, match="101 bytes"):
        policy.check_model(101)


@pytest.mark.parametrize(
    ("policy", "rule", "refused"),
    [
        (Policy(may_send=roles("value", "head")), "may_send", "embed, layer.0.query$"),
        (Policy(never_send=("*query", "fc")), "never_send", "fc, layer.0.query$"),
        (Policy(may_send=roles("value"), never_send=("*.value",)), "never_send", "leave: layer.0.value$"),
    ],
)
def test_a_plan_that_asks_for_what_may_not_leave_is_refused_with_the_blocks_names(
    policy: Policy, rule: str, refused: str
) -> None:
    with pytest.raises(PolicyViolation, match=refused) as violation:
        policy.check_upload(TABLE)
    assert violation.value.rule == rule


@pytest.mark.parametrize(
    ("policy", "rule", "told"),
    [
        ({"never_send": ["*query", "lair.0"]}, "never_send", "no block called 'lair.0'"),
        ({"never_send": ["layer"]}, "never_send", r"did you mean `\*layer\*`"),
        ({"never_send": ["*LAYER*"]}, "never_send", r"did you mean `\*layer\*`"),
        ({"never_send": ["*.vlaue"]}, "never_send", r"did you mean `\*value\*`\? Correct it"),
        ({"never_send": ["*vlaue*"]}, "never_send", r"did you mean `\*value\*`"),
        ({"never_send": ["zzz"]}, "never_send", "it has embed, fc, layer.0.query, layer.0.value"),
        ({"may_send": {"exclude": [{"names": ["*query", "*vlaue"]}]}}, "may_send", r"\['\*vlaue'\]"),
        ({"may_send": {"exclude": [{"layers": [0, 12]}]}}, "may_send", r"'layers': \[12\]"),
        ({"may_send": {"exclude": [{"roles": ["prompt"]}]}}, "may_send", "'prompt'"),
    ],
)
def test_a_rule_that_keeps_back_no_block_of_the_model_is_refused(
    policy: dict[str, object], rule: str, told: str
) -> None:
    table = tuple(block.model_copy(update={"layer": 0} if "layer" in block.tensor else {}) for block in TABLE)
    with pytest.raises(PolicyViolation, match=told) as violation:
        Policy.model_validate(policy).check_effect(table)
    assert violation.value.rule == rule


def test_a_rule_about_blocks_of_some_models_refuses_no_other() -> None:
    policy = Policy(never_send=("*query",), never_send_if_present=("prompt.*", "fc"))
    policy.check_effect(TABLE)
    with pytest.raises(PolicyViolation, match="never leave: fc"):
        policy.check_upload(TABLE[-1:])


def test_the_rule_against_extra_arrays_refuses_no_run_without_them() -> None:
    policy, array = Policy(never_send_if_present=("extra/*",)), ExtraArray(name="counts", shape=(3,)).block
    policy.check_effect(TABLE)
    policy.check_upload(TABLE)
    with pytest.raises(PolicyViolation, match="never leave: extra/counts"):
        policy.check_upload([*TABLE, array])


def test_the_further_name_of_a_tied_tensor_is_no_misspelling() -> None:
    policy = Policy(never_send=("lm_head*",))
    # A table of blocks does not tell: only the built model has the name.
    policy.check_effect(TABLE)
    policy.check_effect(TABLE, ["lm_head.weight"])
    with pytest.raises(PolicyViolation, match="no block called"):
        policy.check_effect(TABLE, [])


@pytest.mark.parametrize("pattern", ["", " *embed*", "*embed*\n", "\uff0aembed\uff0a", "*\u0435mbed*"])
def test_a_pattern_that_can_match_no_name_is_refused_with_the_settings(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches no block: names of blocks are of printable ASCII"):
        Policy(never_send=(pattern,))


@pytest.mark.parametrize(
    ("rule", "names", "nbytes", "kept"),
    [
        ("plan", ["layer.0.value", "embed"], 10, []),  # in the model, and not asked for
        ("plan", ["layer.0.value", "diary"], 10, []),  # in no model
        ("never_send", ["layer.0.query"], 10, []),
        ("vault", ["layer.0.value"], 10, ["layer.0.value"]),
        ("max_upload_bytes", ["layer.0.value"], 1001, []),
    ],
)
def test_a_file_that_holds_more_than_it_may_does_not_leave(
    rule: str, names: list[str], nbytes: int, kept: list[str]
) -> None:
    policy = Policy(never_send=("*query",), max_upload_bytes=1000)
    with pytest.raises(PolicyViolation) as violation:
        policy.check_egress(names, nbytes, TABLE[1:3], kept)
    assert violation.value.rule == rule

"""A coordinator that asks for less noise than a site agreed to: the site and the helpers refuse it by a rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tessera.shared.api.secure_sums import SumTask
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.run_settings import ClientPrivacy
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.governance.descriptions import policy_in_words
from tessera.worker.governance.policy import ClientPrivacyFloor, Policy, PolicyViolation
from tessera.worker.governance.run_history import RunHistory, TaskStatement
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.site_keys import SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.task.environment import Journal, TaskEnvironment, TaskRun
from tessera.worker.task.secure_sums import admitted_terms, help_open
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.federation import small_model
from tests.support.secure_sums import Federation

MODEL = small_model()
FEDERATION = Federation(6, 4, quorum=5)
AGREED = ClientPrivacy(epsilon=8.0, delta=1e-5, clip_norm=0.5, honest_sites=4)
FLOOR = ClientPrivacyFloor(epsilon=8.0, delta=1e-5)


def task_of(terms: Terms | None, client_privacy: ClientPrivacy | None = AGREED, **more: Any) -> Task:
    secure_sums = {"helpers": FEDERATION.names[:4], "quorum": 5} if terms else None
    given = {
        "id": "t", "token": 1, "kind": "train", "run": "run-1", "run_name": "demo", "round": 1, "rounds": 4,
        "method": MethodSpec(name="fedavg"), "plan": Plan(), "dataset": "wards", "codec": "raw",
        "training": {}, "normalization": "cohort", "model": digest_of(canonical(MODEL)), "lease_seconds": 60.0,
        "version": {"number": 0, "digest": FEDERATION.terms().version}, "client_privacy": client_privacy,
        "secure_sums": secure_sums, "seed": 0,
    }  # fmt: skip
    task = Task.model_validate({**given, **more})
    if terms is None:
        return task
    digest = terms_for(terms, task).digest
    return task.model_copy(update={"sums": SumTask(terms=digest, document=digest)})


def terms_for(terms: Terms, task: Task) -> Terms:
    """Return the terms with the settings of a task."""
    return Terms.model_validate({**terms.model_dump(), "settings": task.alike_digest})


def run_of(folder: Path, terms: Terms | None, policy: Policy, task: Task) -> TaskRun:
    cache = Cache(folder / "cache", 1 << 20)
    for document in (MODEL, *([terms_for(terms, task)] if terms else [])):
        text = canonical(document)
        cache.put(digest_of(text), [text], len(text))
    # No other key of this site is needed, and nothing is fetched.
    party = SumParty("site-05", cast("Any", None), FEDERATION.roster, quorum=5, helper=False, agreements=None)
    direct, vault = Direct({}, TrainingSetup(torch.device("cpu"))), Vault(folder / "vault")
    nothing = cast("Any", SimpleNamespace(copy_blob=None))
    kinds = ("train", "agree")
    env = TaskEnvironment(nothing, {}, direct, vault, cache, folder, policy=policy, kinds=kinds, sums=party)
    return TaskRun(env, task, lambda: None, Report(), Journal(cast("Any", None), "wards", None, None))


def less_noise(terms: Terms) -> Terms:
    assert terms.noise
    noise = terms.noise.model_copy(update={"deviation": terms.noise.deviation // 2})
    return FEDERATION.noisy_terms(noise=noise)


FAIR = FEDERATION.noisy_terms()
WEAK = AGREED.model_copy(update={"epsilon": 9.0})
ALL_HONEST = AGREED.model_copy(update={"honest_sites": 5})
ACTS: dict[str, tuple[Terms | None, ClientPrivacy | None, Policy, str]] = {
    "half the noise": (less_noise(FAIR), AGREED, Policy(), "secure_sums"),
    "a larger epsilon than the task's": (FEDERATION.noisy_terms(9.0), AGREED, Policy(), "secure_sums"),
    "noise for fewer rounds": (FEDERATION.noisy_terms(rounds=3), AGREED, Policy(), "secure_sums"),
    "another clip norm": (FEDERATION.noisy_terms(clip_norm=5.0), AGREED, Policy(), "secure_sums"),
    "more shares than the task's": (FEDERATION.noisy_terms(honest_sites=5), AGREED, Policy(), "secure_sums"),
    "no noise": (FEDERATION.terms(), AGREED, Policy(), "secure_sums"),
    "noise that no task asks for": (FAIR, None, Policy(), "secure_sums"),
    "a run with a larger epsilon than the site allows": (
        FEDERATION.noisy_terms(9.0),
        WEAK,
        Policy(require_client_privacy=FLOOR),
        "require_client_privacy",
    ),
    "a run that trusts every site": (
        FEDERATION.noisy_terms(honest_sites=5),
        ALL_HONEST,
        Policy(require_client_privacy=FLOOR),
        "require_client_privacy",
    ),
    "noise without secure sums": (None, AGREED, Policy(), "secure_sums"),
    "exact sums": (FEDERATION.terms(), None, Policy(require_client_privacy=FLOOR), "require_client_privacy"),
    "no secure sums": (None, None, Policy(require_client_privacy=FLOOR), "require_client_privacy"),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_site_trains_for_no_sum_with_less_noise_than_it_agreed_to(tmp_path: Path, act: str) -> None:
    terms, given, policy, rule = ACTS[act]
    with pytest.raises(PolicyViolation) as refusal:
        admitted_terms(run_of(tmp_path, terms, policy, task_of(terms, given)))
    assert refusal.value.rule == rule


# A helper checks the epsilon of a set's noise where it signs: tests/shared/secure_sums/test_noisy_updates.py.
@pytest.mark.parametrize("act", [name for name, (terms, *_) in ACTS.items() if terms and name != "half the noise"])
def test_a_helper_signs_no_set_of_senders_with_less_noise(tmp_path: Path, act: str) -> None:
    terms, given, policy, rule = ACTS[act]
    with pytest.raises(PolicyViolation) as refusal:
        help_open(run_of(tmp_path, terms, policy, task_of(terms, given, kind="agree")))
    assert refusal.value.rule == rule


def test_a_site_takes_a_sum_with_the_noise_that_it_requires(tmp_path: Path) -> None:
    task = task_of(FAIR)
    run = run_of(tmp_path, FAIR, Policy(require_client_privacy=FLOOR), task)
    assert admitted_terms(run) == terms_for(FAIR, task)


def test_a_site_trains_for_no_sum_beyond_its_total(tmp_path: Path) -> None:
    """Four rounds spend epsilon 8: with three of them spent by other runs, two more are beyond it."""
    policy = Policy(require_client_privacy=FLOOR.model_copy(update={"total_epsilon": 8.0}))
    run, history = run_of(tmp_path, FAIR, policy, task_of(FAIR)), RunHistory(tmp_path / "runs", "w")
    run = replace(run, env=replace(run.env, history=history))
    history.add(TaskStatement.of(task_of(FAIR)), policy, 1, 3 * FAIR.rho)
    assert admitted_terms(run)
    history.add(TaskStatement.of(task_of(FAIR, run="run-2")), policy, 1, FAIR.rho)
    with pytest.raises(PolicyViolation, match="all runs reveal of this site to an epsilon of"):
        admitted_terms(run)


@pytest.mark.parametrize(
    "method",
    [
        MethodSpec(name="safl", settings={"layers": 1}),
        MethodSpec(name="scaffold"),
        MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"}),
    ],
    ids=lambda method: method.name,
)
def test_a_site_trains_by_no_method_whose_updates_tell_more_than_noisy_steps(
    tmp_path: Path, method: MethodSpec
) -> None:
    run = run_of(tmp_path, FAIR, Policy(), task_of(FAIR, method=method))
    with pytest.raises(PolicyViolation, match="secure_sums: noise: "):
        admitted_terms(run)


@pytest.mark.parametrize("later", [WEAK, None, AGREED.model_copy(update={"clip_norm": 0.1})])
def test_a_run_keeps_its_client_level_privacy(tmp_path: Path, later: ClientPrivacy | None) -> None:
    history = RunHistory(tmp_path, "worker")
    history.add(TaskStatement.of(task_of(FAIR)), Policy(), 1)
    version = {"number": 1, "digest": f"sha256:{'1' * 64}"}
    history.check(TaskStatement.of(task_of(FAIR, round=2, version=version)), Policy())
    with pytest.raises(PolicyViolation, match="has changed its client_privacy"):
        history.check(TaskStatement.of(task_of(FAIR, later, round=2, version=version)), Policy())


def test_an_approval_covers_the_client_level_privacy() -> None:
    agreed, weak, none = (TaskStatement.of(task_of(FAIR, given)).terms_digest() for given in (AGREED, WEAK, None))
    assert len({agreed, weak, none}) == 3


def test_the_policy_says_what_the_site_requires_for_itself() -> None:
    said = " ".join(policy_in_words(Policy(require_client_privacy=FLOOR)))
    assert "privacy of this site as a whole, in secure sums: at most epsilon 8 at delta 1e-05" in said

"""A private task that resumes from its checkpoint: the same noise, the same choice, and no second charge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Participant, RunInfo, State
from tessera.shared.methods.registry import coordinator_half, worker_half
from tessera.shared.run_settings import Privacy, Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Groups
from tessera.worker.governance.policy import Allowance, PolicyViolation
from tessera.worker.model.block_map import block_table
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.private_task import PrivateTask
from tessera.worker.state.checkpoints import CheckpointKey, Checkpoints
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger, NoisySteps
from tessera.worker.training.batches import Batches
from tessera.worker.training.checkpoints import CheckpointFile, TrainingCheckpoints
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tasks import CPU, PLAIN, images
from tests.worker.privacy.test_private_task import task as task_of

DIGEST = f"sha256:{'0' * 64}"
KEY = b"not secret, but always the same."
PRIVACY = Privacy(epsilon=3.0, delta=1e-5, clip_norm=0.5, selection="noisy")
TRAINING = Training(batch_size=8, learning_rate=0.05, epochs=2)
STEPS = 6
"""Two epochs of 24 examples in samples of 8."""

CHECKPOINT = CheckpointKey(
    run="r", round=1, task="t", model="m", base="b", plan="p", settings="s", data="d", libraries="l", device="cpu"
)


class Killed(BaseException):
    """Stands for the end of the process."""


def private_update(
    folder: Path,
    noise_key: bytes | None = None,
    budget: Allowance | None = None,
    check: Callable[[], None] = lambda: None,
    checkpoint: CheckpointKey = CHECKPOINT,
    method: str = "safl",
    groups: Sequence[bytes] | None = None,
) -> tuple[dict[str, bytes], PrivacyAccount]:
    """What a private task sends, as a runner computes it. With `groups` of the examples, these are its units."""
    model = PLAIN.model()
    privacy = PRIVACY.model_copy(update={"unit": "group", "max_per_group": 2, "delta": 1e-2} if groups else {})
    chosen = MethodSpec(name=method, settings={"layers": 1} if method == "safl" else {})
    facts = RunInfo(block_table(model), rounds=4, training=TRAINING, privacy=privacy)
    plan = coordinator_half(chosen, facts).plan_for(State(0, {}), Participant("a/w", 24))
    task = Task.model_validate(
        {
            "id": "t", "token": 1, "kind": "train", "run": "r", "run_name": "demo", "round": 1, "rounds": 4,
            "seed": 0, "method": chosen, "plan": plan, "dataset": "wards", "privacy": privacy, "codec": "raw",
            "training": TRAINING, "normalization": "participants", "model": DIGEST,
            "version": VersionRef(number=0, digest=DIGEST), "lease_seconds": 60.0,
        }
    )  # fmt: skip
    stored = Checkpoints(folder / "vault").of_task(checkpoint)
    resumed = stored.document["private"] if stored.document else None
    data: Dataset = images()
    units = Groups.of(groups) if groups else None
    account = PrivacyAccount(
        task, privacy, units.count if units else data.examples, Ledger(folder), budget,
        checkpoint=checkpoint.digest, resumed=resumed and resumed["account"],
    )  # fmt: skip
    private = PrivateTask(account, task, units, noise_key, resumed)
    context = LocalTaskContext(model, PLAIN.head, plan, facts.blocks, choose_top=private.top_k)
    half = worker_half(chosen, facts)
    seed_everything(0)
    half.setup(context)
    selected = half.select(context, private.watched(Batches(data, 8, CPU)))
    # A checkpoint after each step.
    checkpoints = TrainingCheckpoints(CheckpointFile.of(stored), 0)
    trainer = Trainer(half, context, TRAINING, TrainingSetup(CPU), check, private, checkpoints=checkpoints)
    stats = trainer.train(half.phases(context, selected), data, 0)
    result = half.collect(context, selected, stats)
    return {name: values.tobytes() for name, values in result.upload.items()}, account


def killed_at(step: int) -> Callable[[], None]:
    left = step

    def check() -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1

    return check


def charges(folder: Path) -> list[str]:
    return [event.kind for entry in Ledger(folder).read("wards") for event in entry.events]


@pytest.mark.parametrize("kills", [(0,), (3, 1), pytest.param((1, 1, 1, 1), marks=pytest.mark.long)])
def test_a_killed_task_resumes_with_the_same_noise_and_choice_and_is_charged_once(
    tmp_path: Path, kills: tuple[int, ...]
) -> None:
    undisturbed, one = private_update(tmp_path / "one", KEY)
    key: bytes | None = KEY
    for kill in kills:
        with pytest.raises(Killed):
            private_update(tmp_path / "two", key, check=killed_at(kill))
        key = None  # the next process draws a key of its own, which it must not use
    update, two = private_update(tmp_path / "two", None)
    assert update == undisturbed
    assert charges(tmp_path / "two") == charges(tmp_path / "one") == ["noisy-choice", "noisy-steps"]
    assert two.spent() == one.spent()


def test_a_killed_task_of_groups_resumes_with_the_same_groups_and_members(tmp_path: Path) -> None:
    # Six groups of four examples, all of them in each step, of which two take part.
    groups = [b"%d" % (row % 6) for row in range(24)]
    undisturbed, one = private_update(tmp_path / "one", KEY, groups=groups)
    with pytest.raises(Killed):
        private_update(tmp_path / "two", KEY, check=killed_at(1), groups=groups)
    update, two = private_update(tmp_path / "two", None, groups=groups)
    assert update == undisturbed
    assert charges(tmp_path / "two") == charges(tmp_path / "one") == ["noisy-choice", "noisy-steps"]
    assert two.spent() == one.spent()


def test_a_task_that_resumes_days_later_counts_from_when_it_leaves(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        private_update(tmp_path, KEY, check=killed_at(3))
    reserved = Ledger(tmp_path).read("wards")
    _, private = private_update(tmp_path, None)
    assert Ledger(tmp_path).read("wards") == reserved
    private.leave()
    (entry,) = Ledger(tmp_path).read("wards")
    assert entry.at > reserved[-1].at
    assert entry.events == tuple(event for one in reserved for event in one.events)
    assert (entry.unit, entry.examples, entry.target) == ("example", 24, reserved[0].target)


def test_without_its_checkpoint_a_killed_task_is_charged_again_and_has_other_noise(tmp_path: Path) -> None:
    undisturbed, one = private_update(tmp_path / "one", KEY)
    with pytest.raises(Killed):
        private_update(tmp_path / "two", KEY, check=killed_at(3))
    other = CHECKPOINT.model_copy(update={"data": "changed"})
    update, two = private_update(tmp_path / "two", None, checkpoint=other)
    assert charges(tmp_path / "two") == 2 * ["noisy-choice", "noisy-steps"]
    assert two.spent() > one.spent()
    assert update != undisturbed


def test_what_a_stop_took_back_is_charged_again_when_the_task_resumes(tmp_path: Path) -> None:
    undisturbed, one = private_update(tmp_path / "one", KEY)
    with pytest.raises(Killed):
        private_update(tmp_path / "two", KEY, check=killed_at(3))
    # Its process voids what it reserved, as the runner does when it is stopped.
    with Ledger(tmp_path / "two").page("wards") as page:
        first = page.entries[0]
        page.void(
            TaskRef(first.run, first.run_name, first.round, first.task, first.token),
            [entry.seq for entry in page.entries],
        )
    assert charges(tmp_path / "two") == []

    update, two = private_update(tmp_path / "two", None)
    assert update == undisturbed
    assert charges(tmp_path / "two") == ["noisy-choice", "noisy-steps"]
    assert two.spent() == one.spent()


def test_what_a_stop_took_back_is_not_charged_again_if_other_tasks_have_spent_the_target(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        private_update(tmp_path, KEY, check=killed_at(3))
    with Ledger(tmp_path).page("wards") as page:
        ref = TaskRef("r", "demo", 1, "t", 1)
        (steps,) = (event for entry in page.entries for event in entry.events if isinstance(event, NoisySteps))
        page.void(ref, [entry.seq for entry in page.entries])
        # Four rounds of six steps use the target up: with 22, more noise would do for six others, but not this noise.
        page.spend(
            ref, 24, PRIVACY, [NoisySteps(noise_multiplier=steps.noise_multiplier, sampling_rate=1 / 3, steps=22)]
        )
    with pytest.raises(PolicyViolation, match="meanwhile"):
        private_update(tmp_path, None)


def test_a_budget_that_one_task_uses_up_lets_the_task_resume_but_not_begin_anew(tmp_path: Path) -> None:
    _, one = private_update(tmp_path / "one", KEY)
    enough = Allowance(epsilon=one.spent() * 1.2, delta=1e-5)
    with pytest.raises(Killed):
        private_update(tmp_path / "two", KEY, enough, killed_at(3))
    private_update(tmp_path / "two", None, enough)
    with pytest.raises(PolicyViolation, match="would bring"):
        private_update(tmp_path / "two", None, enough, checkpoint=CHECKPOINT.model_copy(update={"task": "t2"}))


def test_a_fault_amid_the_departure_of_a_held_update_does_not_charge_it_twice(tmp_path: Path) -> None:
    asked = task_of(privacy=PRIVACY.model_copy(update={"selection": "refused"}))
    assert asked.privacy
    about = (asked, asked.privacy, 40, Ledger(tmp_path), None)
    first = PrivacyAccount(*about, checkpoint="c")
    first.begin(STEPS)
    stored = first.charges()
    # The ledger has it, and the airlock could not be told.
    first.leave()
    paid = first.spent()
    again = PrivacyAccount(*about, checkpoint="c", resumed=stored)
    again.resume_leaving()
    again.leave()
    assert charges(tmp_path) == ["noisy-steps"]
    assert again.spent() == paid

"""A model that is kept for the next task: whatever came in between, each task starts from exactly its version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.methods.base import LocalResult, Method, MethodSpec, TaskContext, TrainingStats, UnsupportedRun
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import roles
from tessera.shared.tensors.lazy import Array, digest_of
from tessera.simulation import Conditions, Weights, simulate
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import read_block
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.in_process import in_process
from tests.support.tasks import EACH_METHOD, PLAIN, Subject, subject_of
from tests.worker.test_agent import begin, settings_of, succeed, working

SETTINGS: dict[str, dict[str, Any]] = {"fedfrozen": {"warmup_rounds": 1}, "safl": {"layers": 1, "score": "random"}}
STARTS: list[dict[str, Array]] = []
"""The values from which each task of a `checked` method started, without the site's private ones."""
FAILING: set[int] = set()
"""The places in STARTS of the tasks that fail once they have trained."""


def checked(method: Method[Any]) -> Method[Any]:
    """The same method, whose tasks note the values from which they start."""

    class Checked(method.worker):  # type: ignore[misc, name-defined]  # a class that is known only here
        def setup(self, context: TaskContext) -> None:
            own = {block.name for block in self.private().resolve(context.blocks)}
            blocks = [block for block in context.plan.fetch.resolve(context.blocks) if block.name not in own]
            STARTS.append({block.name: context.read(block) for block in blocks})
            super().setup(context)

        def collect(self, context: TaskContext, selected: Any, stats: TrainingStats) -> LocalResult:
            place = len(STARTS) - 1
            if place in FAILING:
                raise UnsupportedRun("this task fails after its training")
            result = super().collect(context, selected, stats)
            return replace(result, metrics={**result.metrics, "place": float(place)})

    return replace(method, worker=Checked)


@pytest.fixture(autouse=True)
def _checked_methods() -> Iterator[None]:
    own = dict(methods())
    methods().update({name: checked(method) for name, method in own.items()})
    yield
    methods().update(own)
    STARTS.clear()
    FAILING.clear()


def weights(subject: Subject) -> Weights:
    model, document = subject.model(), subject.document()
    tensors = named_tensors(model)
    return Weights(document, {block.name: read_block(tensors, block) for block in document.blocks})


def simulated(method: str, subject: Subject = PLAIN, rounds: int = 3, **spec: Any) -> list[int]:
    """The rounds whose tasks were checked to start from the version before."""
    wanted = {
        "method": {"name": method, "settings": SETTINGS.get(method, {})}, "rounds": rounds,
        "training": {"batch_size": 8, "learning_rate": 0.05, "optimizer": "sgd"}, **spec,
    }  # fmt: skip
    data = subject.data()
    every = Conditions(keep_versions="all")
    result = simulate(wanted, weights(subject), {"a": data, "b": data}, test=data, conditions=every)
    found = []
    for made in result.rounds:
        version = result.arrays(made.number - 1)
        for task in made.tasks:
            if "place" in task.metrics:
                require_same(STARTS[int(task.metrics["place"])], version)
                found.append(made.number)
    return found


def require_same(start: dict[str, Array], version: dict[str, Array]) -> None:
    assert [name for name, values in start.items() if values.tobytes() != version[name].tobytes()] == []


@EACH_METHOD
def test_each_task_of_any_method_starts_from_its_version(method: str) -> None:
    # Of those with settings, the third round is the first one after a version that changed in part.
    rounds = 3 if method in SETTINGS else 2
    assert simulated(method, subject_of(method), rounds) == [number for number in range(1, rounds + 1) for _ in "ab"]


def test_evaluations_between_rounds_leave_the_next_start_as_it_is() -> None:
    assert simulated("ditto", evaluation={"sites": True}) == [1, 1, 2, 2, 3, 3]


def test_a_task_that_fails_after_its_training_leaves_nothing_in_the_next() -> None:
    FAILING.update({2, 5})
    assert simulated("fedavg", cohort={"quorum": 1}) == [1, 1, 2, 3]


SIZES = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TIED: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 8, **SIZES,
}  # fmt: skip
FUSED: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 20, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def texts() -> Dataset:
    tokens = torch.randint(0, 20, (16, 8), generator=torch.Generator().manual_seed(3))
    return Dataset({"input_ids": tokens, "labels": tokens})


@pytest.mark.parametrize(
    "subject",
    [
        Subject(TIED, "masked-lm", texts),
        Subject(FUSED, "causal-lm", texts),
    ],
    ids=["tied", "fused"],
)
def test_tied_and_fused_tensors_start_from_their_version(subject: Subject) -> None:
    assert simulated("fedfrozen", subject) == [1, 1, 2, 2, 3, 3]


# ---------------------------------------------------------------- workers of a coordinator


class Site:
    """A worker of site a that takes one task at a time."""

    def __init__(self, coordinator: LiveCoordinator, folder: Path) -> None:
        self.client = coordinator.client()
        settings = settings_of(coordinator, folder, poll_seconds=0, audit_key="ab" * 32)
        self.executor = in_process(settings)
        self.agent = Agent(settings, Stop(), executor=self.executor)

    def work(self, run: Run) -> None:
        """Do the next task, of whichever run, and wait until this one's round is merged."""
        number = self.client.run(run.id).version.number
        self.agent._run_task(until(self.agent._next))
        until(lambda: self.client.run(run.id).version.number > number)

    def trusted(self, run: Run) -> set[str]:
        """The blocks of the last version but one that the kept model still has, by its own account."""
        built = self.executor.cache.models._last
        assert built
        tensors = named_tensors(built.model)
        *_, before, _ = self.client.versions(run.id)
        digests = self.client.manifest(before.digest).blocks
        return {
            block.name
            for block in built.blocks
            if built.held.has(block.tensor, tensors[block.tensor], (digests[block.name],))
        }


@pytest.fixture
def site(coordinator: LiveCoordinator, tmp_path: Path) -> Iterator[Site]:
    found = Site(coordinator, tmp_path)
    yield found
    found.agent.close()


def frozen(client: Client, rounds: int, **spec: Any) -> Run:
    """A run that trains values and the head alone."""
    settings = {"warmup_rounds": 0, "scope": "v_head"}
    return begin(client, method=MethodSpec(name="fedfrozen", settings=settings), rounds=rounds, **spec)


def require_starts(client: Client, run: Run) -> None:
    for made in client.rounds(run.id):
        version = list(client.versions(run.id))[made.number - 1]
        digests = client.manifest(version.digest).blocks
        for task in made.tasks:
            start = STARTS[int(task.metrics["place"])]
            assert {name: digest_of(values.tobytes()) for name, values in start.items()} == digests


def test_exactly_what_does_not_train_is_trusted(site: Site) -> None:
    run = frozen(site.client, rounds=2)
    for _ in range(2):
        site.work(run)
        model = site.client.model(run.spec.model)
        open_ = roles("value", "head").resolve(model.blocks)
        assert site.trusted(run) == {block.name for block in model.blocks} - {block.name for block in open_}
    require_starts(site.client, run)


def test_frozen_values_are_not_read_from_the_disk_again(
    coordinator: LiveCoordinator, site: Site, tmp_path: Path
) -> None:
    client, versions = site.client, []
    for touched in (False, True):
        run = frozen(client, rounds=2, seed=5)
        if touched:
            succeed(tmp_path / "False/state", tmp_path / "True/state")
        other = Site(coordinator, tmp_path / str(touched))
        other.work(run)
        if touched:
            for digest in {digest_of(values.tobytes()) for values in STARTS[-1].values()}:
                path = other.agent._runner.shelf.path(digest)
                path.write_bytes(bytes(path.stat().st_size))
        other.work(run)
        other.agent.close()
        versions.append(client.run(run.id).version)
    assert versions[0] == versions[1]
    assert versions[0].number == 2


def test_tasks_of_two_runs_in_turns_start_from_their_own_versions(site: Site) -> None:
    runs = [frozen(site.client, rounds=2, seed=seed) for seed in (1, 2)]
    for _ in range(4):
        site.agent._run_task(until(site.agent._next))
    until(lambda: all(site.client.run(run.id).state == "completed" for run in runs))
    for run in runs:
        require_starts(site.client, run)


def test_a_worker_that_misses_rounds_starts_from_the_version_of_its_next_one(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = frozen(client, rounds=6, cohort=Cohort(size=1, quorum=1))
    with ExitStack() as stack:
        for name in ("a", "b"):
            token = coordinator.token("site", name)
            stack.enter_context(working(coordinator, tmp_path / name, executes=True, token=token, poll_seconds=1))
        until(lambda: client.run(run.id).state == "completed")
    assert len({task.worker for made in client.rounds(run.id) for task in made.tasks}) == 2
    require_starts(client, run)

"""Sites of different ranks over real HTTP: what each sends, what the rounds make of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec, State, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.spec import Lora
from tessera.shared.problems import Invalid, Problem
from tessera.shared.rounds.planning import run_facts
from tessera.shared.tensors.lazy import ArrayTensor, Tensor, from_bytes, to_array
from tessera.shared.updates.update_file import read_update
from tessera.worker.agent import Agent
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.shared.methods.test_lora_averages import products
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.datafiles import some_digits
from tests.support.federation import ScriptedWorker, start_run
from tests.support.in_process import in_process
from tests.support.tapping import Tap
from tests.support.tasks import DIGITS_VIT, untrained

LORA = Lora(rank=8, alpha=16, roles=("query", "value"), ranks=(2, 4, 8))
DOCUMENT, START = untrained(DIGITS_VIT, "image-classification", seed=1, lora=LORA)
RANKS = {"a": 2, "b": 4, "c": 8}
BASE = [block.name for block in DOCUMENT.blocks if ".base_layer.weight" in block.name]
ADAPTERS = [block.name for block in DOCUMENT.blocks if block.role == "adapter"]


class Site:
    """A worker of one site, behind a tap. Each has as many examples as the others."""

    def __init__(self, live: LiveCoordinator, folder: Path, name: str, tap: Tap, **settings: Any) -> None:
        self.name, self.tap = name, tap
        digits = some_digits(folder / "data", 24, "abcd".index(name))
        given = WorkerSettings.model_validate({
            "url": tap.url, "token": live.token("site", name), "name": "w", "state_dir": folder / name, "threads": 1,
            "datasets": {"digits": digits}, "poll_seconds": 0, **settings,
        })  # fmt: skip
        self.settings = given
        self.agent = Agent(given, Stop(), executor=in_process(given))
        # Makes itself known. A task that it gets by the way, it gets again.
        self.agent._next()

    def close(self) -> None:
        self.agent.close()

    def works(self) -> bytes:
        """Does its task; what it sent meanwhile."""
        before = len(self.tap.up)
        self.agent._run_task(until(self.agent._next))
        return bytes(self.tap.up[before:])


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveCoordinator]:
    # An update as it is, and not within JSON, so that its names can be looked for.
    with LiveCoordinator(tmp_path / "coordinator", submission_bytes=0) as found:
        yield found


@pytest.fixture
def join(live: LiveCoordinator, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:

        def joined(name: str, rank: int | None = None, **settings: Any) -> Site:
            limits = {} if rank is None else {"resources": {"lora_rank": rank}}
            site = Site(live, tmp_path, name, stack.enter_context(Tap(live.url)), **limits, **settings)
            stack.callback(site.close)
            return site

        yield joined


def begin(client: Client, names: str, settings: dict[str, Any] | None = None, **spec: Any) -> Run:
    wanted: dict[str, Any] = {
        "rounds": 2, "codec": "raw", "training": Training(learning_rate=0.01, batch_size=24), "dataset": "digits",
        "keep_updates": "run", "method": MethodSpec(name="lora", settings=settings or {}),
        "cohort": Cohort(quorum=len(names), max_attempts=1, max_task_attempts=1, sites=tuple(names)), **spec,
    }  # fmt: skip
    return start_run(client, DOCUMENT, START, **wanted)


def version(client: Client, run: Run, number: int) -> dict[str, np.ndarray]:
    made = until(lambda: next((one for one in client.versions(run.id) if one.number == number), None))
    blocks = client.manifest(made.digest).blocks
    by_name = DOCUMENT.by_name
    return {
        name: from_bytes(client.read_blob(digest), by_name[name].dtype).reshape(by_name[name].shape)
        for name, digest in blocks.items()
    }


def sent(live: LiveCoordinator, task: TaskView, base: dict[str, np.ndarray]) -> Update:
    """A task's update, read as a coordinator does."""
    assert task.update
    data = live.services.blobs.read(task.update)
    bases: dict[str, Tensor] = {name: ArrayTensor(value) for name, value in base.items()}
    blocks = read_update(partial(BytesIO, data), len(data), dict(DOCUMENT.by_name), bases)
    assert task.examples
    return Update(task.worker, task.examples, {name: ArrayTensor(to_array(one)) for name, one in blocks.items()})


def parts_in(names: Any) -> set[str]:
    return {part for part in LORA.parts for name in names if f".{part}." in name}


@pytest.mark.parametrize(
    "average",
    ["factors", "stack", *(pytest.param(name, marks=pytest.mark.long) for name in ("partition", "residual"))],
)
def test_each_site_trains_its_rank_and_the_version_is_the_average_of_what_was_sent(
    live: LiveCoordinator, join: Callable[..., Site], average: str
) -> None:
    client, sites = live.client(), [join(name, rank) for name, rank in RANKS.items()]
    run = begin(client, "abc", {"average": average})
    for number in (1, 2):
        for site in sites:
            up = site.works()
            # The update's own header names its blocks.
            assert [part.encode() in up for part in LORA.parts] == [
                RANKS[site.name] >= int(p[5:]) for p in LORA.parts
            ]
        before, after = version(client, run, number - 1), version(client, run, number)
        (round_,) = (one for one in client.rounds(run.id) if one.number == number)
        assert {task.worker[0]: task.metrics["lora_rank"] for task in round_.tasks} == RANKS
        updates = [sent(live, task, before) for task in sorted(round_.tasks, key=lambda task: task.worker)]
        for update in updates:
            assert parts_in(update.blocks) == set(LORA.parts_within(RANKS[update.worker[0]]))
        expected = merged(run, before, updates)
        for name, value in expected.items():
            np.testing.assert_array_equal(after[name], value)
        moved = {name for name in after if not np.array_equal(before[name], after[name])}
        heads = {block.name for block in DOCUMENT.blocks if block.role == "head"}
        assert moved == heads | {*(BASE if average in ("stack", "residual") else ())} | {
            *(ADAPTERS if average != "stack" else ())
        }
        if average in ("stack", "residual"):
            mean_product(before, after, updates)
    until(lambda: client.run(run.id).state == "completed")
    shown = tessera("run", "show", run.id, TESSERA_URL=live.url, TESSERA_TOKEN=live.token("orchestrator"))
    assert "a/w 2, b/w 4, c/w 8" in " ".join(shown.stdout.split())


def merged(run: Run, before: dict[str, np.ndarray], updates: list[Update]) -> dict[str, np.ndarray]:
    """The version that the method's half computes here from the updates."""
    half = coordinator_half(run.spec.method, run_facts(run.spec, DOCUMENT))
    state = State(0, {name: ArrayTensor(value) for name, value in before.items()})
    return {name: to_array(tensor) for name, tensor in half.merge(state, updates).model.items()}


def mean_product(before: dict[str, np.ndarray], after: dict[str, np.ndarray], updates: list[Update]) -> None:
    """The new version computes with the sites' mean of W + alpha / rank B A."""
    found: dict[str, Any] = {}
    for values, share in (
        (after, 1.0),
        *(({**before, **{n: to_array(t) for n, t in update.blocks.items()}}, -1 / 3) for update in updates),
    ):
        for part in LORA.parts:
            for matrix, product in products(DOCUMENT, values, part).items():
                found[matrix] = found.get(matrix, 0) + share * LORA.alpha / LORA.rank * product
    for matrix, change in found.items():
        np.testing.assert_allclose(after[matrix] - before[matrix] + change, 0, atol=1e-5)
        assert np.abs(after[matrix] - before[matrix]).max() > 1e-6


def test_a_site_that_is_away_or_joins_later_is_averaged_in_the_rounds_that_it_is_there(
    live: LiveCoordinator, join: Callable[..., Site]
) -> None:
    """With a quorum of one and a cohort of whoever is there: first the site of rank 2, and then that of rank 8."""
    client, first = live.client(), join("a", 2)
    cohort = Cohort(quorum=1, sites=("a", "c"), max_attempts=1, max_task_attempts=1)
    run = begin(client, "ac", {"average": "residual"}, cohort=cohort, rounds=2)
    first.works()
    start, one = version(client, run, 0), version(client, run, 1)
    changed = [name for name in ADAPTERS if not np.array_equal(start[name], one[name])]
    assert parts_in(changed) == {"rank_2"}
    second = join("c", 8)
    # The second round opened with the site of rank 2 alone, or with both.
    while client.run(run.id).state == "running":
        rounds = list(client.rounds(run.id))
        for site in (first, second):
            if any(task.worker[0] == site.name and task.state in ("offered", "leased") for task in rounds[-1].tasks):
                site.works()
    assert client.run(run.id).state == "completed"


def test_the_run_may_give_a_site_a_smaller_rank_than_it_states(
    live: LiveCoordinator, join: Callable[..., Site]
) -> None:
    client, sites = live.client(), [join("a", 4), join("b"), join("c", 4)]
    run = begin(client, "abc", lora_ranks={"a": 2, "c": 8}, rounds=1)
    for site in sites:
        site.works()
    until(lambda: client.run(run.id).state == "completed")
    (round_,) = client.rounds(run.id)
    # c states 4, and the run may not give it more.
    assert {task.worker[0]: task.metrics["lora_rank"] for task in round_.tasks} == {"a": 2.0, "b": 8.0, "c": 4.0}


def test_ranks_that_the_model_lacks_are_refused_before_the_run(live: LiveCoordinator) -> None:
    client = live.client()
    with pytest.raises(Invalid) as refusal:
        begin(client, "a", lora_ranks={"a": 3})
    (fault,) = refusal.value.errors
    assert (fault.pointer, "of the ranks 2, 4, 8: name one of these" in fault.detail) == ("/lora_ranks/a", True)


def test_a_site_below_all_ranks_is_told_before_the_run_and_gets_no_task(
    live: LiveCoordinator, join: Callable[..., Site]
) -> None:
    client = live.client()
    join("a", 1)
    run = begin(client, "a", rounds=1)
    found = client.preview_run(run.spec)
    (one,) = (each for each in found.workers if each.worker == "a/w")
    assert [(each.rule, each.detail) for each in one.ineligibilities] == [
        ("lora_rank", "it trains adapters up to rank 1 (resources.lora_rank), and the model's have rank 2")
    ]
    client.set_run_state(run.id, "cancelled")


def test_an_update_of_another_rank_than_the_task_states_is_rejected(live: LiveCoordinator) -> None:
    client = live.client()
    cohort = Cohort(quorum=1, sites=("a",), max_attempts=1, max_task_attempts=1)
    worker = ScriptedWorker(live.client("site", "a"), "scripted", datasets={"liar": 10}, methods=("lora",))
    worker.enrol()
    run = begin(client, "a", rounds=1, lora_ranks={"a": 2}, dataset="liar", cohort=cohort)
    task = worker.take()
    assert task.plan.scalars["lora_rank"] == 2.0
    more = [name for name in ADAPTERS if ".rank_8." in name][:1]
    update = worker.upload(task, {name: START[name] + 1 for name in more})
    with pytest.raises(Problem) as refusal:
        worker.submit(task, update)
    assert more[0] in str(refusal.value.errors)
    until(lambda: client.run(run.id).state != "running")


def test_a_site_refuses_a_rank_that_its_settings_no_longer_allow(
    live: LiveCoordinator, join: Callable[..., Site]
) -> None:
    """The task was planned before: the agent compares it with its own settings, whatever the coordinator knows."""
    client, site = live.client(), join("a")
    run = begin(client, "a", rounds=1)
    until(lambda: next(iter(client.rounds(run.id)), None))
    site.agent.close()
    lower = site.settings.model_copy(update={"resources": {"lora_rank": 4.0}})
    site.agent = Agent(lower, Stop(), executor=in_process(lower))
    site.works()
    (task,) = (task for round_ in client.rounds(run.id) for task in round_.tasks)
    assert task.problem
    assert "the plan trains adapters of rank 8, and this site holds at most 4" in task.problem.detail

"""SAFL over real HTTP: what crosses the wire, in both directions, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.metrics.rows import rows_of
from tessera.shared.metrics.selections import choices_of, selection_scalars
from tessera.shared.model.blocks import layers_of
from tessera.shared.model.spec import Model
from tessera.shared.run_settings import Privacy
from tessera.shared.updates.safetensors_file import read_header
from tessera.worker.agent import Agent
from tessera.worker.governance.policy import Policy
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.database import StateDatabase
from tessera.worker.stores import STATE_ID
from tessera.worker.task import fetch
from tessera.worker.task.heartbeat import Stop
from tests.support.chain_rows import ledger_in
from tests.support.coordinator import LiveCoordinator, until
from tests.support.datafiles import some_digits
from tests.support.federation import start_run
from tests.support.tapping import Tap
from tests.support.tasks import DIGITS_VIT

VIT = {**DIGITS_VIT, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
BLOCKS = block_table(instantiate(VIT, "image-classification", seed=1))
BY_NAME = {block.name: block for block in BLOCKS}
FIGURES = ("layers_sent", "turnover", "overlap", "one_sender")
LAYER_BYTES = layers_of(BLOCKS)[0].nbytes
ALWAYS_BYTES = sum(b.nbytes for b in BLOCKS if b.layer is None and b.role in ("head", "norm"))
OVERHEAD = 40_000
"""More bytes than a task's requests and the header of its update; fewer than a layer."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    # An update as it is, and not within JSON, so that its bytes can be looked for.
    with LiveCoordinator(tmp_path_factory.mktemp("coordinator"), submission_bytes=0) as found:
        yield found


@pytest.fixture(autouse=True)
def _blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not made out of differences, so that bytes are those of the blocks."""
    monkeypatch.setattr(fetch, "MIN_DIFFERENCE_BYTES", 1 << 40)


@dataclass
class Site:
    """A worker of one site, behind a tap."""

    name: str
    agent: Agent
    tap: Tap
    folder: Path

    def works(self) -> tuple[bytes, int]:
        """Does its task; what it sent and how many bytes it got meanwhile."""
        up, down = len(self.tap.up), self.tap.down
        self.agent._run_task(until(self.agent._next))
        return bytes(self.tap.up[up:]), self.tap.down - down


@contextmanager
def sites(
    coordinator: LiveCoordinator, folder: Path, *names: str, policy: Policy | None = None
) -> Iterator[list[Site]]:
    with ExitStack() as stack:
        found = []
        for index, name in enumerate(names):
            tap = stack.enter_context(Tap(coordinator.url))
            digits = some_digits(folder / "data", 24, index)
            state_dir = folder / name
            # Each test's worker of this name is the same one, whose state folder was lost.
            StateDatabase.of(state_dir).set_note(STATE_ID, "0" * 64)
            settings = WorkerSettings(
                url=tap.url, token=coordinator.token("site", name), name="w", state_dir=state_dir,
                datasets={"digits": digits}, threads=1, poll_seconds=0,
                policy=policy or Policy(),
            )  # fmt: skip
            agent = Agent(settings, Stop())
            stack.callback(agent.close)
            found.append(Site(name, agent, tap, folder / name))
        for site in found:
            # Makes itself known. A task that it gets by the way, it gets again.
            site.agent._next()
        yield found


def begin(client: Client, names: str = "a", settings: dict[str, Any] | None = None, **spec: Any) -> Run:
    model = instantiate(VIT, "image-classification", seed=1)
    start = {block.name: read_block(named_tensors(model), block) for block in BLOCKS}
    document = Model(config=VIT, head="image-classification", blocks=BLOCKS)
    wanted = {
        "rounds": 2, "codec": "raw", "training": Training(learning_rate=0.01, batch_size=64), "dataset": "digits",
        "cohort": Cohort(quorum=len(names), max_attempts=1, max_task_attempts=1, sites=tuple(names)), **spec,
    }  # fmt: skip
    return start_run(client, document, start, method=MethodSpec(name="safl", settings=settings or {}), **wanted)


def moved(before: Manifest, after: Manifest) -> set[str]:
    return {name for name in before.blocks if before.blocks[name] != after.blocks[name]}


def layers_in(names: set[str]) -> set[int]:
    return {BY_NAME[name].layer or 0 for name in names if ".layers." in name}


def matrices(layers: set[int]) -> list[str]:
    return [b.name for b in BLOCKS if b.layer in layers and len(b.shape) == 2]


def manifests(client: Client, run: Run) -> list[Manifest]:
    """Of every version, once the run is at its end."""
    until(lambda: client.run(run.id).state == "completed")
    return [client.manifest(version.digest) for version in client.versions(run.id)]


def tasks(client: Client, run: Run) -> list[TaskView]:
    return [task for made in client.rounds(run.id) for task in made.tasks]


def test_no_byte_of_a_layer_that_was_not_chosen_is_sent(live: LiveCoordinator, tmp_path: Path) -> None:
    client = live.client()
    run = begin(client, settings={"layers": 2})
    with sites(live, tmp_path, "a") as [site]:
        crossed = [site.works()[0] for _ in range(2)]
    versions = manifests(client, run)
    for before, after, up in zip(versions, versions[1:], crossed, strict=False):
        chosen = layers_in(moved(before, after))
        assert len(chosen) == 2
        # Uncoded, a block crosses as its very bytes: those chosen are there, and of the others there is no trace.
        assert all(client.read_blob(after.blocks[name]) in up for name in matrices(chosen))
        for name in matrices(set(range(4)) - chosen):
            value = client.read_blob(before.blocks[name])
            assert not any(value[row : row + 64] in up for row in range(0, len(value), 64)), name
        assert 0 < len(up) - ALWAYS_BYTES - 2 * LAYER_BYTES < OVERHEAD < LAYER_BYTES
    assert sum(versions[1].scalars[f"picks.{layer}"] for layer in range(4)) == 2


def test_everybody_fetches_the_union_of_what_anybody_sent(live: LiveCoordinator, tmp_path: Path) -> None:
    client = live.client()
    run = begin(client, "ab", settings={"score": "random", "layers": 2})
    with sites(live, tmp_path, "a", "b") as [a, b]:
        fetched = [site.works()[1] for site in (a, b, a, b)][2:]
    union = layers_in(moved(*manifests(client, run)[:2]))
    # The figures of the selections are those of the rounds on record, and their exports name each pick.
    rounds, versions = list(client.rounds(run.id)), list(client.versions(run.id))
    first, second = choices_of(rounds)
    figures = [{name: v.scalars[name] for name in v.scalars if name in FIGURES} for v in versions]
    assert figures == [{}, selection_scalars([], first), selection_scalars([first], second)]
    assert figures[1]["layers_sent"] == len(union)
    assert [text.split(":")[0] for text in versions[1].warnings] == ["aggregation mismatch"] * (len(union) > 2)
    picked = [row for row in rows_of(client.run(run.id), rounds, versions, []) if row.metric.startswith("picked.")]
    assert len(picked) == 2 * 2 * 2
    assert {row.metric.removeprefix("picked.") for row in picked if (row.round, row.site) == (1, "a")} == first["a"]
    # With this run's dice the two workers did not draw the same layers.
    assert len(union) > 2
    assert all(0 < down - ALWAYS_BYTES - len(union) * LAYER_BYTES < OVERHEAD for down in fetched)


def test_a_consensus_is_found_in_a_round_that_sends_no_block(live: LiveCoordinator, tmp_path: Path) -> None:
    client = live.client()
    run = begin(client, "ab", settings={"chooser": "consensus", "layers": 2})
    with sites(live, tmp_path, "a", "b") as [a, b]:
        for site in (a, b, a, b):
            site.works()
    first, second, third = manifests(client, run)
    assert [made.stage for made in client.rounds(run.id)] == ["profile", "train"]
    assert first.blocks == second.blocks
    assert all(task.upload_bytes < 200 for task in tasks(client, run)[:2])
    scores = [second.scalars[f"score.{layer}"] for layer in range(4)]
    best = sorted(range(4), key=lambda layer: -scores[layer])[:2]
    assert layers_in(moved(second, third)) == set(best)
    assert all(third.scalars[f"picks.{layer}"] == (2 if layer in best else 0) for layer in range(4))


def test_a_site_whose_scores_may_not_leave_refuses_a_consensus_that_needs_them(
    live: LiveCoordinator, tmp_path: Path
) -> None:
    client = live.client()
    run = begin(client, settings={"chooser": "consensus", "layers": 2})
    with sites(live, tmp_path, "a", policy=Policy(figures="rounded")) as [site]:
        site.works()
    (refused,) = tasks(client, run)
    assert refused.problem is not None
    assert "policy-violation: figures: the method safl needs metrics of training" in refused.problem.detail


def test_what_is_pruned_crosses_as_next_to_nothing(live: LiveCoordinator, tmp_path: Path) -> None:
    client, sent = live.client(), []
    for settings in ({"layers": 4}, {"layers": 4, "prune": 0.5}):
        run = begin(client, settings=settings, rounds=1, codec="bits+shuffle+zstd")
        with sites(live, tmp_path / str(len(sent)), "a") as [site]:
            site.works()
        sent.append(tasks(client, run)[0].upload_bytes)
    header = 1_000 * 4
    assert sent[1] - header < 0.62 * (sent[0] - header)


def test_a_private_choice_is_noisy_and_paid_for_and_what_it_leaves_out_is_neither_sent_nor_noised(
    live: LiveCoordinator, tmp_path: Path
) -> None:
    pytest.importorskip("opacus")
    client = live.client()
    privacy = Privacy(epsilon=8.0, delta=1e-5, clip_norm=1.0, selection="noisy")
    run = begin(client, settings={"layers": 2}, privacy=privacy)
    with sites(live, tmp_path, "a") as [site]:
        for _ in range(2):
            site.works()
        entries = ledger_in(site.folder).read("digits")
    for before, after in zip(versions := manifests(client, run), versions[1:], strict=False):
        assert len(layers_in(moved(before, after))) == 2
    assert [event.kind for entry in entries for event in entry.events] == ["noisy-choice", "noisy-steps"] * 2
    # Entropies and losses would tell of the examples as well.
    assert all(set(task.metrics) <= {"epsilon", "update_norm", "anomaly.norm"} for task in tasks(client, run))
    assert not any(name.startswith("entropy") for name in versions[-1].scalars)


def test_an_update_file_names_only_what_was_chosen(live: LiveCoordinator, tmp_path: Path) -> None:
    client = live.client()
    run = begin(client, settings={"layers": 1, "always": []}, rounds=1)
    with sites(live, tmp_path, "a") as [site]:
        up, _ = site.works()
    body = up[up.index(b'{"__metadata__"') - 8 :]
    with (tmp_path / "update").open("w+b") as file:
        file.write(body[: tasks(client, run)[0].upload_bytes])
        file.seek(0)
        names = set(read_header(file, tasks(client, run)[0].upload_bytes).entries)
    assert names == {b.name for b in BLOCKS if b.layer in layers_in(names) and ".layers." in b.name}
    assert len(layers_in(names)) == 1

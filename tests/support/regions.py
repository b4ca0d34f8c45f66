"""Regions in this process: a coordinator with scripted sites, and the process that joins it to a parent's."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.tasks import Submission, Task
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.problems import Problem
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.worker.agent import Agent
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model
from tests.support.processes import CoordinatorProcess, Process

Steps = Callable[[str, Task], dict[str, np.ndarray]]
"""A function from a site and its task to the steps that it sends, float32 by block."""


def typed_model(dtype: str, width: int = 32) -> Model:
    """The small model with another type of values."""
    blocks = [Block.model_validate({**b.model_dump(), "dtype": dtype}) for b in small_model(width).blocks]
    return small_model(width).model_copy(update={"blocks": tuple(blocks)})


def drawn(site: str, task: Task, model: Model, scale: float = 0.1) -> dict[str, np.ndarray]:
    """Steps that follow from the site and the round, the same in a flat run and in a region."""
    rng = np.random.default_rng([*site.encode(), task.round])
    return {b.name: rng.normal(0, scale, b.shape).astype(np.float32) for b in model.blocks}


class Site(ScriptedWorker):
    """A site that sends what `steps` says, until it is stopped."""

    def work(self, site: str, steps: Steps, stopped: threading.Event, done: list[Task]) -> None:
        while not stopped.is_set():
            with suppress(Problem):
                if task := self.claim(1):
                    self.send(task, steps(site, task))
                    done.append(task)

    def send(self, task: Task, moved: dict[str, np.ndarray]) -> None:
        model, base = self.model_of(task), self.fetch(task)
        changes = []
        for name, step in moved.items():
            block = model.by_name[name]
            value = (base[name].astype(np.float32) + step).astype(NUMPY_DTYPES[block.dtype])
            changes.append(TrainedBlock(block, ArrayTensor(value, block.dtype), ArrayTensor(base[name], block.dtype)))
        file = io.BytesIO()
        write_update(file, task.codec, changes)
        about = {"token": task.token, "version": task.version.digest, "examples": self.datasets[task.dataset]}
        self.client.submit(task.id, Submission(update=self.client.put_bytes(file.getvalue()), **about))


@contextmanager
def working(
    coordinator: LiveCoordinator | CoordinatorProcess,
    sites: Sequence[tuple[str, int]],
    steps: Steps,
    methods: Sequence[str] = ("fedavg",),
) -> Iterator[list[Task]]:
    """Sites of this coordinator at work, with their numbers of examples. Yields the tasks that they have done."""
    stopped, done = threading.Event(), list[Task]()
    with ExitStack() as stack:
        stack.callback(stopped.set)
        for site, examples in sites:
            is_process = isinstance(coordinator, CoordinatorProcess)
            client = coordinator.site(site) if is_process else coordinator.client("site", site=site)
            one = Site(client, datasets={"data": examples}, methods=tuple(methods))
            one.enrol()
            thread = threading.Thread(target=one.work, args=(site, steps, stopped, done))
            thread.start()
            stack.callback(thread.join)
        # Stopped before they are joined.
        stack.callback(stopped.set)
        yield done


def settings_of(
    folder: Path, parent: LiveCoordinator, inner: LiveCoordinator, name: str, region: dict[str, Any], **others: Any
) -> WorkerSettings:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(inner.token("orchestrator"))
    settings = {"url": inner.url, "token_file": folder / "token", **region}
    return WorkerSettings(
        url=parent.url,
        token=parent.token("site", site=name),
        name="region",
        state_dir=folder / "state",
        datasets={"data": {"kind": "region"}},
        region=settings,
        poll_seconds=1,
        **others,
    )


@contextmanager
def joined(settings: WorkerSettings) -> Iterator[Agent]:
    """The region's process, as a thread."""
    stop = Stop()
    agent = Agent(settings, stop)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        yield agent
    finally:
        stop.request()
        thread.join()


def regional_process(folder: Path, parent: CoordinatorProcess, inner: CoordinatorProcess, name: str) -> Process:
    """`tessera regional` for a new site of the parent."""
    folder.mkdir(parents=True)
    token = inner.admin().issue_token(TokenSpec(name=f"region-{name}", role="orchestrator", studies=("default",)))
    (folder / "parent.token").write_text(parent.site_token(name))
    (folder / "inner.token").write_text(token.secret)
    lines = [
        f'url = "{parent.url}"',
        f'token_file = "{folder / "parent.token"}"',
        'name = "region"',
        f'state_dir = "{folder / "state"}"',
        "poll_seconds = 1",
        "[region]",
        f'url = "{inner.url}"',
        f'token_file = "{folder / "inner.token"}"',
        "[datasets.data]",
        'kind = "region"',
    ]
    (folder / "regional.toml").write_text("\n".join(lines))
    return start_region(folder)


def start_region(folder: Path) -> Process:
    """The region's process whose settings lie in `folder`, once more."""
    return Process(folder, "regional", ["tessera.shared.cli", "regional", "--config", str(folder / "regional.toml")])

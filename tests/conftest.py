from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

# Before torch is imported, which reads it then. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Private tasks wait until the end of it. Settings, which tests write in many ways, are overridden by it.
os.environ.setdefault("TESSERA_WORKER_DURATION_QUANTUM_SECONDS", "0.01")
# Bits are compared, which are the CPU's. `make test-gpu` needs a GPU.
if not os.environ.get("TESSERA_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import structlog
from _pytest.logging import catching_logs
from execnet import gateway_base
from hypothesis import settings

from tests.support import databases, leftovers, zygote
from tests.support.browser import NO_BROWSER
from tests.support.coordinator import LiveCoordinator

# How long one example takes says more about what else the machine does than about the code.
# `make test` draws the same examples each time, and the long tests draw others, and twice as many.
LONG = bool(os.environ.get("TESSERA_TEST_LONG"))
settings.register_profile("tessera", deadline=None, derandomize=not LONG, max_examples=100 if LONG else 50)
settings.load_profile("tessera")


leftovers.name_run()

# Shells start what runs in the background deaf to ^C, and every process of it would be.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Nobody cuts this machine's power, and a disk takes milliseconds for each. Processes that tests start do wait.
os.fsync = lambda _: None


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Defaults name a folder of the tests: whoever runs them may have a coordinator of their own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator of its own is the same each time, so that it fails always or never."""
    # Imported by those that need it, which takes seconds.
    if torch := sys.modules.get("torch"):
        # `torch.manual_seed` would write down the stack for CUDA, which takes longer than many tests.
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def logs_restored() -> Iterator[None]:
    """Undo what a test's commands, in this process, change in what is logged, which later tests may read."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if marker := metafunc.definition.get_closest_marker("both_databases"):
        long = marker.kwargs.get("long") if len(databases.EACH) > 1 else None
        kinds = [pytest.param(kind, marks=pytest.mark.long if kind == long else ()) for kind in databases.EACH]
        metafunc.parametrize("database_kind", kinds, indirect=True, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # To skip a test costs each process milliseconds, a thousand times. Where all are long, the reason is shown.
    if not LONG and (short := [item for item in items if not item.get_closest_marker("long")]):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = short
    for item in items:
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(pytest.mark.skip(reason="make test-long runs it"))
        if item.get_closest_marker("sqlite") and databases.EACH == ("postgresql",):
            item.add_marker(pytest.mark.skip(reason="is about SQLite"))


def _attach_to_root(self: catching_logs[logging.Handler]) -> logging.Handler:
    """Attaches a handler to the root alone: to look for loggers that tell it nothing, six times a test, takes longer
    than many tests."""
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = logging.root.level
        logging.root.setLevel(min(self.orig_level, self.level))
    logging.root.addHandler(self.handler)
    self.attached_loggers.append(logging.root)
    return self.handler


catching_logs.__enter__ = _attach_to_root  # type: ignore[method-assign]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    # Each process would import for ten seconds what tests need, and so would its zygote.
    gateway_base.ThreadExecModel.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": zygote.testing})


# What is imported and collected stays: to look through it for garbage takes seconds.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
    # To import what lays models out takes seconds, and it ends after a minute without work.
    if sandbox := sys.modules.get("tessera.worker.model.sandbox"):
        sandbox.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": zygote.piped})
    # Supervisors and ranks are forked from a process that has their imports, which take seconds in each rank.
    if launcher := sys.modules.get("tessera.worker.executor.launcher"):
        launcher.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": zygote.reading})
    # A worker that has no task asks again at once: most tests take less than the second for which it would wait.
    if agent := sys.modules.get("tessera.worker.agent"):
        agent.MIN_POLL_SECONDS = 0.1
    # A third of the time; epsilon rises by less than one in ten thousand. `fine_grid` undoes it.
    if accountant := sys.modules.get("tessera.worker.privacy.accountant"):
        accountant.LOSS_GRID = 1e-2


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Skipped by a fixture, each test would have a line of its own at the end.
    if report.skipped and isinstance(report.longrepr, tuple) and NO_BROWSER in report.longrepr[2]:
        report.longrepr = ("tests that need a browser", 0, report.longrepr[2])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # Of several processes, those that ran tests are ended soon after this.
    databases.close()


def pytest_unconfigure(config: pytest.Config) -> None:
    # The process that started the others looks.
    if not hasattr(config, "workerinput") and (found := leftovers.leftovers()):
        raise SystemExit("the tests have left behind:\n" + "\n".join(found))


@pytest.fixture(scope="module", autouse=True)
def database_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """What tests of the module run on: SQLite unless they are marked or the environment says otherwise."""
    kind = getattr(request, "param", databases.EACH[0])
    with databases.running_on(kind):
        yield kind


@pytest.fixture(autouse=True)
def _executors_end_with_their_test() -> Iterator[None]:
    before = len(zygote.SUPERVISORS)
    yield
    for supervisor in zygote.SUPERVISORS[before:]:
        supervisor.send_signal(signal.SIGUSR1)
        supervisor.wait()
        with suppress(BrokenPipeError):
            supervisor.stdin.close()
    del zygote.SUPERVISORS[before:]


@pytest.fixture(autouse=True)
def _databases_end_with_their_test(database_kind: str) -> Iterator[None]:
    with databases.dropped():
        yield


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        yield live

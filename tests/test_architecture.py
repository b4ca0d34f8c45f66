"""What keeps the parts apart: imports point one way, and the coordinator runs without torch."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.coordinator import until

ROOT = Path(__file__).parents[1]
PACKAGES = ("coordinator", "shared", "worker")
READY_SECONDS = 2.0
IDLE_BYTES = 150 << 20

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(module: str, *, typing_too: bool) -> Iterator[str]:
    """What a module imports, by absolute name; what only type checkers see is left out unless asked for."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing_too:
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            yield node.module or ""
            # Of `from package import module`, the module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def crossing(inside: str, forbidden: tuple[str, ...], *, typing_too: bool) -> list[str]:
    """The imports within `inside` of anything in `forbidden`."""
    return [
        f"{module} imports {name}"
        for module in MODULES
        if module == inside or module.startswith(f"{inside}.")
        for name in imports(module, typing_too=typing_too)
        if name in forbidden or name.startswith(tuple(f"{part}." for part in forbidden))
    ]


@pytest.mark.parametrize(
    ("inside", "forbidden"),
    [
        ("coordinator", ("worker", "tests", "examples")),
        ("worker", ("coordinator", "migrations", "tests", "examples")),
        ("shared", ("coordinator", "worker", "migrations", "tests", "examples")),
    ],
)
def test_imports_point_one_way(inside: str, forbidden: tuple[str, ...]) -> None:
    assert crossing(inside, forbidden, typing_too=True) == []


@pytest.mark.parametrize("inside", ["coordinator", "shared"])
def test_neither_the_coordinator_nor_what_is_shared_imports_torch(inside: str) -> None:
    assert crossing(inside, ("torch", "transformers"), typing_too=False) == []


def test_the_rules_import_only_the_standard_library_and_what_is_shared() -> None:
    allowed = {*sys.stdlib_module_names, "shared"}
    for module in MODULES:
        if module.startswith("tessera.coordinator.domain"):
            for name in imports(module, typing_too=True):
                assert name.partition(".")[0] in allowed or name.startswith("tessera.coordinator.domain"), (
                    module,
                    name,
                )


def test_storage_knows_the_rules_and_nothing_above_itself() -> None:
    below = ("tessera.coordinator.domain", "tessera.coordinator.db")
    for module in MODULES:
        if module.startswith("tessera.coordinator.db"):
            ours = {name for name in imports(module, typing_too=True) if name.startswith("coordinator.")}
            assert {name for name in ours if not name.startswith(below)} == set(), module


def test_no_module_imports_inside_a_function() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert found == []


def test_no_imports_go_in_a_circle() -> None:
    graph = {
        module: {name for name in imports(module, typing_too=False) if name in MODULES and name != module}
        for module in MODULES
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle: {' -> '.join((*above, module))}"
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


# ---------------------------------------------------------------- the running coordinator


RAISING = """
class Raising:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors"):
            raise RuntimeError(f"{name} was imported")
import sys
sys.meta_path.insert(0, Raising())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Settings for a coordinator on a fresh database, in an interpreter in which importing torch raises."""
    (tmp_path / "sitecustomize.py").write_text(RAISING)
    port = str(free_port())
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "TESSERA_DATABASE_URL": f"sqlite:///{tmp_path}/test.db",
        "TESSERA_BLOB_URL": str(tmp_path / "blobs"),
        "TESSERA_STAGING_DIR": str(tmp_path / "staging"),
        "TESSERA_ADMIN_TOKEN_FILE": str(tmp_path / "token"),
        "TESSERA_PORT": port,
    }
    subprocess.run(
        [sys.executable, "-m", "tessera.coordinator", "migrate"], env=environment, check=True, capture_output=True
    )
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A coordinator that is ready, and its URL."""
    url = f"http://127.0.0.1:{environment['TESSERA_PORT']}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tessera.coordinator", "serve"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: process.poll() is not None or ready(url))
        yield process, url
    finally:
        process.terminate()
        process.wait(20)


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz/ready", verify=False).status_code == 200  # noqa: S501 (no TLS)
    except httpx.TransportError:
        return False


def test_the_coordinator_serves_in_an_interpreter_where_importing_torch_raises(environment: dict[str, str]) -> None:
    poisoned = subprocess.run(
        [sys.executable, "-c", "import torch"], env=environment, capture_output=True, check=False
    )
    assert b"torch was imported" in poisoned.stderr
    with serving(environment) as (process, url):
        token = Path(environment["TESSERA_ADMIN_TOKEN_FILE"]).read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{url}/v1/admin/status", headers=headers).json()["runs"] == {}
        process.terminate()
        # The server stops in good order and then, as is the custom, ends by the signal that it was sent.
        assert process.wait(10) in (0, -signal.SIGTERM)


def test_the_coordinator_idles_in_little_memory(environment: dict[str, str]) -> None:
    with serving(environment) as (process, _):
        assert psutil.Process(process.pid).memory_info().rss < IDLE_BYTES


# Starting is all computing; but what a core gets done in a second depends on what its neighbour does.
@pytest.mark.long
def test_the_coordinator_is_ready_in_two_seconds(environment: dict[str, str]) -> None:
    seconds = []
    for _ in range(3):
        with serving(environment) as (process, _):
            used = psutil.Process(process.pid).cpu_times()
            seconds.append(used.user + used.system)
    assert min(seconds) < READY_SECONDS, seconds

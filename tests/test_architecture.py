"""What keeps the parts apart: imports point one way, and the coordinator runs without torch."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support import databases
from tests.support.coordinator import until
from tests.support.paths import ROOT
from tests.support.processes import free_port

TOP = "tessera"
FOLDERS = {
    **{side: ROOT / side for side in ("coordinator", "shared", "worker")},
    "simulation": ROOT / TOP / "simulation",
}
READY_SECONDS = 2.0
IDLE_BYTES = 120 << 20
"""Its own memory: how much of a library is mapped depends on the file cache of the machine."""
PATIENT_SECONDS = 60.0
"""For what takes moments, however busy the machine is."""

MAX_MODULES = 15
"""In a folder, `__init__` not counted."""
UNBOUNDED = ("shared/methods", "migrations/versions")
"""A method is one file, and so is a step of the schema: their folders may grow."""

MODULES = {
    ".".join((TOP, side, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
    for side, folder in FOLDERS.items()
    for path in sorted(folder.rglob("*.py"))
}
METHODS = f"{TOP}.shared.methods"
PACKAGES = {module for module, path in MODULES.items() if path.name == "__init__.py"}


def imports(module: str, *, typing_too: bool) -> Iterator[str]:
    """Yield the absolute names that a module imports, also through `importlib`.

    What only type checkers see, or a method's worker half when it runs, is left out unless `typing_too`.
    """
    return (name for name, typing in _imports(module) if typing_too or not typing)


def at_import(module: str) -> Iterator[str]:
    """Yield the absolute names that a module imports when it is imported itself."""
    waiting: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


@cache
def _imports(module: str) -> list[tuple[str, bool]]:
    """The names, and whether no coordinator imports them. Trees are not kept, which would fill memory."""
    tree, found = ast.parse(MODULES[module].read_text()), list[tuple[str, bool]]()
    is_method = place(module) == METHODS
    unseen = {
        id(part)
        for node in ast.walk(tree)
        if (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        or (is_method and isinstance(node, ast.FunctionDef))
        for statement in node.body
        for part in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            # Of `from package import module`, the module.
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and node.value in MODULES:
            names = [str(node.value)]
        found += [(name, id(node) in unseen) for name in names]
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Return our modules with those of ours that each imports.

    A package's `__init__` counts only where a name is taken from it: `from package import module` imports the module.
    """
    edges: dict[str, set[str]] = {}
    for module in MODULES:
        found = {name for name in imports(module, typing_too=True) if name in MODULES} - {module}
        edges[module] = {
            name for name in found if name not in PACKAGES or not any(other.startswith(f"{name}.") for other in found)
        }
    return edges


def place(module: str) -> str:
    """Return the part of its side that a module belongs to: a package, or a module that stands beside them."""
    return ".".join(module.split(".")[:3])


def circle(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Return the names along a circle, or nothing."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for other in sorted(edges.get(name, ())):
                if found := visit(other, (*above, name)):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := visit(name, ()))), [])


def crossing(inside: str, forbidden: tuple[str, ...], *, typing_too: bool) -> list[str]:
    """Return the imports within `inside` of anything in `forbidden`."""
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
        ("coordinator", ("worker", "simulation")),
        ("worker", ("coordinator", "migrations", "simulation")),
        ("shared", ("coordinator", "worker", "migrations", "simulation")),
    ],
)
def test_imports_point_one_way(inside: str, forbidden: tuple[str, ...]) -> None:
    above = (*(f"{TOP}.{side}" for side in forbidden), f"{TOP}.examples", "tests", "benchmarks")
    assert crossing(f"{TOP}.{inside}", above, typing_too=True) == []


@pytest.mark.parametrize("inside", ["coordinator", "shared"])
def test_neither_the_coordinator_nor_what_is_shared_imports_torch(inside: str) -> None:
    assert crossing(f"{TOP}.{inside}", ("torch", "transformers", "sklearn"), typing_too=False) == []


def test_the_agent_reaches_no_module_that_imports_torch() -> None:
    """What runs at the import of a module counts, and not what its functions import later."""
    waiting = [f"{TOP}.worker.agent", f"{TOP}.worker.cli.worker", f"{TOP}.worker.executor.supervisor"]
    reached, heavy = set(waiting), set[tuple[str, str]]()
    while waiting:
        module = waiting.pop()
        for name in at_import(module):
            if name.partition(".")[0] in ("torch", "transformers"):
                heavy.add((module, name))
            # A package's own module runs first.
            parts = {".".join(name.split(".")[:length]) for length in range(1, name.count(".") + 2)}
            waiting += (new := sorted((parts & set(MODULES)) - reached))
            reached.update(new)
    assert heavy == set()


def test_operations_know_nothing_of_http() -> None:
    http = ("fastapi", "starlette", f"{TOP}.coordinator.api")
    assert crossing(f"{TOP}.coordinator.operations", http, typing_too=True) == []


def test_the_domain_imports_only_the_standard_library_and_what_is_shared() -> None:
    allowed = (f"{TOP}.shared.", f"{TOP}.coordinator.domain.")
    for module in MODULES:
        if place(module) == f"{TOP}.coordinator.domain":
            for name in imports(module, typing_too=True):
                assert name.partition(".")[0] in sys.stdlib_module_names or name.startswith(allowed), (module, name)


@pytest.mark.parametrize("package", sorted(name for name in PACKAGES if name.count(".") == 2))
def test_a_package_imports_what_its_docstring_says(package: str) -> None:
    """The first sentence says what it holds; another names the parts of its side that it imports."""
    side = package.rpartition(".")[0]
    said = ast.get_docstring(ast.parse(MODULES[package].read_text())) or ""
    found = re.search(r"\bImports (no other package|[^.]*)[^.]*\.", said)
    assert found, f"{package} does not say what it imports"
    named = {f"{side}.{name}" for name in re.findall(r"`(\w+)`", found.group(1))}
    used = {
        place(name)
        for module in MODULES
        if place(module) == package
        for name in graph()[module]
        if name.startswith(f"{side}.") and place(name) != package
    }
    # What stands beside the packages of `shared` may be used by all of them.
    used -= {name for name in used if side == f"{TOP}.shared" and name not in PACKAGES}
    assert named == used


@pytest.mark.parametrize("side", FOLDERS)
def test_the_packages_of_a_side_form_layers(side: str) -> None:
    layers: dict[str, set[str]] = {}
    for module, names in graph().items():
        if module.startswith(f"{TOP}.{side}."):
            below = {place(name) for name in names if name.startswith(f"{TOP}.{side}.")}
            layers.setdefault(place(module), set()).update(below - {place(module)})
    assert circle(layers) == []


def test_no_imports_go_in_a_circle() -> None:
    """Not even those that only type checkers follow, or that `importlib` makes."""
    assert circle(graph()) == []


def test_the_modules_beside_the_packages_of_shared_stand_below_them() -> None:
    for module, names in graph().items():
        if place(module) == module and module.startswith(f"{TOP}.shared.") and module not in PACKAGES:
            assert {name for name in names if name in PACKAGES or name.count(".") > 2} == set(), module


def test_a_folder_holds_few_modules() -> None:
    folders = {path.parent for path in MODULES.values()}
    crowded = {
        name: count
        for folder in folders
        if (name := str(folder.relative_to(ROOT))) not in UNBOUNDED
        and (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > MAX_MODULES
    }
    assert crowded == {}


# ---------------------------------------------------------------- where importing torch raises


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
    with databases.running_on("sqlite"):
        url = databases.url_in(tmp_path)
    return {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "TESSERA_DATABASE_URL": url,
        "TESSERA_BLOB_URL": str(tmp_path / "blobs"),
        "TESSERA_STAGING_DIR": str(tmp_path / "staging"),
        "TESSERA_ADMIN_TOKEN_FILE": str(tmp_path / "token"),
        "TESSERA_PORT": port,
    }


def test_a_settings_file_is_read_in_an_interpreter_where_importing_torch_raises(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RAISING)
    (tmp_path / "worker.toml").write_text(
        'url = "http://127.0.0.1:9"\ntoken = "tsr_secret"\nname = "north-1"\nstate_dir = "state"\n'
        '[datasets.digits]\nkind = "digits"\npart = { scheme = "shift", count = 3, index = 1 }\n'
    )
    read = (
        "import pathlib, tessera.worker.settings_reload as reload, tessera.worker.stores as stores\n"
        "settings = reload.SettingsFile(pathlib.Path('worker.toml')).settings\n"
        "print(stores.audit_of(settings).read())"
    )
    found = subprocess.run(
        [sys.executable, "-c", read],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.stdout, found.stderr) == ("()\n", "")


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
        process.wait(PATIENT_SECONDS)


def ready(url: str) -> bool:
    try:
        return asked(f"{url}/healthz/ready").status_code == 200
    except httpx.TransportError:
        return False


def asked(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.get(url, headers=headers, timeout=PATIENT_SECONDS, verify=False)  # noqa: S501 (no TLS)


def test_the_coordinator_serves_in_little_memory_in_an_interpreter_where_importing_torch_raises(
    environment: dict[str, str],
) -> None:
    # Whoever imports a module for the first time compiles it, which takes memory.
    poisoned = subprocess.run(
        [sys.executable, "-c", "import tessera.coordinator.app, tessera.coordinator.server.http_limits, torch"],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert b"torch was imported" in poisoned.stderr
    with serving(environment) as (process, url):
        memory = psutil.Process(process.pid).memory_info()
        assert memory.rss - memory.shared < IDLE_BYTES
        token = Path(environment["TESSERA_ADMIN_TOKEN_FILE"]).read_text().strip()
        status = asked(f"{url}/v1/admin/status", {"Authorization": f"Bearer {token}"})
        assert status.json()["runs"] == {}
        process.terminate()
        # The server stops in good order and then, as is the custom, ends by the signal that it was sent.
        assert process.wait(PATIENT_SECONDS) in (0, -signal.SIGTERM)


# Starting is all computing; but what a core gets done in a second depends on what its neighbour does.
@pytest.mark.long
def test_the_coordinator_is_ready_in_two_seconds(environment: dict[str, str]) -> None:
    seconds = []
    for _ in range(3):
        with serving(environment) as (process, _):
            used = psutil.Process(process.pid).cpu_times()
            seconds.append(used.user + used.system)
    assert min(seconds) < READY_SECONDS, seconds

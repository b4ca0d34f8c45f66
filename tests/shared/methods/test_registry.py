"""The methods there are: their plans, their settings, and that importing them needs no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.shared.methods.base import MethodSpec, Participant, Plan, RunInfo, State, UnsupportedRun
from tessera.shared.methods.registry import (
    FOLDERS,
    UnknownMethod,
    beyond_script,
    check,
    check_rounds,
    coordinator_half,
    method_faults,
    methods,
    places_searched,
    worker_half,
)
from tessera.shared.model.selectors import SelectorError
from tests.support.cli import environment
from tests.support.federation import small_model
from tests.support.paths import ROOT

MODEL = small_model()
FACTS = RunInfo(blocks=MODEL.blocks, rounds=10)
COHORT = [Participant("a/w", 10), Participant("b/w", 30)]


def plan_at(chosen: MethodSpec, round_: int) -> Plan:
    plans = coordinator_half(chosen, FACTS).plan(State(round_, {}), COHORT, rng())
    assert set(plans) == {"a/w", "b/w"}
    assert plans["a/w"] == plans["b/w"]
    return plans["a/w"]


def rng() -> Random:
    return Random(0)


def roles_of(plan: Plan) -> tuple[set[str], set[str]]:
    """The roles that a plan trains and uploads."""
    return {b.role for b in plan.train.resolve(MODEL.blocks)}, {b.role for b in plan.upload.resolve(MODEL.blocks)}


ALL = {"query", "key", "value", "output", "mlp", "head"}


def test_fedavg_trains_and_sends_everything_in_every_round() -> None:
    for round_ in (0, 5):
        assert roles_of(plan_at(MethodSpec(name="fedavg"), round_)) == (ALL, ALL)


@pytest.mark.parametrize(
    ("scope", "trained"),
    [
        ("all_but_qk", ALL - {"query", "key"}),
        ("attn_vo", {"value", "output", "head"}),
        ("v_head", {"value", "head"}),
        ("v_only", {"value"}),
    ],
)
def test_fedfrozen_freezes_after_its_warm_up(scope: str, trained: set[str]) -> None:
    chosen = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 2, "scope": scope})
    for round_ in (0, 1):
        assert plan_at(chosen, round_).stage == "warm-up"
        assert roles_of(plan_at(chosen, round_)) == (ALL, ALL)
    for round_ in (2, 9):
        assert plan_at(chosen, round_).stage == "frozen"
        assert roles_of(plan_at(chosen, round_)) == (trained, trained)


def test_fedfrozen_without_a_warm_up_freezes_from_the_start() -> None:
    assert plan_at(MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0}), 0).stage == "frozen"


def test_a_scope_that_the_model_has_no_blocks_for_is_an_error_and_not_an_empty_plan() -> None:
    headless = [block for block in MODEL.blocks if block.role != "value"]
    plan = plan_at(MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, "scope": "v_only"}), 0)
    with pytest.raises(SelectorError):
        plan.train.resolve(headless)


def test_an_unknown_method_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownMethod, match=r"no method 'sgd'; it can be .*fedavg.*fedfrozen"):
        check(MethodSpec(name="sgd"))
    with pytest.raises(UnknownMethod, match=r"no method 'fedprx'; did you mean `fedprox`\?"):
        check(MethodSpec(name="fedprx"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"warmup_rounds": 1}),
        ("fedfrozen", {"warmup": 1}),
        ("fedfrozen", {"warmup_rounds": -1}),
        ("fedfrozen", {"scope": "qk_only"}),
    ],
)
def test_settings_that_a_method_does_not_take_are_refused(name: str, settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        check(MethodSpec(name=name, settings=settings))


def test_every_method_names_its_source_and_is_known_by_its_own_name() -> None:
    for name, method in methods().items():
        assert method.name == name
        assert "arXiv" in method.source
        chosen = MethodSpec(name=name)
        assert coordinator_half(chosen, FACTS).settings == worker_half(chosen, FACTS).settings


def test_both_halves_of_every_method_are_made_in_an_interpreter_without_torch() -> None:
    program = (
        "import sys\n"
        "class Raising:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers'):\n"
        "            raise RuntimeError(f'{name} was imported')\n"
        "sys.meta_path.insert(0, Raising())\n"
        "from tessera.shared.methods.base import MethodSpec\n"
        "from tessera.shared.methods.registry import coordinator_half, methods, worker_half\n"
        "from tessera.shared.methods.base import RunInfo\n"
        "facts = RunInfo(blocks=(), rounds=1)\n"
        "for name in methods():\n"
        "    coordinator_half(MethodSpec(name=name), facts), worker_half(MethodSpec(name=name), facts)\n"
        "print(' '.join(sorted(methods())))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"fedavg", "fedfrozen"} <= set(done.stdout.split())


def test_a_method_of_a_name_that_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from tessera.shared.methods.fedavg import METHOD\n")
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    with pytest.raises(ValueError, match=r"fedavg\.py and .*mine\.py both declare the method 'fedavg'"):
        methods.__wrapped__()


def test_a_folder_of_methods_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"TESSERA_METHODS names .*none, which is not a folder"):
        methods.__wrapped__()


@pytest.mark.parametrize("side", ["coordinator", "worker"])
def test_no_method_is_known_by_name_outside_its_file(side: str) -> None:
    common = {"local", "lora"}  # a kind of place, and an extra of the package
    for path in (ROOT / side).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant):
                assert node.value not in methods().keys() - common, f"{path}, line {node.lineno}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tessera.shared.methods"):
                within = [f"{node.module}.{each.name}" for each in node.names]
                allowed = ("tessera.shared.methods.base", "tessera.shared.methods.registry")
                assert all(each.startswith(allowed) for each in within), path


def test_a_file_without_a_method_is_named_unless_it_begins_with_an_underscore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("mine", "_common", "__init__"):
        (tmp_path / f"{name}.py").write_text("METHODS = ()\n")
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert "fedavg" in methods.__wrapped__()
    (warning,) = caplog.messages
    assert warning.startswith(f"warning: no method was read from {tmp_path}/mine.py: it declares no METHOD; begin")
    monkeypatch.delenv(FOLDERS)
    methods.__wrapped__()


def test_a_file_that_cannot_be_imported_is_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "also_broken.py").write_text("METHOD = 1 / 0\n")
    good = "from tessera.shared.methods import fedavg\nfrom dataclasses import replace\n"
    (tmp_path / "good.py").write_text(good + "METHOD = replace(fedavg.METHOD, name='mine')\n")
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert {"fedavg", "mine"} <= methods.__wrapped__().keys()
    assert f"no method was read from {tmp_path}/broken.py: ModuleNotFoundError: No module named" in caplog.text
    said = places_searched()
    assert said.startswith(f"files of TESSERA_METHODS were looked for in: {tmp_path}; skipped: ")
    assert f"{tmp_path}/also_broken.py (ZeroDivisionError: division by zero)" in said
    monkeypatch.delenv(FOLDERS)
    methods.__wrapped__()
    assert places_searched() == "TESSERA_METHODS is not set"


@pytest.mark.parametrize(
    ("parent", "line", "refused"),
    [
        ("base.CoordinatorHalf", "from tessera.shared.rounds.planning import run_facts", False),
        ("scaffold.ScaffoldCoordinator", "def left(run): return run.rounds", True),
    ],
)
def test_a_method_keeps_its_number_of_rounds_if_its_own_file_reads_it_whatever_it_inherits_or_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str, line: str, refused: bool
) -> None:
    code = "from tessera.shared.methods import base, scaffold\nfrom dataclasses import replace\n"
    code += f"class Mine({parent}): pass\nMETHOD = replace(scaffold.METHOD, name='mine', coordinator=Mine)\n{line}\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    monkeypatch.setitem(methods(), "mine", methods.__wrapped__()["mine"])
    with pytest.raises(UnsupportedRun, match="reads the number of rounds") if refused else nullcontext():
        check_rounds(MethodSpec(name="mine"), FACTS)


HALVES = """
from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, WorkerHalf
class Server(CoordinatorHalf[MethodSettings]):
    {server}
class Site(WorkerHalf[MethodSettings]):
    {site}
METHOD = Method(name="mine", coordinator=Server, worker={worker}, source="none")
"""


@pytest.mark.parametrize(
    ("server", "site", "worker", "said"),
    [
        (
            "pass",
            "def los(self, context, batch): ...",
            "Site",
            "Site.los is no hook of WorkerHalf; did you mean `loss`?",
        ),
        (
            "def mergee(self, state, updates): ...",
            "pass",
            "Site",
            "Server.mergee is no hook .* did you mean `merge`?",
        ),
        ("stiky = True", "pass", "Site", "Server.stiky is no hook .* did you mean `sticky`?"),
        ("pass", "one_exampel_per_row = True", "Site", "did you mean `one_example_per_row`?"),
        ("pass", "def helper(self): ...", "Site", "Begin the names of your own methods and attributes with _"),
        ("def loss(self, context, batch): ...", "pass", "Site", "Server.loss is a hook of WorkerHalf"),
        ("pass", "def merge(self, state, updates): ...", "Site", "Site.merge is a hook of CoordinatorHalf"),
        ("pass", "def loss(self, batch): ...", "Site", r"Site.loss takes \(self, batch\), and is called with"),
        ("pass", "loss = 3", "Site", "Site.loss is 3, and has to be a method"),
        ("pass", "async def after_backward(self, context): ...", "Site", "Site.after_backward would .* async"),
        ("pass", "def after_backward(self, context): yield", "Site", "Site.after_backward would .* leave out yield"),
        ("pass", "@property\n    def loss(self): ...", "Site", "Site.loss is <property .*, and has to be a method"),
        ("sticky = 'yes'", "pass", "Site", "Server.sticky is 'yes': set it to True or False"),
        ("pass", "pass", "WorkerHalf", "METHOD does not name Site: pass it as worker"),
        ("pass", "pass", "Server", "METHOD has <class .*Server'> as its worker: give a subclass of WorkerHalf"),
    ],
)
def test_a_hook_that_would_never_be_called_is_refused_when_its_file_is_read(
    server: str, site: str, worker: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(HALVES.format(server=server, site=site, worker=worker))
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert "mine" not in methods.__wrapped__()
    assert re.search(said, places_searched()), places_searched()
    monkeypatch.delenv(FOLDERS)
    methods.__wrapped__()


def test_a_hook_of_a_base_that_python_passes_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixin = "class Mixin:\n    def loss(self, context, batch): ...\nclass Site(WorkerHalf[MethodSettings], Mixin):"
    text = HALVES.format(server="pass", site="pass", worker="Site")
    (tmp_path / "mine.py").write_text(text.replace("class Site(WorkerHalf[MethodSettings]):", mixin))
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert "mine" not in methods.__wrapped__()
    assert "Mixin.loss is hidden by WorkerHalf: name Mixin before it" in places_searched()
    after, before = "(WorkerHalf[MethodSettings], Mixin)", "(Mixin, WorkerHalf[MethodSettings])"
    (tmp_path / "other.py").write_text((tmp_path / "mine.py").read_text().replace(after, before))
    assert "mine" in methods.__wrapped__()
    monkeypatch.delenv(FOLDERS)
    methods.__wrapped__()


def test_private_names_further_parameters_and_shared_bases_are_no_misspelt_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = """_share = 0.5
    def _helper(self): ...
    def loss(self, context, batch, *, scale=1.0): ...
    @staticmethod
    def private(): ...
    @property
    def resumable(self): return False"""
    (tmp_path / "mine.py").write_text(HALVES.format(server="sticky = True", site=site, worker="Site"))
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert "mine" in methods.__wrapped__()
    monkeypatch.delenv(FOLDERS)
    for method in methods.__wrapped__().values():
        assert not list(method_faults(sys.modules[f"tessera.shared.methods.{method.name}"]))


def test_a_file_that_imports_torch_when_it_is_read_is_named(tmp_path: Path) -> None:
    path, folder, of_benchmarks = tmp_path / "path", tmp_path / "methods", ROOT / "benchmarks" / "own_methods"
    path.mkdir()
    folder.mkdir()
    # Imported in a moment; the real one takes seconds.
    (path / "torch.py").touch()
    source = (of_benchmarks / "drift.py").read_text()
    (folder / "greedy.py").write_text(source.replace('name="drift"', 'name="greedy"') + "\nimport torch\n")
    done = subprocess.run(
        [sys.executable, "-c", "from tessera.shared.methods.registry import methods; print(*methods())"],
        env=environment(**{FOLDERS: f"{of_benchmarks}:{folder}", "PYTHONPATH": str(path)}),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert {"greedy", "drift"} <= set(done.stdout.split())
    (line,) = (line for line in done.stderr.splitlines() if "torch" in line)
    assert line.startswith(f"warning: {folder}/greedy.py imports torch when it is read")


@pytest.mark.parametrize("name", ["fedavg", "fedbabu", "fedfrozen", "fedvpt", "lora"])
def test_a_sites_own_script_can_train_by_methods_of_the_plan_alone(name: str) -> None:
    assert beyond_script(MethodSpec(name=name)) is None


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ditto", {}, "ditto"),
        ("fedbn", {}, "fedbn keeps blocks at the sites"),
        ("feddyn", {}, "feddyn"),
        ("fedfrozen", {"kernel_drift": True}, "fedfrozen measures each version"),
        ("fedfrozen", {"warmup_rounds": 1, "lower_rate": 0.5}, "fedfrozen"),
        ("fednova", {}, None),
        ("fedprox", {}, "fedprox has a loss of its own"),
        ("fedproto", {}, "fedproto"),
        ("local", {}, "local"),
        ("moon", {}, "moon"),
        ("safl", {}, "safl has each site choose blocks"),
        ("safl", {"score": "random", "prune": 0.5, "prune_by": "magnitude"}, "safl has each site choose blocks"),
        ("safl", {"score": "random"}, None),
        ("safl", {"score": "last"}, None),
        ("scaffold", {}, "scaffold corrects gradients"),
    ],
)
def test_what_a_method_does_beside_training_is_beyond_a_script(name: str, settings: Any, said: str | None) -> None:
    found = beyond_script(MethodSpec(name=name, settings=settings))
    assert (found is None) if said is None else f"the method {said}" in (found or "")

"""The documents say what the code does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from coordinator.domain.lifecycle import ROUND, RUN, TASK, diagram
from coordinator.metrics import REGISTRY
from coordinator.settings import Settings
from shared.methods import methods
from shared.problems import PROBLEMS
from worker.policy import Policy
from worker.settings import Settings as WorkerSettings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(("title", "table"), [("Run", RUN), ("Round", ROUND), ("Task", TASK)])
def test_the_diagrams_are_those_of_the_tables(title: str, table: dict[str, tuple[tuple[str, ...], str]]) -> None:
    assert diagram(title, table) in text("docs/architecture.md")


def test_every_setting_of_the_coordinator_is_described_with_its_default() -> None:
    rows = re.findall(r"\| `TESSERA_([A-Z_]+)` \| (\S+)", text("docs/operating.md"))
    shown = {name.lower(): default.strip("`") for name, default in rows}
    actual = {name: "none" if f.default is None else str(f.default) for name, f in Settings.model_fields.items()}
    assert shown == actual


def test_every_setting_of_a_worker_and_its_policy_is_described() -> None:
    document = text("docs/operating.md")
    missing = [name for name in (*WorkerSettings.model_fields, *Policy.model_fields) if f"`{name}" not in document]
    assert missing == []


def test_every_metric_is_described() -> None:
    document = text("docs/operating.md")
    names = {metric.name for metric in REGISTRY.collect() if metric.name.startswith("tessera_")}
    assert {name for name in names if name not in document} == set()


def test_every_method_is_in_the_readme() -> None:
    assert set(re.findall(r"^\| `([a-z]+)` \|", text("README.md"), re.MULTILINE)) == set(methods())


def test_every_problem_that_the_protocol_names_exists() -> None:
    named = set(re.findall(r"\d{3} `([a-z-]+)`", text("docs/protocol.md")))
    assert named
    assert named <= set(PROBLEMS)


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_decision_is_in_the_index() -> None:
    index = text("docs/decisions/README.md")
    assert [p.name for p in sorted((DOCS / "decisions").glob("0*.md")) if p.name not in index] == []


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = {line.split()[0] for line in listed.splitlines()}
    used = {
        name for document in ("README.md", "CONTRIBUTING.md") for name in re.findall(r"make ([a-z]+)", text(document))
    }
    assert used - {"help"} <= targets

"""The documents say what the code does."""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tessera.coordinator.domain.lifecycle import ROUND, RUN, TASK, diagram
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.cli.docs import GENERATED
from tessera.shared.cli.reference import settings
from tessera.shared.methods.registry import methods
from tessera.shared.problems import PROBLEMS
from tessera.simulation.config import SimulationTable
from tessera.worker.cli.exits import BAD_SETTINGS, DEVICE_FAILED, NOT_ADMITTED
from tessera.worker.data.partition.schemes import Scheme
from tessera.worker.data.registry import adapters
from tessera.worker.governance.policy import Policy
from tessera.worker.settings import DataSource, WorkerSettings
from tests.support import cli
from tests.support.paths import ROOT
from tests.support.shell_blocks import PAGES, blocks, commands, faults
from tests.system.test_documents import PAGES_RUN

DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(("title", "table"), [("Run", RUN), ("Round", ROUND), ("Task", TASK)])
def test_the_diagrams_are_those_of_the_tables(title: str, table: dict[str, tuple[tuple[str, ...], str]]) -> None:
    assert diagram(title, table) in text("docs/architecture.md")


def test_a_stranger_reads_a_round_in_the_four_files_that_the_architecture_names() -> None:
    named = re.findall(r"^\| `(coordinator/\S+\.py)` \|", text("docs/architecture.md"), re.MULTILINE)
    assert len(named) == 4
    assert sum(len((ROOT / path).read_text().splitlines()) for path in named) <= 600


def test_every_setting_of_the_coordinator_is_described_with_its_default() -> None:
    rows = re.findall(r"^\| `TESSERA_([A-Z_]+)` \| (\S+) \| (\S.*) \|$", settings.coordinator(), re.MULTILINE)
    assert [name.lower() for name, *_ in rows] == list(CoordinatorSettings.model_fields)
    assert "sqlite:///STATE/tessera.db" in rows[0][1]


def test_every_limit_names_settings_that_exist() -> None:
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|", text("docs/operating/limits.md"), re.MULTILINE)
    named = re.findall(r"`([A-Z_]+)`", "".join(cells))
    assert "REQUESTS_PER_SECOND" in named
    assert [name for name in named if name.lower() not in CoordinatorSettings.model_fields] == []


def test_every_setting_of_a_worker_and_its_policy_is_described() -> None:
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \| .* \| .* \| (.*) \|$", settings.worker(), re.MULTILINE)
    assert [name for name, meaning in rows if not meaning] == []
    shown = {name.partition(".")[0] for name, _ in rows} | {name.removeprefix("policy.") for name, _ in rows}
    # The keys of the policy have rows.
    assert {*WorkerSettings.model_fields, *Policy.model_fields} - shown == {"policy"}


def test_every_setting_of_a_simulation_is_described() -> None:
    described = set(re.findall(r"^\| `([a-z_]+)` \|", text("docs/simulating.md"), re.MULTILINE))
    assert described == set(SimulationTable.model_fields)


def test_every_method_is_in_the_readme() -> None:
    cells = re.findall(r"^\| (`[a-z`, ]+`) \|", text("README.md"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(methods())


def test_every_exit_status_of_a_running_worker_is_described() -> None:
    rows = re.findall(r"^\| (\d) \| .* \| .* \|$", text("docs/worker.md"), re.MULTILINE)
    assert rows == [str(status) for status in (0, 1, BAD_SETTINGS, NOT_ADMITTED, DEVICE_FAILED)]


def test_the_unit_of_a_worker_needs_no_file_that_its_user_cannot_read() -> None:
    (unit,) = re.findall(r"```ini\n(.*?)```", text("docs/worker.md"), re.DOTALL)
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read_string(unit)
    service = parsed["Service"]
    config = f"--config /var/lib/{service['StateDirectory']}/worker.toml"
    # `join` writes secret and state beside the settings, for its own user alone.
    (join,) = re.findall(rf"^sudo -u {service['User']} (.* worker join .*)$", text("docs/worker.md"), re.MULTILINE)
    assert join.endswith(config)
    assert service["ExecStart"] == f"/opt/tessera/bin/tessera worker run {config}"
    assert "EnvironmentFile" not in service
    assert service["RestartPreventExitStatus"].split() == ["1", str(BAD_SETTINGS), str(NOT_ADMITTED)]


def test_every_problem_that_the_protocol_names_exists() -> None:
    named = set(re.findall(r"\d{3} `([a-z-]+)`", text("docs/protocol.md")))
    assert named
    assert named <= set(PROBLEMS)


def test_every_kind_of_data_is_described_with_all_its_options() -> None:
    sections = re.split(r'^## `kind = "(\w+)"`$', settings.data(), flags=re.MULTILINE)
    for kind, section in zip(sections[1::2], sections[2::2], strict=True):
        rows = re.findall(r"^\| `(\w+)` \| .* \| .* \| (\S.*) \|$", section, re.MULTILINE)
        assert {name for name, _ in rows} == set(adapters()[kind].options.model_fields), kind
    assert set(sections[1::2]) == set(adapters())
    assert set(re.findall(r"^\| `(\w+)` \|", text("docs/data.md"), re.MULTILINE)) == set(DataSource.model_fields)


def test_every_scheme_of_a_partition_is_described_with_all_its_settings() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)", text("docs/partitions.md"), re.MULTILINE))
    schemes = {get_args(kind.model_fields["scheme"].annotation)[0]: kind for kind in Scheme.__subclasses__()}
    assert set(rows) == {*Scheme.model_fields, *schemes}
    for scheme, kind in schemes.items():
        own = set(kind.model_fields) - set(Scheme.model_fields)
        assert {name for name in own if f"`{name}`" not in rows[scheme]} == set(), scheme


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.long
def test_the_documents_build_as_a_site_that_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=.?(?:https?:)?//", page.read_text())
        assert fetched == [], page
    client = (tmp_path / "reference/client.html").read_text()
    assert "tessera.shared.client.client.Client.create_run" in client
    http = (tmp_path / "reference/http.html").read_text()
    assert 'href="wire.html#tessera.shared.api.runs.RunSpec"' in http


def anchors(document: Path) -> set[str]:
    """What a document's headings are called in links."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_to_a_heading_finds_it() -> None:
    found = 0
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
            found += 1
            place = document.parent / target if target else document
            assert anchor in anchors(place), f"{document.name} links to {target}#{anchor}"
    assert found > 10


THREATS = ("threats-to-a-site", "threats-to-the-coordinator")


@pytest.mark.parametrize("page", ["what-a-signature-covers", "review-board", *THREATS, "papers"])
def test_every_test_that_a_page_promises_by_is_there(page: str) -> None:
    named = set(re.findall(r"(?<![\w/])tests/[\w/]+\.py(?:::\w+)?", text(f"docs/{page}.md")))
    assert len(named) > 10
    tests = [each.partition("::") for each in sorted(named)]
    assert [f"{file}::{test}" for file, _, test in tests if test and f"def {test}(" not in text(file)] == []


def test_every_element_of_a_paper_that_is_said_to_be_implemented_names_a_test_or_a_command() -> None:
    rows = [row.strip("| ").split(" | ") for row in text("docs/papers.md").splitlines() if row.count(" | ") == 2]
    implemented = [(row[0], row[1]) for row in rows if row[2].startswith("implemented")]
    assert len(implemented) > 30
    shown = re.compile(r"`((research/)?tests/|tessera |make |python -m )")
    assert [element for element, place in implemented if not shown.search(place)] == []
    for _, place in implemented:
        for folder, target in re.findall(r"`make (?:-C (\w+) )?([\w-]+)", place):
            assert f"\n{target}:" in (ROOT / folder / "Makefile").read_text(), target
        for file in re.findall(r"examples/[\w/-]+\.toml", place):
            assert (ROOT / file).exists(), file


@pytest.mark.parametrize("page", THREATS)
def test_every_threat_names_a_test(page: str) -> None:
    rows = [
        row
        for row in text(f"docs/{page}.md").splitlines()
        if row.startswith("| ") and row.count("|") == 4 and "threat" not in row
    ]
    assert len(rows) > 20
    # A row without a test of its own has the row above's.
    assert [row for row in rows if "tests/" not in row and "the same" not in row] == []


def test_a_page_can_be_read_at_one_sitting() -> None:
    words = {str(page.relative_to(DOCS)): len(page.read_text().split()) for page in DOCS.rglob("*.md")}
    assert {page: count for page, count in words.items() if count > 2500} == {}


def test_every_test_that_the_ten_risks_name_is_there() -> None:
    document = text("docs/security.md")
    rows = re.findall(r"^\| (API\d+) .*", document, re.MULTILINE)
    assert rows == [f"API{number}" for number in range(1, 11)]
    for row in document.splitlines():
        if row.startswith("| API"):
            named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
            assert named, row
            assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in text(file)] == []


def test_the_decisions_are_few_and_short_and_in_the_index() -> None:
    index, records = text("docs/decisions/README.md"), sorted((DOCS / "decisions").glob("0*.md"))
    assert len(records) <= 35
    assert [p.name for p in records if p.name not in index or len(p.read_text().split()) > 250] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_shell_line_names_commands_and_options_that_exist(page: Path) -> None:
    found = [
        (block.line, fault) for block in blocks(page) for words in commands(block.text) for fault in faults(words)
    ]
    assert found == []


def test_no_shell_line_has_a_secret_among_its_arguments() -> None:
    assert [block.line for page in PAGES for block in blocks(page) if "--from-literal" in block.text] == []


def test_every_shell_block_is_run_or_says_why_not() -> None:
    runnable = {str(page.relative_to(ROOT)) for page in PAGES if any(not block.reason for block in blocks(page))}
    assert runnable == {"docs/quickstart.md", "docs/offline.md", "docs/own-data.md", "docs/regions.md", *PAGES_RUN}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("tessera run creat run.toml", "no command creat in tessera run"),
        ("tessera coordinator serve --migrat", "No such option: --migrat"),
        ("tessera run show a b", "takes no ['b']"),
        ("tessera worker approve", "lacks run"),
        ("make tests", "no target tests"),
        ("make -C research tests", "no target tests"),
        ("python -m benchmarks.none", "no module benchmarks.none"),
        ("pip install '.[workers]'", "no extra workers"),
    ],
)
def test_a_shell_line_that_names_what_is_not_there_is_found(line: str, fault: str) -> None:
    (words,) = commands(line)
    assert fault in " ".join(faults(words))


def test_nothing_names_the_other_project_called_tessera_to_pip() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    # The changelog tells of the releases before the name.
    files = [ROOT / name for name in tracked if name not in ("CHANGELOG.md", "tests/test_docs.py")]
    named = re.compile(
        r"tessera\[[a-z]|(?<!helm )(?<!un)install (\S+ )*['\"`]?tessera(?![-\w/])|^name = \"tessera\"", re.MULTILINE
    )
    found = {
        f"{file.relative_to(ROOT)}: {hit[0]}"
        for file in files
        if file.is_file() and not file.is_symlink()
        for hit in named.finditer(file.read_text(encoding="utf-8", errors="ignore"))
    }
    assert found == set()
    assert named.search("install tessera[dicom]")
    assert named.search("pip install -U 'tessera'")


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = {line.split()[0] for line in listed.splitlines()}
    used = {
        name for document in ("README.md", "CONTRIBUTING.md") for name in re.findall(r"make ([a-z]+)", text(document))
    }
    assert used - {"help"} <= targets


def test_a_message_points_to_pages_that_each_installation_has() -> None:
    """A wheel has no folder docs/: its user reads a page by command."""
    named: set[str] = set()
    for file in (
        path for side in ("coordinator", "shared", "worker") for path in sorted((ROOT / side).rglob("*.py"))
    ):
        tree = ast.parse(file.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                assert not re.search(r"docs/[\w-]+\.md", node.value), f"{file}: {node.value}"
                named |= set(re.findall(r"`tessera docs ([\w/-]+)`", node.value))
    assert {"site", "run-keys"} <= named
    for page in named - set(GENERATED):
        assert (ROOT / f"docs/{page}.md").is_file(), page
        assert cli.tessera("docs", page).stdout == text(f"docs/{page}.md")
    listed = json.loads(cli.tessera("docs", "--json").stdout)
    assert set(listed) - set(GENERATED) == {
        path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")
    }
    for page, (title, _) in GENERATED.items():
        assert cli.tessera("docs", page).stdout.startswith(f"# {title}\n"), page
        assert listed[page] == title
    refused = cli.tessera("docs", "sites")
    assert (refused.returncode, "did you mean `site`?" in refused.stderr) == (1, True)

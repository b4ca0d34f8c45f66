"""The shell lines of the documents, run in their order against a federation of real processes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.worker.model.build import instantiate
from tests.support.cli import environment
from tests.support.duals import dual
from tests.support.launcher import Launcher
from tests.support.paths import ROOT
from tests.support.processes import CoordinatorProcess, worker_process
from tests.support.shell_blocks import blocks
from tests.system.test_tutorial import written
from tests.worker.model.test_model_options import BERT, tokenizer

DATA = """
[datasets.digits]
kind = "digits"
part = { scheme = "iid", count = 8, index = 0 }
"""
RUN_FILE = """
name = "NAME"
dataset = "digits"
rounds = 1
method = { name = "fedavg" }
cohort = { size = 1, quorum = 1 }
"""
SIMULATION = """
name = "own"
model = "model"
rounds = 2
method = { name = "fedavg" }
[simulation]
sites = 2
[simulation.data]
kind = "digits"
part = { scheme = "iid" }
"""
PAGES_RUN: dict[str, dict[str, str]] = {
    "README.md": {},
    "docs/evaluation.md": {"RUN": "NAME"},
    "docs/blockmap.md": {"config.json": "bert/config.json"},
    "docs/partitions.md": {},
    "docs/simulating.md": {"examples/digits/simulation.toml": "short.toml"},
    "docs/writing-a-method.md": {
        "/opt/our-methods": "methods",
        "digits-model": "methods-model",
        "examples/digits/simulation.toml": "own.toml",
    },
    "docs/site.md": {},
    "docs/site-audit.md": {},
    "docs/worker-settings.md": {},
    "docs/worker.md": {},
    "docs/operating.md": {},
    "docs/operating/backups.md": {"/backups/tessera": "backup"},
    "docs/operating/monitoring.md": {"/etc/prometheus/": ""},
}
"""The pages that run here, each with what stands here for what it names."""
FIRST = "README.md"
"""Its commands make the model and the run that other pages are about."""


class Reader:
    """Types what pages say, in one folder, as who runs the coordinator, the site and the study."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self.settings = settings

    def reads(self, page: str) -> None:
        exports = ""
        for block in blocks(ROOT / page):
            if block.reason:
                continue
            text = exports + block.text
            for named, here in PAGES_RUN[page].items():
                text = text.replace(named, here)
            exports += "".join(f"{line}\n" for line in text.splitlines() if line.startswith("export "))
            if "DIGEST" in text:
                text = text.replace("DIGEST", re.findall(r"[0-9a-f]{64}", self._types(text.splitlines()[0]))[-1])
            said = self._types(text)
            if block.text.startswith("$ "):
                assert said.split() == block.text.partition("\n")[2].split()

    def _types(self, text: str) -> str:
        lines = [line.removeprefix("$ ") for line in text.splitlines() if "$ " not in text or line.startswith("$ ")]
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join(lines)],
            cwd=self.folder,
            env=environment(**self.settings),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "config.json").write_text((ROOT / "examples" / "digits" / "vit.json").read_text())
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "own.toml").write_text(SIMULATION)
    (folder / "digits.toml").write_text('[datasets.digits]\nkind = "digits"\n')
    of_page = (ROOT / "examples" / "digits" / "simulation.toml").read_text()
    # The page's own goes through 32 rounds.
    (folder / "short.toml").write_text(of_page.replace("rounds = 32", "rounds = 2").replace("= 12", "= 1"))
    written(folder / "methods")
    clip = dual("clip")
    clip["text_config"]["max_position_embeddings"] = 77
    instantiate(clip, "contrastive").save_pretrained(folder / "clip")
    tokenizer(folder / "clip")
    instantiate(BERT, "text-classification").save_pretrained(folder / "bert")
    with Launcher(folder) as launcher, CoordinatorProcess(folder / "coordinator") as live:
        worker = worker_process(live, "north", DATA)
        (folder / "worker.toml").symlink_to(live.folder / "north" / "worker.toml")
        made = Reader(
            folder,
            {
                **live.environment,
                "PATH": f"{launcher.python.parent}:{os.environ['PATH']}",
                "TESSERA_URL": live.url,
                "TESSERA_TOKEN": (live.folder / "admin.token").read_text().strip(),
            },
        )
        made.reads(FIRST)
        yield made
        worker.terminate()


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES_RUN if page != FIRST])
def test_the_lines_of_a_page_run_as_they_stand_there(reader: Reader, page: str) -> None:
    reader.reads(page)

"""The commands of docs/own-data.md, as they stand there: own data and an own model make an exported one with a score.

Each part of the page is a case. All share a coordinator and two sites, whose workers are processes.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, pipeline

from tests.support.cli import environment
from tests.support.coordinator import until
from tests.support.launcher import Launcher
from tests.support.paths import ROOT
from tests.support.pretrained import bert_tokenizer
from tests.support.processes import CoordinatorProcess
from tests.support.shell_blocks import blocks, commands

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "own-data.md"
SITES = ("north", "south")
JOINING = ("tessera coordinator serve", "tessera worker join", "tessera admin join approve")
MOST_COMMANDS = 10
"""From nothing; what each site types counts once."""

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GOOD, BAD, REST = ("fine", "clear", "healthy"), ("mass", "lesion", "shadow"), ("the", "left", "lung", "shows", "a")


def sentence(words: tuple[str, ...], rng: random.Random) -> str:
    return " ".join(rng.sample([rng.choice(words), *REST], 5))


def reports(site: Path, rng: random.Random) -> None:
    rows = [
        (sentence(words, rng), label) for words, label in ((GOOD, "benign"), (BAD, "malignant")) for _ in range(60)
    ]
    (site / "reports.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))


def bert(study: Path) -> None:
    words = [*GOOD, *BAD, *REST]
    bert_tokenizer(study / "my-bert", words)
    BertModel(BertConfig(**SIZES, vocab_size=len(words) + 4, max_position_embeddings=128)).save_pretrained(
        study / "my-bert"
    )


def classifies_texts(trained: str) -> None:
    (said,) = pipeline("text-classification", trained)("the left lung shows a lesion")
    assert said["label"] in {"benign", "malignant"}


@dataclass(frozen=True)
class Journey:
    """A part of the page: how its data and its model are made, and what its export must do."""

    data: Callable[[Path, random.Random], None]
    model: Callable[[Path], None]
    use: Callable[[str], None]
    metric: str = "accuracy"


JOURNEYS = [Journey(reports, bert, classifies_texts)]
"""In the order of the page."""


class Federation:
    """Types blocks of the page, in a folder for each machine."""

    def __init__(self, folder: Path, launcher: Launcher, live: CoordinatorProcess) -> None:
        self.folder, self.live = folder, live
        self.settings = {
            "PATH": f"{launcher.python.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "TESSERA_URL": live.url,
            "TESSERA_TOKEN_FILE": str(live.folder / "admin.token"),
        }
        for machine in (*SITES, "study"):
            (folder / machine).mkdir()
        for site in SITES:
            with self.begun(site, f"tessera worker join {live.url} --site {site}") as (joining, log):
                code = until(lambda log=log: re.search(r"\b[A-Z]{4}-[A-Z]{4}\b", log.read_text()), 60)[0]
                self.type("study", f"tessera admin join approve {code} --site {site}")
                assert joining.wait(timeout=60) == 0, log.read_text()

    @contextmanager
    def begun(self, machine: str, text: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Start commands; yield their process, and the file of what they say. End them at last."""
        log = self.folder / f"{machine}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-ec", text],
                cwd=self.folder / machine,
                env=environment(**self.settings),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=30)

    def type(self, machine: str, text: str) -> str:
        with self.begun(machine, text) as (process, log):
            code, said = process.wait(timeout=200), log.read_text()
        print(f"\n{machine}$ {text}\n{said}")
        assert code == 0, f"{text}\n{said}"
        return said

    def offered(self, dataset: str) -> bool:
        """Whether a live worker of each site has the data set."""
        workers = self.live.admin().workers()
        return {worker.site for worker in workers if worker.live and dataset in worker.datasets} == set(SITES)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("own")
    with Launcher(folder) as launcher, CoordinatorProcess(folder / "coordinator") as live:
        yield Federation(folder, launcher, live)


BLOCKS = [block.text for block in blocks(PAGE) if not block.reason]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(len(JOURNEYS)), ids=[journey.data.__name__ for journey in JOURNEYS])
def test_own_data_and_an_own_model_make_a_scored_model_that_transformers_loads(
    federation: Federation, number: int
) -> None:
    journey, (at_site, at_study) = JOURNEYS[number], BLOCKS[2 * number : 2 * number + 2]
    assert len([*JOINING, *commands(at_site), *commands(at_study)]) <= MOST_COMMANDS
    for place, site in enumerate(SITES):
        journey.data(federation.folder / site, random.Random(place))
    journey.model(federation.folder / "study")
    with ExitStack() as running:
        workers = [running.enter_context(federation.begun(site, at_site)) for site in SITES]
        until(lambda: federation.offered(journey.data.__name__) or any(w.poll() is not None for w, _ in workers), 100)
        said = [log.read_text() for _, log in workers]
        print(*said)
        assert all(worker.poll() is None for worker, _ in workers), said
        assert journey.metric in federation.type("study", at_study)
    journey.use(str(federation.folder / "study" / f"trained-{journey.data.__name__}"))

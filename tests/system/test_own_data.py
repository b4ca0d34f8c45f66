"""The commands of docs/own-data.md, as they stand there: own data and an own model make an exported one with a score.

Each part of the page is a case. All share a coordinator and two sites, whose workers are processes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
from PIL import Image
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

from tests.support.cli import environment
from tests.support.coordinator import until
from tests.support.launcher import Launcher
from tests.support.paths import ROOT
from tests.support.pretrained import CLS, SEP, bert_tokenizer, image_processor, picture, plain_tokenizer
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
WORDS = (*GOOD, *BAD, *REST)


def sentence(words: tuple[str, ...], rng: random.Random) -> str:
    return " ".join(rng.sample([rng.choice(words), *REST], 5))


def reports(folder: Path, rng: random.Random) -> None:
    rows = [
        (sentence(words, rng), label) for words, label in ((GOOD, "benign"), (BAD, "malignant")) for _ in range(100)
    ]
    (folder / "reports.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))


def bert(folder: Path) -> None:
    bert_tokenizer(folder / "my-bert", WORDS)
    BertModel(BertConfig(**SIZES, vocab_size=len(WORDS) + 4, max_position_embeddings=128)).save_pretrained(
        folder / "my-bert"
    )


def classifies_texts(trained: str) -> None:
    (said,) = pipeline("text-classification", trained)("the left lung shows a lesion")
    assert said["label"] in {"benign", "malignant"}


def scans(folder: Path, rng: random.Random) -> None:
    for label, colour in (("benign", (40, 90, 40)), ("malignant", (90, 40, 40))):
        for number in range(100):
            size = (rng.randint(30, 40), rng.randint(30, 40))
            shade = tuple(value + rng.randint(-30, 30) for value in colour)
            picture(folder / "scans" / label / f"{number}.png", shade, size)


def vit(folder: Path) -> None:
    config = ViTConfig(**SIZES, image_size=32, patch_size=8)
    ViTForImageClassification(config).save_pretrained(folder / "my-vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / "my-vit")


def names_images(trained: str) -> None:
    said = pipeline("image-classification", trained)(Image.new("RGB", (50, 40)))
    assert {one["label"] for one in said} == {"benign", "malignant"}


def letters(folder: Path, rng: random.Random) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["routine", "urgent"])}
    )
    rows = [
        {"text": sentence(words, rng), "label": label} for label, words in enumerate((GOOD, BAD)) for _ in range(100)
    ]
    saved = datasets.Dataset.from_list(rows, features=features)
    datasets.DatasetDict(train=saved, test=saved.select(range(10))).save_to_disk(str(folder / "letters"))


def llama(folder: Path) -> None:
    plain_tokenizer(folder / "my-llama", WORDS)
    config = LlamaConfig(**SIZES, vocab_size=len(WORDS) + 2, max_position_embeddings=128, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(folder / "my-llama")


def classifies_letters(trained: str) -> None:
    (said,) = pipeline("text-classification", trained)("the left lung shows a lesion")
    assert said["label"] in {"routine", "urgent"}


def notes(folder: Path, rng: random.Random) -> None:
    lines = [json.dumps({"text": sentence(rng.choice((GOOD, BAD)), rng)}) for _ in range(200)]
    (folder / "notes.jsonl").write_text("\n".join(lines) + "\n")


def continues_texts(trained: str) -> None:
    (said,) = pipeline("text-generation", trained)("the left lung", max_new_tokens=4)
    assert said["generated_text"].startswith("the left lung")


def clip(folder: Path) -> None:
    bert_tokenizer(folder / "my-clip", (*WORDS, "scan", "of", "tissue", ".", "benign", "malignant"))
    text = {
        **SIZES,
        "vocab_size": len(WORDS) + 10,
        "max_position_embeddings": 16,
        "bos_token_id": CLS,
        "eos_token_id": SEP,
    }
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    model.save_pretrained(folder / "my-clip")
    image_processor(folder / "my-clip", 32)


def compares_images_with_texts(trained: str) -> None:
    labels = ["a benign lesion", "a malignant lesion"]
    said = pipeline("zero-shot-image-classification", trained)(Image.new("RGB", (50, 40)), candidate_labels=labels)
    assert {one["label"] for one in said} == set(labels)


def findings(folder: Path, rng: random.Random) -> None:
    kinds = (("fine", []), ("mass", ["mass"]), ("shadow", ["edema"]), ("lesion", ["edema", "mass"]))
    rows = [{"text": sentence((word,), rng), "label": given} for word, given in kinds for _ in range(50)]
    (folder / "findings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def names_findings(trained: str) -> None:
    text = "the left lung shows a lesion"
    (said,) = pipeline("text-classification", trained, top_k=None)([text])
    settings = json.loads((Path(trained) / "config.json").read_text())
    assert settings["problem_type"] == "multi_label_classification"
    # Each label has a probability of its own.
    model = AutoModelForSequenceClassification.from_pretrained(trained)
    logits = model(**AutoTokenizer.from_pretrained(trained)(text, return_tensors="pt")).logits[0]
    scores = dict(zip(("edema", "mass"), logits.sigmoid().tolist(), strict=True))
    assert {one["label"]: one["score"] for one in said} == pytest.approx(scores, abs=1e-4)


def ages(folder: Path, rng: random.Random) -> None:
    lines = [
        f"{sentence((word,), rng)},{age + rng.random():.1f}"
        for word, age in (("fine", 40), ("mass", 80))
        for _ in range(100)
    ]
    (folder / "ages.csv").write_text("\n".join(["text,target", *lines]) + "\n")


def gives_a_number(trained: str) -> None:
    settings = json.loads((Path(trained) / "config.json").read_text())
    assert (settings["problem_type"], settings["target_mean"], settings["target_deviation"]) == ("regression", 60, 15)
    model = AutoModelForSequenceClassification.from_pretrained(trained)
    assert model(**AutoTokenizer.from_pretrained(trained)("a mass", return_tensors="pt")).logits.shape == (1, 1)


def spans(folder: Path, rng: random.Random) -> None:
    rows = []
    for _ in range(200):
        words = rng.sample([*REST, rng.choice(BAD)], 6)
        text = " ".join(words)
        place = next(text.index(word) for word in words if word in BAD)
        entity = {"start": place, "end": (text + " ").index(" ", place), "label": "drug"}
        rows.append({"text": text, "label": [entity]})
    two = {"start": 0, "end": len("left lung"), "label": "drug"}
    rows += [{"text": "left lung shows the lesion", "label": [two]}] * 20
    (folder / "entities.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def finds_entities(trained: str) -> None:
    settings = json.loads((Path(trained) / "config.json").read_text())
    assert settings["id2label"] == {"0": "O", "1": "B-drug", "2": "I-drug"}
    said = pipeline("token-classification", trained, ignore_labels=[])("the left lung shows a lesion")
    assert {one["entity"] for one in said} <= {"O", "B-drug", "I-drug"}


@dataclass(frozen=True)
class Journey:
    """A part of the page: how its data and its model are made, and what its export must do."""

    dataset: str
    data: Callable[[Path, random.Random], None]
    model: Callable[[Path], None]
    use: Callable[[str], None]
    copied: str | None = None
    """The model's folder, if the sites have a copy of it."""
    metric: str = "accuracy"


JOURNEYS = [
    Journey("reports", reports, bert, classifies_texts),
    Journey("scans", scans, vit, names_images, copied="my-vit"),
    Journey("letters", letters, llama, classifies_letters),
    Journey("notes", notes, llama, continues_texts, copied="my-llama"),
    Journey("scans-clip", scans, clip, compares_images_with_texts, copied="my-clip"),
    Journey("findings", findings, bert, names_findings, metric="micro_f1"),
    Journey("ages", ages, bert, gives_a_number, metric="mae"),
    Journey("entities", spans, bert, finds_entities, metric="entity_f1"),
]
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
@pytest.mark.parametrize("number", range(len(JOURNEYS)), ids=[journey.dataset for journey in JOURNEYS])
def test_own_data_and_an_own_model_make_a_scored_model_that_transformers_loads(
    federation: Federation, number: int
) -> None:
    journey, (at_site, at_study) = JOURNEYS[number], BLOCKS[2 * number : 2 * number + 2]
    assert len([*JOINING, *commands(at_site), *commands(at_study)]) <= MOST_COMMANDS
    for place, site in enumerate(SITES):
        journey.data(federation.folder / site, random.Random(place))
    journey.model(federation.folder / "study")
    for site in SITES if journey.copied else ():
        shutil.copytree(federation.folder / "study" / journey.copied, federation.folder / site / journey.copied)
    with ExitStack() as running:
        workers = [running.enter_context(federation.begun(site, at_site)) for site in SITES]
        until(lambda: federation.offered(journey.dataset) or any(w.poll() is not None for w, _ in workers), 100)
        said = [log.read_text() for _, log in workers]
        print(*said)
        assert all(worker.poll() is None for worker, _ in workers), said
        assert journey.metric in federation.type("study", at_study)
    journey.use(str(federation.folder / "study" / f"trained-{journey.dataset}"))

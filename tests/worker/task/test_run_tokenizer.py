"""Data sets whose texts are converted with the tokenizer of each run's model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RobertaTokenizer

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName, FileRef, read_files, require_file
from tessera.shared.problems import DigestMismatch, Invalid
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import digest_of
from tessera.simulation import Conditions, Stalled, Weights, simulate
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import hold_out
from tessera.worker.data.readers.tokenizer import tokenizer_of
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError, TaskFailure
from tessera.worker.executor.stages.run_cache import RunCache
from tessera.worker.executor.stages.tokenize import tokenize
from tessera.worker.governance.approvals import ApprovalDecision, Unapproved
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.governance.run_history import TaskStatement
from tessera.worker.model.build import instantiate
from tessera.worker.model.sandbox import Sandbox
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.blob_cache import BlobTooLarge, Cache
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.stores import inbox_of
from tessera.worker.task.admission import admit
from tessera.worker.task.environment import Journal, TaskRun
from tessera.worker.task.fetch import _tokenizer_files
from tessera.worker.task.heartbeat import Stop
from tessera.worker.training.progress import Report
from tessera.worker.training.ranks import OneRank
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.pretrained import bert_tokenizer, picture
from tests.support.tasks import untrained
from tests.worker.privacy.test_private_task import task as private_task
from tests.worker.privacy.test_total_budget import a_runner

WORDS = ("the", "cat", "sat", "dog")
FILES = ("tokenizer.json", "tokenizer_config.json")
SECRET = "the secretword"


def texts(folder: Path, *rows: str, **options: object) -> Dataset:
    lines = [f"{text},{number % 2}" for number, text in enumerate(rows)]
    (folder / "notes.csv").write_text("\n".join(["text,label", *lines]))
    return load("text", {"file": str(folder / "notes.csv"), "tokenizer": "run", **options})


def files(folder: Path, words: tuple[str, ...] = WORDS, **more: object) -> dict[str, bytes]:
    made = bert_tokenizer(folder / "bert", words, **more)
    settings = json.loads((made / FILES[1]).read_text())
    kept = {key: value for key, value in settings.items() if key.endswith(("_token", "_side", "_names"))}
    (made / FILES[1]).write_text(json.dumps(kept))
    return {name: (made / name).read_bytes() for name in FILES}


def tokens(
    folder: Path, dataset: Dataset, held: Mapping[Any, bytes], *, embeddings: int = 8, sandbox: Sandbox | None = None,
    refs: Mapping[str, FileRef] | None = None, sent: bytes | None = None, blocks: tuple[Block, ...] = (),
    rounds: bool = False,
) -> Dataset:  # fmt: skip
    """The data set as a task of a run with these files sees it."""
    named = {name: FileRef(digest=digest_of(raw), nbytes=len(raw)) for name, raw in held.items()}
    stored = {digest_of(raw): raw for raw in held.values()}

    def copy_blob(digest: str, file: Any, progress: Any = None) -> None:
        progress(file.write(stored[digest] if sent is None else sent))

    coordinator = SimpleNamespace(copy_blob=copy_blob)
    shelf = Cache(folder / "cache", 1 << 30)
    env: Any = SimpleNamespace(shelf=shelf, coordinator=coordinator)
    task: Any = SimpleNamespace(kind="evaluate", dataset="notes", model="sha256:" + "0" * 64)
    journal: Any = None
    run = TaskRun(env, task, lambda: None, Report(), journal)
    rows = SimpleNamespace(num_embeddings=embeddings)
    loaded: Any = SimpleNamespace(built=SimpleNamespace(model=SimpleNamespace(get_input_embeddings=lambda: rows)))
    document: Any = SimpleNamespace(preprocessing=refs or named, blocks=blocks, config={})
    fetched: Any = SimpleNamespace(document=document, tokenizer=_tokenizer_files(run, document))
    local: Any = SimpleNamespace(
        task=task, cache=RunCache(), setup=SimpleNamespace(ranks=OneRank()), scratch=folder, sandbox=sandbox,
        check=lambda: None, rules=SimpleNamespace(rounds_figures=lambda _: rounds),
    )  # fmt: skip
    made = tokenize(local, fetched, loaded, dataset)
    # Later tasks of the run convert nothing.
    assert tokenize(local, fetched, loaded, dataset) is made
    return made


ROWS = [{"text": text, "label": text.split()} for text in ("the cat", "the dog sat", "sat", "cat cat cat dog")]
ROWS = [{**row, "other": "the sat", "class": number % 2} for number, row in enumerate(ROWS * 5)]
ONE_OF_EACH = {"label": "class"}
PETS = {"kind": "imagetext", "labels": ["cat", "dog"], "size": 4, "template": "the {}"}


def described(folder: Path, options: dict[str, Any], tokenizer: str) -> Dataset:
    """A data set of ROWS, or of pictures with a text for each class."""
    if not (folder / "pets").exists():
        (folder / "notes.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
        for number in range(20):
            picture(folder / "pets" / ("cat", "dog")[number % 2] / f"{number}.png", (number, 0, 0))
    kind = options.get("kind", "text")
    given = {name: value for name, value in options.items() if name != "kind"}
    given |= {"folder": str(folder / "pets")} if kind == "imagetext" else {"file": str(folder / "notes.jsonl")}
    return load(kind, {**given, "tokenizer": tokenizer})


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "options",
    [
        ONE_OF_EACH,
        {**ONE_OF_EACH, "second_text": "other"},
        {"head": "token-classification", "labels": list(WORDS)},
        {"head": "token-classification", "labels": list(WORDS), "max_length": 4},
        {"head": "causal-lm"},
        PETS,
        {**PETS, "max_length": 7},
    ],
    ids=["text", "pair", "words", "words cut off", "language", "classes", "classes filled up"],
)
def test_texts_become_the_tensors_that_the_same_tokenizer_of_a_site_makes(
    tmp_path: Path, options: dict[str, Any], side: str
) -> None:
    held = files(tmp_path, padding_side=side)
    kind = options.get("kind", "text")
    theirs, own = (
        hold_out(described(tmp_path, options, tokenizer), 0.5, b"key")
        for tokenizer in ("run", str(tmp_path / "bert"))
    )
    assert theirs.texts
    assert (own.classes is None) == (theirs.classes is None)
    assert list(theirs.identities()) == list(own.identities())
    # The site does not know a run's vocabulary before the run.
    declared = own.schema.model_copy(update={"vocabulary": None, "tokens": None})
    if kind == "text":
        assert theirs.schema == declared
    made = tokens(tmp_path, theirs, held)
    for part, same in ((made, own), (made.held_out, own.held_out)):
        assert part
        assert same
        assert part.texts is None
        assert part.schema == declared
        # Each side is as wide as its own longest text.
        found, wanted = ({**each.padded().tensors, **each.common} for each in (part, same))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_texts_keep_what_fits_the_positions_of_the_runs_model(tmp_path: Path) -> None:
    table = Block(tensor="wpe.weight", role="embedding", shape=(5, 4), dtype="F32")
    made = tokens(tmp_path, texts(tmp_path, "the cat sat the cat", "the cat"), files(tmp_path), blocks=(table,))
    # [CLS], three words and [SEP].
    assert made.tensors["attention_mask"].sum(dim=1).tolist() == [5, 4]
    assert made.report.truncation
    assert (made.report.truncation.cut, made.report.truncation.most) == (1, 5)


def test_words_of_a_byte_level_tokenizer_begin_with_a_space_as_within_a_sentence(tmp_path: Path) -> None:
    pieces = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", *"cat", "\u0120", "ca", "cat", "\u0120cat")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = RobertaTokenizer(vocab=vocabulary, merges=[("c", "a"), ("ca", "t"), ("\u0120", "cat")])
    made.save_pretrained(tmp_path / "roberta")
    options = {"head": "token-classification", "label": "text", "labels": ["cat"]}
    dataset = texts(tmp_path, "cat cat", **options)
    own = load("text", {"file": str(tmp_path / "notes.csv"), "tokenizer": str(tmp_path / "roberta"), **options})
    for each in (tokens(tmp_path, dataset, read_files(tmp_path / "roberta"), embeddings=12), own):
        assert each.tensors["input_ids"].tolist() == [[0, 11, 11, 2]]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"held": {}}, "no-tokenizer", "'notes' takes the run's tokenizer, and the run's model has none"),
        ({"embeddings": 7}, "invalid-tokenizer", "has token 7; its model has embeddings for 0 to 6"),
        ({"held": {"tokenizer.json": b"{}"}}, "invalid-tokenizer", "the run's tokenizer cannot be loaded"),
        ({"held": {"tokenizer.json": b"no"}}, "invalid-tokenizer", "not JSON"),
        ({"words": ()}, "invalid-tokenizer", "the run's tokenizer has no vocabulary"),
        ({"rows": (SECRET, "unheard")}, "tokenizer-mismatch", "cannot convert the texts of this site"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_without_a_word_of_the_texts(
    tmp_path: Path, change: dict[str, Any], code: str, said: str
) -> None:
    held = change.get("held", files(tmp_path, change.get("words", ("cat",) if "rows" in change else WORDS)))
    dataset = texts(tmp_path, *change.get("rows", (SECRET, "the cat")))
    if "rows" in change:
        dataset = replace(dataset, texts=replace(dataset.texts, first=["secretword", "unheard"]))  # type: ignore[type-var]
    with pytest.raises(TaskFailure, match=said) as refused:
        tokens(tmp_path, dataset, held, embeddings=change.get("embeddings", 8))
    assert refused.value.code == code
    assert "secretword" not in str(refused.value)
    assert str(tmp_path) not in str(refused.value)


@pytest.mark.parametrize("kind", [{}, {"kind": "evaluate", "held_out": True}], ids=["train", "evaluate"])
@pytest.mark.parametrize("rows", [("the cat", "dog"), (SECRET, "unheard")])
def test_a_private_task_takes_no_tokenizer_of_the_run_whatever_the_texts_are(
    tmp_path: Path, rows: tuple[str, ...], kind: dict[str, Any]
) -> None:
    task = private_task(dataset="notes", **kind)
    runner = replace(a_runner(tmp_path, Policy()), datasets={"notes": texts(tmp_path, *rows).info})
    with pytest.raises(PolicyViolation, match="'notes' takes the run's own tokenizer") as refused:
        admit(TaskRun(runner, task, lambda: None, Report(), Journal(TaskRef.of(task), "notes", None, None)))
    assert (refused.value.rule, "in place of 'run'" in refused.value.remedy) == ("tokenizer", True)


def with_special_tokens(raw: bytes, count: int, *, nested: bool = False) -> bytes:
    """The tokenizer, with so many special tokens before each text: half of them in the template, by pairs of ids."""
    document = json.loads(raw)
    step = document["post_processor"]
    step["special_tokens"]["[CLS]"].update(ids=[2, 2], tokens=["[CLS]", "[CLS]"])
    first = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
    for name in ("single", "pair"):
        step[name] = [first] * (count // 2) + [part for part in step[name] if "SpecialToken" not in part]
    if nested:
        document["post_processor"] = {"type": "Sequence", "processors": [step]}
    return json.dumps(document).encode()


@pytest.mark.parametrize("options", [ONE_OF_EACH, PETS], ids=["text", "classes"])
def test_no_text_exceeds_max_length_whatever_the_tokenizer_adds(tmp_path: Path, options: dict[str, Any]) -> None:
    held = files(tmp_path)
    held["tokenizer.json"] = with_special_tokens(held["tokenizer.json"], 40)
    dataset = described(tmp_path, {**options, "max_length": 16}, "run")
    with pytest.raises(TaskFailure, match="cannot convert the texts of this site") as refused:
        tokens(tmp_path, dataset, held)
    assert isinstance(refused.value.__context__, DataError)
    assert "tokens, although max_length is 16" in str(refused.value.__context__)


@pytest.mark.parametrize("nested", [False, True])
def test_a_tokenizer_with_many_special_tokens_does_not_travel(tmp_path: Path, nested: bool) -> None:
    raw = files(tmp_path)["tokenizer.json"]
    require_file("tokenizer.json", with_special_tokens(raw, 64, nested=nested))
    with pytest.raises(Invalid, match="adds 66 special tokens to a text; at most 64 are taken"):
        require_file("tokenizer.json", with_special_tokens(raw, 66, nested=nested))


def test_a_tokenizer_with_very_many_added_tokens_does_not_travel(tmp_path: Path) -> None:
    document = json.loads(files(tmp_path)["tokenizer.json"])
    document["added_tokens"] = [{"id": 8, "content": "x"}] * ((1 << 14) + 1)
    with pytest.raises(Invalid, match="more than 16384 added_tokens"):
        require_file("tokenizer.json", json.dumps(document).encode())


def test_bytes_that_are_others_or_too_many_are_refused(tmp_path: Path) -> None:
    held, dataset = files(tmp_path), texts(tmp_path, "the cat", "dog")
    with pytest.raises(DigestMismatch):
        tokens(tmp_path, dataset, held, sent=b"{}")
    refs = {"tokenizer.json": FileRef(digest=digest_of(held["tokenizer.json"]), nbytes=10)}
    with pytest.raises(BlobTooLarge, match="more than the 10 bytes"):
        tokens(tmp_path, dataset, held, refs=refs)


BERT = {
    "model_type": "bert", "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "num_labels": 2,
}  # fmt: skip


@dataclass(frozen=True)
class WithTokenizer(Weights):
    held: Mapping[FileName, bytes]

    def files(self) -> dict[FileName, bytes]:
        return dict(self.held)


def test_a_task_fails_if_the_site_s_own_tokenizer_numbers_words_differently(tmp_path: Path) -> None:
    held: Any = files(tmp_path)
    plain = Weights.of(instantiate(BERT, "text-classification", seed=0), BERT, "text-classification")
    model = WithTokenizer(plain.model, plain.values, held)
    other = bert_tokenizer(tmp_path / "other", WORDS[::-1])
    alike, differing = (
        texts(tmp_path, "the cat", "dog", tokenizer=str(folder)) for folder in (tmp_path / "bert", other)
    )
    trial = partial(
        simulate,
        {"method": {"name": "fedavg"}, "rounds": 1},
        conditions=Conditions(policy=Policy(min_evaluation_examples=1)),
    )
    assert len(trial(model, {"a": alike}, test=alike).measurements) == 2
    assert trial(plain, {"a": differing}).over
    with pytest.raises(Stalled, match="its tokenizer numbers words differently from the model's"):
        trial(model, {"a": differing})
    # A version is not measured by such tokens either.
    assert trial(model, {"a": alike}, test=differing).measurements == ()


def test_a_task_fails_before_training_if_the_site_s_own_tokenizer_has_more_tokens_than_the_model(
    tmp_path: Path,
) -> None:
    bert_tokenizer(tmp_path / "bert", WORDS)
    larger = tokenizer_of("tokenizer", str(tmp_path / "bert"))
    larger.add_tokens([f"new{number}" for number in range(BERT["vocab_size"])])
    larger.save_pretrained(tmp_path / "larger")
    plain = Weights.of(instantiate(BERT, "text-classification", seed=0), BERT, "text-classification")
    # Neither text has one of these tokens: the refusal says nothing of them.
    own = texts(tmp_path, "the cat", "dog", tokenizer=str(tmp_path / "larger"))
    with pytest.raises(Stalled, match=f"its tokenizer has token {len(larger) - 1}, and the model takes 0 to"):
        simulate({"method": {"name": "fedavg"}, "rounds": 1}, plain, {"a": own})


# ---------------------------------------------------------------- over HTTP

TABLE = "bert.embeddings.word_embeddings.weight"
CLS, SEP, THE, CAT, DOG = 2, 3, 4, 5, 7


def test_a_site_trains_with_the_tokenizer_of_the_run_that_it_approved(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client, held = coordinator.client(), files(tmp_path)
    refs = {name: FileRef(digest=client.put_bytes(raw), nbytes=len(raw)) for name, raw in held.items()}
    document, start = untrained(BERT, "token-classification", seed=0, preprocessing=refs)
    plain = Training(optimizer="sgd", learning_rate=0.1, weight_decay=0.0, batch_size=4)
    (tmp_path / "notes.csv").write_text("text,label\nthe cat,0 1\ndog,1\n")
    notes = {
        "kind": "text", "file": str(tmp_path / "notes.csv"), "head": "token-classification", "tokenizer": "run",
    }  # fmt: skip
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", "a"), name="w", state_dir=tmp_path / "state", threads=1,
        poll_seconds=5, datasets={"notes": notes}, policy={"approve_runs": True},
    )  # fmt: skip
    agent, inbox = Agent(settings, Stop()), inbox_of(settings)
    run = start_run(client, document, start, dataset="notes", training=plain)
    asked: Task = until(agent._next)
    agent._run_task(asked)
    (request,) = inbox.requests()
    assert f"`notes` is converted with the run's own tokenizer, {refs[FILES[0]].digest}." in request.summary

    inbox.decide(inbox.find(run.id), ApprovalDecision(approved=True, by="ann", at=datetime.now(UTC)))
    task: Task = until(agent._next)
    # The approval does not cover the same task with another tokenizer.
    other = document.model_copy(update={"preprocessing": {FILES[0]: refs[FILES[1]]}})
    changed = TaskStatement.of(task.model_copy(update={"model": digest_of(canonical(other))}))
    with pytest.raises(Unapproved, match="awaiting-approval"):
        inbox.require(changed, lambda terms: request.model_copy(update={"terms": terms}))
    agent._run_task(task)
    until(lambda: client.run(run.id).state == "completed")
    agent.close()
    first, last = (client.manifest(version.digest).blocks[TABLE] for version in client.versions(run.id))
    before, after = (np.frombuffer(client.read_blob(digest), np.float32).reshape(12, 8) for digest in (first, last))
    # Only the tokens of these texts have learnt.
    assert np.flatnonzero((before != after).any(axis=1)).tolist() == [CLS, SEP, THE, CAT, DOG]

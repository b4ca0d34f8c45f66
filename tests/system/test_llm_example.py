"""The demo of a language model: its texts, its measure, and the whole of it shortened, on a folder of the user's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tessera.examples.llm import __main__ as demo
from tessera.examples.llm.instructions import EXERCISES, KINDS, LENGTHS, Kind, encode, texts, word_tokenizer
from tessera.examples.llm.measure import measure, measure_in_four_bits
from tessera.examples.staging import DemoFailed
from tessera.shared.client.run_file import read_spec
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.cli.model import app as model_app
from tessera.worker.inventory import load_source
from tessera.worker.model.build import load
from tests.support.cli import environment
from tests.system.test_demo import left_of


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's own model, hardly trained."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    demo.pretrained(folder, 2)
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("capitals", "RED FOX OLD"),
        ("reverse", "old fox red"),
        ("count", "three"),
        ("last two", "old fox"),
        ("number", "one red two fox three old"),
    ],
)
def test_each_kind_has_the_answer_that_it_asks_for(name: str, expected: str) -> None:
    assert " ".join({**KINDS, **EXERCISES}[name].answer(["red", "fox", "old"])) == expected


@pytest.mark.parametrize("kind", [*KINDS.values(), *EXERCISES.values()], ids=[*KINDS, *EXERCISES])
def test_texts_vary_and_are_the_same_each_time_and_the_tokenizer_knows_them(kind: Kind) -> None:
    some = texts(kind, 200, Random(3))
    assert some == texts(kind, 200, Random(3))
    assert {text.instruction.partition(" :")[0] for text in some} == set(kind.wordings)
    lengths = {len(text.instruction.split(" : ")[1].split(" .")[0].split()) for text in some}
    assert lengths == set(range(LENGTHS[0], LENGTHS[1] + 1))
    assert len({text.instruction for text in some}) > 190
    tokenizer = word_tokenizer()
    ids = [token for text in some for token in tokenizer(" ".join(text))["input_ids"]]
    assert tokenizer.unk_token_id not in ids


def test_only_the_answer_and_the_end_of_a_text_count() -> None:
    tokenizer = word_tokenizer()
    short, longer = encode(tokenizer, texts(KINDS["count"], 1, Random(0)) + texts(KINDS["reverse"], 1, Random(1)))[
        "labels"
    ]
    words = [tokenizer.convert_ids_to_tokens(row[row != -100].tolist()) for row in (short, longer)]
    assert words == [
        [*text.answer.split(), "</s>"]
        for text in (*texts(KINDS["count"], 1, Random(0)), *texts(KINDS["reverse"], 1, Random(1)))
    ]


def test_every_site_has_mostly_one_kind_and_no_site_has_a_tested_text(tmp_path: Path) -> None:
    held, tested = demo.holdings(tmp_path, word_tokenizer())
    assert {holding.site for holding in held} == {*demo.SITES, demo.LABORATORY}
    assert [load_source(holding.source).examples for holding in held] == [demo.EACH] * 3 + [3 * demo.TESTED]
    rng, known = Random(demo.SEED), set()
    for kind in demo.SITES.values():
        some = demo.site_texts(kind, rng)
        own = [text for text in some if text.instruction.partition(" :")[0] in KINDS[kind].wordings]
        assert len(own) == round(demo.EACH * demo.OWN)
        known |= set(some)
    assert not known.intersection(text for several in tested.values() for text in several)
    wanted = read_spec(demo.HERE / "run.toml", [])
    assert {wanted["dataset"], wanted["evaluation"]["dataset"]} == {holding.dataset for holding in held}


def test_the_measure_is_the_models_own_loss_and_what_it_would_write(llama: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama).eval(), AutoTokenizer.from_pretrained(llama)
    encoded = encode(tokenizer, texts(KINDS["capitals"], 5, Random(0)))
    with torch.inference_mode():
        assert measure(llama, {"it": encoded})["it"].loss == pytest.approx(float(model(**encoded).loss), rel=1e-4)
    asked = tokenizer("shout : red fox . answer :", return_tensors="pt")["input_ids"]
    written = model.generate(asked, max_new_tokens=4, do_sample=False)
    labels = written.clone()
    labels[:, : asked.shape[1]] = -100
    told = {"input_ids": written, "attention_mask": torch.ones_like(written), "labels": labels}
    assert measure(llama, {"it": told})["it"].right == 1
    labels[0, -1] += 1
    assert measure(llama, {"it": told})["it"].right == 0


def test_a_folder_without_model_or_tokenizer_is_refused_with_what_to_do(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match=r"has no config\.json: name a folder that `save_pretrained` has written"):
        demo.tokenizer_beside(tmp_path)
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(DemoFailed, match="Save the model's tokenizer into this folder"):
        demo.tokenizer_beside(tmp_path)
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DemoFailed, match="no end-of-text token: set its eos_token"):
        demo.tokenizer_beside(tmp_path)


def test_a_model_in_the_folder_that_the_demo_replaces_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(llama.parent), "--model", str(llama)])
    with pytest.raises(SystemExit, match="2"):
        demo.arguments()
    assert "which this demo replaces: move it, or give another --out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "base"),
    [
        ([], "sent"),
        (["--model"], "external"),
        (["--base", "sent", "--model"], "sent"),
        (["--base", "external"], "external"),
    ],
)
def test_a_model_of_the_users_stays_at_the_offices_unless_they_say_otherwise(
    words: list[str], base: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = [str(llama)] if "--model" in words else []
    monkeypatch.setattr("sys.argv", ["demo", *words, *model])
    assert demo.arguments().base == base


def test_the_measure_in_4_bits_keeps_the_adapters_beside_the_rounded_base(llama: Path, tmp_path: Path) -> None:
    words = ["init", str(tmp_path / "model"), "--config", str(llama), "--head", "causal-lm", "--lora-rank", "2"]
    assert CliRunner().invoke(model_app, words).exit_code == 0
    encoded = {"it": encode(word_tokenizer(), texts(KINDS["reverse"], 8, Random(0)))}
    whole, rounded = measure(llama, encoded)["it"], measure_in_four_bits(tmp_path / "model", encoded)["it"]
    assert 0 < abs(whole.loss - rounded.loss) < 0.1 * whole.loss


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_merges_what_a_model_of_the_users_has_learnt(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "tessera.examples.llm", "--out", str(out), "--set", "rounds=2"]
    command += ["--model", str(llama)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The base never passed the coordinator" in done.stdout
    external = set(ModelFolder.open(out / "model").model.external.values())
    blobs = {path.name for path in (out / "coordinator" / "blobs").rglob("*") if path.is_file()}
    assert len(external) > 10
    assert not any(digest.removeprefix("sha256:") in name for digest in external for name in blobs)
    losses = re.findall(r"(?:capitals|reverse|count) .*?([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 3, done.stdout
    assert all(float(after) < float(before) for before, after in losses)
    merged, report = AutoModelForCausalLM.from_pretrained(out / "merged-model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]  # noqa: PT018 (one report)
    ids = torch.tensor([[1, 7, 8, 9, 10]])
    adapted = load(ModelFolder.open(out / "global-model")).eval()
    with torch.inference_mode():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(merged(ids).logits, AutoModelForCausalLM.from_pretrained(llama)(ids).logits)
    assert AutoTokenizer.from_pretrained(out / "merged-model").eos_token == "</s>"
    assert left_of(out) == []

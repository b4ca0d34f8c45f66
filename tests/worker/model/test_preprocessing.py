"""Tokenizers and image processors that travel with a model, from `tessera model init` to an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification, pipeline
from typer.testing import CliRunner

from tessera.shared.client.model_upload import upload_model
from tessera.shared.model.preprocessing import (
    MAX_SETTINGS_BYTES,
    MAX_TEMPLATE,
    FileRef,
    read_files,
    require_file,
    vocabulary_in,
)
from tessera.shared.problems import Invalid
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation.blob_folder import Folder
from tessera.worker.cli.model import app
from tessera.worker.model import build
from tests.support.pretrained import bert_tokenizer, image_processor, picture, plain_tokenizer

BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "vocab_size": 6, "max_position_embeddings": 16,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "image_size": 8, "patch_size": 4,
}  # fmt: skip


def saved(folder: Path, config: dict[str, Any], auto: Any) -> Path:
    """Save a small pretrained model as transformers does."""
    auto.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    return folder


def init(out: Path, source: Path, head: str, *more: str) -> ModelFolder:
    words = ["init", str(out), "--config", str(source), "--head", head, "--labels", "2", *more]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return ModelFolder.open(out)


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("tokenizer.json", b"[" * 100_000, "nested too deep"),
        ("tokenizer.json", b"[" + b"0," * (1 << 22) + b"0]", "values"),
        ("tokenizer.json", b"no", "not JSON"),
        ("tokenizer_config.json", b'{"auto_map": {"AutoTokenizer": "evil.py"}}', "do not travel"),
        ("tokenizer_config.json", b'{"tokenizer_class": "Evil"}', "do not travel"),
        ("tokenizer_config.json", b'{"chat_template": "' + b"a" * (MAX_TEMPLATE + 1) + b'"}', "do not travel"),
        ("preprocessor_config.json", b'{"image_processor_type": "Evil"}', "do not travel"),
        ("preprocessor_config.json", b'{"size": {"height": 100000000}}', "do not travel"),
        ("preprocessor_config.json", b" " * (MAX_SETTINGS_BYTES + 1), "may have at most 65536"),
    ],
)
def test_hostile_file_is_refused(name: Any, raw: bytes, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        require_file(name, raw)


def test_tokenizer_travels_to_an_export_with_its_chat_template_and_without_classes(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", BERT, AutoModelForSequenceClassification)
    bert_tokenizer(source, ["good", "bad"], model_max_length=12, chat_template="{{ messages[0].content }}")
    # A file of its own, which transformers reads before the key of the settings.
    assert "chat_template" not in json.loads((source / "tokenizer_config.json").read_text())
    folder = init(tmp_path / "made", source, "text-classification")
    blobs = Folder(tmp_path / "blobs")
    states = States(blobs)
    model = states.model(upload_model(blobs, folder).model)
    states.check_files(model, set)
    assert list(model.preprocessing) == ["tokenizer.json", "tokenizer_config.json"]
    for name, ref in model.preprocessing.items():
        (source / name).write_bytes(blobs.read(ref.digest))
    (source / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    assert (settings["model_max_length"], settings["tokenizer_class"]) == (12, "PreTrainedTokenizerFast")
    assert settings["chat_template"] == "{{ messages[0].content }}"
    classify = pipeline("text-classification", str(source))
    good = [{"role": "user", "content": "good"}]
    assert classify.tokenizer.apply_chat_template(good, tokenize=False) == "good"
    assert classify.tokenizer("good bad unheard")["input_ids"] == [2, 4, 5, 1, 3]
    assert len(classify("good", top_k=2)) == 2
    evil = blobs.put_bytes(b'{"auto_map": {}}')
    for ref, reason in (
        (FileRef(digest=evil, nbytes=16), "do not travel"),
        (FileRef(digest=evil, nbytes=17), "cannot be used"),
        (FileRef(digest=digest_of(b"absent"), nbytes=6), "cannot be used"),
    ):
        with pytest.raises(Invalid, match=reason):
            states.check_files(model.model_copy(update={"preprocessing": {"tokenizer_config.json": ref}}), set)


def test_the_default_of_several_chat_templates_travels(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path, ["good"])
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    assert json.loads(read_files(tmp_path)["tokenizer_config.json"])["chat_template"] == "chat"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named[:1]}))
    assert "chat_template" not in json.loads(read_files(tmp_path)["tokenizer_config.json"])


def test_processor_travels_to_an_export(tmp_path: Path) -> None:
    source = image_processor(saved(tmp_path / "source", VIT, AutoModelForImageClassification), 8)
    folder = init(tmp_path / "made", source, "image-classification")
    files = folder.files()
    assert json.loads(files["preprocessor_config.json"])["crop_size"] == {"height": 8, "width": 8}
    (source / "preprocessor_config.json").write_bytes(files["preprocessor_config.json"])
    classify = pipeline("image-classification", str(source))
    assert len(classify(str(picture(tmp_path / "red.png", (255, 0, 0))))) == 2
    assert folder.model.preprocessing == {}


DECODER = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 6, "max_position_embeddings": 16, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ends", "settings", "padding"),
    [
        # The tokenizer has a token for padding only, and the config does not name it: as Qwen2.5-Instruct.
        ("qwen2", 1, {"pad_token": "<pad>"}, 4),
        # Several tokens end a text, and the tokenizer pads with the token that it writes: as Llama 3 Instruct.
        ("llama", [3, 1], {}, 1),
        ("llama", [3, 1], None, 3),
    ],
)
def test_a_decoder_reads_the_last_token_of_a_text_that_its_tokenizer_pads(
    tmp_path: Path, kind: str, ends: Any, settings: dict[str, str] | None, padding: int
) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": kind, **DECODER, "eos_token_id": ends}))
    if settings is not None:
        plain_tokenizer(source, ["good", "bad"], **settings)
    folder = init(tmp_path / "made", source, "text-classification", "--random")
    assert folder.model.config["pad_token_id"] == padding
    model = build.load(folder).eval()
    ids = torch.tensor([[2, 3, 2], [2, padding, padding]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(batch[1:], model(input_ids=torch.tensor([[2]])).logits)


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "BPE", "Unigram"])
def test_a_vocabulary_is_that_of_its_words_and_their_numbers(kind: str) -> None:
    def made(*words: str, added: tuple[str, ...] = ()) -> str | None:
        numbers = {word: number for number, word in enumerate(words)}
        models = {
            "WordLevel": lambda: WordLevel(numbers, unk_token=words[0]),
            "WordPiece": lambda: WordPiece(numbers, unk_token=words[0]),
            "BPE": lambda: BPE(numbers, []),
            "Unigram": lambda: Unigram([(word, -1.0) for word in words], 0),
        }
        tokenizer = Tokenizer(models[kind]())
        tokenizer.add_special_tokens(list(added))
        return vocabulary_in(tokenizer.to_str().encode())

    found = made("<unk>", "cat", "dog")
    assert found is not None
    assert found == made("<unk>", "cat", "dog", added=("<pad>",))
    assert len({found, made("<unk>", "dog", "cat"), made("<unk>", "cat", "dog", "bird")}) == 3


@pytest.mark.parametrize(
    "raw",
    ["no", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}}', '{"model": {"vocab": [["a"]]}}',
     '{"model": {"vocab": {"a": 1, "b": "c"}}}', '{"model": {"vocab": {"a": 1}}, "added_tokens": [{}]}',
     '{"model": {"vocab": [[["a"], 1]]}}', "[" * 100_000],
)  # fmt: skip
def test_a_tokenizer_without_a_list_of_words_has_no_vocabulary(raw: str) -> None:
    assert vocabulary_in(raw.encode()) is None

"""Tokenizers and image processors that travel with a model, from `tessera model init` to an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification, pipeline
from typer.testing import CliRunner

from tessera.shared.cli.upload import upload_model
from tessera.shared.model.preprocessing import MAX_SETTINGS_BYTES, FileRef, require_file
from tessera.shared.model.spec import Model
from tessera.shared.problems import Invalid
from tessera.shared.rounds.versions import States
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.cli.model import app
from tessera.worker.simulation.blob_folder import Folder
from tests.support.pretrained import bert_tokenizer, image_processor, picture

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


def init(out: Path, source: Path, head: str) -> tuple[ModelFolder, str]:
    result = CliRunner().invoke(app, ["init", str(out), "--config", str(source), "--head", head, "--labels", "2"])
    assert result.exit_code == 0, result.output
    return ModelFolder.open(out), result.output


def test_model_of_texts_keeps_its_tokenizer_without_classes_and_templates(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", BERT, AutoModelForSequenceClassification)
    bert_tokenizer(source, ["good", "bad"], model_max_length=12, chat_template="{{ evil }}")
    folder, _ = init(tmp_path / "made", source, "text-classification")
    settings = json.loads((folder.path / "tokenizer_config.json").read_text())
    assert list(folder.model.preprocessing) == ["tokenizer.json", "tokenizer_config.json"]
    assert settings["model_max_length"] == 12
    assert settings["pad_token"] == "[PAD]"
    assert "evil" not in json.dumps(settings)
    classify = pipeline("text-classification", str(folder.path))
    assert classify.tokenizer("good bad unheard")["input_ids"] == [2, 4, 5, 1, 3]
    assert {entry["label"] for entry in classify("good", top_k=2)} == {"LABEL_0", "LABEL_1"}


def test_model_of_images_keeps_its_processor(tmp_path: Path) -> None:
    source = image_processor(saved(tmp_path / "source", VIT, AutoModelForImageClassification), 8)
    folder, _ = init(tmp_path / "made", source, "image-classification")
    settings = json.loads((folder.path / "preprocessor_config.json").read_text())
    assert settings["image_mean"] == [0.5, 0.5, 0.5]
    assert settings["crop_size"] == {"height": 8, "width": 8}
    assert len(pipeline("image-classification", str(folder.path))(str(picture(tmp_path / "red.png", (255, 0, 0))))) == 2


@pytest.mark.parametrize(
    ("words", "note"), [(["good", "bad", "new"], "has token 6, the model only 6 embeddings"), ([], "no tokenizer with a vocabulary")]
)
def test_tokenizer_that_does_not_fit_the_model_is_not_carried(tmp_path: Path, words: list[str], note: str) -> None:
    source = bert_tokenizer(saved(tmp_path / "source", BERT, AutoModelForSequenceClassification), words)
    folder, output = init(tmp_path / "made", source, "text-classification")
    assert folder.model.preprocessing == {}
    assert note in " ".join(output.split())


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("tokenizer.json", b"[" * 100_000, "nested too deep"),
        ("tokenizer.json", b"[" + b"0," * (1 << 22) + b"0]", "values"),
        ("tokenizer.json", b"no", "not JSON"),
        ("tokenizer_config.json", b'{"auto_map": {"AutoTokenizer": "evil.py"}}', "do not travel"),
        ("tokenizer_config.json", b'{"tokenizer_class": "Evil"}', "do not travel"),
        ("preprocessor_config.json", b'{"image_processor_type": "Evil"}', "do not travel"),
        ("preprocessor_config.json", b'{"size": {"height": 100000000}}', "do not travel"),
        ("preprocessor_config.json", b" " * (MAX_SETTINGS_BYTES + 1), "may have at most 65536"),
    ],
)
def test_hostile_file_is_refused(name: Any, raw: bytes, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        require_file(name, raw)


def test_files_are_uploaded_and_checked_against_the_document(tmp_path: Path) -> None:
    source = bert_tokenizer(saved(tmp_path / "source", BERT, AutoModelForSequenceClassification), ["good", "bad"])
    folder, _ = init(tmp_path / "made", source, "text-classification")
    blobs = Folder(tmp_path / "blobs")
    model = States(blobs).model(upload_model(blobs, folder).model)
    States(blobs).check_files(model)
    assert blobs.read(model.preprocessing["tokenizer.json"].digest) == (folder.path / "tokenizer.json").read_bytes()
    evil = blobs.put_bytes(b'{"auto_map": {}}')
    for ref, reason in (
        (FileRef(digest=evil, nbytes=16), "do not travel"),
        (FileRef(digest=evil, nbytes=17), "cannot be used"),
        (FileRef(digest=digest_of(b"absent"), nbytes=6), "cannot be used"),
    ):
        with pytest.raises(Invalid, match=reason):
            States(blobs).check_files(model.model_copy(update={"preprocessing": {"tokenizer_config.json": ref}}))
    (folder.path / "tokenizer.json").write_text("{}")
    with pytest.raises(Invalid, match=r"tokenizer\.json is missing or is not the file"):
        upload_model(blobs, folder)


def test_document_without_files_is_written_as_before(tmp_path: Path) -> None:
    model, _ = init(tmp_path / "made", saved(tmp_path / "source", VIT, AutoModelForImageClassification), "features")
    assert b"preprocessing" not in canonical(model.model)
    assert Model.model_validate_json(canonical(model.model)) == model.model

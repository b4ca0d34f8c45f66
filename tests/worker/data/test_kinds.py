"""Data sets: every example once, what is held out apart, wrong options named."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tessera.worker.data import kinds, registry
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.kinds import arrays
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.data.partition.schemes import Dirichlet, Iid
from tessera.worker.data.registry import EVERY_KIND, adapters, load
from tessera.worker.enrolment import SKELETON
from tessera.worker.errors import DataError
from tessera.worker.settings import DataSource
from tests.support.paths import ROOT

DIGITS = 1797


def test_batches_give_every_example_once_in_an_order_drawn_from_the_generator() -> None:
    dataset = Dataset({"labels": torch.arange(10)})
    orders = [
        torch.cat([batch["labels"] for batch in dataset.batches(4, torch.Generator().manual_seed(seed))])
        for seed in (1, 1, 2)
    ]
    assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()
    assert sorted(orders[2].tolist()) == list(range(10))
    assert [len(batch["labels"]) for batch in dataset.batches(4)] == [4, 4, 2]


def test_no_batch_size_means_all_at_once_in_the_stored_order() -> None:
    (batch,) = Dataset({"labels": torch.arange(10)}).batches(None)
    assert batch["labels"].tolist() == list(range(10))


def test_tensors_that_differ_in_their_number_of_examples_are_refused() -> None:
    with pytest.raises(DataError, match="same leading size"):
        Dataset({"labels": torch.arange(3), "input_ids": torch.zeros(4, 2)})


def test_what_is_common_goes_with_every_batch_as_it_is() -> None:
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    dataset = Dataset({"labels": torch.arange(5)}, common={"input_ids": prompts})
    batches = list(dataset.batches(2))
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1]
    assert all(batch["input_ids"] is prompts for batch in batches)


def test_rows_are_taken_in_the_order_asked_for_and_keep_what_is_common() -> None:
    dataset = Dataset(
        {"labels": torch.arange(5) * 10}, common={"input_ids": torch.ones(2, 3)}, domains=torch.arange(5)
    )
    chosen = dataset.rows(torch.tensor([4, 0, 4]))
    assert chosen.tensors["labels"].tolist() == [40, 0, 40]
    assert chosen.domains is not None
    assert chosen.domains.tolist() == [4, 0, 4]
    assert chosen.common["input_ids"].shape == (2, 3)
    with pytest.raises(DataError, match="it must be positive"):
        dataset.rows(torch.tensor([], dtype=torch.int64))


def test_a_name_cannot_be_both_of_each_example_and_common() -> None:
    with pytest.raises(DataError, match="input_ids: given both for each example and as common"):
        Dataset({"labels": torch.arange(2), "input_ids": torch.zeros(2, 1)}, common={"input_ids": torch.zeros(2, 1)})


def test_what_is_held_out_is_of_the_sites_own_part() -> None:
    part = Iid(scheme="iid", count=3, index=1)
    mine = load("digits", {}, part=part)
    kept = load("digits", {}, part=part, held_out=0.25, key=key_of_seed(0))
    assert kept.held_out is not None
    both = torch.cat([kept.tensors["pixel_values"], kept.held_out.tensors["pixel_values"]])
    assert mine.examples == 479  # of 1437, a third
    assert kept.examples + kept.held_out.examples == 479
    assert sorted(map(bytes, both.numpy())) == sorted(map(bytes, mine.tensors["pixel_values"].numpy()))


def test_digits_are_scaled_images_with_a_stratified_fifth_held_out() -> None:
    train, test = load("digits", {}), load("digits", {"split": "test"})
    images = train.tensors["pixel_values"]
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)
    assert train.examples + test.examples == DIGITS
    assert min(torch.bincount(test.tensors["labels"])) >= 34  # a tenth of 360, in proportion


def test_parts_of_the_digits_are_disjoint_and_together_the_training_images() -> None:
    parts = [
        load("digits", {}, part=Dirichlet(scheme="dirichlet", count=3, index=index, alpha=0.3, seed=7))
        for index in range(3)
    ]
    together = torch.cat([part.tensors["pixel_values"] for part in parts])
    whole = load("digits", {}).tensors["pixel_values"]
    assert len(together) == len(whole)
    assert sorted(map(bytes, together.numpy())) == sorted(map(bytes, whole.numpy()))


def test_arrays_are_read_under_their_own_names(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    save_file({"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.tensor([0, 1, 1, 0])}, file)
    dataset = load("arrays", {"file": str(file)})
    (batch,) = dataset.batches(None)
    assert batch["input_ids"][3].tolist() == [9, 10, 11]
    assert dataset.examples == 4
    # How long the longest text is does not leave the site.
    assert str(dataset.schema) == "input_ids int64, labels int64 []"


def test_arrays_may_say_where_each_example_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    save_file({"labels": torch.tensor([0, 1]), "domain": torch.tensor([5, 3])}, file)
    dataset = load("arrays", {"file": str(file)})
    assert dataset.domains is not None
    assert dataset.domains.tolist() == [5, 3]
    assert set(dataset.tensors) == {"labels"}


def test_arrays_labels_of_any_integers_are_classes(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    for dtype in (torch.int32, torch.uint8, torch.bool):
        save_file({"labels": torch.tensor([0, 1], dtype=dtype)}, file)
        labels = load("arrays", {"file": str(file)}).tensors["labels"]
        assert (labels.dtype, labels.tolist()) == (torch.int64, [0, 1])
    save_file({"labels": torch.tensor([0.0, 0.5])}, file)
    assert load("arrays", {"file": str(file)}).tensors["labels"].dtype == torch.float32


@pytest.mark.parametrize("domain", [torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0.5, 1.0])])
def test_domains_that_are_not_one_integer_for_each_example_are_refused(tmp_path: Path, domain: torch.Tensor) -> None:
    file = tmp_path / "notes.safetensors"
    save_file({"labels": torch.tensor([0, 1]), "domain": domain}, file)
    with pytest.raises(DataError, match=r"notes\.safetensors: domain: .* is not one integer for each example"):
        load("arrays", {"file": str(file)})


def test_another_package_brings_a_kind_by_the_documents_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (ROOT / "docs" / "data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    (tmp_path / "bars_of_yours.py").write_text(code)
    (tmp_path / "yours-1.dist-info").mkdir()
    (tmp_path / "yours-1.dist-info" / "METADATA").write_text("Name: yours\nVersion: 1\n")
    (tmp_path / "yours-1.dist-info" / "entry_points.txt").write_text("[tessera.datasets]\nbars = bars_of_yours\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("bars", {"count": 5}).tensors["labels"].tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(DataError, match="count"):
        load("bars", {"count": 0})


def test_arrays_without_labels_are_refused_by_the_files_name(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    save_file({"input_ids": torch.zeros(4, 3)}, file)
    with pytest.raises(DataError, match=r"notes\.safetensors.*no tensor 'labels'"):
        load("arrays", {"file": str(file)})


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("digits", {"prat": "train"}, "prat"),
        ("arrays", {"file": "/nowhere/at.all"}, "/nowhere/at.all"),
        ("pictures", {}, "no 'pictures'; it can be arrays, chat, digits"),
        ("image", {}, "no 'image'; did you mean `images`?"),
        ("partition", {}, "no 'partition'"),
    ],
)
def test_wrong_options_are_named(kind: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told):
        load(kind, options)


def test_sample_tables_in_new_settings_are_valid() -> None:
    filled = SKELETON.format(url='""', token_file='""', name='""', state_dir='""', more="")
    samples = tomllib.loads(re.sub(r"^# (?=\[|\w+ = )", "", filled, flags=re.MULTILINE))["datasets"]
    for sample in samples.values():
        options = {option: value for option, value in sample.items() if option not in ("kind", "held_out")}
        adapters()[sample["kind"]].options.model_validate(options)
    assert {sample["kind"] for sample in samples.values()} == {"images", "text"}


def test_a_misspelt_key_of_every_kind_is_suggested() -> None:
    assert set(EVERY_KIND) == DataSource.model_fields.keys()
    with pytest.raises(DataError, match="heldout: unknown key; did you mean `held_out`"):
        load("digits", {"heldout": 0.2})
    with pytest.raises(DataError, match="splitt: unknown key; did you mean `split`"):
        load("digits", {"splitt": "test"})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pixel_values": torch.full((2, 1, 2, 2), float("nan"))}, "pixel_values: 2 with values that are not finite"),
        ({"pixel_values": torch.tensor([0.0, float("inf")]).view(2, 1, 1, 1)}, "pixel_values: 1 with .* example 1 "),
        ({"labels": torch.tensor([0, -1])}, "labels: 1 with labels that are no class, first example 1 "),
        ({"labels": torch.tensor([-100, -100])}, "labels: 2 with labels that are no class, first example 0 "),
        ({"labels": torch.tensor([[0, -100], [0, -2]])}, "labels: 1 with .* first example 1 "),
        ({"labels": torch.tensor([0, 100_000])}, "labels: 1 with .* first example 1 "),
    ],
)
def test_values_of_arrays_that_nothing_can_be_learnt_from_are_warned_of(
    tmp_path: Path, changed: dict[str, torch.Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A piece of one example.
    monkeypatch.setattr(arrays, "PIECE", 1)
    good = {"pixel_values": torch.zeros(2, 1, 2, 2), "labels": torch.tensor([0, 1])}
    save_file({**good, **changed}, tmp_path / "a.safetensors")
    ((warning, _),) = load("arrays", {"file": str(tmp_path / "a.safetensors")}).report.warnings()
    assert re.match(reason, warning)


def test_pixels_in_bytes_which_nothing_scales_are_refused(tmp_path: Path) -> None:
    pixels = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    save_file({"pixel_values": pixels, "labels": torch.tensor([0, 1])}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=r"pixel_values: torch.uint8 is not read"):
        load("arrays", {"file": str(tmp_path / "a.safetensors")})


def test_arrays_that_can_be_learnt_from_are_taken_and_large_pixels_are_asked_about(tmp_path: Path) -> None:
    pixels = torch.rand(2, 1, 2, 2) * 255 + 1
    save_file({"pixel_values": pixels, "labels": torch.tensor([1, 0])}, tmp_path / "a.safetensors")
    loaded = load("arrays", {"file": str(tmp_path / "a.safetensors")})
    ((warning, _),) = loaded.report.warnings()
    assert "as if they had not been scaled" in warning
    save_file({"input_ids": torch.ones(1, 2).long(), "labels": torch.tensor([[3, -100]])}, tmp_path / "b.safetensors")
    assert not list(load("arrays", {"file": str(tmp_path / "b.safetensors")}).report.warnings())


@pytest.mark.parametrize(("name", "content", "said"), [
    ("bars.py", "import no_such_package", "bars.py cannot be imported: ModuleNotFoundError: No module named"),
    ("bars.py", "A = 1", "bars.py declares no ADAPTER: add it, or begin the name of the file with _"),
    ("text.py", "A = 1", "text.py has the name of another kind: rename it"),
    ("yours.py", "A = 1", "yours.py has the name of another kind: rename it"),
    (None, "", "which is not a folder: create it or remove it there"),
])  # fmt: skip
def test_a_file_of_a_site_that_is_no_kind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, content: str, said: str
) -> None:
    folder = tmp_path if name else tmp_path / "none"
    if name:
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("TESSERA_KINDS", str(folder))
    # An installed package has a kind too.
    (tmp_path / "yours-1.dist-info").mkdir()
    (tmp_path / "yours-1.dist-info" / "entry_points.txt").write_text("[tessera.datasets]\nyours = bars_of_yours\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # This process has read both.
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(folder)])
    registry._files.cache_clear()
    registry._adapter.cache_clear()
    importlib.invalidate_caches()
    try:
        with pytest.raises(DataError, match=said):
            load("bars", {"count": 5})
    finally:
        registry._files.cache_clear()
        registry._adapter.cache_clear()
        sys.modules.pop("tessera.worker.data.kinds.bars", None)

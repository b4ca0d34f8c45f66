"""What is held out follows from each example by itself and the site's secret, whatever the other examples are."""

from __future__ import annotations

import hmac
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import hold_out, key_of_seed
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.inventory import datasets_of
from tessera.worker.settings import DataSource, SettingsError, WorkerSettings
from tessera.worker.state.atomic_files import secret_key
from tests.support.pretrained import bert_tokenizer, picture

KEY = key_of_seed(0)
COUNT = 1000


def numbers(count: int, labels: torch.Tensor | None = None) -> Dataset:
    """Examples that are told apart by one number each."""
    found = torch.zeros(count, dtype=torch.int64) if labels is None else labels
    return Dataset({"input_ids": torch.arange(count)[:, None], "labels": found}, common={"more": torch.ones(1)})


def held(dataset: Dataset) -> set[int]:
    """The first number of each example that is held out."""
    assert dataset.held_out is not None
    return {int(row.flatten()[0]) for row in dataset.held_out.tensors["input_ids"]}


def test_each_example_is_on_one_side_and_keeps_what_is_common() -> None:
    kept = hold_out(numbers(COUNT), 0.2, KEY)
    out = kept.held_out
    assert out is not None
    together = torch.cat([kept.tensors["input_ids"], out.tensors["input_ids"]]).flatten()
    assert sorted(together.tolist()) == list(range(COUNT))
    assert set(kept.common) == set(out.common) == {"more"}
    # 200 are to be expected, with a standard deviation of 12.6.
    assert abs(out.examples - 200) < 50


def test_one_example_more_moves_no_other() -> None:
    assert held(hold_out(numbers(COUNT + 1), 0.2, KEY)) - {COUNT} == held(hold_out(numbers(COUNT), 0.2, KEY))


def test_another_label_moves_no_example() -> None:
    relabelled = torch.zeros(COUNT, dtype=torch.int64)
    relabelled[17] = 1
    assert held(hold_out(numbers(COUNT, relabelled), 0.2, KEY)) == held(hold_out(numbers(COUNT), 0.2, KEY))


def test_what_is_twice_there_is_on_one_side() -> None:
    once = numbers(COUNT)
    twice = once.rows(torch.arange(COUNT).repeat(2))
    assert held(hold_out(twice, 0.2, KEY)) == held(hold_out(once, 0.2, KEY))
    assert hold_out(twice, 0.2, KEY).examples == 2 * hold_out(once, 0.2, KEY).examples


def test_only_the_same_key_holds_out_the_same_examples() -> None:
    first, same, other = (held(hold_out(numbers(COUNT), 0.5, key)) for key in (KEY, KEY, key_of_seed(1)))
    assert first == same
    # Half of the examples are on another side.
    assert 400 < len(first ^ other) < 600


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_an_empty_side_is_refused_with_what_to_do(share: float) -> None:
    with pytest.raises(DataError, match=r"held_out: of 3 examples none is .* add examples, or leave"):
        hold_out(numbers(3), share, KEY)


def test_a_longer_text_pads_all_others_and_moves_none(tmp_path: Path) -> None:
    bert = str(bert_tokenizer(tmp_path / "bert", tuple(f"w{n}" for n in range(200))))

    def words(*more: str) -> set[int]:
        lines = ["text,label", *(f"w{n},0" for n in range(200)), *more]
        (tmp_path / "notes.csv").write_text("\n".join(lines) + "\n")
        options = {"file": str(tmp_path / "notes.csv"), "tokenizer": bert}
        loaded = load("text", options, held_out=0.3, key=KEY)
        assert loaded.held_out is not None
        return {int(row[1]) for row in loaded.held_out.tensors["input_ids"]}

    long = " ".join(["w3"] * 9) + ",0"
    assert words(long) - words() <= {3 + 4}
    assert words() <= words(long)


def test_one_picture_more_moves_no_other(tmp_path: Path) -> None:
    for shade in range(40):
        picture(tmp_path / "pets" / "cat" / f"{shade:02}.png", (shade, 0, 0))

    def shades() -> set[int]:
        options = {"folder": str(tmp_path / "pets"), "labels": ["cat"], "size": 2, "mean": [0.0], "std": [1.0]}
        loaded = load("images", options, held_out=0.5, key=KEY)
        assert loaded.held_out is not None
        return {round(float(image[0, 0, 0]) * 255) for image in loaded.held_out.tensors["pixel_values"]}

    before = shades()
    picture(tmp_path / "pets" / "cat" / "00-first.png", (200, 0, 0))
    assert shades() - {200} == before


def test_what_is_of_one_group_is_on_one_side(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    patients = torch.arange(COUNT) // 10
    save_file({"input_ids": torch.arange(COUNT)[:, None], "labels": patients % 2, "group": patients}, file)
    loaded = load("arrays", {"file": str(file)}, held_out=0.3, key=KEY)
    assert set(loaded.tensors) == {"input_ids", "labels"}
    of_group = {patient: len({n for n in held(loaded) if n // 10 == patient}) for patient in range(COUNT // 10)}
    assert set(of_group.values()) == {0, 10}
    save_file({"labels": torch.zeros(2, dtype=torch.int64), "group": torch.tensor([0.5, 1.0])}, file)
    with pytest.raises(DataError, match=r"group: .* is not one integer for each example"):
        load("arrays", {"file": str(file)})


def test_a_column_of_a_table_is_the_group(tmp_path: Path) -> None:
    bert = str(bert_tokenizer(tmp_path / "bert", ("a", "b")))
    rows = [f"{'a ' * (n % 7)}b,0,patient-{n // 5}" for n in range(200)]
    (tmp_path / "notes.csv").write_text("\n".join(["text,label,patient", *rows]) + "\n")
    options = {"file": str(tmp_path / "notes.csv"), "tokenizer": bert, "group": "patient"}
    loaded = load("text", options, held_out=0.3, key=KEY)
    assert loaded.held_out is not None
    assert loaded.held_out.examples % 5 == 0


@pytest.mark.parametrize("missing", [b"", b" NA", b"nan", b"None"])
def test_examples_without_a_group_are_held_out_one_by_one_and_move_no_group(missing: bytes) -> None:
    everything = numbers(COUNT)
    names = [b"patient-%d" % (n // 20) for n in range(COUNT)]
    half = replace(everything, groups=[missing if n % 2 else name for n, name in enumerate(names)])
    found = held(hold_out(half, 0.2, KEY))
    assert {n for n in found if n % 2} == {n for n in held(hold_out(everything, 0.2, KEY)) if n % 2}
    grouped = held(hold_out(replace(everything, groups=names), 0.2, KEY))
    assert {n for n in found if n % 2 == 0} == {n for n in grouped if n % 2 == 0}
    # The side of a group follows from its name and the key alone, as before.
    by_hmac = {n for n in range(COUNT) if int.from_bytes(hmac.digest(KEY, names[n], "sha256")[:8]) < 0.2 * 2**64}
    assert grouped == by_hmac


def test_images_of_one_patient_by_their_paths_are_on_one_side(tmp_path: Path) -> None:
    for number in range(40):
        picture(tmp_path / "pets" / "cat" / f"p{number // 4:02}-{number}.png", (number, 0, 0))
    options = {"folder": str(tmp_path / "pets"), "labels": ["cat"], "size": 2}
    loaded = load("images", {**options, "group": r"/p(\d+)-"}, held_out=0.3, key=KEY)
    assert loaded.held_out is not None
    assert not set(loaded.groups or ()) & set(loaded.held_out.groups or ())
    assert loaded.held_out.examples % 4 == 0
    for pattern, reason in (
        (r"/q(\d+)-", "matches nothing in 40 of 40 paths below .*, such as cat/p00-0.png"),
        (r"/(p)(\d+)-", "has 2 groups in parentheses"),
        ("PatientID", "has 0 groups in parentheses.* with dicom = true a keyword such as 'PatientID'"),
        ("(", "is not a regular expression"),
    ):
        with pytest.raises(DataError, match=reason):
            load("images", {**options, "group": pattern})


def settings(folder: Path, **more: object) -> WorkerSettings:
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": folder / "state", **more}
    return WorkerSettings(**given, datasets={"digits": {"kind": "digits", "held_out": 0.2}})


def test_the_sites_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    first, again = (held_digits(datasets_of(settings(tmp_path).sources, make=True)) for _ in range(2))
    path = tmp_path / "state" / "held-out.key"
    assert torch.equal(first, again)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = datasets_of(settings(tmp_path / "other").sources, make=True)
    assert not torch.equal(first, held_digits(other))
    # A second worker with the same examples is given the same key.
    shared = settings(tmp_path / "third", held_out_key_file=path)
    assert torch.equal(first, held_digits(datasets_of(shared.sources, make=True)))


def held_digits(loaded: dict[str, Dataset]) -> torch.Tensor:
    out = loaded["digits"].held_out
    assert out is not None
    return out.tensors["pixel_values"]


def test_a_key_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for wrong in ("", "not hex", "ab12"):
        path.write_text(wrong)
        with pytest.raises(SettingsError, match=f"held_out_key_file: {path} cannot be used"):
            datasets_of(settings(tmp_path, held_out_key_file=path).sources)


def test_no_command_but_the_worker_makes_the_key(tmp_path: Path) -> None:
    datasets_of(settings(tmp_path).sources)
    assert not (tmp_path / "state").exists()
    assert len(secret_key(tmp_path / "new" / "key")) == 32


def test_nothing_is_held_out_of_a_data_set_for_evaluation() -> None:
    with pytest.raises(ValidationError, match="leave held_out out"):
        DataSource.model_validate({"kind": "digits", "held_out": 0.2, "use": "evaluate"})

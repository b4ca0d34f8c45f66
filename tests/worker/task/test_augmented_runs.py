"""Runs that change images in training: what trains, and what is refused, with the remedy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tessera.shared.problems import Invalid
from tessera.simulation import Result, Stalled, simulate
from tessera.worker.data.dataset import Dataset
from tests.support.tasks import PLAIN, Subject, images
from tests.worker.training.test_micro_batch import BERT, CASES
from tests.worker.training.test_training_loss import spec_of, start_of

FLIP = {"horizontal_flip": 1.0}


def trained(changes: Mapping[str, Any], data: Dataset | None = None, subject: Subject = PLAIN, **spec: Any) -> Result:
    settings = spec_of(augmentation=changes, batch_size=8)
    return simulate({**settings, **spec}, start_of(subject), {"a": data or images()})


def mirrored() -> Dataset:
    """The images mirrored, but for those held out."""
    data = images()
    return Dataset(data.tensors | {"pixel_values": data.tensors["pixel_values"].flip(-1)}, held_out=images(30))


def same(one: Result, other: Result) -> bool:
    return all((values == other.arrays()[name]).all() for name, values in one.arrays().items())


def test_run_trains_on_the_changed_images_and_measures_those_held_out_as_they_are() -> None:
    sites = {"evaluation": {"sites": True}}
    data = Dataset(images().tensors, held_out=images(30))
    flipped, beforehand = trained(FLIP, data, **sites), trained({}, mirrored(), **sites)
    assert same(flipped, beforehand)
    assert flipped.scores() == beforehand.scores() != {}
    assert not same(flipped, trained({}, data))


def test_blocks_are_chosen_by_the_images_as_they_are() -> None:
    safl = {"method": {"name": "safl", "settings": {"layers": 1}}}
    metrics = [trained(changes, **safl).rounds[0].tasks[0].metrics for changes in (FLIP, {})]
    assert metrics[0]["loss"] != metrics[1]["loss"]
    measured = [{name: value for name, value in each.items() if "." in name} for each in metrics]
    assert measured[0] == measured[1] != {}


# ---------------------------------------------------------------- what is refused


def test_run_of_a_model_without_images_is_refused_at_its_creation() -> None:
    texts = Subject(BERT, "text-classification", lambda: CASES["classes"][2])
    with pytest.raises(Invalid) as raised:
        trained(FLIP, subject=texts)
    (fault,) = raised.value.errors
    assert fault.pointer == "/training/augmentation"
    assert fault.detail.startswith("changes images, and this bert for text-classification takes none: leave it out")


def test_unknown_change_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(Invalid) as raised:
        trained({"horizontal_flips": 0.5})
    (fault,) = raised.value.errors
    assert fault.pointer == "/training/augmentation/horizontal_flips"
    assert "did you mean `horizontal_flip`?" in fault.detail


def test_site_whose_images_have_no_known_colours_fails_the_task_with_the_remedy() -> None:
    with pytest.raises(Stalled, match=r"input-mismatch: .* does not take .* which hue need: leave these out"):
        trained({"hue": 0.1})


def test_worker_without_kornia_fails_the_task_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia", None)
    with pytest.raises(Stalled, match=r"augmentation-not-installed: .* pip install 'tessera-fl\[augmentation\]'"):
        trained(FLIP)
    assert not same(trained({}), trained({}, mirrored()))

"""Figures of a method's own: one value of each example, clipped, summed and rounded as the other figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.shared.api.runs import Evaluation
from tessera.shared.methods.registry import FOLDERS, methods
from tessera.simulation import Weights, simulate
from tessera.worker.data.partition.division import hold_out, key_of_seed
from tessera.worker.data.partition.schemes import Iid
from tessera.worker.data.registry import load
from tessera.worker.governance.policy import Policy
from tessera.worker.model.build import instantiate
from tests.support.coordinator import LiveCoordinator
from tests.support.tasks import DIGITS_VIT, images
from tests.worker.training.test_site_evaluation import begin, settings, working
from tests.worker.training.test_site_evaluation import measured as at_sites

METHOD = """
from tessera.shared.methods.base import Method, MethodSettings, WorkerHalf


class OwnWorker(WorkerHalf[MethodSettings]):
    metric_ranges = {"own_right": (0.0, 1.0), "own_label": (-1.0, 3.0)}

    def metrics(self, context, outputs, labels):
        return {"own_right": (outputs.logits.argmax(dim=1) == labels).double(), "own_label": LABEL}


METHOD = Method(name="own", worker=OwnWorker, source="this test")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of methods, which this process reads anew."""
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    methods.cache_clear()
    yield tmp_path
    methods.cache_clear()


def measured() -> tuple[dict[str, float], list[int]]:
    """What the site measures of the version before training, and the labels."""
    dataset = hold_out(images(120), 0.5, key_of_seed(0))
    assert dataset.held_out is not None
    weights = Weights.of(instantiate(DIGITS_VIT, "image-classification", seed=0), DIGITS_VIT, "image-classification")
    spec = {
        "method": {"name": "own"}, "rounds": 1, "training": {"batch_size": 16, "steps": 1},
        "evaluation": {"sites": True},
    }  # fmt: skip
    found = simulate(spec, weights, {"a": dataset}).measurements
    return next(one.metrics for one in found if one.version == 0), dataset.held_out.tensors["labels"].tolist()


def test_the_figure_is_the_mean_of_the_examples_values_within_their_range(folder: Path) -> None:
    (folder / "own.py").write_text(METHOD.replace("LABEL", "labels"))
    found, labels = measured()
    assert found["own_right"] == found["accuracy"]
    assert found["own_label"] == pytest.approx(sum(min(label, 3) for label in labels) / len(labels), rel=5e-3)


@pytest.mark.parametrize(("value", "fails"), [("labels", False), ("labels.new_zeros(7)", True), ("1 / 0", True)])
def test_figures_leave_rounded_where_others_do(
    folder: Path, coordinator: LiveCoordinator, tmp_path: Path, value: str, fails: bool
) -> None:
    (folder / "own.py").write_text(METHOD.replace("LABEL", value))
    given = settings(coordinator, tmp_path / "state").model_copy(update={"policy": Policy(figures="rounded")})
    client = coordinator.client()
    with working(given, executes=True):
        run = begin(client, "own", Evaluation(sites=True, every=2))
        found = at_sites(client, run)[0]
    if fails:
        # No value of an example can fail the evaluation: without one it counts as the least.
        assert (found.metrics["own_right"], found.metrics["own_label"]) == (0.0, -1.0)
        return
    part = Iid(scheme="iid", count=8, index=0)
    held_out = load("digits", {}, part=part, held_out=0.25, key=key_of_seed(0)).held_out
    assert held_out is not None
    labels = held_out.tensors["labels"].clamp(max=3).tolist()
    assert found.examples == len(labels)
    assert found.metrics["own_right"] == found.metrics["accuracy"]
    # A step is five times the range of an example.
    steps = sum(label + 1 for label in labels) / 20
    assert found.metrics["own_label"] == pytest.approx(round(steps) * 20 / len(labels) - 1)


@pytest.mark.parametrize(("ranges", "said"), [
    ('{"accuracy": (0, 1)}', "'accuracy' has to begin with own_"),
    ('{"own_a": (1, 1)}', "'own_a' is \\(1, 1\\): give the least and the largest value"),
    ('{"own_a": 3}', "'own_a' is 3: give the least and the largest value"),
    ('{f"own_{n}": (0, 1) for n in range(17)}', "give a dict of at most 16 names"),
    ("{}", "define metrics and metric_ranges together"),
])  # fmt: skip
def test_a_figure_without_a_range_or_with_a_name_of_others_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture, ranges: str, said: str
) -> None:
    content = METHOD.replace('{"own_right": (0.0, 1.0), "own_label": (-1.0, 3.0)}', ranges).replace("LABEL", "labels")
    (folder / "own.py").write_text(content)
    assert "own" not in methods()
    assert re.search(said, caplog.text)


def test_ranges_without_the_hook_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "own.py").write_text(METHOD.replace("def metrics", "def _metrics").replace("LABEL", "labels"))
    assert "own" not in methods()
    assert "define metrics and metric_ranges together" in caplog.text


def test_a_value_without_a_declared_range_ends_the_evaluation(folder: Path) -> None:
    (folder / "own.py").write_text(METHOD.replace('"own_label": LABEL', '"own_label": labels, "own_more": labels'))
    with pytest.raises(ValueError, match=r"returns \['own_label', 'own_more', 'own_right'\]"):
        measured()

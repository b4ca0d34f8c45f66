"""An update is steps from the version that it started from, whichever version it is merged into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from tessera.shared.aggregation.mean import average
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.methods import registry
from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    MethodSpec,
    Plan,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.model.blocks import Block
from tessera.shared.rounds.aggregate import AcceptedUpdate, Aggregation
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.schema import Compatibility, canonical
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import Array, ArrayTensor, as_bytes, to_array
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.simulation.blob_folder import Folder
from tests.support.federation import small_model, values

VARIANCE = Block(tensor="norm.running_var", role="other", shape=(4,), dtype="F32")
MODEL = small_model().model_copy(update={"blocks": (*small_model().blocks, VARIANCE)})
HEAD, MLP = MODEL.by_name["head.weight"], MODEL.by_name["layer.0.mlp.weight"]
CODECS = ("raw", LOSSLESS, "delta", "delta+zstd")


class Buffering(CoordinatorHalf[MethodSettings]):
    """FedBuff's weights (Nguyen et al. 2022, arXiv 2106.06639)."""

    buffered = Compatibility()

    def weight(self, update: Update) -> float:
        return super().weight(update) / sqrt(1 + update.staleness)


class Remembering(CoordinatorHalf[MethodSettings]):
    def merge(self, state: State, updates: Sequence[Update]) -> State:
        return super().merge(state, updates)


@pytest.fixture(autouse=True)
def method(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = {"buffering": Buffering, "remembering": Remembering}
    made = {name: Method(name, coordinator=half, source="a test") for name, half in halves.items()}
    known = registry.methods()
    monkeypatch.setattr(registry, "methods", lambda: {**known, **made})


class Counting(Folder):
    """Counts how often each blob is opened."""

    opened: Counter[str] = Counter()

    def open(self, digest: str) -> BinaryIO:
        self.opened[digest] += 1
        return super().open(digest)


class Run:
    """Three versions: 2 and 3 moved the MLP, and none the head."""

    def __init__(self, path: Path, method: str = "buffering", dtype: DType = "F32") -> None:
        self.folder = Counting(path)
        self.states = States(self.folder)
        self.aggregation = Aggregation(self.states, Inspector(self.folder, self.states))
        blocks = tuple(block.model_copy(update={"dtype": dtype}) for block in MODEL.blocks)
        self.model = MODEL.model_copy(update={"blocks": blocks})
        start = values(self.model)
        moved = [(start[MLP.name] + np.float32(0.25 * number)).astype(NUMPY_DTYPES[dtype]) for number in range(3)]
        variances = [np.full(4, value, NUMPY_DTYPES[dtype]) for value in (10, 5, 2)]
        self.versions = [
            {**start, MLP.name: value, VARIANCE.name: variance}
            for value, variance in zip(moved, variances, strict=True)
        ]
        self.refs = [self._version(number, version) for number, version in enumerate(self.versions, start=1)]
        model = self.folder.put([canonical(self.model)]).digest
        self.spec = RunSpec(
            name="r", method=MethodSpec(name=method), model=model, version=self.refs[0].digest, dataset="d", rounds=9
        )

    def _version(self, number: int, version: dict[str, Array]) -> VersionRef:
        blocks = {name: self.folder.put([as_bytes(value)]).digest for name, value in version.items()}
        return VersionRef(number=number, digest=self.folder.put([Manifest(blocks=blocks).document()]).digest)

    def update(
        self,
        number: int,
        step: float,
        codec: str = "raw",
        worker: str = "a",
        moves: Sequence[Block] = (HEAD, MLP),
    ) -> AcceptedUpdate:
        """An update that moves the head and the MLP of a version by a step."""
        base = self.versions[number - 1]
        changes = [
            TrainedBlock(
                block,
                ArrayTensor(base[block.name] + np.float32(step), block.dtype),
                ArrayTensor(base[block.name], block.dtype),
            )
            for block in (self.model.by_name[each.name] for each in moves)
        ]
        file = BytesIO()
        write_update(file, dict.fromkeys((block.name for block in moves), codec), changes)
        digest = self.folder.put([file.getvalue()]).digest
        return AcceptedUpdate(worker, worker, digest, 10, {}, Plan(), self.refs[number - 1])

    def merged(self, *accepted: AcceptedUpdate) -> dict[str, Array]:
        """Version 3 with these updates merged into it."""
        state, _ = self.aggregation.next_state(self.spec, Bounds(), self.refs[2], accepted)
        return {name: to_array(tensor) for name, tensor in state.model.items()}


@pytest.mark.parametrize("codec", CODECS)
def test_an_update_of_an_earlier_version_leaves_what_later_ones_changed(tmp_path: Path, codec: str) -> None:
    run = Run(tmp_path)
    merged = run.merged(run.update(1, 0.5, codec))
    # Version 1 + 0.5 is version 3: what was sent, taken as it is, would change nothing.
    np.testing.assert_allclose(merged[MLP.name], run.versions[2][MLP.name] + 0.5, atol=1e-6)
    np.testing.assert_allclose(merged[HEAD.name], run.versions[2][HEAD.name] + 0.5, atol=1e-6)


@pytest.mark.parametrize("codec", CODECS)
def test_a_method_may_weigh_updates_by_their_staleness(tmp_path: Path, codec: str) -> None:
    run = Run(tmp_path)
    merged = run.merged(run.update(1, 0.5, codec), run.update(3, -0.5, codec, worker="b"))
    # Alike in examples; the first is two versions old.
    stale, fresh = 1 / sqrt(3), 1.0
    step = (0.5 * stale - 0.5 * fresh) / (stale + fresh)
    np.testing.assert_allclose(merged[MLP.name], run.versions[2][MLP.name] + step, atol=1e-6)


@pytest.mark.parametrize("codec", CODECS)
def test_a_single_late_update_moves_what_changed_since_by_its_step_times_its_weight(
    tmp_path: Path, codec: str
) -> None:
    run = Run(tmp_path, "fedavg")
    late = replace(run.update(1, 0.5, codec), since=[ref.digest for ref in run.refs[1:]])
    merged, present = run.merged(late), run.versions[2]
    # Two versions changed the MLP, and none the head, which is not stale. No sum of weights cancels this.
    np.testing.assert_allclose(merged[MLP.name], present[MLP.name] + 0.5 / sqrt(3), atol=1e-6)
    np.testing.assert_allclose(merged[HEAD.name], present[HEAD.name] + 0.5, atol=1e-6)


@pytest.mark.parametrize("codec", ["raw", LOSSLESS])
def test_the_running_variance_of_an_earlier_version_is_averaged_and_stays_positive(
    tmp_path: Path, codec: str
) -> None:
    run = Run(tmp_path)
    # From 10 to 1, where the latest version has 2.
    late = run.update(1, -9, codec, moves=[VARIANCE])
    np.testing.assert_allclose(run.merged(late)[VARIANCE.name], 1, rtol=1e-6)
    late = replace(late, since=[ref.digest for ref in run.refs[1:]])
    np.testing.assert_allclose(run.merged(late)[VARIANCE.name], 2 - 1 / sqrt(3), rtol=1e-6)


def test_workers_of_a_site_may_have_started_from_different_versions(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pair = [run.update(1, 0.5), run.update(3, -0.25, worker="b")]
    merged = run.merged(*(replace(one, site="site") for one in pair))
    np.testing.assert_allclose(merged[MLP.name], run.versions[2][MLP.name] + 0.125, atol=1e-6)


def test_a_merge_that_does_not_say_it_can_is_given_no_earlier_version(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "remembering")
    assert run.merged(run.update(3, 0.5))
    with pytest.raises(UnsupportedRun, match="overrides plan or merge and does not declare buffered: set"):
        run.merged(run.update(3, 0.5), run.update(2, 0.5, worker="b"))


def test_an_average_refuses_an_update_of_another_base(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, third = (run.states.manifest(ref.digest) for ref in (run.refs[0], run.refs[2]))
    sent = run.aggregation.inspector.open(run.update(1, 0.5).digest, MODEL, first, Plan())
    model = run.states.load(MODEL, third, 3).model
    with pytest.raises(ValueError, match=f"an update of {third.blocks[MLP.name]} started from"):
        average(model, [(1.0, sent)], "participants")
    # The head is the same in all versions.
    assert average(model, [(1.0, {HEAD.name: sent[HEAD.name]})], "participants").keys() == {HEAD.name}


@pytest.mark.parametrize("codec", CODECS)
def test_merging_updates_of_the_present_version_reads_each_block_once(tmp_path: Path, codec: str) -> None:
    run = Run(tmp_path)
    updates = [run.update(3, 0.5, codec), run.update(3, -0.25, codec, worker="b")]
    state, _ = run.aggregation.next_state(run.spec, Bounds(), run.refs[2], updates)
    run.folder.opened.clear()
    merged = to_array(state.model[MLP.name])
    np.testing.assert_allclose(merged, run.versions[2][MLP.name] + 0.125, atol=1e-6)
    base = run.states.manifest(run.refs[2].digest).blocks[MLP.name]
    # A lossless codec of differences needs the base for each update beside the sum's own.
    assert run.folder.opened == {base: 3 if codec == LOSSLESS else 1, **{one.digest: 1 for one in updates}}

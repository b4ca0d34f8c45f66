"""Arrays that a method sends beside blocks: declared by its plan, checked at the gate, exact, given to its merge."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.methods import registry
from tessera.shared.methods.base import (
    CoordinatorHalf,
    Extra,
    ExtraArray,
    LocalResult,
    Method,
    MethodSettings,
    MethodSpec,
    Participant,
    Plan,
    RunInfo,
    State,
    TaskContext,
    TrainingStats,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.model.selectors import NOTHING, Selector, named
from tessera.shared.problems import InvalidUpdate
from tessera.shared.rounds.aggregate import AcceptedUpdate, Aggregation
from tessera.shared.rounds.planning import check_work
from tessera.shared.rounds.validation import HeldUpdates, Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.run_settings import ClientPrivacy, Privacy
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import ArrayTensor, ZeroTensor, as_bytes, to_array
from tessera.shared.updates.update_file import TrainedBlock, longest_update, read_update, write_update
from tessera.simulation import Stalled, Weights, simulate
from tessera.simulation.blob_folder import Folder
from tessera.worker.task.upload_budget import write_within
from tests.support.federation import small_model, values
from tests.support.tasks import VIT, images, untrained
from tests.support.updates import update_file

MODEL = small_model()
HEAD, MEANS = MODEL.by_name["head.weight"], ExtraArray(name="means", shape=(2, 3))
PLAN = Plan(upload=named([HEAD.name]), extra=(MEANS,))
SENT = np.array([[1.5, -2.0, 3e6], [0.1, 0.0, 1e-20]], np.float32)


class Sharing(CoordinatorHalf[MethodSettings]):
    """Averages blocks, and keeps the sum of the arrays in the server's state."""

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(extra=(MEANS,))

    def merge(self, state: State, updates: Any) -> State:
        total = ArrayTensor(sum(to_array(update.extra["means"]) for update in updates))
        return replace(super().merge(state, updates), server_state={"means": total})

    def check_merge(self, guard: str) -> None:
        """Claim that every guard holds."""


class SharingWorker(WorkerHalf[MethodSettings]):
    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        examples = sum(len(batch["labels"]) for batch in context.batches)
        return replace(
            super().collect(context, selected, stats), extra={"means": Extra(SENT, np.array([examples, 1]))}
        )


class Gate:
    """A version of the small model, and the coordinator's checks and merge."""

    def __init__(self, path: Path, held: HeldUpdates | None = None) -> None:
        self.folder, self.start = Folder(path), values(MODEL)
        self.states = States(self.folder)
        self.inspector = Inspector(self.folder, self.states, held)
        blocks = {name: self.folder.put([as_bytes(array)]).digest for name, array in self.start.items()}
        self.manifest = Manifest(blocks=blocks)
        self.ref = VersionRef(number=1, digest=self.folder.put([self.manifest.document()]).digest)
        self.model = self.folder.put([canonical(MODEL)]).digest

    def check(self, arrays: dict[str, bytes], plan: Plan = PLAN) -> tuple[str, float]:
        """Return an update's digest, and its norm."""
        digest = self.folder.put([update_file({HEAD.name: self.head(0.5), **arrays})]).digest
        measured, blocks = self.inspector.checked(digest, MODEL, self.manifest, plan, 2.0)
        assert blocks == [HEAD.name]
        return digest, measured["update_norm"]

    def head(self, step: float) -> bytes:
        return (self.start[HEAD.name] + np.float32(step)).tobytes()


@pytest.fixture(params=["streamed", "held"])
def gate(tmp_path: Path, request: pytest.FixtureRequest) -> Gate:
    return Gate(tmp_path, HeldUpdates(1 << 20) if request.param == "held" else None)


@pytest.fixture(autouse=True)
def _method(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Method("sharing", coordinator=Sharing, worker=SharingWorker, source="a test")
    known = registry.methods()
    monkeypatch.setattr(registry, "methods", lambda: {**known, made.name: made})


def test_the_merge_gets_arrays_as_they_were_sent_and_no_version_has_them(gate: Gate) -> None:
    accepted = []
    for worker, factor in (("a", 1), ("b", 2)):
        # The arrays are 3e6 long; the head's 8 values moved by 0.5, and the limit of the norm is 2.
        digest, norm = gate.check({"extra/means": (factor * SENT).tobytes()})
        assert norm == pytest.approx(np.sqrt(8) / 2)
        accepted.append(AcceptedUpdate(worker, worker, digest, 10, {}, PLAN, gate.ref))
    spec = RunSpec(
        name="r", method=MethodSpec(name="sharing"), model=gate.model, version=gate.ref.digest, dataset="d", rounds=9
    )
    state, merged = Aggregation(gate.states, gate.inspector).next_state(spec, Bounds(), gate.ref, accepted)
    np.testing.assert_array_equal(to_array(state.server_state["means"]), 3 * SENT)
    np.testing.assert_allclose(to_array(state.model[HEAD.name]), gate.start[HEAD.name] + 0.5, rtol=1e-6)
    assert state.model.keys() == gate.start.keys()
    assert merged == {"a": (), "b": ()}


@pytest.mark.parametrize(
    ("arrays", "plan", "code"),
    [
        ({}, PLAN, "extra-missing"),
        ({"extra/means": SENT.tobytes(), "extra/more": SENT.tobytes()}, PLAN, "block-not-asked"),
        ({"extra/means": SENT.tobytes()}, Plan(upload=PLAN.upload), "block-not-asked"),
        ({"extra/means": SENT[:1].tobytes()}, PLAN, "block-too-short"),
        ({"extra/means": (SENT * np.nan).tobytes()}, PLAN, "not-finite"),
        ({"extra/means": np.full_like(SENT, 1e30).tobytes()}, PLAN, "too-far"),
    ],
)
def test_an_update_with_other_arrays_than_the_plan_s_is_refused(
    gate: Gate, arrays: dict[str, bytes], plan: Plan, code: str
) -> None:
    with pytest.raises(InvalidUpdate) as caught:
        gate.check(arrays, plan)
    assert {fault.code for fault in caught.value.errors} == {code}


def test_arrays_alone_are_no_update_of_a_plan_that_asks_for_blocks(gate: Gate) -> None:
    digest = gate.folder.put([update_file({"extra/means": SENT.tobytes()})]).digest
    with pytest.raises(InvalidUpdate, match="holds no block"):
        gate.inspector.checked(digest, MODEL, gate.manifest, PLAN, None)
    alone = PLAN.model_copy(update={"upload": NOTHING})
    assert gate.inspector.checked(digest, MODEL, gate.manifest, alone, None) == ({"update_norm": 0.0}, [])


@pytest.mark.parametrize("codec", ["delta+int8+zstd", "delta+topk=0.01+zstd", "delta+bf16", "within a budget"])
def test_no_codec_rounds_an_array(codec: str) -> None:
    large = ExtraArray(name="means", shape=(64, 64)).block
    sent = np.random.default_rng(0).normal(size=large.shape).astype(np.float32)
    block = large.model_copy(update={"tensor": "mlp.weight", "role": "mlp"})
    zeros = ZeroTensor(large.shape, "F32")
    changes = [TrainedBlock(each, ArrayTensor(sent), zeros) for each in (block, large)]
    file = BytesIO()
    if codec == "within a budget":
        write_within(file, "raw", changes, budget=longest_update([large]) + 4000)
    else:
        write_update(file, codec, changes)
    asked = {each.name: each for each in (block, large)}
    found = read_update(lambda: BytesIO(file.getvalue()), len(file.getvalue()), asked, dict.fromkeys(asked, zeros))
    assert (to_array(found[large.name]) == sent).all()
    assert (to_array(found[block.name]) != sent).any()


@pytest.mark.parametrize("lossy", [{"codec": "delta+int8+zstd"}, {"upload_budget": 20_000}], ids=str)
def test_arrays_go_exact_beside_blocks_that_a_site_rounds(lossy: dict[str, Any]) -> None:
    spec = {"method": {"name": "sharing"}, "rounds": 2, "training": {"batch_size": 8}, **lossy}
    result = simulate(spec, Weights(*untrained(VIT, "image-classification")), {"a": images(), "b": images()})
    # The second row is over one example.
    expected = np.array([2 * SENT[0], np.zeros(3)], np.float32)
    np.testing.assert_array_equal(to_array(result.state().server_state["means"]), expected)
    assert all(task.metrics["codec_error"] > 0 for made in result.rounds for task in made.tasks)


def test_a_task_without_the_arrays_of_its_plan_fails_at_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharingWorker, "collect", WorkerHalf.collect)
    spec = {"method": {"name": "sharing"}, "rounds": 1, "cohort": {"max_attempts": 1}, "training": {"steps": 1}}
    with pytest.raises(Stalled, match=r"the extra arrays \{\}, expected \{'means': \(2, 3\)\}"):
        simulate(spec, Weights(*untrained(VIT, "image-classification")), {"a": images()})


PRIVATE = Privacy(epsilon=4.0, delta=1e-5, clip_norm=1.0)


@pytest.mark.parametrize(
    ("guard", "facts"),
    [
        ("secure_sums", {"secure_sums": True}),
        ("client_privacy", {"client_privacy": ClientPrivacy(epsilon=4.0, delta=1e-5, clip_norm=1.0)}),
        ("privacy", {"privacy": PRIVATE}),
        ("cohort.workers_per_site", {"workers_per_site": 2}),
    ],
)
def test_no_array_passes_a_guard_of_the_run(guard: str, facts: dict[str, Any]) -> None:
    half = Sharing(MethodSettings(), RunInfo(MODEL.blocks, rounds=2, **facts))
    with pytest.raises(UnsupportedRun, match=rf"\(means\), which {guard} would not cover: leave out {guard}, or"):
        check_work(half, MODEL, [PLAN])
    check_work(half, MODEL, [Plan(upload=PLAN.upload)])


def test_two_arrays_of_one_name_are_refused_before_a_merge_misses_one() -> None:
    half = Sharing(MethodSettings(), RunInfo(MODEL.blocks, rounds=2))
    with pytest.raises(UnsupportedRun, match="names an extra array twice"):
        check_work(half, MODEL, [Plan(extra=(MEANS, ExtraArray(name=MEANS.name, shape=(4,))))])


def test_a_method_may_say_that_the_noise_of_training_covers_its_arrays() -> None:
    class Covering(Sharing):
        covers_extra = True

    check_work(Covering(MethodSettings(), RunInfo(MODEL.blocks, rounds=2, privacy=PRIVATE)), MODEL, [PLAN])


def test_the_largest_update_counts_the_arrays() -> None:
    half = Sharing(MethodSettings(), RunInfo(MODEL.blocks, rounds=2))
    assert half.largest_update(PLAN) == HEAD.nbytes + 2 * 3 * 4


def test_a_plan_without_extra_arrays_has_the_digest_that_it_had_before_there_were_any() -> None:
    # Sites draw their seeds from it (`Task.alike_digest`): another digest is another model.
    plan = json.dumps(Plan().model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    assert sha256(plan.encode()).hexdigest() == "ee4308b603691ee634e4ca93e3d8721d724e2f39cdeb8689a2d644e7c6d3d7ee"

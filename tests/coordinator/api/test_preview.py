"""Who would take part in a run, asked before it is started; and who is asked once it runs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Preview, RunSpec, WorkerPreview
from tessera.shared.api.tasks import AdvertisedPolicy, Failure
from tessera.shared.api.versions import Manifest
from tessera.shared.cli.run import preview_table
from tessera.shared.client.client import Client
from tessera.shared.client.previews import preview_notes
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.dataset_schema import DatasetSchema, name_digests
from tessera.shared.model.preprocessing import FileRef, vocabulary_in
from tessera.shared.model.selectors import roles
from tessera.shared.model.spec import Model
from tessera.shared.problems import Forbidden, Invalid
from tessera.shared.run_settings import UnitBudget
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import as_bytes
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.federation import HOLDING, ScriptedWorker, small_model, start_run, values

MODEL = small_model()
FROZEN = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1, "scope": "v_head"})


def spec_of(client: Client, *, model_of: Model = MODEL, **more: Any) -> RunSpec:
    start = values(model_of)
    blocks = dict(zip(start, HOLDING[client](bytes(as_bytes(array)) for array in start.values()), strict=True))
    version = client.put_bytes(canonical(Manifest(blocks=blocks)))
    given = {"name": "trial", "method": MethodSpec(name="fedavg"), "dataset": "data", "rounds": 2, **more}
    return RunSpec(model=client.put_bytes(canonical(model_of)), version=version, **given)


def by_name(found: Preview) -> dict[str, WorkerPreview]:
    return {prospect.worker: prospect for prospect in found.workers}


def reasons(found: Preview) -> dict[str, list[str]]:
    return {prospect.worker: [said.rule for said in prospect.ineligibilities] for prospect in found.workers}


def known(coordinator: LiveCoordinator, site: str, **said: Any) -> ScriptedWorker:
    return ScriptedWorker(coordinator.client("site", site), **said).enrol()


def test_a_preview_names_why_each_worker_would_not_take_part(coordinator: LiveCoordinator) -> None:
    known(coordinator, "a")
    known(coordinator, "b", methods=("fedprox",))
    known(coordinator, "c", datasets={"other": 3})
    known(
        coordinator,
        "d",
        advertised_policy=AdvertisedPolicy(max_epochs=1, require_privacy=UnitBudget(epsilon=1, delta=1e-6)),
    )
    known(coordinator, "e", advertised_policy=AdvertisedPolicy(approve_runs=True))
    known(coordinator, "f", advertised_policy=AdvertisedPolicy(never_send=("head*",)))
    client = coordinator.client("orchestrator")
    cohort = Cohort(quorum=2, sites=("a", "b", "c", "d", "e", "f", "nobody"))
    found = client.preview_run(spec_of(client, cohort=cohort))
    assert reasons(found) == {
        "a/w": [], "b/w": ["methods"], "c/w": ["datasets"], "d/w": ["require_privacy"], "e/w": ["awaiting-approval"],
        "f/w": ["never_send"],
    }  # fmt: skip
    assert by_name(found)["f/w"].never_sends == ("'head*' keeps 1 of 6 blocks (head.weight)",)
    assert (found.quorum, found.eligible, found.awaiting_approval, found.missing_sites) == (2, 1, 1, ("nobody",))
    known(coordinator, "g", kinds=("train", "evaluate"), held_out={"data": 20})
    (said,) = client.preview_run(spec_of(client, evaluation=Evaluation(sites=True))).warnings
    assert said.startswith("a, e would give no score: too few examples are held out of 'data'")
    assert client.preview_run(spec_of(client, evaluation=Evaluation(dataset="data"))).warnings == ()
    (said,) = client.preview_run(spec_of(client, evaluation=Evaluation(dataset="dota"))).warnings
    assert said == "no worker that evaluates has the data set 'dota' of evaluation.dataset; did you mean 'data'?"


def test_a_data_set_that_does_not_fit_the_model_is_told_before_the_run_and_gets_no_task(
    coordinator: LiveCoordinator,
) -> None:
    words = {"dtype": "int64", "shape": [512]}
    images = {"pixel_values": {"dtype": "float32", "shape": [3, 32, 32]}}
    said = {
        "images": {"inputs": images},
        "classes": {"inputs": {"input_ids": words}, "classes": 3},
        "fits": {"inputs": {"input_ids": words}, "classes": 2},
        "of-before": {},
    }
    for site, schema in said.items():
        known(coordinator, site, schemas={"data": DatasetSchema.model_validate(schema)} if schema else {})
    client = coordinator.client("orchestrator")
    found = by_name(client.preview_run(spec_of(client, cohort=Cohort(quorum=2))))
    assert {name: [(one.rule, one.detail) for one in worker.ineligibilities] for name, worker in found.items()} == {
        "images/w": [("inputs", "its data set data: the model takes input_ids; the data set gives pixel_values")],
        "classes/w": [("inputs", "its data set data: the model has 2 classes; the data set has 3 labels")],
        "fits/w": [],
        "of-before/w": [],
    }
    run = start_run(client, MODEL, values(MODEL), cohort=Cohort(quorum=2))
    (asked,) = until(lambda: list(client.rounds(run.id)))
    assert sorted(task.worker for task in asked.tasks) == ["fits/w", "of-before/w"]


def test_sites_that_number_a_class_differently_are_named_before_the_run(coordinator: LiveCoordinator) -> None:
    lists = {"a": ["benign", "malignant"], "b": ["malignant", "benign"], "c": ["gutartig", "bösartig"], "d": []}
    for site, names in lists.items():
        schema = DatasetSchema(classes=len(names) or None, class_names=name_digests(names))
        known(coordinator, site, schemas={"data": schema})
    client = coordinator.client("orchestrator")
    found = client.preview_run(spec_of(client))
    (warning,) = found.warnings
    assert warning.startswith("class 1 of 'data' at a/w has the name of class 0 at b/w: put the same `labels`")
    assert reasons(found) == {"a/w": [], "b/w": [], "c/w": [], "d/w": []}
    # A model that names its classes says who is right.
    config = {**MODEL.config, "id2label": {"0": "benign", "1": "malignant"}}
    found = client.preview_run(spec_of(client, model_of=MODEL.model_copy(update={"config": config})))
    assert found.warnings == ()
    assert reasons(found) == {"a/w": [], "b/w": ["inputs"], "c/w": [], "d/w": []}
    (said,) = by_name(found)["b/w"].ineligibilities
    assert said.detail.startswith(
        "its data set data: 'malignant' is class 0 in `labels` and class 1 of the model: put"
    )


def test_a_site_that_numbers_words_differently_is_named_and_gets_no_task(coordinator: LiveCoordinator) -> None:
    raw, other = (json.dumps({"model": {"vocab": {"cat": place, "dog": 1 - place}}}).encode() for place in (0, 1))
    vocabularies = {"a": vocabulary_in(raw), "b": vocabulary_in(other), "c": vocabulary_in(raw), "d": None}
    for site, own in vocabularies.items():
        known(coordinator, site, schemas={"data": DatasetSchema(vocabulary=own)})
    client = coordinator.client("orchestrator")
    found = client.preview_run(spec_of(client))
    (warning,) = found.warnings
    assert warning.startswith("the tokenizers of 'data' at a/w and b/w number words differently: start from a model")
    assert reasons(found) == {"a/w": [], "b/w": [], "c/w": [], "d/w": []}
    # A model with a tokenizer says who is right.
    ref = FileRef(digest=client.put_bytes(raw), nbytes=len(raw))
    brings = MODEL.model_copy(update={"preprocessing": {"tokenizer.json": ref}})
    found = client.preview_run(spec_of(client, model_of=brings))
    assert found.warnings == ()
    assert reasons(found) == {"a/w": [], "b/w": ["inputs"], "c/w": [], "d/w": []}
    (said,) = by_name(found)["b/w"].ineligibilities
    assert said.detail.startswith("its data set data: its tokenizer numbers words differently from the model's: set")
    run = start_run(client, brings, values(MODEL), cohort=Cohort(quorum=3))
    (asked,) = until(lambda: list(client.rounds(run.id)))
    assert sorted(task.worker for task in asked.tasks) == ["a/w", "c/w", "d/w"]
    # A tokenizer that lists no words leaves it open.
    unknown = FileRef(digest=client.put_bytes(b"{}"), nbytes=2)
    silent = MODEL.model_copy(update={"preprocessing": {"tokenizer.json": unknown}})
    assert client.preview_run(spec_of(client, model_of=silent)).warnings == (warning,)


def test_a_preview_tells_what_the_first_round_asks_and_changes_nothing(coordinator: LiveCoordinator) -> None:
    known(coordinator, "a")
    client = coordinator.client("orchestrator")
    spec = spec_of(client, method=FROZEN)
    admin = coordinator.client()
    before = len(list(admin.audit()))
    asked = by_name(client.preview_run(spec))["a/w"].workload
    assert asked
    # The warm-up trains it all: query, key, value and output of 4 x 4, an MLP of 4 x 16, a head of 2 x 4.
    whole = 4 * (4 * 16 + 64 + 8)
    assert (asked.fetch_blocks, asked.fetch_bytes, asked.upload_blocks, asked.upload_bytes) == (6, whole, 6, whole)
    assert list(client.runs()) == []
    assert len(list(admin.audit())) == before


def test_what_is_previewed_is_what_the_round_then_asks(coordinator: LiveCoordinator) -> None:
    workers = [known(coordinator, site) for site in "abcd"]
    client = coordinator.client("orchestrator")
    spec = spec_of(client, cohort=Cohort(size=2, quorum=2), seed=7)
    prospects = by_name(client.preview_run(spec))
    drawn = {name for name, prospect in prospects.items() if prospect.workload}
    assert len(drawn) == 2
    left = [said for name, prospect in prospects.items() if name not in drawn for said in prospect.warnings]
    assert {(said.rule, said.detail) for said in left} == {
        ("cohort", "a round asks 2 of 4 sites, and the first round draws others")
    }
    run = client.create_run(spec)
    until(lambda: list(client.rounds(run.id)))
    assert {task.worker for task in client.round(run.id, 1).tasks} == drawn
    assert len(workers) == 4


def test_a_second_worker_of_a_site_is_told_why_it_is_not_drawn(coordinator: LiveCoordinator) -> None:
    for name in ("w", "x"):
        ScriptedWorker(coordinator.client("site", "a"), name=name).enrol()
    found = coordinator.client("orchestrator")
    prospects = by_name(found.preview_run(spec_of(found)))
    (said,) = [said.detail for prospect in prospects.values() for said in prospect.warnings]
    assert said == "cohort.workers_per_site is 1, and another worker of its site was drawn"


def test_a_preview_tells_what_a_worker_that_chooses_layers_sends(coordinator: LiveCoordinator) -> None:
    known(coordinator, "a", methods=("safl",))
    client = coordinator.client("orchestrator")
    second = [
        block.model_copy(update={"tensor": block.tensor.replace("0", "1"), "layer": 1})
        for block in MODEL.blocks
        if block.layer == 0
    ]
    two_layers = MODEL.model_copy(update={"blocks": (*MODEL.blocks, *second)})
    safl = MethodSpec(name="safl", settings={"layers": 1})
    found = client.preview_run(spec_of(client, model_of=two_layers, method=safl))
    asked = by_name(found)["a/w"].workload
    assert asked
    # A layer has 4 * (4 * 16 + 64) bytes, and the head, which is always sent, 4 * 8.
    assert (asked.largest_update_bytes, asked.upload_bytes) == (544, 1056)
    (shown,) = preview_table(found).columns[4].cells
    assert shown == "544 bytes, chosen from 11 blocks, 1.1 kB"


def test_who_is_silent_is_told_apart_by_its_hours(tmp_path: Any) -> None:
    clock = Clock()  # 2027-01-15 08:00 UTC, a Friday
    with LiveCoordinator(tmp_path, clock=clock, liveness_seconds=90) as coordinator:
        known(coordinator, "a")
        known(
            coordinator,
            "b",
            advertised_policy=AdvertisedPolicy(hours=("Mon-Fri 19:00-07:00",), utc_offset_minutes=60),
        )
        known(coordinator, "c", advertised_policy=AdvertisedPolicy(hours=("Fri 08:00-10:00",), utc_offset_minutes=60))
        client = coordinator.client("orchestrator")
        spec = spec_of(client)
        coordinator.services.conductor.step()
        clock.advance(600)
        found = by_name(client.preview_run(spec))
    assert [said.rule for said in found["a/w"].ineligibilities] == ["silent"]
    assert found["b/w"].ineligibilities[0].detail == "it works Mon-Fri 19:00-07:00 and begins in 9 h 50 min"
    # There it is ten past nine, when it should be there.
    assert [said.rule for said in found["c/w"].ineligibilities] == ["silent"]


def test_a_preview_is_for_orchestrators_and_of_a_run_that_could_be(coordinator: LiveCoordinator) -> None:
    client = coordinator.client("orchestrator")
    spec = spec_of(client)
    with pytest.raises(Forbidden):
        coordinator.client("viewer").preview_run(spec)
    with pytest.raises(Invalid, match=r"nothing"):
        client.preview_run(spec.model_copy(update={"method": MethodSpec(name="nothing")}))


def test_a_round_leaves_out_who_would_refuse_it(coordinator: LiveCoordinator) -> None:
    known(coordinator, "a", advertised_policy=AdvertisedPolicy(may_send=roles("value")))
    known(coordinator, "b", advertised_policy=AdvertisedPolicy(max_batch=1))
    willing = known(coordinator, "c", advertised_policy=AdvertisedPolicy())
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL), cohort=Cohort(size=1))
    willing.train(willing.take())
    until(lambda: client.run(run.id).state == "completed")
    assert [task.worker for task in client.round(run.id, 1).tasks] == ["c/w"]


def test_a_run_waits_while_too_few_would_do_it(coordinator: LiveCoordinator) -> None:
    worker = known(coordinator, "a", advertised_policy=AdvertisedPolicy(never_send=("*",)))
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL))
    assert worker.claim(1) is None
    assert (client.run(run.id).state, list(client.rounds(run.id))) == ("running", [])


def test_a_run_that_a_site_withholds_is_offered_to_it_no_more_until_it_agrees(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker, other = known(coordinator, "a"), known(coordinator, "b")
    run = start_run(client, MODEL, values(MODEL), rounds=3, cohort=Cohort(size=2, quorum=1))
    task = worker.take()
    view = worker.client.fail(task.id, Failure(token=task.token, code="awaiting-approval", detail="a person decides"))
    # Not a failure, and a report whose answer was lost may come again.
    assert (view.state, view.problem and view.problem.code) == ("cancelled", "withheld")
    again = worker.client.fail(
        task.id, Failure(token=task.token, code="awaiting-approval", detail="a person decides")
    )
    assert again == view
    worker.withheld = {run.id: "a person decides"}
    assert worker.claim(0) is None
    other.train(other.take())
    until(lambda: client.run(run.id).version.number == 1)
    assert worker.claim(1) is None
    (second,) = until(lambda: [made for made in client.rounds(run.id) if made.number == 2])
    assert [task.worker for task in second.tasks] == ["b/w"]
    worker.withheld = {}
    worker.claim(0)
    other.train(other.take())
    until(lambda: client.run(run.id).version.number == 2)
    assert worker.take().round == 3


def test_what_is_offered_is_taken_back_from_a_site_that_withholds_the_run(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker, other = known(coordinator, "a"), known(coordinator, "b")
    run = start_run(client, MODEL, values(MODEL), cohort=Cohort(size=2, quorum=1))
    until(lambda: list(client.rounds(run.id)))
    worker.withheld = {run.id: "declined: not ours"}
    assert worker.claim(0) is None
    other.train(other.take())
    # The round does not wait for it until its deadline.
    until(lambda: client.run(run.id).state == "completed")
    (taken,) = [task for task in client.round(run.id, 1).tasks if task.worker == "a/w"]
    assert taken.state == "cancelled"
    assert taken.problem
    assert taken.problem.detail == "declined: not ours"


def test_a_preview_says_how_many_evaluations_are_left_and_warns_of_too_few(coordinator: LiveCoordinator) -> None:
    measuring: dict[str, Any] = {"kinds": ("train", "evaluate"), "held_out": {"data": 20}}
    limits = {"a": AdvertisedPolicy(max_run_evaluations=100)}
    limits["b"] = AdvertisedPolicy(max_run_evaluations=100, evaluations_left={"data": 5})
    for site, policy in limits.items():
        known(coordinator, site, advertised_policy=policy, **measuring)
    client = coordinator.client("orchestrator")
    asked = Evaluation(sites=True, every=2)
    # Versions 0, 2, 4, 6, 8 and 9 of nine rounds.
    found = client.preview_run(spec_of(client, rounds=9, evaluation=asked))
    assert {name: one.evaluations_left for name, one in by_name(found).items()} == {"a/w": 100, "b/w": 5}
    (said,) = found.warnings
    assert said.startswith("the run measures 6 versions, more than b/w (5 left) would: raise evaluation.every")
    assert "evaluations left for this run: a/w 100, b/w 5" in list(preview_notes(found))
    assert client.preview_run(spec_of(client, rounds=8, evaluation=asked)).warnings == ()
    assert by_name(client.preview_run(spec_of(client)))["a/w"].evaluations_left is None


@pytest.mark.parametrize(
    ("cohort", "makes"),
    [
        ({}, 4),
        ({"size": 2}, 6),
        ({"mode": "buffer", "target_updates": 2, "quorum": 1}, 6),
        ({"mode": "buffer", "target_updates": 1}, 12),
    ],
)
def test_a_preview_warns_of_fewer_updates_than_the_run_has_versions(
    coordinator: LiveCoordinator, cohort: dict[str, Any], makes: int
) -> None:
    for site in "abc":
        known(coordinator, site)
    client = coordinator.client("orchestrator")
    wanted = Cohort(max_updates_per_site=4, **cohort)
    (said,) = client.preview_run(spec_of(client, rounds=makes + 1, cohort=wanted)).warnings
    assert said == (
        f"3 sites, each of which trains from 4 versions at most, make about {makes} versions of {makes + 1}: "
        f"set rounds to {makes}, or raise cohort.max_updates_per_site"
    )
    # What it says helps.
    assert client.preview_run(spec_of(client, rounds=makes, cohort=wanted)).warnings == ()


def test_sites_that_have_not_agreed_use_up_no_tries(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = known(coordinator, "a")
    run = start_run(client, MODEL, values(MODEL), cohort=Cohort(max_attempts=1))
    task = worker.take()
    worker.client.fail(task.id, Failure(token=task.token, code="awaiting-approval", detail="a person decides"))
    until(lambda: client.round(run.id, 1).state == "abandoned")
    # It is not asked again, though it has claimed nothing since.
    time.sleep(0.3)
    assert client.run(run.id).state == "running"
    assert len(list(client.rounds(run.id))) == 1
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")


def test_a_mirror_that_has_not_changed_is_entered_once(coordinator: LiveCoordinator) -> None:
    advertised_policy = AdvertisedPolicy(
        may_send=roles("value"), hours=("Mon 10:00-11:00",), budgets={"d": UnitBudget(epsilon=1, delta=1e-6)}
    )
    worker = known(coordinator, "a", advertised_policy=advertised_policy)
    worker.enrol()
    admin = coordinator.client()
    assert len([entry for entry in admin.audit() if entry.action == "worker.enrol"]) == 1
    worker.withheld = {"r": "declined: not ours"}
    worker.enrol()
    assert len([entry for entry in admin.audit() if entry.action == "worker.enrol"]) == 2

"""The documents of a dossier on runs of real federations: figures, words, and nothing of others."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from tessera.coordinator.auth.tokens import authenticate
from tessera.coordinator.db.tables import VersionRow
from tessera.coordinator.dossier.contents import documents
from tessera.coordinator.operations.remerge import remerge
from tessera.shared.api.admin import StudyMember
from tessera.shared.api.class_counts import ScoreCounts
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.membership import LOSS_BINS, MembershipCounts
from tessera.shared.api.runs import Evaluation, Run, RunPatch, RunSpec
from tessera.shared.api.tasks import AdvertisedPolicy, EvaluationResult, Failure, ReportResult, Submission, Task
from tessera.shared.client.client import Client
from tessera.shared.problems import Gone, NotFound
from tessera.shared.run_settings import Privacy
from tessera.worker.governance.run_history import TaskStatement
from tests.coordinator.api.test_without_rounds import measure, of_two_classes, summed
from tests.coordinator.dashboard.test_browser import violations
from tests.support.browser import chromium
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.pages import Page

HEAD = "ab" * 32
EVIL = 'X"]}\n---\nevil: <script>alert(1)</script> | ![x](http://evil.example) www.evil.example `y` \u202etxt'
NAMES = {"0": EVIL, "1": "</main> {{ 1 }}"}
MODEL = small_model().model_copy(update={"config": {"model_type": "bert", "id2label": NAMES}})

COUNTS: Mapping[str, Mapping[str, ScoreCounts]] = {
    "north": {"f": of_two_classes(((80, 0), (0, 20))), "m": of_two_classes(((70, 10), (10, 10)))},
    "south": {"f": of_two_classes(((90, 5), (5, 0))), "m": of_two_classes(((20, 30), (30, 20)))},
    "west": {"f": of_two_classes(((90, 5), (5, 0))), "m": of_two_classes(((20, 30), (30, 20)))},
}
"""Right are 100, 80, 90 and 40 of 100 labels each."""


class Dossier:
    """The documents on a version, read back."""

    def __init__(self, coordinator: LiveCoordinator, run: Run, number: int, study: str | None = None) -> None:
        services = coordinator.services
        token = coordinator.token("orchestrator", studies=(study,)) if study else coordinator.token("admin")
        with services.database.transaction() as session:
            caller = authenticate(session, services.database.now(), token)
        self.text = {name: raw.decode() for name, raw in documents(services, caller, run.id, number).items()}
        self.json: dict[str, Any] = {n: json.loads(t) for n, t in self.text.items() if n.endswith(".json")}
        _, front, card = self.text["README.md"].split("---\n", 2)
        self.front: dict[str, Any] = yaml.safe_load(front)
        self.card = MarkdownIt("commonmark").enable("table").render(card)
        self.page = Page(self.text["report.html"])
        self.said = self.page.parts["li"]

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        return {site["site"]: site for site in self.json["sites.json"]["sites"]}


def site(
    coordinator: LiveCoordinator, name: str, examples: int = 10, study: str = "default", **about: Any
) -> ScriptedWorker:
    given = {
        "kinds": ("train", "evaluate", "attack"),
        "datasets": {"data": examples},
        "held_out": {"data": 200},
        **about,
    }
    return ScriptedWorker(coordinator.client("site", name, (study,)), name, **given).enrol()


def evaluate(one: ScriptedWorker, task: Task) -> None:
    counts = COUNTS[one.name]
    found = EvaluationResult(
        token=task.token, version=task.version.digest, examples=200, metrics={"accuracy": 0.5},
        class_counts=summed(dict(counts)), subgroup_counts=dict(counts),
    )  # fmt: skip
    one.client.submit_evaluation(task.id, found)


def answer(one: ScriptedWorker, task: Task) -> None:
    if task.kind == "evaluate":
        evaluate(one, task)
        return
    # Of 100 members all have a smaller loss than 100 others.
    members, others = ([100 * (place == at) for place in range(LOSS_BINS)] for at in (10, 20))
    counts = MembershipCounts(
        unit="example", minimum=10, step=5, members=tuple(members), others=tuple(others), known=True
    )
    one.client.submit_report(task.id, ReportResult(token=task.token, membership=counts))


def train(one: ScriptedWorker, epsilon: float | None = None) -> Task:
    """Send an update, and the evaluations that are asked for before it."""
    while (task := one.take()).kind == "evaluate":
        evaluate(one, task)
    digest = one.upload(task, {"head.weight": one.fetch(task)["head.weight"] + 1})
    submission = Submission(
        token=task.token, version=task.version.digest, update=digest, examples=one.datasets["data"],
        metrics={} if epsilon is None else {"epsilon": epsilon}, audit_head=HEAD,
    )  # fmt: skip
    one.client.submit(task.id, submission)
    return task


def ended(client: Client, run: Run, *workers: ScriptedWorker) -> None:
    """Answer evaluations and attacks until the run has ended."""

    def over() -> bool:
        for one in workers:
            if (task := one.claim(0)) is not None:
                answer(one, task)
        return client.run(run.id).state not in ("running", "paused")

    until(over)


@dataclass
class Scene:
    coordinator: LiveCoordinator
    run: Run
    """Of one round without its larger site."""
    task: Task
    """Of the smaller site in that round."""
    again: Run
    """The same version, measured once more."""
    elsewhere: Run
    """The same in another study."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with LiveCoordinator(tmp_path_factory.mktemp("dossier")) as coordinator:
        client = coordinator.client()
        policy = AdvertisedPolicy(approve_runs=True, airlock=True)
        north = site(coordinator, "north", 10, advertised_policy=policy)
        south = site(coordinator, "south", 90)
        run = start_run(
            client, MODEL, values(MODEL), name="wards", rounds=1, seed=7,
            evaluation=Evaluation(sites=True, subgroups="sex"),
            cohort=Cohort(quorum=1, max_task_attempts=1, min_coverage=0.5),
        )  # fmt: skip
        while (task := south.take()).kind == "evaluate":
            evaluate(south, task)
        south.client.fail(task.id, Failure(token=task.token, code="out-of-memory", detail="too <b>large"))
        task = train(north)
        ended(client, run, north, south)
        version = next(one for one in client.versions(run.id) if one.number == 1)
        given = {
            "model": run.spec.model, "version": version.digest, "dataset": "data", "rounds": 0,
            "evaluation": Evaluation(sites=True, subgroups="sex"), "cohort": Cohort(quorum=2),
        }  # fmt: skip
        again = client.create_run(RunSpec.model_validate({"name": "again", **given}))
        ended(client, again, north, south)
        attack = client.create_run(
            RunSpec.model_validate({**given, "name": "attack", "evaluation": None, "membership_attack": True})
        )
        ended(client, attack, north, south)
        west = site(coordinator, "west", study="other")
        hidden = {**given, "name": "hidden-run", "study": "other", "cohort": Cohort()}
        elsewhere = client.create_run(RunSpec.model_validate(hidden))
        ended(client, elsewhere, west)
        both = next(one for one in client.sites() if one.name == "north")
        client.add_to_study("other", StudyMember(kind="site", member=both.id))
        yield Scene(coordinator, client.run(run.id), task, client.run(again.id), elsewhere)


@pytest.fixture(scope="module")
def dossier(scene: Scene) -> Dossier:
    return Dossier(scene.coordinator, scene.run, 1)


def test_a_version_without_its_largest_site_does_not_look_well(dossier: Dossier) -> None:
    version = dossier.json["versions.json"][1]
    assert version["merged"] == {"north": 10}
    assert version["coverage"] == {"sites": 0.5, "examples": 0.1, "low": True}
    assert version["left_out"] == {"south": "worker-failed: out-of-memory: too <b>large"}
    low, absent, weak = dossier.said[:3]
    assert low.startswith("This version rests on 10% of the examples, 50% of the sites: on fewer examples than")
    assert (
        absent
        == "south was asked for this version and is not part of it: worker-failed: out-of-memory: too <b>large."
    )
    assert weak.startswith("For south the accuracy is clearly lower than over all: 65.0 % (58.2 % to 71.3 %) against")
    assert "box calm" not in dossier.text["report.html"]


def test_results_have_the_figures_of_all_sites_each_and_each_subgroup_with_intervals(
    scene: Scene, dossier: Dossier
) -> None:
    own, again = dossier.json["results.json"]["results"]
    assert (own["run"], own["version"], again["run"], again["version"]) == (scene.run.id, 1, scene.again.id, 0)
    for found in (own, again):
        assert {name: round(one["value"], 3) for name, one in found["sites"].items()} == {"north": 0.9, "south": 0.65}
        assert {n: (one["value"], one["labels"]) for n, one in found["subgroups"].items()} == {
            "f": (0.95, 200),
            "m": (0.6, 200),
        }
        assert found["all"] == {
            "value": 0.775,
            "low": pytest.approx(0.7316, abs=1e-3),
            "high": pytest.approx(0.8133, abs=1e-3),
            "labels": 400,
        }
    assert (
        "For the subgroup sex = m the accuracy is clearly lower than over all: 60.0 % (53.1 % to 66.5 %) against "
        "77.5 % (73.2 % to 81.3 %)." in dossier.said
    )
    assert ["sex: m", "200", "60.0 % (53.1 % to 66.5 %)"] in dossier.page.rows
    assert dossier.front["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.775


def test_the_terms_have_the_digest_that_a_site_approves(scene: Scene, dossier: Dossier) -> None:
    terms = dossier.json["sites.json"]["terms"]
    assert terms["digests"]["train"] == TaskStatement.of(scene.task).terms_digest()
    assert (dossier.sites["north"]["approves_runs"], dossier.sites["south"]["approves_runs"]) == (True, None)
    assert ["north", "yes", "yes", "nothing"] in dossier.page.rows


def test_settings_repeat_the_run_and_heads_are_those_of_the_chains(scene: Scene, dossier: Dossier) -> None:
    again = tomllib.loads(dossier.text["run.toml"])
    assert RunSpec.model_validate({**again, "model": scene.run.spec.model, "version": scene.run.spec.version}) == (
        scene.run.spec
    )
    last = list(scene.coordinator.client().audit())[-1]
    # The token of this reader may have made an entry.
    head = dossier.json["audit.json"]["audit"]["coordinator"]
    assert head["seq"] <= last.seq
    assert dossier.json["audit.json"]["audit"]["sites"]["north"] == {"north": HEAD}


def test_no_name_becomes_markup(dossier: Dossier) -> None:
    """Class names of a model are any text."""
    assert set(dossier.front) == {"library_name", "pipeline_tag", "tags", "model-index"}
    assert not re.search("<(?!/?(h1|h2|p|ul|li|table|thead|tbody|tr|th|td|strong|code|pre|em)[ >])", dossier.card)
    assert "href" not in dossier.card
    assert "X&quot;]} --- evil: &lt;script&gt;alert(1)&lt;/script&gt; | ![x](http://evil.example)" in dossier.card
    assert "\u202e" not in "".join(text for name, text in dossier.text.items() if not name.endswith("json"))
    # What GitHub and the hub make a link without brackets.
    assert not re.search(r"(www\.|(?<!\\)://)evil", dossier.text["README.md"])
    assert dossier.json["results.json"]["classes"] == list(NAMES.values())


def test_an_attack_is_stated_and_the_lack_of_one_too(scene: Scene, dossier: Dossier) -> None:
    (attack,) = dossier.json["results.json"]["attacks"]
    assert attack["figures"][0]["figures"]["auroc"]["value"] == 1.0
    assert "The membership attack of the run attack did better than a guess: see below." in dossier.said
    assert any("picks the right one 100 of 100 times" in said for said in dossier.said)
    assert "No membership attack" not in dossier.text["README.md"]
    start = Dossier(scene.coordinator, scene.run, 0)
    command = f"tessera run attack --from {scene.run.id}@0"
    assert any("No membership attack" in said and said.endswith(command) for said in start.said)


def test_what_was_asked_of_other_data_is_not_stated_of_the_run_s(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    sizes: dict[str, Any] = {"datasets": {"data": 10, "other": 10}, "held_out": {"data": 200, "other": 200}}
    north = site(coordinator, "north", **sizes)
    run = measure(client)
    other = {"dataset": "other", "name": "elsewhere"}
    attack = {"membership_attack": True, "evaluation": None}
    for each in (run, measure(client, **other), measure(client, **other, **attack)):
        ended(client, each, north)
    found = Dossier(coordinator, run, 0)
    assert found.json["results.json"]["attacks"] == []
    assert any("No membership attack was made on this model with the run's data" in said for said in found.said)
    data = [one["dataset"] for one in found.front["model-index"][0]["results"]]
    assert [(one["name"], one["type"]) for one in data] == [
        (f"examples of {name} that sites hold out", name) for name in ("data", "other")
    ]


def test_a_reader_of_one_study_gets_nothing_of_another(scene: Scene) -> None:
    own = Dossier(scene.coordinator, scene.run, 1, "default")
    for found in (own, Dossier(scene.coordinator, scene.run, 1)):
        assert [one["run_name"] for one in found.json["results.json"]["results"]] == ["wards", "again"]
        assert not any(w in text for text in found.text.values() for w in ("hidden-run", "west", scene.elsewhere.id))
    # The policy of a site that is in the other study too says something about its work there.
    assert (own.sites["north"]["approves_runs"], own.sites["north"]["audit_heads"]) == (None, {"north": HEAD})
    assert "seq" not in own.json["audit.json"]["audit"]["coordinator"]
    with pytest.raises(NotFound):
        Dossier(scene.coordinator, scene.elsewhere, 0, "default")
    with pytest.raises(NotFound):
        Dossier(scene.coordinator, scene.run, 2)


def test_privacy_is_stated_by_site_and_unit(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    north, south = site(coordinator, "north"), site(coordinator, "south")
    run = start_run(
        client, MODEL, values(MODEL), rounds=2, cohort=Cohort(quorum=2),
        privacy=Privacy(epsilon=3.0, delta=1e-5, clip_norm=1.0, unit="group"),
    )  # fmt: skip
    for epsilon in (0.5, 0.75):
        train(north, epsilon)
        train(south, epsilon + 1)
    until(lambda: client.run(run.id).state == "completed")
    first, last = Dossier(coordinator, run, 1), Dossier(coordinator, run, 2)
    assert [one.sites["south"]["epsilon"] for one in (first, last)] == [{"south": 1.5}, {"south": 1.75}]
    assert any("all of one patient: epsilon 3 at delta 1e-05 for each group" in said for said in last.said)
    assert ["south", "10", "2 of 2", "member", "1.75"] in last.page.rows
    assert "The run has later versions; the latest is 2." in first.said
    assert "This version was not measured: how good it is, is not known." in last.said


def test_a_site_that_withdrew_is_not_named_and_a_paused_run_does_not_look_well(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    north, south = site(coordinator, "hospital-north"), site(coordinator, "hospital-south")
    run = start_run(client, MODEL, values(MODEL), rounds=3, cohort=Cohort(quorum=1))
    train(north)
    train(south)
    until(lambda: client.run(run.id).version.number == 1)
    client.patch_run(run.id, RunPatch(state="paused"))
    stays, left = sorted(client.sites(), key=lambda one: one.name)
    client.withdraw_site(left.id)
    client.remove_from_study("default", StudyMember(kind="site", member=stays.id))
    found = Dossier(coordinator, run, 1)
    assert found.said[0] == "The run is paused, and not completed."
    assert "hospital-north has left the study. Its influence on this version remains." in found.said
    assert f"withdrawn-{left.id[:8]} has withdrawn. Its influence on this version remains." in found.said
    assert "hospital-south" not in "".join(found.text.values())
    with coordinator.services.database.transaction() as session:
        session.get_one(VersionRow, (run.id, 0)).retired_at = 1.0
    with pytest.raises(Gone):
        Dossier(coordinator, run, 0)


def test_a_run_that_rests_on_another_names_it(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    north, south = site(coordinator, "north"), site(coordinator, "south")
    run = start_run(client, MODEL, values(MODEL), cohort=Cohort(quorum=1), keep_updates="run")
    train(north)
    train(south)
    until(lambda: client.run(run.id).state == "completed")
    start = {"version": client.run(run.id).version.digest, "cohort": Cohort(sites=("east",))}
    later = Dossier(coordinator, client.create_run(run.spec.model_copy(update=start)), 0)
    assert later.json["sites.json"]["origin"] == {"run": run.id, "version": 1}
    assert "The run names east, which has not offered this data." in later.said
    again = remerge(coordinator.services, run.id, "south").run
    assert again
    found = Dossier(coordinator, client.run(again), 1)
    assert (
        f"The versions were merged again from updates of the run {run.id}: its dossier has the sites." in found.said
    )
    assert not any("took no part" in said for said in found.said)


def test_a_score_over_all_counts_each_label_or_states_how_many_are_left_out(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    evaluation = Evaluation(sites=True, subgroups="sex")

    def scored(*workers: tuple[ScriptedWorker, Mapping[str, ScoreCounts]]) -> dict[str, Any]:
        run = measure(client, evaluation=evaluation)
        for one, counts in workers:
            task = one.take()
            found = EvaluationResult(
                token=task.token, version=task.version.digest, examples=210, metrics={"accuracy": 0.5},
                subgroup_counts=dict(counts),
            )  # fmt: skip
            one.client.submit_evaluation(task.id, found)
        until(lambda: client.run(run.id).state == "completed")
        result, *_ = Dossier(coordinator, run, 0).json["results.json"]["results"]
        return {name: result[name] for name in ("all", "labels_left_out")}

    north = site(coordinator, "north", held_out={"data": 210})
    alone = scored((north, COUNTS["north"]))
    assert (alone["all"]["value"], alone["all"]["labels"], alone["labels_left_out"]) == (0.9, 200, 10)
    south = site(coordinator, "south", held_out={"data": 210})
    both = scored((north, COUNTS["north"]), (south, {}))
    assert (both["all"]["value"], both["all"]["labels"], both["labels_left_out"]) == (0.5, 420, 0)


def test_any_figure_of_a_site_is_shown(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run = measure(client)
    north = site(coordinator, "north")
    north.evaluate(north.take(), accuracy=1e99, loss=-1e99)
    until(lambda: client.run(run.id).state == "completed")
    assert ["north", "200", "1e+99"] in Dossier(coordinator, run, 0).page.rows


def test_the_first_page_can_be_read_by_all(dossier: Dossier) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.set_content(dossier.text["report.html"])
        assert violations(page) == []
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

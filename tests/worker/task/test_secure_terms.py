"""A sender refuses terms of a sum that are not its own task's: what the coordinator could learn by others is said
beside each."""

from __future__ import annotations

import time
from base64 import b64encode
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tessera.shared.api.runs import RunSpec
from tessera.shared.api.tasks import ALIKE, Task
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec, Participant, Plan, State, UnsupportedRun
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block
from tessera.shared.model.dataset_schema import token_rows
from tessera.shared.model.selectors import NOTHING, roles
from tessera.shared.problems import Invalid, Problem
from tessera.shared.rounds.planning import begun
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.committee import Commitment
from tessera.shared.secure_sums.messages import Envelope, RingBlock, Terms
from tessera.shared.tensors.lazy import ArrayTensor, digest_of
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.update_file import TrainedBlock
from tessera.simulation import Weights
from tessera.simulation.blob_folder import Folder
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.executor.stages.load import load
from tessera.worker.executor.stages.train import train
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.model.build import instantiate
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.site_keys import AgreementLog, Keyring, SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.task.admission import admit
from tessera.worker.task.environment import Journal, TaskEnvironment, TaskRun
from tessera.worker.task.fetch import fetch
from tessera.worker.task.secure_sums import admitted_terms, check_values, help_open, masked
from tessera.worker.task.upload import Egress
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.simulation.test_simulation import DROPOUT
from tests.support.duals import dual
from tests.support.federation import small_model
from tests.support.secure_sums import Federation, ring_of
from tests.support.tasks import ADAPTED, PLAIN, images, untrained
from tests.worker.model.test_four_bits import LLAMA
from tests.worker.model.test_sandbox import BERT

MODEL = small_model()
VERSION = digest_of(b"version")
START = State(0, {block.name: ArrayTensor(np.zeros(block.shape, np.float32)) for block in MODEL.blocks})
PRIVACY = {"epsilon": 3.0, "delta": 1e-5, "clip_norm": 1.0}


class Sender:
    """A site of a run whose four helpers its roster has."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.federation = Federation(8, 4)
        self.sums = {"helpers": self.federation.names[:4], "quorum": 3}
        self.cache = Cache(folder / "cache", 1 << 20)
        party = SumParty(
            "site-07", Keyring(folder / "keys"), self.federation.roster, 3, helper=False, agreements=None
        )
        self.party = party
        # All blobs are in the cache, so that no coordinator is asked.
        self.env = TaskEnvironment(
            Client("http://127.0.0.1:1", "t", patience_seconds=0.1),
            {},
            Direct({}, TrainingSetup(torch.device("cpu"))),
            Vault(folder / "vault"),
            self.cache,
            folder,
            policy=Policy(**policy),
            kinds=("train", "agree", "open", "abandon"),
            sums=party,
        )

    def task(self, terms: Terms | None = None, **changed: Any) -> Task:
        given = {
            "id": "t", "token": 1, "kind": "train", "run": "run-1", "run_name": "demo", "round": 1, "rounds": 4,
            "seed": 0, "method": MethodSpec(name="fedavg"), "plan": Plan(), "dataset": "wards", "codec": LOSSLESS,
            "training": {"batch_size": 8}, "normalization": "participants", "model": digest_of(canonical(MODEL)),
            "version": {"number": 0, "digest": VERSION}, "lease_seconds": 60.0, "secure_sums": self.sums,
            "sums": {"terms": terms.digest} if terms else None,
        }  # fmt: skip
        return Task.model_validate({**given, **changed})

    def terms(self, **changed: Any) -> Terms:
        about = {"settings": self.task().alike_digest, "version": VERSION, **changed}
        return self.federation.terms(**about)

    def run(self, task: Task, *blobs: bytes) -> TaskRun:
        for blob in blobs:
            self.cache.put(digest_of(blob), [blob], 1 << 20)
        report = Report()
        return TaskRun(self.env, task, lambda: None, report, Journal(TaskRef.of(task), task.dataset, None, None))

    def admitted(self, terms: Terms, **changed: Any) -> Terms | None:
        return admitted_terms(self.run(self.task(terms, **changed), canonical(terms), canonical(MODEL)))


def refusal(sender: Sender, terms: Terms, **changed: Any) -> str:
    with pytest.raises(PolicyViolation) as violation:
        sender.admitted(terms, **changed)
    assert violation.value.rule == "secure_sums"
    return violation.value.detail


def test_terms_of_the_task_are_admitted(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    terms = sender.terms()
    assert sender.admitted(terms) == terms
    # What differs between the sites of a round.
    assert sender.admitted(terms, token=9, id="u", orchestrator="trial", inline_bytes=9) == terms


@pytest.mark.parametrize("name", ["fedavg", "fedbabu", "fedfrozen", "fedper", "lora", "safl"])
def test_the_coordinator_and_a_worker_find_the_same_digest(tmp_path: Path, name: str) -> None:
    settings = {"safl": {"score": "random", "chooser": "consensus", "layers": 1}, "fedfrozen": {"warmup_rounds": 0}}
    method = MethodSpec(name=name, settings=settings.get(name, {}))
    model = ADAPTED if name == "lora" else PLAIN
    half = coordinator_half(method, model.facts(learning_rate=1e-3, schedule="cosine"))
    state = State(0, {block.name: ArrayTensor(np.zeros(block.shape, np.float32)) for block in half.run.blocks})
    (plan,) = half.plan(half.start(state), [Participant("a", 3)], Random(0)).values()
    made = Sender(tmp_path).task(method=method, plan=plan, training=half.run.training, privacy=PRIVACY)
    assert Task.model_validate_json(made.model_dump_json()).alike_digest == made.alike_digest


CHANGES: dict[str, Any] = {
    "rounds": 5,
    "method": MethodSpec(name="fedprox"),
    "plan": Plan(train=roles("head")),
    "dataset": "clinics",
    "training": {"batch_size": 8, "learning_rate": 1e-30},
    "describe": True,
    "privacy": PRIVACY,
    "client_privacy": {**PRIVACY, "honest_sites": 2},
    "codec": "zstd",
    "secure_sums": {"helpers": ["site-00", "site-01", "site-02"], "quorum": 3},
    "upload_budget": 9,
    "upload_seconds": 1.0,
    "normalization": "cohort",
    "model": digest_of(b"another"),
    "seed": 3,
    "cohort": {"size": 5},
    "robust": {"rule": "median"},
    "server_optimizer": {"kind": "adam"},
    "max_examples": 9,
    "max_update_norm": 1.0,
    "max_norm_of_median": 2.0,
}


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_sites_that_train_otherwise_are_not_summed(tmp_path: Path, name: str) -> None:
    """Others that train at a rate of almost zero would leave this site's update alone in the sum."""
    sender = Sender(tmp_path)
    assert refusal(sender, sender.terms(), **{name: CHANGES[name]}).startswith("terms-differ: ")


class Trained:
    """A site of a run with exact sums, that trains without masks so that its integers show."""

    def __init__(self, folder: Path, seed_key: bytes | None = bytes(32)) -> None:
        self.cache = Cache(folder / "cache", 1 << 24)
        blobs = Folder(folder / "blobs")
        start = Weights.of(instantiate(DROPOUT, "image-classification", seed=1), DROPOUT, "image-classification")
        uploaded = upload_model(blobs, start)
        blocks = Manifest.read(blobs.read(uploaded.version), blobs.read).blocks
        for digest in (uploaded.model, uploaded.version, *blocks.values()):
            self.put(blobs.read(digest))
        self.federation = Federation(4, 4)
        ring = {block.name: RingBlock(elements=block.numel, exponent=-24) for block in start.model.blocks}
        self.base: dict[str, Any] = {
            "id": "t", "token": 1, "kind": "train", "run": "run-1", "run_name": "demo", "round": 1, "rounds": 4,
            "seed": 7, "method": {"name": "fedavg"}, "plan": Plan().model_dump(), "dataset": "data", "codec": "raw",
            "training": {"batch_size": 8, "learning_rate": 0.05}, "normalization": "participants",
            "model": uploaded.model, "version": {"number": 0, "digest": uploaded.version}, "lease_seconds": 60.0,
            "secure_sums": {"helpers": self.federation.names, "quorum": 3},
        }  # fmt: skip
        alike = Task.model_validate(self.base).alike_digest
        self.terms = self.federation.terms(settings=alike, version=uploaded.version, blocks=ring)
        self.put(canonical(self.terms))
        self.base["sums"] = {"terms": self.terms.digest}
        about = (Keyring(folder / "keys"), self.federation.roster, 3)
        data = {name: images().info for name in ("data", CHANGES["dataset"])}
        direct = Direct({}, TrainingSetup(torch.device("cpu")))
        self.env = TaskEnvironment(
            Client("http://127.0.0.1:1", "t", patience_seconds=0.1), data, direct,
            Vault(folder / "vault"), self.cache, folder, seed_key=seed_key,
            sums=SumParty("site-00", *about, helper=False, agreements=None, masks=False),
        )  # fmt: skip

    def put(self, blob: bytes) -> str:
        self.cache.put(digest_of(blob), [blob], 1 << 24)
        return digest_of(blob)

    def update(self, **changed: Any) -> dict[str, bytes] | str:
        """Return the integers that a task sends, or why the site refuses it."""
        try:
            task = Task.model_validate({**self.base, **changed})
            journal = Journal(TaskRef.of(task), task.dataset, None, None)
            run = TaskRun(self.env, task, lambda: None, Report(), journal)
            admission = admit(run)
            fetched = fetch(run, admission.dataset)
            local = self.env.executor.local(run)
            result, _ = train(local, load(local, fetched), images(), None)
        except (PolicyViolation, TaskFailure, ValidationError) as fault:
            return str(fault)
        assert admission.terms
        egress = Egress(run, terms=admission.terms)
        with egress.checked(result, fetched) as update, update.open() as file:
            rings = ring_of(file.read(), admission.terms, sorted(admission.terms.blocks))
        return {name: b"".join(chunk.tobytes() for chunk in ring.chunks()) for name, ring in rings.items()}


OTHER = digest_of(b"other")
REFUSED: dict[str, Any] = {
    **CHANGES, "held_out": True, "kind": "evaluate", "run": "run-2", "round": 2,
    "version": {"number": 1},
}  # fmt: skip
"""Task fields that decide what is trained, each with another value: a site refuses it, as it is not that of the
terms."""

WITHOUT_EFFECT: dict[str, Any] = {
    "id": "u", "token": 9, "run_name": "another", "study": "another", "orchestrator": "trial", "lease_seconds": 9.0,
    "inline_bytes": 1 << 20, "stream_bytes": 1 << 20,
    "inline_blobs": [b64encode(b"x").decode()], "ignore": ["O"], "subgroups": "sex", "keep_updates": "run",
    "max_new_tokens": 9,
    "receipt": {"task": "before", "token": 1, "state": "left_out"},
    "audit_head": None,
    "sums": {"document": OTHER, "seeds": [1]},
    "parent": {"coordinator": "https://parent", "run": "r", "terms": "0" * 64},
}  # fmt: skip
"""The other fields. A receipt decides which of two states of its own a site goes on from, which no one else knows:
helpers open one sum from a version. An audit head that the site lacks ends the task."""


def test_every_field_of_a_task_is_alike_or_without_effect() -> None:
    assert REFUSED.keys() | WITHOUT_EFFECT.keys() == set(Task.model_fields)
    assert REFUSED.keys() > ALIKE


def test_two_tasks_that_differ_in_a_field_give_the_same_update_to_a_sum_or_are_refused(tmp_path: Path) -> None:
    """Two updates of one site from one version, beside the same of the others, would be told by two sums."""
    site = Trained(tmp_path)
    update = site.update()
    assert isinstance(update, dict)
    for name, value in WITHOUT_EFFECT.items():
        given = {**site.base[name], **value} if isinstance(site.base.get(name), dict) else value
        assert site.update(**{name: given}) == update, name
    for name, value in REFUSED.items():
        given = {**site.base[name], **value} if name == "version" else value
        assert isinstance(site.update(**{name: given}), str), name


def test_a_coordinator_that_knows_a_seed_does_not_know_what_a_site_draws_from_it(tmp_path: Path) -> None:
    updates = [
        Trained(tmp_path / str(n), key).update() for n, key in enumerate((bytes(32), bytes(32), b"k" * 32, None))
    ]
    assert updates[0] == updates[1], "a worker that was restarted trains the same"
    assert updates[0] not in updates[2:]
    assert updates[2] != updates[3]


def test_an_exact_sum_takes_no_update_over_a_few_examples(tmp_path: Path) -> None:
    """A batch of one, at a seed of the coordinator's, would be an example."""
    site = Trained(tmp_path)
    few: dict[str, Any] = {"training": {"batch_size": 1, "steps": 1, "epochs": None, "learning_rate": 0.05}}
    alike = Task.model_validate({**site.base, **few}).alike_digest
    terms = site.put(canonical(site.terms.model_copy(update={"settings": alike})))
    few["sums"] = {"terms": terms}
    assert "min_batch: a task of less than one pass" in str(site.update(**few))


TEXTS = {**BERT, "vocab_size": 20, "max_position_embeddings": 12}
WORDS = {name: f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")}


@pytest.mark.parametrize(
    ("config", "head", "rows"),
    [
        (TEXTS, "text-classification", list(WORDS.values())),
        ({**LLAMA, "vocab_size": 40}, "causal-lm", ["model.embed_tokens.weight", "lm_head.weight"]),
        ({**LLAMA, "vocab_size": 40, "tie_word_embeddings": True}, "causal-lm", ["model.embed_tokens.weight"]),
        (
            dual("clip"),
            "contrastive",
            [f"text_model.embeddings.{name}_embedding.weight" for name in ("token", "position")],
        ),
        # All images move all of its values.
        (DROPOUT, "image-classification", []),
    ],
    ids=["bert", "llama", "tied", "clip", "vit"],
)
def test_blocks_with_a_row_for_each_token_are_known(config: dict[str, Any], head: Any, rows: list[str]) -> None:
    document, _ = untrained(config, head)
    assert [block.name for block in token_rows(head, document.blocks)] == rows


def test_rows_of_single_tokens_go_into_no_exact_sum_unless_the_site_allows_it(tmp_path: Path) -> None:
    """Which words a site has shows in rows that it alone moves, however many sites are in the sum."""
    document, _ = untrained(TEXTS, "text-classification")
    sender = Sender(tmp_path)
    given = {"model": digest_of(canonical(document)), "plan": Plan(upload=roles("embedding", "head"))}
    run = sender.run(sender.task(**given), canonical(document))
    with pytest.raises(PolicyViolation, match=r"secure_sums\.embeddings: a row of bert.embeddings.position"):
        fetch(run, images().info)
    allowed = replace(sender.env, sums=replace(cast("SumParty", sender.env.sums), embeddings=True))
    # The version is not here.
    for env, changed in ((allowed, {}), (sender.env, {"plan": Plan(upload=roles("head"))})):
        with pytest.raises(Problem):
            fetch(replace(run, env=env, task=run.task.model_copy(update=changed)), images().info)


def test_a_site_weighs_by_its_own_settings_and_refuses_terms_in_which_it_would_weigh_less(tmp_path: Path) -> None:
    """A weight that follows the terms is a known coefficient of the site's update, which differs between sums."""
    site = Sender(tmp_path)
    site.env = replace(site.env, sums=replace(cast("SumParty", site.env.sums), weight=4))
    terms = site.terms(max_weight=4)
    block = Block(tensor="head", role="head", shape=(7,), dtype="F32")
    still = ArrayTensor(np.ones(7, np.float32))
    for limit in (4, 9):
        run = site.run(site.task(), canonical(terms))
        _, envelope, _ = masked(
            run, site.terms(max_weight=limit), [TrainedBlock(block, still, still)], BytesIO(), norms=False
        )
        assert Envelope.model_validate_json(envelope).weight == 4
    assert site.admitted(terms) == terms
    with pytest.raises(PolicyViolation, match=r"secure_sums\.weight: this site weighs 4; the terms allow 3"):
        site.admitted(site.terms(max_weight=3))


REFUSED_RUNS: dict[str, dict[str, Any]] = {
    "each site's own choice of layers": {"method": MethodSpec(name="safl", settings={"layers": 1})},
    "each site's own choice without data": {
        "method": MethodSpec(name="safl", settings={"layers": 1, "score": "random"})
    },
    "a common choice by data": {"method": MethodSpec(name="safl", settings={"layers": 1, "chooser": "consensus"})},
    "layers by a site's memory": {
        "method": MethodSpec(
            name="safl", settings={"layers": 1, "score": "random", "chooser": "consensus", "memory_share": 0.5}
        )
    },
    "numbers of steps": {"method": MethodSpec(name="fednova")},
    "controls": {"method": MethodSpec(name="scaffold"), "training": {"optimizer": "sgd"}},
    "gradients": {"method": MethodSpec(name="feddyn")},
    "an automatic warm-up": {"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"})},
    "signals": {"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": 2, "signals": True})},
    "nothing to sum": {"method": MethodSpec(name="local"), "plan": Plan(upload=NOTHING)},
    "a lossy codec": {"codec": "delta+int8"},
    "a budget of bytes": {"upload_budget": 9},
    "a limit of time": {"upload_seconds": 1.0},
    "probabilities": {"normalization": "inverse-probability"},
    "scaled losses under privacy": {"privacy": PRIVACY, "training": {"precision": "float16"}},
    "recomputation under privacy": {"privacy": PRIVACY, "training": {"gradient_checkpointing": True}},
}
"""Runs that no coordinator of ours creates with secure sums."""


@pytest.mark.parametrize("what", REFUSED_RUNS)
def test_a_site_trains_for_no_run_that_a_coordinator_refuses_to_create(tmp_path: Path, what: str) -> None:
    """A coordinator without its own refusals would learn what secure sums are to hide: such as each site's choice of
    layers, which is a function of its data and named in its envelope."""
    sender = Sender(tmp_path)
    terms = sender.terms(settings=sender.task(**REFUSED_RUNS[what]).alike_digest)
    assert refusal(sender, terms, **REFUSED_RUNS[what]).startswith("run: ")
    about = {"version": VERSION, "cohort": {"quorum": 3}, "name": "demo"}
    fields = sender.task(terms, **REFUSED_RUNS[what]).model_dump(
        mode="json", include=ALIKE & set(RunSpec.model_fields)
    )
    with pytest.raises((ValidationError, Invalid)):
        begun(
            RunSpec.model_validate(fields | about),
            MODEL,
            START,
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"privacy": PRIVACY, "training": {"precision": "float16"}},
        {"client_privacy": PRIVACY},
        {"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"}), "client_privacy": PRIVACY},
    ],
    ids=str,
)
def test_a_site_trains_for_no_private_run_without_sums_that_a_coordinator_refuses(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    sender = Sender(tmp_path)
    task = sender.task(**{"secure_sums": None, "sums": None, **changed})
    with pytest.raises(UnsupportedRun):
        admitted_terms(sender.run(task, canonical(MODEL)))


def test_a_site_sends_to_no_noisy_sum_of_which_delta_permits_the_release_of_its_update(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    privacy = {"epsilon": 8.0, "delta": 0.01, "clip_norm": 0.5, "honest_sites": 2, "expected_sites": 100}
    sender.sums["quorum"] = 3
    noise = sender.federation.noisy_terms().noise
    assert noise
    changed = {"client_privacy": privacy, "normalization": "cohort"}
    terms = sender.federation.noisy_terms(
        settings=sender.task(**changed).alike_digest,
        noise=noise.model_copy(update={"delta": 0.01}),
    )
    said = refusal(sender, terms, **changed)
    assert "a delta of 0.01 gives no guarantee for 100 sites: set client_privacy.delta to 0.0063 or less" in said


@pytest.mark.parametrize(
    "sums",
    [
        {"helpers": ["site-00", "site-01", "site-02"], "quorum": 3},
        {"helpers": ["site-03", "site-01", "site-02", "site-00"], "quorum": 3},
        {"helpers": ["site-00", "site-01", "site-02", "site-03"], "quorum": 4},
        {"helpers": ["site-00", "site-01", "site-02", "site-03"], "quorum": 3, "bits": 16},
        {"helpers": ["site-00", "site-01", "site-02", "site-03"], "quorum": 3, "repeat_model": True},
    ],
    ids=str,
)
def test_only_the_run_s_helpers_open_its_sums(tmp_path: Path, sums: dict[str, Any]) -> None:
    """A smaller committee resists fewer that collude. Another one would sign a second set of the same round."""
    sender = Sender(tmp_path)
    settings = sender.task(secure_sums=sums).alike_digest
    assert "the terms have the helpers" in refusal(sender, sender.terms(settings=settings), secure_sums=sums)


def test_only_helpers_of_the_roster_open_its_sums(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    terms = sender.terms()
    del sender.federation.roster["site-02"]
    assert refusal(sender, terms) == "not-in-roster: the site site-02 is not in the roster of this site"


@pytest.mark.parametrize("changed", [{"run": "run-2"}, {"number": 2}, {"version": digest_of(b"another")}], ids=str)
def test_terms_of_another_round_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    sender = Sender(tmp_path)
    assert "and not of the task" in refusal(sender, sender.terms(**changed))


def test_a_version_under_another_number_is_refused(tmp_path: Path) -> None:
    """One version under two numbers would be two rounds, each with a sum."""
    sender = Sender(tmp_path)
    terms = sender.terms()
    assert "does not start from version 1" in refusal(sender, terms, version={"number": 1, "digest": VERSION})


def test_terms_that_name_another_model_than_the_version_are_refused() -> None:
    """Helpers, who see no version, know by this name which sums are from one model."""
    blocks = {"head": digest_of(b"values")}
    manifest = Manifest(blocks=blocks)
    terms = Federation(8, 4).terms(values=manifest.values)
    check_values(terms, manifest)
    # What a coordinator can vary without another model.
    check_values(terms, Manifest(blocks=blocks, scalars={"round": 2.0}, root=digest_of(b"root")))
    with pytest.raises(PolicyViolation, match="terms-differ: the terms name the values of another model"):
        check_values(terms, Manifest(blocks={"head": digest_of(b"others")}))


def test_a_site_does_not_train_for_a_second_sum_from_one_model(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    sender.env = replace(sender.env, history=RunHistory(tmp_path / "runs", "w"))
    assert sender.env.history
    terms = sender.terms()
    assert sender.admitted(terms)
    sender.env.history.add_sum(sender.terms(run="run-2"))
    with pytest.raises(PolicyViolation, match=r"sums_repeated: .* left in another run"):
        sender.admitted(terms)
    # Two sums with noise differ by that noise.
    assert sender.terms().is_exact
    assert not sender.federation.noisy_terms(epsilon=8.0).is_exact


def test_a_helper_signs_that_it_never_opens_an_attempt_and_keeps_it_on_disk(tmp_path: Path) -> None:
    sender, log = Sender(tmp_path), AgreementLog(tmp_path)
    sender.env = replace(sender.env, sums=replace(sender.party, site="site-03", helper=True, agreements=log))
    former = sender.terms()
    task = sender.task(kind="abandon", plan=Plan(stage="abandon"), sums={"terms": former.digest})

    def give_up() -> None:
        raise TimeoutError

    # Nobody hears of it.
    with pytest.raises(TimeoutError):
        help_open(replace(sender.run(task), check=give_up))
    signed = Commitment(run="run-1", round=1, terms=former.digest, senders=digest_of(b"set"))
    abandoned = Commitment(run="run-1", round=1, terms=former.digest)
    assert AgreementLog(tmp_path).remember(signed) == abandoned


def test_an_update_leaves_under_masks(tmp_path: Path) -> None:
    """Without them, a step of zeros would be zeros in the file."""
    sender, file = Sender(tmp_path), BytesIO()
    terms = sender.terms()
    block = Block(tensor="head", role="head", shape=(7,), dtype="F32")
    still = ArrayTensor(np.ones(7, np.float32))
    masked(sender.run(sender.task(terms)), terms, [TrainedBlock(block, still, still)], file, norms=False)
    values = np.frombuffer(file.getvalue()[-28:], np.int32)
    assert np.abs(values.astype(np.int64)).max() > 1 << 20


def test_a_task_has_both_settings_and_terms_of_secure_sums_or_neither(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    refusal(sender, sender.terms(), secure_sums=None)
    refusal(sender, sender.terms(), sums=None)
    assert sender.admitted(sender.terms(), sums=None, secure_sums=None) is None


def test_a_helper_writes_no_sums_larger_than_its_site_sends(tmp_path: Path) -> None:
    sender = Sender(tmp_path, max_upload_bytes=200)
    terms, document = sender.terms(), b'{"envelopes": []}'
    sums = {"terms": terms.digest, "document": digest_of(document), "seeds": [1]}
    # 7 + 33 + 12 integers of 4 bytes.
    with pytest.raises(PolicyViolation, match="sums of 208 bytes are larger than the 200 allowed"):
        help_open(
            sender.run(sender.task(kind="open", plan=Plan(stage="open"), sums=sums), canonical(terms), document)
        )


@pytest.mark.parametrize(
    ("rule", "policy"),
    [("orchestrators", {"orchestrators": ["trial"]}), ("max_lease_seconds", {"max_lease_seconds": 59})],
)
def test_a_helper_keeps_to_its_site_s_rules_of_who_asks_and_for_how_long(
    tmp_path: Path, rule: str, policy: dict[str, Any]
) -> None:
    sender = Sender(tmp_path, **policy)
    run = sender.run(sender.task(sender.terms(), kind="agree", plan=Plan(stage="agree")))
    with pytest.raises(PolicyViolation) as violation:
        help_open(run)
    assert violation.value.rule == rule


def test_what_any_task_sends_keeps_to_the_site_s_rate(tmp_path: Path) -> None:
    sender = Sender(tmp_path, max_upload_bytes_per_second=16_384)
    run = sender.run(sender.task(kind="open", plan=Plan(stage="open")))
    began_at = time.monotonic()
    run.sent(4096)
    run.sent(4096)
    assert time.monotonic() - began_at >= 0.5
    assert run.report.upload_bytes == 8192


def test_a_document_that_would_fill_memory_is_not_parsed(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    terms, document = sender.terms(), b'{"envelopes": [], "envelopes": []}'
    sums = {"terms": terms.digest, "document": digest_of(document)}
    run = sender.run(sender.task(kind="agree", plan=Plan(stage="agree"), sums=sums), canonical(terms), document)
    with pytest.raises(ValueError, match="names something twice"):
        help_open(run)

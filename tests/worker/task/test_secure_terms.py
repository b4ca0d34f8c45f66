"""A sender refuses terms of a sum that are not its own task's: what the coordinator could learn by others is said
beside each."""

from __future__ import annotations

import time
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.api.tasks import ALIKE, Task
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec, Participant, Plan, State
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import roles
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import ArrayTensor, digest_of
from tessera.shared.updates.update_file import TrainedBlock
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.site_keys import Keyring, SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.task.environment import Journal, TaskEnvironment, TaskRun
from tessera.worker.task.secure_sums import admitted_terms, help_open, masked
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.secure_sums import Federation
from tests.support.tasks import ADAPTED, PLAIN

VERSION = digest_of(b"version")
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
        # All blobs are in the cache, so that no coordinator is asked.
        self.env = TaskEnvironment(
            Client("http://127.0.0.1:1", "t"),
            {},
            TrainingSetup(torch.device("cpu")),
            Vault(folder / "vault"),
            self.cache,
            folder,
            policy=Policy(**policy),
            kinds=("train", "agree", "open"),
            sums=party,
        )

    def task(self, terms: Terms | None = None, **changed: Any) -> Task:
        given = {
            "id": "t", "token": 1, "kind": "train", "run": "run-1", "run_name": "demo", "round": 1, "rounds": 4,
            "seed": 0, "method": MethodSpec(name="fedavg"), "plan": Plan(), "dataset": "wards", "codec": "raw",
            "training": {"batch_size": 8}, "normalization": "participants", "model": digest_of(b"model"),
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
        return admitted_terms(self.run(self.task(terms, **changed), canonical(terms)))


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
    assert sender.admitted(terms, seed=3, token=9, id="u", orchestrator="trial", inline_bytes=9) == terms


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
    "privacy": PRIVACY,
    "client_privacy": {**PRIVACY, "honest_sites": 2},
    "codec": "zstd",
    "secure_sums": {"helpers": ["site-00", "site-01", "site-02"], "quorum": 3},
    "upload_budget": 9,
    "upload_seconds": 1.0,
    "normalization": "cohort",
    "model": digest_of(b"another"),
}


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_sites_that_train_otherwise_are_not_summed(tmp_path: Path, name: str) -> None:
    """Others that train at a rate of almost zero would leave this site's update alone in the sum."""
    sender = Sender(tmp_path)
    assert refusal(sender, sender.terms(), **{name: CHANGES[name]}).startswith("terms-differ: ")


def test_every_field_of_a_task_is_alike_or_a_site_s_own() -> None:
    in_the_terms = {"run", "round", "version", "sums"}
    of_one_site = {"id", "token", "seed", "lease_seconds", "receipt", "inline_bytes", "inline_blobs", "stream_bytes"}
    without_effect = {"run_name", "orchestrator", "decode_seconds_per_byte", "kind", "held_out"}
    assert set(Task.model_fields) == ALIKE | in_the_terms | of_one_site | without_effect


@pytest.mark.parametrize(
    "sums",
    [
        {"helpers": ["site-00", "site-01", "site-02"], "quorum": 3},
        {"helpers": ["site-03", "site-01", "site-02", "site-00"], "quorum": 3},
        {"helpers": ["site-00", "site-01", "site-02", "site-03"], "quorum": 4},
        {"helpers": ["site-00", "site-01", "site-02", "site-03"], "quorum": 3, "bits": 16},
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


def test_an_update_leaves_under_masks(tmp_path: Path) -> None:
    """Without them, a step of zeros would be zeros in the file."""
    sender, file = Sender(tmp_path), BytesIO()
    terms = sender.terms()
    block = Block(tensor="head", role="head", shape=(7,), dtype="F32")
    still = ArrayTensor(np.ones(7, np.float32))
    masked(sender.run(sender.task(terms)), terms, [TrainedBlock(block, still, still)], 10, file, norms=False)
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

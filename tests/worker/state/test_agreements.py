"""A helper signs one set of senders for a round, also after its files were lost, cut off or put back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
from pydantic import JsonValue

from tessera.shared.api.tasks import Task
from tessera.shared.client.client import Client
from tessera.shared.problems import NotFound
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.committee import Commitment
from tessera.shared.secure_sums.messages import SumDocument
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.bootstrap import runner_of
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.state.audit import Action, Audit, signed_sets
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.hash_chain import ChainError, TaskRef
from tessera.worker.state.site_keys import KEYS_FOLDER, AgreementLog
from tessera.worker.state.vault import Vault
from tessera.worker.stores import audit_of, sum_party_of
from tessera.worker.task.environment import Journal, TaskEnvironment, TaskRun
from tessera.worker.task.secure_sums import help_open
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.chain_rows import ChainRows
from tests.support.coordinator import LiveCoordinator
from tests.support.in_process import in_process
from tests.support.secure_sums import Federation, steps_of

FIRST, SECOND = digest_of(b"first"), digest_of(b"second")
TERMS = digest_of(b"terms")
KEY = "0000-" * 7 + "0000"


def made(number: int, senders: str) -> Commitment:
    """A set of senders of a round of one run."""
    return Commitment(run="r", round=number, terms=TERMS, senders=senders)


def test_the_first_set_of_a_round_is_remembered(tmp_path: Path) -> None:
    log = AgreementLog(tmp_path)
    assert log.remember(made(1, FIRST)) is None
    assert AgreementLog(tmp_path).remember(made(1, SECOND)) == made(1, FIRST)
    assert log.remember(made(1, FIRST)) is log.remember(made(2, SECOND)) is None


def test_abandoned_terms_are_remembered(tmp_path: Path) -> None:
    """A site sends another update once helpers have said that the first one's sum is never opened."""
    log, abandoned = AgreementLog(tmp_path), Commitment(run="r", round=1, terms=TERMS)
    assert log.remember(abandoned) is log.remember(abandoned) is None
    assert AgreementLog(tmp_path).remember(made(1, FIRST)) == abandoned
    other = digest_of(b"other terms")
    signed = made(1, FIRST).model_copy(update={"terms": other})
    assert log.remember(signed) is None
    assert log.remember(Commitment(run="r", round=2, terms=other)) == signed


@pytest.mark.parametrize(
    ("action", "about"),
    [("sums.agree", {"senders": FIRST}), ("sums.open", {"senders": FIRST}), ("sums.abandon", {"terms": FIRST})],
)
def test_a_file_that_lacks_a_signed_or_an_opened_set_or_abandoned_terms_is_refused(
    tmp_path: Path, action: Action, about: dict[str, JsonValue]
) -> None:
    audit = Audit(tmp_path / "audit", "w")
    audit.record(action, TaskRef("r", "demo", 1, "t", 1), **about, key=KEY)
    signed = signed_sets(audit.read(), KEY)
    assert signed == {FIRST: ("r", 1)}
    with pytest.raises(ChainError, match="lacks 1 of"):
        AgreementLog(tmp_path).expect(signed)
    abandoned = Commitment(run="r", round=1, terms=FIRST)
    AgreementLog(tmp_path).remember(abandoned if action == "sums.abandon" else made(1, FIRST))
    AgreementLog(tmp_path).expect(signed)
    assert signed_sets(audit.read(), "another key") == {}


def test_a_file_under_a_lost_key_is_refused_with_the_remedy(tmp_path: Path) -> None:
    AgreementLog(tmp_path, b"k" * 32).remember(made(1, FIRST))
    with pytest.raises(ChainError, match=rf"agreements.*remove the folder {tmp_path / KEYS_FOLDER}"):
        AgreementLog(tmp_path, b"l" * 32).expect({})


def test_a_file_that_is_removed_while_the_worker_runs_is_noticed(tmp_path: Path) -> None:
    log = AgreementLog(tmp_path)
    log.remember(made(1, FIRST))
    ChainRows(tmp_path, "agreements").unlink()
    with pytest.raises(ChainError, match="removed"):
        log.remember(made(1, SECOND))


def test_a_worker_without_its_agreements_does_not_start_until_it_has_new_keys(tmp_path: Path) -> None:
    settings = WorkerSettings(
        url="http://127.0.0.1:1", token="t", name="w", state_dir=tmp_path / "state", device="cpu",
        datasets={"digits": {"kind": "digits"}}, secure_sums={"site": "north", "helper": True},
    )  # fmt: skip
    party = sum_party_of(settings)
    assert party is not None
    assert party.agreements is not None
    party.agreements.remember(made(1, FIRST))
    about = {"senders": FIRST, "key": party.fingerprint}
    audit_of(settings).record("sums.agree", TaskRef("r", "demo", 1, "t", 1), **about)
    with Client(settings.url, "t") as client:
        runner_of(client, settings, in_process(settings))
        ChainRows(settings.state_dir, f"agreements {party.fingerprint}").unlink()
        with pytest.raises(SettingsError, match="such as that of round 1 of run r"):
            runner_of(client, settings, in_process(settings))
        for path in (settings.state_dir / KEYS_FOLDER).iterdir():
            path.unlink()
        runner_of(client, settings, in_process(settings))


@dataclass
class Opening:
    """A helper with a task to open a sum, whose terms and envelopes it has. The coordinator knows of no such task."""

    settings: WorkerSettings
    env: TaskEnvironment
    task: Task
    audit: Audit

    def refusal(self) -> Exception:
        """Opens the sum, whose masks the coordinator takes, and returns how the task ends."""
        journal = Journal(TaskRef.of(self.task), self.task.dataset, self.audit, None)
        with pytest.raises((NotFound, PolicyViolation)) as ended:
            help_open(TaskRun(self.env, self.task, lambda: None, Report(), journal))
        return ended.value


@pytest.fixture
def opening(coordinator: LiveCoordinator, tmp_path: Path) -> Iterator[Opening]:
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", "site-00"), name="w", state_dir=tmp_path / "state",
        device="cpu", datasets={"digits": {"kind": "digits"}}, secure_sums={"site": "site-00", "helper": True},
    )  # fmt: skip
    party, fed = sum_party_of(settings), Federation(5, 4, quorum=5)
    assert party is not None
    fed.identities["site-00"], (fed.sealing["site-00"],) = party.keys.identity(), party.keys.sealing_keys().values()
    fed.roster["site-00"] = party.fingerprint
    terms = fed.terms()
    envelopes = tuple(fed.send(terms, site, steps_of(Random(0))).envelope for site in fed.names)
    agreed = tuple(fed.member(site).agree(terms, envelopes) for site in ("site-01", "site-02", "site-03"))
    blobs = [canonical(terms), canonical(SumDocument(envelopes=envelopes, agreements=agreed))]
    cache = Cache(tmp_path / "cache", 1 << 20)
    for blob in blobs:
        cache.put(digest_of(blob), [blob], 1 << 20)
    task = Task.model_validate({
        "id": "t", "token": 1, "kind": "open", "run": terms.run, "run_name": "demo", "round": 1, "rounds": 4,
        "seed": 0, "method": {"name": "fedavg"}, "plan": {}, "dataset": "digits", "codec": "raw",
        "training": {"batch_size": 8}, "normalization": "participants", "model": FIRST, "lease_seconds": 60.0,
        "version": {"number": 0, "digest": terms.version},
        "secure_sums": {"helpers": fed.names[:4], "quorum": 5},
        "sums": {"terms": digest_of(blobs[0]), "document": digest_of(blobs[1]), "seeds": terms.seeds_of(0)},
    })  # fmt: skip
    with coordinator.client("site", "site-00") as client:
        env = TaskEnvironment(
            client, {}, Direct({}, TrainingSetup(torch.device("cpu"))), Vault(tmp_path / "vault"), cache, tmp_path,
            kinds=("open",), sums=replace(party, roster=fed.roster), history=RunHistory(tmp_path / "runs", "w"),
        )  # fmt: skip
        yield Opening(settings, env, task, audit_of(settings))


def test_a_helper_that_opened_a_set_without_having_signed_it_misses_its_lost_agreements(opening: Opening) -> None:
    assert isinstance(opening.refusal(), NotFound)
    assert [entry.action for entry in opening.audit.read()] == ["sums.open"]
    client, settings = opening.env.coordinator, opening.settings
    runner_of(client, settings, in_process(settings))
    assert opening.env.sums is not None
    ChainRows(settings.state_dir, f"agreements {opening.env.sums.fingerprint}").unlink()
    with pytest.raises(SettingsError, match="opened sums as a helper, such as that of round 1 of run run-1"):
        runner_of(client, settings, in_process(settings))


def test_the_sums_that_a_helper_sends_count_among_the_run_s_uploads(opening: Opening) -> None:
    assert isinstance(opening.refusal(), NotFound)
    (entry,) = opening.audit.read()
    sent = entry.detail["bytes"]
    assert isinstance(sent, int)
    opening.env = replace(opening.env, policy=Policy(max_run_upload_bytes=2 * sent - 1))
    refused = opening.refusal()
    assert isinstance(refused, PolicyViolation)
    assert refused.rule == "max_run_upload_bytes"
    assert opening.audit.read() == (entry,)

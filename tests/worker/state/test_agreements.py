"""A helper signs one set of senders for a round, also after its files were lost, cut off or put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.shared.client.client import Client
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.bootstrap import runner_of
from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.state.audit import Audit, signed_sets
from tessera.worker.state.hash_chain import ChainError, TaskRef
from tessera.worker.state.site_keys import AGREEMENTS_FILE, KEYS_FOLDER, AgreementLog
from tessera.worker.stores import audit_of, sum_party_of

FIRST, SECOND = digest_of(b"first"), digest_of(b"second")
KEY = "0000-" * 7 + "0000"


def test_the_first_set_of_a_round_is_remembered(tmp_path: Path) -> None:
    log = AgreementLog(tmp_path)
    assert log.remember("r", 1, FIRST) == FIRST
    assert AgreementLog(tmp_path).remember("r", 1, SECOND) == FIRST
    assert log.remember("r", 2, SECOND) == SECOND


def test_a_file_that_lacks_a_signed_set_is_refused(tmp_path: Path) -> None:
    log, audit = AgreementLog(tmp_path), Audit(tmp_path / "audit", "w")
    log.remember("r", 1, FIRST)
    audit.record("sums.agree", TaskRef("r", "demo", 1, "t", 1), senders=FIRST, key=KEY)
    signed = signed_sets(audit.read(), KEY)
    assert signed == {("r", 1): FIRST}
    AgreementLog(tmp_path).expect(signed)
    for wrong in ({("r", 2): FIRST}, {("r", 1): SECOND}):
        with pytest.raises(ChainError, match="lacks 1 sets"):
            AgreementLog(tmp_path).expect(wrong)
    assert signed_sets(audit.read(), "another key") == {}


def test_a_file_under_a_lost_key_is_refused_with_the_remedy(tmp_path: Path) -> None:
    AgreementLog(tmp_path, b"k" * 32).remember("r", 1, FIRST)
    with pytest.raises(ChainError, match=rf"agreements.jsonl.*remove it and the folder {tmp_path / KEYS_FOLDER}"):
        AgreementLog(tmp_path, b"l" * 32).expect({})


def test_a_file_that_is_removed_while_the_worker_runs_is_noticed(tmp_path: Path) -> None:
    log = AgreementLog(tmp_path)
    log.remember("r", 1, FIRST)
    (tmp_path / AGREEMENTS_FILE).unlink()
    with pytest.raises(ChainError, match="removed"):
        log.remember("r", 1, SECOND)


def test_a_worker_without_its_agreements_does_not_start_until_it_has_new_keys(tmp_path: Path) -> None:
    settings = WorkerSettings(
        url="http://127.0.0.1:1", token="t", name="w", state_dir=tmp_path / "state", device="cpu",
        datasets={"digits": {"kind": "digits"}}, secure_sums={"site": "north", "helper": True},
    )  # fmt: skip
    party = sum_party_of(settings)
    assert party is not None
    assert party.agreements is not None
    party.agreements.remember("r", 1, FIRST)
    about = {"senders": FIRST, "key": party.fingerprint}
    audit_of(settings).record("sums.agree", TaskRef("r", "demo", 1, "t", 1), **about)
    with Client(settings.url, "t") as client:
        runner_of(client, settings)
        (settings.state_dir / AGREEMENTS_FILE).unlink()
        with pytest.raises(SettingsError, match="such as that of round 1 of run r"):
            runner_of(client, settings)
        for path in (settings.state_dir / KEYS_FOLDER).iterdir():
            path.unlink()
        runner_of(client, settings)

"""The audit names sites by keyed pseudonyms: whoever has the keys reads the names, and the chain holds without."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from sqlalchemy import delete, select

from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import AuditKeyRow, AuditRow
from tessera.shared.api.admin import Approval, EnrolmentSpec, TokenSpec
from tessera.shared.api.audit_chain import first_broken, named
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.client.client import Client
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

NORTH, SOUTH = "hospital-north", "hospital.south"


@pytest.fixture
def told(coordinator: LiveCoordinator) -> Client:
    """An administrator's client, after a run of two sites in which everything happened that names a site."""
    client, model = coordinator.client(), small_model()
    cohort = Cohort(sites=(NORTH, SOUTH, "hospital-west"), quorum=1, max_attempts=1, deadline_seconds=30)
    enrolment = EnrolmentSpec(site="hospital-east", worker="icu-7", secret_hash=hash_of(new_secret("site")))
    with Client(coordinator.url, "", verify=False) as stranger:
        asked = stranger.ask_to_join(enrolment)
        client.decline(asked.id)
        again = stranger.ask_to_join(enrolment.model_copy(update={"secret_hash": hash_of(new_secret("site"))}))
    (pending,) = client.enrolments()
    client.approve(again.id, Approval(code=pending.code, site="hospital-east", create_site=True))
    north, south = (
        ScriptedWorker(coordinator.client("site", site), f"gpu-{site}", ("train", "evaluate"), held_out={"data": 40})
        for site in (NORTH, SOUTH)
    )
    for worker in (north, south):
        worker.enrol()
    start = values(model)
    first = start_run(client, model, start, cohort=cohort, evaluation=Evaluation(sites=True))
    for worker in (north, south):
        while client.run(first.id).version.number == 0:
            task = worker.take()
            if task.kind == "evaluate":
                worker.evaluate(task, loss=1.0)
            else:
                worker.train(task)
                break
    until(lambda: client.run(first.id).version.number == 1)
    failing = start_run(client, model, start, cohort=cohort)
    for worker in (north, south):
        until(partial(_failed, worker, failing.id))
    until(lambda: client.run(failing.id).state == "paused")
    (site,) = (one for one in client.sites() if one.name == NORTH)
    client.suspend_site(site.id)
    client.resume_site(site.id)
    issued = client.issue_token(TokenSpec(name=f"{NORTH}.spare", role="site", site=NORTH))
    client.rotate_token(issued.id, hash_of(new_secret("site")))
    client.revoke_token(issued.id)
    return client


def _failed(worker: ScriptedWorker, run: str) -> bool:
    task = worker.claim()
    if task is None:
        return False
    if task.run == run:
        worker.fail(task)
    elif task.kind == "evaluate":
        worker.evaluate(task, loss=1.0)
    return task.run == run


def test_no_entry_of_a_whole_run_names_a_site_or_its_workers(told: Client) -> None:
    entries = list(told.audit())
    texts = [json.dumps([one.actor, one.subject, one.detail]) for one in entries]
    assert not [text for text in texts if re.search("hospital|icu-7|gpu-", text)]
    assert first_broken(entries) is None
    names = told.audit_names()
    read = " ".join(named(names, one).model_dump_json() for one in entries)
    for name in (NORTH, SOUTH, "hospital-west", "hospital-east", f"{NORTH}/gpu-{NORTH}", "hospital-east/icu-7"):
        assert name in read, name
    assert not re.search("site-[0-9a-f]{16}", read)
    actions = {one.action for one in entries if "site-" in json.dumps([one.actor, one.detail])}
    assert actions >= {
        "run.create", "run.pause", "round.open", "round.abandon", "task.accept", "task.fail", "task.evaluate",
        "token.issue", "token.rotate", "site.create", "site.suspend", "site.resume", "worker.enrol",
        "enrolment.decline", "enrolment.approve",
    }  # fmt: skip


def test_the_chain_holds_without_the_keys_and_a_name_gets_another_pseudonym(
    coordinator: LiveCoordinator, told: Client
) -> None:
    database = coordinator.services.database
    with database.transaction() as session:
        before = audit.pseudonym_of(session, NORTH)
        session.execute(delete(AuditKeyRow).where(AuditKeyRow.name == NORTH))
    entries = list(told.audit())
    assert first_broken(entries) is None
    assert NORTH not in told.audit_names().values()
    with database.transaction() as session:
        assert audit.broken_at(session) is None
        assert audit.pseudonym_of(session, NORTH) != before


def test_a_site_called_by_a_word_of_an_entry_leaves_the_entry_readable(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    client.create_site("seven")
    database = coordinator.services.database
    with database.transaction() as session:
        audit.record(session, 1.0, "me", "act", "s", text="the seven/w of seven. Not seventy, seven-of.", n=[7, None])
    with database.snapshot() as session:
        detail = session.scalars(select(AuditRow.detail).where(AuditRow.action == "act")).one()
    assert re.fullmatch(r"the (site-\w{16})/\w{12} of \1\. Not seventy, seven-of\.", detail["text"])
    assert detail["n"] == [7, None]


def test_a_required_site_that_comes_later_has_a_pseudonym_before(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    start_run(client, model, values(model), cohort=Cohort(require=("hospital-east",)))
    assert not any("hospital-east" in entry.model_dump_json() for entry in client.audit())

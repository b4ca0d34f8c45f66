"""What workers declare is bounded in length, in number and in how often it changes: no site fills a disk with it, nor
hides anything behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from tessera.coordinator.db import audit
from tessera.coordinator.db import workers as workers_module
from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.tables import AnnouncedRow, AuditRow, SiteRow, WorkerRow, declared_text
from tessera.coordinator.db.views import PAGE_BYTES
from tessera.coordinator.domain.workers import LiveWorker
from tessera.coordinator.limits import rate
from tessera.shared.api.audit_chain import first_broken
from tessera.shared.api.tasks import AdvertisedPolicy, Claim
from tessera.shared.model.dataset_schema import DatasetSchema
from tessera.shared.schema import MAX_CLAIM_BYTES
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import Clock, LiveCoordinator, refused
from tests.support.federation import ScriptedWorker
from tests.support.raw import announced
from tests.support.storage import NOW, migrated, statements

CLAIM = {"worker": "w", "instance": "0" * 32, "datasets": {"data": 10}, "methods": ["fedavg"]}


def claim(http: httpx.Client, **changes: Any) -> httpx.Response:
    return http.post("/v1/tasks/claim", json={**CLAIM, **changes})


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"methods": ["m" * 129]}, "/methods/0"),
        ({"methods": ["m"] * 257}, "/methods"),
        ({"kinds": ["train"] * 9}, "/kinds"),
        ({"device": "\x1b]0;title\x07"}, "/device"),
        ({"device": "\u202ecpu"}, "/device"),
        ({"version": "1\x9b2J"}, "/version"),
    ],
)
def test_each_text_of_a_claim_is_short_and_fit_to_be_shown(
    standing: LiveCoordinator, changes: dict[str, Any], at: str
) -> None:
    answer = claim(standing.http("site", "texts"), **changes)
    assert [fault.pointer for fault in refused(answer, 422, "invalid").errors] == [at]


def test_a_claim_has_64_kib_at_most(standing: LiveCoordinator) -> None:
    http = standing.http("site", "long")
    withheld = {f"r{number}": "x" * 290 for number in range(220)}
    assert MAX_CLAIM_BYTES < len(json.dumps(withheld)) < standing.settings.max_body_bytes
    assert "larger than 65536 bytes" in refused(claim(http, withheld=withheld), 413, "too-large").detail


def test_a_worker_whose_claim_would_be_too_long_shortens_it() -> None:
    said = Claim(worker="w", instance="0" * 32, datasets={"data": 1}, advertised_policy=AdvertisedPolicy())
    assert said.shortened() is said
    refusing = said.model_copy(update={"withheld": {f"r{number}": "x" * 300 for number in range(256)}})
    short = refusing.shortened()
    assert short.withheld.keys() == refusing.withheld.keys()
    assert short.advertised_policy == AdvertisedPolicy()
    named = DatasetSchema(classes=100, class_names=("0" * 8,) * 100)
    knowing = said.model_copy(update={"schemas": {f"d{number}": named for number in range(100)}})
    assert knowing.shortened().schemas == dict.fromkeys(knowing.schemas, DatasetSchema(classes=100))
    long = AdvertisedPolicy(models=("x" * 128,) * 256, orchestrators=("x" * 128,) * 256)
    listing = refusing.model_copy(update={"advertised_policy": long})
    assert listing.shortened().advertised_policy is None
    assert len(listing.shortened().model_dump_json()) <= MAX_CLAIM_BYTES


def test_the_chain_has_the_digest_of_what_was_declared(coordinator: LiveCoordinator) -> None:
    claim(coordinator.http("site", "a"), withheld={f"r{number}": "x" * 280 for number in range(200)})
    database = coordinator.services.database
    with database.snapshot() as session:
        (declared,) = session.scalars(select(WorkerRow.declared))
        detail = session.scalars(select(AuditRow.detail).where(AuditRow.action == "worker.enrol")).one()
    assert detail == {"declared": digest_of(declared_text(declared).encode())}
    assert len(declared_text(declared)) > 50_000


def test_a_site_has_only_so_many_names_of_workers(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, max_workers_per_site=2) as live:
        http, other = live.http("site", "a"), live.http("site", "b")
        assert [claim(http, worker=name).status_code for name in ("u", "v", "u")] == [204, 204, 204]
        answer = claim(http, worker="w")
        assert "max_workers_per_site" in refused(answer, 429, "quota-exceeded").detail
        assert answer.headers["Retry-After"] == "600"
        assert claim(other, worker="w").status_code == 204
        # Those that are there may still change.
        assert claim(http, worker="u", device="cuda").status_code == 204
        clock.advance(31 * 86_400)
        assert claim(http, worker="w").status_code == 204


def test_the_workers_of_a_site_declare_only_so_much_together(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, max_workers_per_site=10) as live:
        http = live.http("site", "a")
        withheld = {f"r{number}": "x" * 280 for number in range(200)}
        assert claim(http, worker="u", withheld=withheld).status_code == 204
        # 62 KB and 62 KB are more than max(10 * 4 KiB, 64 KiB).
        answer = claim(http, worker="v", withheld=withheld)
        assert "would be over 65536" in refused(answer, 429, "quota-exceeded").detail
        assert claim(http, worker="v").status_code == 204


def test_a_site_changes_what_it_declares_only_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "DECLARATIONS_PER_HOUR", 3)
    with LiveCoordinator(tmp_path, clock=Clock()) as live:
        http = live.http("site", "a")
        assert [claim(http, device=f"d{number}").status_code for number in range(3)] == [204, 204, 204]
        answer = claim(http, device="d3")
        assert "more than 3 times an hour" in refused(answer, 429, "quota-exceeded").detail
        # 3600 / 3 s from the first on.
        assert answer.headers["Retry-After"] == "1200"
        assert claim(http, device="d2").status_code == 204
        assert claim(live.http("site", "b")).status_code == 204


def test_what_a_site_declares_counts_against_its_quota_and_the_disk_and_claims_go_on(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, site_bytes_per_day=1_000) as live:
        http = live.http("site", "a")
        assert claim(http).status_code == 204
        with live.services.database.snapshot() as session:
            spent = session.scalar(select(func.sum(AnnouncedRow.bytes)))
            assert spent == len(declared_text(session.scalars(select(WorkerRow.declared)).one()))
        # The quota of a day would keep the worker from its tasks for as long.
        for device in ("cpu", "cuda"):
            withheld = {"r": "x" * 300, "s": "x" * 300, "t": "x" * 300}
            assert claim(http, device=device, withheld=withheld).status_code == 204
        answer = http.post("/v1/uploads", headers=announced(b"x"))
        assert "site_bytes_per_day" in refused(answer, 429, "quota-exceeded").detail
        live.services.disk._reserve_bytes = 1 << 60
        assert "disk_reserve_bytes" in refused(claim(live.http("site", "b")), 503, "store-full").detail


def test_looks_at_the_runs_read_what_is_declared_once_and_again_when_it_changes(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    advertised_policy = AdvertisedPolicy(never_send=("a*",))
    said = Claim(worker="w", instance="0" * 32, datasets={"data": 10}, advertised_policy=advertised_policy)

    def enrol(claim: Claim) -> None:
        with database.transaction() as session:
            workers_module.enrol(session, NOW, "site", claim, 10, 90)

    def look() -> tuple[LiveWorker, int]:
        with statements(database) as seen, database.snapshot() as session:
            (found,) = live_workers(session, 0.0)
        return found, sum("workers.declared " in f"{statement} " for statement in seen)

    with database.transaction() as session:
        session.add(SiteRow(id="site", name="site", created_at=NOW))
    # No other test says so.
    enrol(said.model_copy(update={"device": str(tmp_path)[-64:]}))
    first, read = look()
    assert (first.advertised_policy, read) == (advertised_policy, 1)
    again, read = look()
    assert read == 0
    assert again.advertised_policy is first.advertised_policy
    enrol(said.model_copy(update={"device": str(tmp_path)[-64:], "datasets": {"data": 11}}))
    changed, read = look()
    assert (changed.declared["datasets"], read) == ({"data": 11}, 1)
    database.close()


def test_a_row_that_an_earlier_version_wrote_is_read_as_it_is(coordinator: LiveCoordinator) -> None:
    ScriptedWorker(coordinator.client("site", "a")).enrol()
    database = coordinator.services.database

    def examples() -> int:
        with database.snapshot() as session:
            found: int = live_workers(session, 0.0)[0].declared["datasets"]["data"]
        return found

    with database.transaction() as session:
        declared = {**session.scalars(select(WorkerRow.declared)).one(), "datasets": {"data": 12}}
        session.execute(update(WorkerRow).values(declared=declared, declared_digest=""))
    assert examples() == 12
    with database.transaction() as session:
        session.execute(update(WorkerRow).values(declared={**declared, "datasets": {"data": 13}}))
    assert examples() == 13


def test_a_chain_with_entries_of_a_mib_is_still_read_and_verified(coordinator: LiveCoordinator) -> None:
    database, long = coordinator.services.database, "x" * (1 << 20)
    with database.transaction() as session:
        for number in range(12):
            audit.record(session, 1.0, "site:a", "worker.enrol", f"w{number}", declared={"methods": [long]})
    page = coordinator.http("admin").get("/v1/admin/audit", params={"limit": 500})
    # As many as fit, and the one that goes beyond.
    assert PAGE_BYTES <= len(page.content) < PAGE_BYTES + 2 * len(long)
    assert page.json()["next_cursor"]
    entries = list(coordinator.client().audit())
    assert sum(entry.detail == {"declared": {"methods": [long]}} for entry in entries) == 12
    assert first_broken(entries) is None
    with database.snapshot() as session:
        assert audit.broken_at(session) is None


def test_a_declaration_that_a_newer_version_stored_is_kept_until_the_worker_changes_it(
    coordinator: LiveCoordinator,
) -> None:
    http = coordinator.http("site", "a")

    def claimed(**changes: Any) -> tuple[dict[str, Any], int]:
        assert claim(http, **changes).status_code == 204
        with coordinator.services.database.snapshot() as session:
            stored = session.scalars(select(WorkerRow)).one().declared
            enrolled = select(func.count()).where(AuditRow.action == "worker.enrol")
            return stored, session.scalars(enrolled).one()

    first, _ = claimed()
    with coordinator.services.database.transaction() as session:
        session.scalars(select(WorkerRow)).one().declared = {**first, "novelty": "known"}
    assert claimed() == ({**first, "novelty": "known"}, 1)
    changed, times = claimed(methods=["fedprox"])
    assert (changed["methods"], times) == (["fedprox"], 2)

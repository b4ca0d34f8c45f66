"""How long the coordinator's page takes: p50 and p95 of each page over a database with a long past.

python -m benchmarks.page            two minutes: 1,001 runs, 400,000 tasks, 1.1 million audit entries
python -m benchmarks.page --quick    seconds: to see that it works

The tables are filled directly: runs of many rounds, each with a task for every worker, measured at every site; then
copies of one run, made in the database.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from alembic import command
from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from benchmarks.measuring import OUT, Results
from tessera.coordinator.app import create_app
from tessera.coordinator.auth.tokens import issue_token
from tessera.coordinator.db.engine import alembic_config
from tessera.coordinator.db.tables import (
    AuditRow,
    BlobRow,
    RoundRow,
    RunBlobRow,
    RunRow,
    TaskRow,
    VersionRow,
    WorkerRow,
)
from tessera.coordinator.db.workers import create_site
from tessera.coordinator.server.connections import Server
from tessera.coordinator.server.http_limits import configuration
from tessera.coordinator.server.serve import freeze_imports
from tessera.coordinator.services import Services, assemble
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.audit_chain import GENESIS
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, RunSpec
from tessera.shared.api.tasks import AdvertisedPolicy
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.problems import WorkerFailed

LIMIT_SECONDS = 0.2
LIMIT_PROCESSOR_MS = 100.0
LIMIT_STATUS_MS = 20.0
MODEL_BYTES = 440_000_000
LAYERS = 12
DIGEST = "sha256:" + "0" * 64


WORKERS_PER_SITE = 4
COPIED_ROUNDS, COPIED_COHORT = 100, 2
"""Of each copied run: four tasks a round, half of them evaluations."""
COPIED = f"{'c' * 31}b"


def _copied(number: int) -> str:
    return f"{number:031x}c"


def fill(services: Services, rounds: int, tasks: int, sites: int, copies: int) -> str:
    """Ten runs, the first with half of all rounds, then one and its copies; returns the first run's id."""
    dice = random.Random(0)  # noqa: S311 (no secret)
    now = services.database.now()
    with services.database.transaction() as session:
        workers = []
        for number in range(sites):
            site = create_site(session, now, "benchmark", f"site-{number:03}")
            spec = TokenSpec(name=site.name, role="site", site=site.name)
            token = issue_token(session, now, "benchmark", spec)[0].id
            for gpu in range(WORKERS_PER_SITE):
                row = WorkerRow(id=f"w{number:03}{gpu}", site_id=site.id, name=f"gpu-{gpu}", created_at=now,
                                last_seen_at=now, token_id=token)  # fmt: skip
                row.declared = {"kinds": ["train", "evaluate"], "datasets": {"wards": 1000}, "held_out": {"wards": 9},
                                "methods": ["safl"], "device": "cuda:0", "resources": {},
                                "advertised_policy": AdvertisedPolicy().model_dump(mode="json")}  # fmt: skip
                session.add(row)
                workers.append(row.id)
    runs = [f"{number:032x}" for number in range(10)]
    counts = [rounds // 2] + [rounds // 2 // 9] * 9
    trained = tasks // (2 * sum(counts))
    for run_id, count in zip(runs, counts, strict=True):
        fill_run(services, run_id, count, max(1, trained), workers, dice, now)
    fill_run(services, COPIED, COPIED_ROUNDS, COPIED_COHORT, workers, dice, now)
    with services.database.transaction() as session:
        for number in range(copies):
            _copy(session, COPIED, _copied(number))
    return runs[0]


def _copy(session: Session, run_id: str, other: str) -> None:
    """Copy a run under another id, which takes the place of the run's own in the ids of its rows."""
    last = session.query(func.max(AuditRow.seq)).scalar()
    first = session.query(func.min(AuditRow.seq)).filter(AuditRow.run_id == run_id).scalar()
    for table in (RunRow, VersionRow, RoundRow, TaskRow, AuditRow):
        columns: dict[str, Any] = {column.name: column for column in table.__table__.columns}
        for name in {"id", "run_id", "round_id", "subject", "digest"} & columns.keys():
            columns[name] = func.replace(columns[name], run_id, other)
        if table is AuditRow:
            columns |= {"seq": AuditRow.seq + (last - first + 1), "digest": func.printf("%064d", AuditRow.seq + last)}
        of_run = table.__table__.columns["id" if table is RunRow else "run_id"] == run_id
        session.execute(insert(table).from_select(list(columns), select(*columns.values()).where(of_run)))


def fill_run(
    services: Services, run_id: str, rounds: int, trained: int, workers: list[str], dice: random.Random, now: float
) -> None:
    spec = RunSpec(
        name=f"run-{int(run_id, 16)}", method=MethodSpec(name="safl"), model=DIGEST, version=DIGEST, dataset="wards",
        rounds=rounds + 1, cohort=Cohort(quorum=1), evaluation=Evaluation(sites=True),
    )  # fmt: skip
    opened = run_id.endswith("0")
    run = {"id": run_id, "name": spec.name, "state": "running" if opened else "completed", "reason": None,
           "spec": spec.model_dump(mode="json"), "model_bytes": MODEL_BYTES, "version_number": rounds, "revision": 1,
           "created_at": now - 60.0 * rounds, "resumed_at": now, "updated_at": now}  # fmt: skip
    plan = Plan().model_dump(mode="json")
    versions, rows, audit = [], [], []
    tasks: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        at = now - 60.0 * (rounds - number)
        scalars = {
            f"{name}.{layer}": dice.random() for name in ("picks", "score", "entropy") for layer in range(LAYERS)
        }
        versions.append({"run_id": run_id, "number": number, "digest": DIGEST, "scalars": scalars, "warnings": [],
                         "created_at": at, "retired_at": None})  # fmt: skip
        cohort = dice.sample(workers, min(trained, len(workers)))
        round_id = f"{run_id}-{number}"
        if number:
            rows.append({"id": round_id, "run_id": run_id, "number": number, "attempt": 1, "state": "committed",
                         "stage": "warm-up" if number < rounds / 3 else "frozen", "opened_at": at - 50,
                         "deadline_at": at + 3600, "closed_at": at, "reason": "all tasks ended"})  # fmt: skip
            audit += [(at, f"round.{event}", round_id, run_id) for event in ("open", "close", "commit")]
        for worker in cohort:
            for kind in ("train", "evaluate"):
                if kind == "train" and not number:
                    continue
                measured = {"accuracy": dice.random(), "loss": dice.random(), "macro_f1": dice.random()}
                scores = {"anomaly.norm": 1.0, "anomaly.distance": 1.0, "anomaly.cosine": 0.5, "update_norm": 1.0}
                layers = [f"encoder.layer.{layer}" for layer in sorted(dice.sample(range(LAYERS), 4))]
                task_id = f"{round_id}-{worker}-{kind[0]}"
                tasks.append({
                    "id": task_id, "run_id": run_id, "round_id": round_id if kind == "train" else None,
                    "worker_id": worker, "kind": kind, "held_out": kind == "evaluate", "state": "accepted",
                    "version_number": number - (kind == "train"), "seed": 0, "plan": plan, "token": 1, "attempts": 1,
                    "instance": "0" * 32, "lease_expires_at": at, "created_at": at, "update_digest": None,
                    "upload_bytes": 50_000_000 * (kind == "train"), "download_bytes": 150_000_000, "examples": 1000,
                    "metrics": measured | scores, "progress": {}, "problem": None,
                    "layers": layers if kind == "train" else [],
                })  # fmt: skip
                audit += [(at, f"task.{event}", task_id, run_id) for event in ("lease", "accept")]
    down = {
        kind: sum(task["download_bytes"] for task in tasks if task["kind"] == kind) for kind in ("train", "evaluate")
    }
    run |= {"updates": sum(task["kind"] == "train" for task in tasks), "fetches": len(tasks),
            "upload_bytes": sum(task["upload_bytes"] for task in tasks), "download_bytes": sum(down.values()),
            "evaluation_bytes": down["evaluate"]}  # fmt: skip
    if opened:
        rows.append({**rows[-1], "id": f"{run_id}-open", "number": rounds + 1, "state": "open", "opened_at": now - 20,
                     "closed_at": None, "deadline_at": now + 3600})  # fmt: skip
        tasks += [
            {**tasks[-2], "id": f"{run_id}-open-{worker}", "round_id": f"{run_id}-open", "worker_id": worker,
             "kind": "train", "held_out": False, "state": "leased", "version_number": rounds, "layers": [],
             "progress": {"phase": "training", "step": 5, "steps": 10}}
            for worker in workers[:trained]
        ]  # fmt: skip
    with services.database.transaction() as session:
        first = session.query(AuditRow).count() + 1
        session.execute(insert(RunRow), [run])
        session.execute(insert(VersionRow), versions)
        session.execute(insert(RoundRow), rows)
        session.execute(insert(TaskRow), tasks)
        entries = [{"seq": first + place, "at": at, "actor": "site:x", "action": action, "subject": subject,
                    "run_id": of, "detail": {"token": 1}, "previous": GENESIS, "digest": f"{first + place:064x}"}
                   for place, (at, action, subject, of) in enumerate(audit)]  # fmt: skip
        session.execute(insert(AuditRow), entries)
        blobs = [f"sha256:{run_id}{number:032x}" for number in range(rounds * 5)]
        session.execute(
            insert(BlobRow), [{"digest": d, "size": 1000, "inline": None, "created_at": now} for d in blobs]
        )
        session.execute(insert(RunBlobRow), [{"run_id": run_id, "digest": digest} for digest in blobs])


class Looking:
    """Somebody who is signed in."""

    def __init__(self, url: str, token: str) -> None:
        # The pages have a session, `/metrics` the token.
        headers = {"Sec-Fetch-Site": "same-origin", "Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=url, headers=headers, verify=False, timeout=60)  # noqa: S501 (no TLS)
        answer = self.http.post("/page/sign-in", data={"token": token})
        if answer.status_code != httpx.codes.SEE_OTHER:
            raise RuntimeError(f"signing in gave {answer.status_code}")

    def seconds(self, path: str, times: int) -> tuple[list[float], float]:
        """What each look takes, in order of length, and the processor's time for one, the caller's included."""
        # The first one fills caches, templates among them.
        self.http.get(path).raise_for_status()
        taken, computed = [], time.process_time()
        for _ in range(times):
            began = time.perf_counter()
            answer = self.http.get(path)
            taken.append(time.perf_counter() - began)
            answer.raise_for_status()
        return sorted(taken), (time.process_time() - computed) / times


def measure(results: Results, url: str, token: str, of_site: str, run: str, times: int) -> None:
    looking, site = Looking(url, token), Looking(url, of_site)
    rounds = int(re.findall(r"rounds/(\d+)", looking.http.get(f"/page/runs/{run}").text)[0])
    ways = {
        "overview": "/page/", "runs": "/page/runs", "run": f"/page/runs/{COPIED}",
        "run, what changes": f"/page/runs/{COPIED}?part=live", "rounds": f"/page/runs/{run}/rounds",
        "round": f"/page/runs/{run}/rounds/{rounds}", "sites": "/page/sites", "approvals": "/page/approvals",
        "sites, filtered": "/page/sites?q=site-01&health=well", "worker": "/page/workers/w0000",
        "tokens": "/page/tokens",
        "failures": "/page/failures", "audit": "/page/audit", "audit of a run": f"/page/audit?run={run}",
        "audit, filtered": "/page/audit?who=nothing&what=task",
        "runs compared": f"/page/runs/compare?run={COPIED}&run={_copied(0)}",
        "long run": f"/page/runs/{run}", "long run compared": f"/page/runs/compare?run={run}&run={COPIED}",
        "audit, of a time": "/page/audit?until=2001-01-01T00:00",
        "metrics": "/metrics", "storage": "/page/storage",
        "start": "/page/runs/new?method=safl",
        "a site's own": "/page/site", "a site's run": f"/page/site/runs/{run}",
        "a site's first rounds": f"/page/site/runs/{run}?before=50",
    }  # fmt: skip
    worst = 0.0
    most_processor = _first_scrape(results, looking.http)
    for name, path in ways.items():
        caller = site if name.startswith("a site") else looking
        taken, computed = caller.seconds(path, times)
        p95 = taken[min(len(taken) - 1, int(0.95 * len(taken)))]
        worst = max(worst, p95)
        most_processor = max(most_processor, 1e3 * computed)
        size = len(caller.http.get(path).content)
        results.add(
            page=name,
            p50_ms=1e3 * taken[len(taken) // 2],
            p95_ms=1e3 * p95,
            processor_ms=1e3 * computed,
            kB=size / 1e3,
        )
    results.aim("the slowest page's p95 in seconds", worst, LIMIT_SECONDS)
    results.aim("the most processor time of a page or scrape in ms", most_processor, LIMIT_PROCESSOR_MS)


def measure_status(results: Results, services: Services, url: str, token: str, times: int) -> None:
    """Measure `/v1/admin/status` with twenty live runs, each with a failed task."""
    runs = [_copied(number) for number in range(20)]
    problem = WorkerFailed.of("out-of-memory", "the GPU's memory is full").json()
    with services.database.transaction() as session:
        session.execute(update(RunRow).where(RunRow.id.in_(runs)).values(state="running"))
        failed = TaskRow.run_id.in_(runs) & (TaskRow.kind == "train") & (TaskRow.version_number == 0)
        session.execute(update(TaskRow).where(failed).values(state="failed", problem=problem))
    path = "/v1/admin/status"
    looking = Looking(url, token)
    taken, computed = looking.seconds(path, times)
    size = len(looking.http.get(path).content)
    results.add(page="status, 20 live runs", p50_ms=1e3 * taken[len(taken) // 2], p95_ms=1e3 * taken[-1],
                processor_ms=1e3 * computed, kB=size / 1e3)  # fmt: skip
    results.aim("the status's processor time in ms", 1e3 * computed, LIMIT_STATUS_MS)


def _first_scrape(results: Results, scraping: httpx.Client) -> float:
    began = time.process_time()
    size = len(scraping.get("/metrics").raise_for_status().content)
    computed = 1e3 * (time.process_time() - began)
    results.add(page="metrics, first after a start", p50_ms=None, p95_ms=None, processor_ms=computed, kB=size / 1e3)
    return computed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny past, to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="where results go")
    given = parser.parse_args(arguments)
    rounds, tasks, sites, times, copies = (20, 200, 4, 3, 3) if given.quick else (500, 10_000, 50, 20, 990)
    results = Results(
        "page",
        f"{rounds} rounds and {tasks} tasks of ten runs, {sites} sites and {WORKERS_PER_SITE * sites} workers, and "
        f"{copies + 1} runs of {COPIED_ROUNDS} rounds and {4 * COPIED_ROUNDS} tasks in SQLite; one caller",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = CoordinatorSettings(database_url=f"sqlite:///{folder}/tessera.db", blob_url=str(folder / "blobs"),
                            staging_dir=folder / "staging", liveness_seconds=3600)  # fmt: skip
        services = assemble(settings, duty="serve")
        with services.database.engine.begin() as connection:
            command.upgrade(alembic_config(connection), "head")
        run = fill(services, rounds, tasks, sites, copies)
        with services.database.transaction() as session:
            spec = TokenSpec(name="benchmark", role="admin")
            token = issue_token(session, services.database.now(), "benchmark", spec)[1]
            of_first = TokenSpec(name="people", role="site", site="site-000")
            of_site = issue_token(session, services.database.now(), "benchmark", of_first)[1]
        config = configuration(create_app(services, conduct=False), settings)
        config.port = 0
        freeze_imports()
        server = Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.listeners[0].getsockname()[1]}"
        measure(results, url, token, of_site, run, times)
        measure_status(results, services, url, token, times)
        services.release_waiters()
        server.should_exit = True
        thread.join()
    results.finish(given.out)


if __name__ == "__main__":
    main()

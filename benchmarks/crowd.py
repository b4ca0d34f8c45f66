"""What thousands of workers cost one coordinator: `python -m benchmarks.crowd [--workers 200 1000 2000]`.

A run that buffers updates makes a version of every 100. Each worker is of a site of its own, claims over a new
connection, renews its lease, and sends an update of 10 kB inside its submission, so often that all together offer
`--rate` updates a second. As with `serve`, one process serves and one conducts. The latter notes the time of each
pass, in which it reads the live workers and the run's tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
from sqlalchemy import Engine, event

from benchmarks.federation import DATASET, Federation
from benchmarks.idle import allow_open_files, post
from benchmarks.measuring import MIB, OUT, PeakMemory, Results, processor_seconds, proportional_bytes
from benchmarks.payloads import Weights
from tessera.coordinator import cli
from tessera.coordinator.auth.tokens import issue_token
from tessera.coordinator.conductor.conductor import Conductor
from tessera.coordinator.conductor.liveness import Liveness
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.workers import create_site
from tessera.examples.processes import end_by_interrupt
from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.framing import MEDIA_TYPE, pack_submission, unpack_head
from tessera.shared.api.tasks import Claim, Submission
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.updates.codecs.pipeline import RAW
from tessera.shared.updates.update_file import TrainedBlock, write_update

CLIENTS, UPDATE_BYTES, LEASE_SECONDS = 2, 10_000, 300
LIMITS = {"pass_p99_ms": 10, "claim_p99_s": 1, "MiB": 500}


def conduct(told: Path) -> None:
    """Conduct as `tessera coordinator conduct` does, and write what each look cost."""
    file, asked, spent = told.open("a", encoding="ascii", buffering=1), 0, 0.0

    def timed(of: type, name: str) -> None:
        act = getattr(of, name)

        def timing(*given: Any, **named: Any) -> Any:
            nonlocal asked, spent
            began = time.perf_counter()
            if is_first := name == "workers":
                asked, spent = 0, 0.0
            found = act(*given, **named)
            spent += time.perf_counter() - began
            if not is_first:
                file.write(json.dumps([time.time(), "pass", spent, asked]) + "\n")
            return found

        setattr(of, name, timing)

    def count(*_: object) -> None:
        nonlocal asked
        asked += 1

    timed(Liveness, "workers")
    timed(Conductor, "_look")
    event.listen(Engine, "before_cursor_execute", count)
    cli.conduct(attached=False)


async def work(url: str, folder: Path, part: int, cycle: float) -> None:
    """Be every second worker, each with a task for `cycle` seconds on average."""
    secrets, update = (folder / "tokens").read_text().split(), (folder / "update").read_bytes()
    told, dice = (folder / f"told-{part}").open("w", buffering=1), random.Random(part)  # noqa: S311 (no secret)

    async def ask(what: str, path: str, secret: str, body: bytes, media: str = "application/json") -> bytes:
        """Return an answer's body, which is empty for none and for a refusal."""
        began = time.perf_counter()
        status, answer = await post(url, path, secret, body, media=media)
        named = {200: what, 204: "none"}.get(status, "refused")
        told.write(json.dumps([time.time(), named, time.perf_counter() - began, status]) + "\n")
        return answer if status == 200 else b""

    async def task(secret: str, claim: bytes) -> None:
        if not (answer := await ask("claim", "claim", secret, claim)):
            return
        given = json.loads(unpack_head(answer)[0])
        left = dice.uniform(0, 2 * cycle)
        while left > LEASE_SECONDS / 3:
            await asyncio.sleep(LEASE_SECONDS / 3)
            left -= LEASE_SECONDS / 3
            await ask("renewal", f"{given['id']}/heartbeat", secret, json.dumps({"token": given["token"]}).encode())
        await asyncio.sleep(left)
        # Low bytes of the last two values make another update of it.
        data = update[:-8] + dice.randbytes(2) + update[-6:-4] + dice.randbytes(2) + update[-2:]
        digest, base = f"sha256:{hashlib.sha256(data).hexdigest()}", given["version"]["digest"]
        report = Submission(token=given["token"], version=base, update=digest, examples=8, data=data)
        await ask("accepted", f"{given['id']}/update", secret, pack_submission(report), MEDIA_TYPE)

    async def worker(secret: str) -> None:
        claim = Claim(worker="w", instance=uuid.uuid4().hex, datasets={DATASET: 8}, methods=("fedavg",)).document()
        await asyncio.sleep(dice.uniform(0, 20))
        while True:
            await task(secret, claim.encode())

    await asyncio.gather(*map(worker, secrets[part::CLIENTS]))


def measure(results: Results, folder: Path, count: int, asked: argparse.Namespace) -> None:
    program = (sys.executable, "-m", "benchmarks.crowd")
    with Federation(folder, conduct=False, lease_seconds=LEASE_SECONDS) as federation:
        database, tokens = Database(f"sqlite:///{folder / 'coordinator' / 'tessera.db'}"), []
        with database.transaction() as session:
            for number in range(count):
                site = create_site(session, database.now(), "benchmark", f"s{number}").name
                token = TokenSpec(name=site, role="site", site=site)
                tokens.append(issue_token(session, database.now(), "benchmark", token)[1])
        database.close()
        (folder / "tokens").write_text("\n".join(tokens), encoding="ascii")
        weights = Weights.of(UPDATE_BYTES)
        arrays = [(block, np.frombuffer(data, np.float32).reshape(block.shape)) for block, data in weights.blocks()]
        with (folder / "update").open("wb") as file:
            write_update(
                file, RAW, [TrainedBlock(one, ArrayTensor(array), ArrayTensor(array)) for one, array in arrays]
            )
        start, seen = federation.processes.start, folder / "told-conductor"
        start("conductor", [*program, "--conduct", str(seen)], federation.environment)
        cohort = {"mode": "buffer", "target_updates": asked.buffer, "quorum": asked.buffer, "max_staleness": 1000}
        federation.begin(weights, 10_000, cohort, {"name": "fedavg"}, codec=RAW)
        for part in range(CLIENTS):
            start(
                f"crowd-{part}",
                [*program, "--work", federation.url, f"{folder}", f"{part}", f"{count / asked.rate}"],
                {},
            )
        sleep(asked.warm)
        pids = [federation.processes.pid(name) for name in ("coordinator", "conductor")]
        began, spent = time.time(), [processor_seconds([pid]) for pid in pids]
        with PeakMemory({"both": pids}, 0.5, proportional_bytes) as memory:
            sleep(asked.seconds)
        federation.processes.check()
        passed = time.time() - began
        spent = [processor_seconds([pid]) - old for pid, old in zip(pids, spent, strict=True)]
        found: defaultdict[str, list[float]] = defaultdict(list)
        for line in (line for each in folder.glob("told-*") for line in each.read_text().splitlines()[:-1]):
            at, what, seconds, more = json.loads(line)
            if at > began:
                found[what].append(seconds)
                if what == "pass":
                    found["statements"].append(more)
    accepted = len(found["accepted"])
    (pass50, pass99), (claim50, claim99) = (
        np.percentile(found[of] or [np.nan], [50, 99]).tolist() for of in ("pass", "claim")
    )
    row = {
        "workers": count, "accepted_per_s": accepted / passed, "refused": len(found["refused"]),
        "serving_ms_each": 1e3 * spent[0] / max(accepted, 1), "conducting_ms_each": 1e3 * spent[1] / max(accepted, 1),
        "passes_per_s": len(found["pass"]) / passed, "pass_p50_ms": 1e3 * pass50, "pass_p99_ms": 1e3 * pass99,
        "statements": max(found["statements"], default=0), "claim_p50_s": claim50, "claim_p99_s": claim99,
        "MiB": memory.peaks["both"] / MIB,
    }  # fmt: skip
    results.add(**row)
    if count == 2000:
        results.aim("seconds for 50 accepted updates", 50 / max(row["accepted_per_s"], 1e-9), 1)
        for name, limit in LIMITS.items():
            results.aim(name, row[name], limit)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[200, 1000, 2000])
    parser.add_argument("--buffer", type=int, default=100, help="updates of a version")
    parser.add_argument("--rate", type=float, default=55.0, help="updates that all workers offer a second")
    parser.add_argument("--warm", type=float, default=90.0, help="seconds before the measured ones")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="few workers, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    parser.add_argument("--conduct", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    allow_open_files()
    if given.conduct:
        conduct(given.conduct)
    elif given.work:
        url, folder, part, cycle = given.work
        asyncio.run(work(url, Path(folder), int(part), float(cycle)))
    else:
        end_by_interrupt()
        if given.quick:
            given.workers, given.buffer, given.rate, given.warm, given.seconds = [20], 5, 10.0, 25.0, 5.0
        results = Results("crowd", f"versions of {given.buffer} updates of 10 kB, {given.rate:g} offered a second")
        for count in given.workers:
            with tempfile.TemporaryDirectory(prefix="tessera-crowd-") as name:
                measure(results, Path(name) / "federation", count, given)
        results.finish(given.out)


if __name__ == "__main__":
    main()

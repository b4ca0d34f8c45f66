"""What workers that wait for a task cost their coordinator: `python -m benchmarks.idle [--workers 100 1000 5000]`.

Each waiting worker is a connection that claims as a real worker does: a new connection for each claim, which waits 25
seconds for a task. One coordinator process, on SQLite. Then a run begins that asks all of them at once, and what is
measured is the time from the round's opening until the last one has its task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from benchmarks.federation import DATASET, Federation
from benchmarks.measuring import MIB, OUT, Results, await_true, forget_peak, peak_bytes, processor_seconds
from benchmarks.payloads import Weights
from tessera.examples.processes import end_by_interrupt
from tessera.shared.api.framing import MEDIA_TYPE
from tessera.shared.api.tasks import Claim

WORKERS = (100, 1000, 5000)
SITES = 20
CLIENTS = 2
TELL_SECONDS = 0.25
WAIT_SECONDS = 25
QUICK_WAIT_SECONDS = 1

MOST = 0.30
"""Of one core, for a thousand."""


@dataclass
class Report:
    """What one client process last said of its workers."""

    waiting: int = 0
    answered: int = 0
    """Claims that came back without a task."""
    claimed: int = 0
    refused: int = 0
    last_claim_at: float = 0.0


class Waiting:
    """A process of connections that wait, in the place of a part of the workers."""

    def __init__(self, url: str, tokens: Path, part: range, wait_seconds: int) -> None:
        self.told = Report()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.idle", "--claim", url, str(tokens)),
                *(str(part.start), str(part.stop), str(wait_seconds)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self.told = Report(**json.loads(line))

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
        self._listener.join()


# ---------------------------------------------------------------- the coordinator's side


def allow_open_files() -> None:
    """As many as this machine allows, for this process and those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure(results: Results, folder: Path, count: int, seconds: float, wait_seconds: int) -> None:
    with Federation(folder) as federation:
        tokens = folder / "tokens"
        tokens.write_text("\n".join(federation.site_token(f"site-{index}") for index in range(SITES)))
        pid = federation.coordinator_pid
        began = monotonic()
        share = -(-count // CLIENTS)
        parts = [range(start, min(start + share, count)) for start in range(0, count, share)]
        clients = [Waiting(federation.url, tokens, part, wait_seconds) for part in parts]

        def total(name: str) -> int:
            return sum(getattr(client.told, name) for client in clients)

        try:
            # They begin spread over one wait, and each is entered into the tables once.
            await_true(lambda: total("waiting") >= count, 60 + count / 20, f"{count} workers wait", 0.1)
            enrolled_seconds = monotonic() - began
            sleep(wait_seconds / 5)
            forget_peak(pid)
            spent, answered, at = processor_seconds([pid]), total("answered"), monotonic()
            sleep(seconds)
            passed = monotonic() - at
            share_of_core = (processor_seconds([pid]) - spent) / passed
            polls = (total("answered") - answered) / passed
            idle_peak = peak_bytes(pid)
            spent = processor_seconds([pid])
            run = federation.begin(Weights.of(40_000), rounds=1, cohort=count, method={"name": "fedavg"})
            await_true(lambda: total("claimed") >= count, 60 + count / 10, f"{count} workers have a task", 0.1)
            opened_at = next(iter(federation.admin.rounds(run.id))).opened_at.timestamp()
            last = max(client.told.last_claim_at for client in clients)
            claim_processor, claim_peak = processor_seconds([pid]) - spent, peak_bytes(pid)
        finally:
            for client in clients:
                client.close()
    results.add(
        workers=count,
        enrolled_s=enrolled_seconds,
        polls_per_s=polls,
        of_one_core=share_of_core,
        ms_per_poll=1e3 * share_of_core / polls if polls else None,
        MiB=idle_peak / MIB,
        last_claim_s=last - opened_at,
        claims_cpu_s=claim_processor,
        MiB_claiming=claim_peak / MIB,
        refused=total("refused"),
    )
    if count == 1000:
        results.aim("a thousand waiting workers, of one core", share_of_core, MOST)


# ---------------------------------------------------------------- the workers' side


async def post(
    url: str, path: str, secret: str, body: bytes, wait_seconds: int = WAIT_SECONDS, media: str = "application/json"
) -> tuple[int, bytes]:
    """Send a request about tasks over a new connection. Return the status and the body of its answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST /v1/tasks/{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nPrefer: wait={wait_seconds}\r\n"
            f"Authorization: Bearer {secret}\r\nContent-Type: {media}\r\nAccept: {MEDIA_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        return int(head[9:12] or 0), answer
    finally:
        writer.close()


async def claim_forever(url: str, tokens: Path, part: range, wait_seconds: int) -> None:
    secrets = tokens.read_text().split()
    told = Report()

    async def worker(index: int) -> None:
        body = Claim(
            worker=f"w{index}",
            instance=uuid.uuid4().hex,
            datasets={DATASET: 8},
            methods=("fedavg",),
        ).model_dump_json()
        secret = secrets[index % len(secrets)]
        await asyncio.sleep(random.random() * wait_seconds)  # noqa: S311  (so that not all come at once)
        told.waiting += 1
        while True:
            status, _ = await post(url, "claim", secret, body.encode(), wait_seconds)
            if status == 200:
                told.claimed += 1
                told.last_claim_at = time.time()
                return
            told.answered += status == 204
            if status != 204:
                told.refused += 1
                await asyncio.sleep(1)

    async def tell() -> None:
        while True:
            print(json.dumps(vars(told)), flush=True)
            await asyncio.sleep(TELL_SECONDS)

    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(worker(index)) for index in part]
    telling = asyncio.create_task(tell())
    await loop.run_in_executor(None, sys.stdin.read)
    for task in (*tasks, telling):
        task.cancel()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    parser.add_argument("--seconds", type=float, default=30.0, help="how long waiting is measured")
    parser.add_argument("--quick", action="store_true", help="few workers, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    parser.add_argument("--claim", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.claim:
        url, tokens, start, stop, wait = given.claim
        asyncio.run(claim_forever(url, Path(tokens), range(int(start), int(stop)), int(wait)))
        return
    end_by_interrupt()
    allow_open_files()
    results = Results("idle", f"workers that wait, each claim for {WAIT_SECONDS} s; one coordinator process")
    with tempfile.TemporaryDirectory(prefix="tessera-idle-") as folder:
        if given.quick:
            measure(results, Path(folder) / "quick", 20, 1.5, QUICK_WAIT_SECONDS)
        else:
            for count in given.workers:
                print(f"{count} workers ...", flush=True)
                measure(results, Path(folder) / str(count), count, given.seconds, WAIT_SECONDS)
    results.finish(given.out)


if __name__ == "__main__":
    main()

"""What the coordinator's limits cost a request: `python -m benchmarks.guards [--quick]`.

Each alone, in processor time of this process, with nothing refused; the median of several runs. An idle poll meets
the first four.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import process_time

from starlette.types import Message, Receive, Scope, Send

from benchmarks.measuring import OUT, Results, median
from tessera.coordinator.api.request_limits import in_time
from tessera.coordinator.limits.disk import DiskSpace
from tessera.coordinator.limits.memory import Memory
from tessera.coordinator.limits.rate import CallerRates
from tessera.coordinator.telemetry.request_timing import Timing, Tracing
from tessera.shared.telemetry.trace_ids import HEADER, traceparent_of

CALLS = 20_000
QUICK_CALLS = 200
RUNS = 5


def microseconds(work: Callable[[], object], calls: int) -> float:
    def run() -> float:
        began = process_time()
        for _ in range(calls):
            work()
        return 1e6 * (process_time() - began) / calls

    return median(run() for _ in range(RUNS))


async def asynchronously(work: Callable[[], Awaitable[object]], calls: int) -> float:
    async def run() -> float:
        began = process_time()
        for _ in range(calls):
            await work()
        return 1e6 * (process_time() - began) / calls

    return median([await run() for _ in range(RUNS)])


async def tracing() -> None:
    await Tracing(_nothing)(SCOPE, _receive, _send)


async def timing() -> None:
    await Timing(_nothing)({**SCOPE, "method": "GET"}, _receive, _send)


async def reading() -> None:
    async with in_time(60.0, 10.0) as came:
        came()


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that does not answer."""


async def _receive() -> Message:
    return {}


async def _send(message: Message) -> None:
    """Nobody listens."""


SCOPE = {
    "type": "http",
    "headers": [(b"host", b"coordinator"), (b"accept", b"*/*"), (HEADER.encode(), traceparent_of("run", 1).encode())],
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few calls only, to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that the results are written to")
    given = parser.parse_args(arguments)
    calls = QUICK_CALLS if given.quick else CALLS
    results = Results("guards", "the coordinator's limits, processor time for each request")
    admission = CallerRates(1e9, 60, 60)
    room, memory = DiskSpace([Path(tempfile.gettempdir())], 0), Memory(None)
    results.add(guard="rate of a token", us=microseconds(lambda: admission.count_request("token"), calls))
    results.add(guard="trace id", us=asyncio.run(asynchronously(tracing, calls)))
    results.add(guard="time of a request", us=asyncio.run(asynchronously(timing, calls)))
    results.add(guard="time of a body", us=asyncio.run(asynchronously(reading, calls)))
    results.add(guard="room on the disk", us=microseconds(lambda: room.require(1), calls))
    results.add(guard="memory", us=microseconds(memory.share, calls))
    results.finish(given.out)


if __name__ == "__main__":
    main()

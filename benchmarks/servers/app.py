"""What a coordinator does with bulk bytes and nothing else of it, for any ASGI server: a file is sent, and what comes
in is hashed and written. Nothing but the standard library, since each server has an environment of its own.

TESSERA_BENCH_FILE names the file that is sent; what comes in is written beside it. TESSERA_BENCH_SEND says how:
`pieces` through the application, or `path`, which leaves the file to the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

STREAM_BYTES = 1 << 20

Message = dict[str, Any]


async def app(scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]) -> None:
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    file = Path(os.environ["TESSERA_BENCH_FILE"])
    if scope["method"] == "GET":
        await _send_file(file, send)
    else:
        await _receive_file(file.parent, receive, send)


async def _send_file(path: Path, send: Callable[[Message], Any]) -> None:
    size = path.stat().st_size
    headers = [(b"content-length", str(size).encode()), (b"content-type", b"application/octet-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if os.environ["TESSERA_BENCH_SEND"] == "path":
        await send({"type": "http.response.pathsend", "path": str(path)})
        return
    with path.open("rb", buffering=0) as file:
        while size:
            piece = await asyncio.to_thread(file.read, STREAM_BYTES)
            size -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": size > 0})


async def _receive_file(
    folder: Path, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]
) -> None:
    found, held, more = hashlib.sha256(), bytearray(), True
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def keep(piece: bytes) -> None:
            found.update(piece)
            file.write(piece)

        while more:
            message = await receive()
            more = message.get("more_body", False)
            held += message.get("body", b"")
            if len(held) >= STREAM_BYTES or not more:
                await asyncio.to_thread(keep, bytes(held))
                held.clear()
    body = found.hexdigest().encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""A real mail server: SMTP with TLS from the start or STARTTLS, and with a sign-in, on loopback."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message


@dataclass
class Mailbox:
    tls: ssl.SSLContext
    implicit: bool = False
    offers_tls: bool = True
    port: int = 0
    said: list[str] = field(default_factory=list)
    """Every command, with `TLS ` before those that came encrypted."""
    mails: list[Message] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def answer(line: str) -> None:
            writer.write(f"{line}\r\n".encode())
            await writer.drain()

        await answer("220 mail.test")
        while line := (await reader.readline()).decode().strip():
            is_secure = writer.get_extra_info("sslcontext") is not None
            self.said.append(f"{'TLS ' if is_secure else ''}{line}")
            match line.split()[0].upper():
                case "EHLO":
                    await answer("250-mail.test")
                    await answer("250 AUTH PLAIN" if is_secure or not self.offers_tls else "250 STARTTLS")
                case "STARTTLS":
                    await answer("220 go ahead")
                    await writer.start_tls(self.tls)
                case "AUTH":
                    given = base64.b64decode(line.split()[2]).split(b"\0")
                    await answer("235 welcome" if given[1:] == [b"tessera", b"open sesame"] else "535 no")
                case "DATA":
                    await answer("354 go on")
                    lines = []
                    while (part := await reader.readline()) != b".\r\n":
                        lines.append(part)
                    self.mails.append(message_from_bytes(b"".join(lines)))
                    await answer("250 taken")
                case "QUIT":
                    await answer("221 bye")
                    break
                case _:
                    await answer("250 well")
        writer.close()


@contextmanager
def mailing(tls: ssl.SSLContext, **options: bool) -> Iterator[Mailbox]:
    box, loop = Mailbox(tls, **options), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(box.serve, "127.0.0.1", 0, ssl=tls if box.implicit else None)

    async def end() -> None:
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    box.port = server.sockets[0].getsockname()[1]
    try:
        yield box
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

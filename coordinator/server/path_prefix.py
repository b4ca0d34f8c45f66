"""The path under which a proxy serves the coordinator: `/tessera` of `https://hospital.example/tessera`."""

import re

from markupsafe import escape
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera.coordinator.dashboard.security_headers import PREFIX, under

# In text, quotation marks are escaped: only a page's own attributes match.
_LINK = re.compile(rb'( (?:href|src|action|formaction|data-events)=")/(?!/)')


class PathPrefix:
    """Takes a path off the requests whose proxy left it there, and puts it before the links, redirects and cookies of
    the dashboard."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path
        self._linked = b"\\1" + str(escape(path)).encode().replace(b"\\", b"") + b"/"
        self._cookie = (f"; Path={PREFIX}".encode(), f"; Path={path}{PREFIX}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if under(scope["path"], self._path):
            scope["path"] = scope["path"].removeprefix(self._path) or "/"
        # The start of a page waits for its body, whose length changes.
        waiting: list[Message] = []

        async def rewritten(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, value.replace(*self._cookie) if name == b"set-cookie" else value)
                    for name, value in message["headers"]
                ]
                headers = MutableHeaders(scope=message)
                if under(location := headers.get("Location", ""), PREFIX):
                    headers["Location"] = self._path + location
                if headers.get("Content-Type", "").startswith("text/html"):
                    waiting.append(message)
                    return
            elif waiting:
                start = waiting.pop()
                message = {**message, "body": _LINK.sub(self._linked, message["body"])}
                MutableHeaders(scope=start)["Content-Length"] = str(len(message["body"]))
                await send(start)
            await send(message)

        await self._app(scope, receive, rewritten)

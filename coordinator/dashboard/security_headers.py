"""Security headers of every response of the dashboard."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera.shared.problems import PAGES

PREFIX = "/page"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}

KEEP = "public, max-age=31536000, immutable"
"""A file's address changes with its content; pages are not cached."""

TLS_ONLY = "max-age=31536000"


class SecurityHeaders:
    """Adds the headers to every response under /page and /problems, including refusals and files."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not under(scope["path"], PREFIX, PAGES):
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                is_file = message["status"] in (200, 206) and scope["path"].startswith(f"{PREFIX}/static/")
                headers.setdefault("Cache-Control", KEEP if is_file else "no-store")
                if scope["scheme"] == "https":
                    headers["Strict-Transport-Security"] = TLS_ONLY
            await send(message)

        await self._app(scope, receive, guarded)


def under(path: str, *prefixes: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)

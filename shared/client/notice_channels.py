"""The channels of notices to people: a webhook, and a command of the operator."""

import base64
import hashlib
import hmac
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Annotated, Protocol
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr

from tessera.shared.version import VERSION

MAX_PORT = 65_535
CONNECT_SECONDS = 5.0
SEND_SECONDS = 20.0
"""Maximum time from the connection to the receiver's answer, however slowly it sends that."""
MIN_KEY_BYTES = 24


def _to_https(url: SecretStr) -> SecretStr:
    """Raise ValueError, without the URL, unless it is one of HTTPS."""
    found = re.fullmatch(r"https://[A-Za-z0-9.-]+(:([0-9]{1,5}))?(/[!-~]*)?", url.get_secret_value())
    if not found or int(found[2] or 443) > MAX_PORT:
        raise ValueError(f"must be https://HOST/PATH, with a port of at most {MAX_PORT} if there is one")
    return url


WebhookUrl = Annotated[SecretStr, AfterValidator(_to_https)]


class Undelivered(Exception):
    """The receiver did not take a notice. The text has no secret and may be logged."""


class Channel(Protocol):
    @property
    def name(self) -> str: ...
    def send(self, notice: Mapping[str, str] | None, now: float) -> None:
        """Send a notice, or only check the channel if there is none. Raises Undelivered."""


@contextmanager
def connected(host: str, port: int, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """Yield a TLS connection, which is cut after SEND_SECONDS. Raise Undelivered for every fault within `with`."""
    try:
        # The copy shares the connection, and stays when TLS takes the socket over.
        with socket.create_connection((host, port), CONNECT_SECONDS) as plain, plain.dup() as copy:
            plain.settimeout(SEND_SECONDS)
            timer = threading.Timer(SEND_SECONDS, _cut, (copy,))
            timer.daemon = True
            timer.start()
            try:
                with context.wrap_socket(plain, server_hostname=host) as secured:
                    yield secured
            finally:
                timer.cancel()
    except (OSError, HTTPException, UnicodeError) as fault:
        raise Undelivered(_reason(host, fault)[:300]) from fault


def _reason(host: str, fault: Exception) -> str:
    """Return the meaning of a fault of the network, TLS, the receiver or a file, with the remedy if it is known."""
    match fault:
        case ssl.SSLCertVerificationError():
            return f"{host} has no trusted certificate ({fault.verify_message}); for your own CA, set SSL_CERT_FILE"
        case ssl.SSLError():
            return f"{host} does not speak TLS as expected ({fault.reason}); check the port"
        case socket.gaierror() | UnicodeError():
            return f"{host} has no address in DNS; correct the name, or check this machine's DNS"
        case OSError(filename=str() as path):
            return f"{path} cannot be read: {fault.strerror}"
    return f"{host}: {type(fault).__name__}: {fault}"


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def post(
    secured: ssl.SSLSocket, host: str, target: str, body: bytes, headers: Mapping[str, str], read_bytes: int = 0
) -> bytes:
    """Send a body, and return the first bytes of the answer. Raise Undelivered unless its status is a success."""
    connection = HTTPSConnection(host, secured.getpeername()[1], context=secured.context)
    connection.sock = secured
    connection.request("POST", target, body, dict(headers))
    with connection.getresponse() as answer:
        if not 200 <= answer.status < 300:
            said = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
            raise Undelivered(f"{host} answered {answer.status}{said}")
        return answer.read(read_bytes)


class Webhook:
    """Notices as JSON by HTTPS, signed as Standard Webhooks has it (https://www.standardwebhooks.com)."""

    name = "webhook"

    def __init__(self, url: SecretStr, secret_file: Path | None) -> None:
        # Its path may contain a secret: nothing but the host is ever shown.
        parts = urlsplit(url.get_secret_value())
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        self._secret_file = secret_file

    def send(self, notice: Mapping[str, str] | None, now: float) -> None:
        """Send a notice, or only connect if there is none. Raise Undelivered."""
        context = ssl.create_default_context()
        with connected(self._host, self._port, context) as secured:
            headers, body = self._signed(notice or {"id": ""}, int(now))
            if notice is None:
                return
            post(secured, self._host, self._target, body, headers)

    def _signed(self, notice: Mapping[str, str], now: int) -> tuple[dict[str, str], bytes]:
        body, file = json.dumps(dict(notice)).encode(), self._secret_file
        kind, key = "", b""
        # A file that is no text, or no base64.
        with suppress(ValueError):
            kind, _, encoded = (file.read_text(encoding="utf-8-sig").strip() if file else "").partition("_")
            key = base64.b64decode(encoded, validate=True)
        if kind != "whsec" or len(key) < MIN_KEY_BYTES:
            raise Undelivered(f"{file} has no key; write whsec_ and {MIN_KEY_BYTES} or more bytes in base64")
        digest = hmac.digest(key, f"{notice['id']}.{now}.".encode() + body, hashlib.sha256)
        return {
            "Content-Type": "application/json",
            "User-Agent": f"Tessera/{VERSION}",
            "webhook-id": notice["id"],
            "webhook-timestamp": str(now),
            "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
        }, body


class Command:
    """A command of the operator, which gets each notice as JSON on its standard input."""

    name = "command"

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def send(self, notice: Mapping[str, str] | None, now: float) -> None:
        if notice is None:
            if shutil.which(self._command[0]) is None:
                raise Undelivered(f"{self._command[0]} cannot be started: there is no such program")
            return
        # Settings of Tessera may be secrets, such as a worker's token.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
        try:
            ended = subprocess.run(  # noqa: S603  (the operator's own)
                self._command,
                input=json.dumps(dict(notice)).encode(),
                timeout=SEND_SECONDS,
                env=environment,
                check=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise Undelivered(f"{self._command[0]} did not end within {SEND_SECONDS:g} s") from None
        except (OSError, ValueError) as fault:
            raise Undelivered(f"{self._command[0]} cannot be started: {fault}") from fault
        if ended.returncode:
            raise Undelivered(f"{self._command[0]} ended with {ended.returncode}")


def channels(webhook: SecretStr | None, secret_file: Path | None, command: Sequence[str]) -> list[Channel]:
    """Return the channels that are set."""
    found: list[Channel] = []
    if webhook:
        found.append(Webhook(webhook, secret_file))
    return [*found, Command(command)] if command else found

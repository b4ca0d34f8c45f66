"""Notices to a webhook: each travels over TLS, to an address that was checked, in bounded time."""

import base64
import hashlib
import hmac
import json
import re
import smtplib
import socket
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr

from tessera.shared.urls import is_public
from tessera.shared.version import VERSION

MAX_PORT = 65_535
CONNECT_SECONDS = 5.0
MAX_ADDRESSES = 3
"""Addresses of a host that are tried."""
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


@contextmanager
def connected(host: str, port: int, private_hosts: Collection[str]) -> Iterator[socket.socket]:
    """Yield a connection to a host, which is cut after SEND_SECONDS. Raise Undelivered for every fault within `with`.

    The name is resolved once, and the addresses that it has then are checked and connected to: an answer of DNS that
    changes in between (DNS rebinding) reaches nothing else.
    """
    try:
        found = _addresses(host, port)
        allowed = [address for address in found if host in private_hosts or is_public(address)]
        if not allowed:
            remedy = "if it is meant to have a private one, name it in TESSERA_NOTICE_PRIVATE_HOSTS"
            raise Undelivered(f"{host} has no public address ({', '.join(found)}); {remedy}")
        # The copy shares the connection, and stays when TLS takes the socket over.
        with _first(allowed[:MAX_ADDRESSES], port) as opened, opened.dup() as copy:
            timer = threading.Timer(SEND_SECONDS, _cut, (copy,))
            timer.daemon = True
            timer.start()
            try:
                yield opened
            finally:
                timer.cancel()
    # ValueError: a user that SMTP cannot carry.
    except (OSError, HTTPException, ValueError) as fault:
        raise Undelivered(_reason(host, fault)[:300]) from fault


def _reason(host: str, fault: Exception) -> str:
    """Return what a fault of the network, TLS, the receiver or a file means, with the remedy if it is known."""
    match fault:
        case ssl.SSLCertVerificationError():
            return f"{host} has no trusted certificate ({fault.verify_message}); for your own CA, set SSL_CERT_FILE"
        case ssl.SSLError():
            return f"{host} does not speak TLS as expected ({fault.reason}); check the port"
        case socket.gaierror():
            return f"{host} has no address in DNS; correct the name, or check this machine's DNS"
        case smtplib.SMTPAuthenticationError():
            return (
                f"{host} refuses the user or the password ({fault.smtp_code}); correct TESSERA_SMTP_URL or the file "
                "that TESSERA_SMTP_PASSWORD_FILE names"
            )
        case UnicodeError():
            return f"{host} cannot receive the user of TESSERA_SMTP_URL: a sign-in carries ASCII characters alone"
        case smtplib.SMTPNotSupportedError():
            return f"{host} offers no STARTTLS or no sign-in; use its port for TLS, smtps://"
        case OSError(filename=str() as path):
            return f"{path} cannot be read: {fault.strerror}"
    return f"{host}: {type(fault).__name__}: {fault}"


def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raise gaierror if DNS has none, or cannot have such a name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise socket.gaierror from None
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def _first(addresses: Collection[str], port: int) -> socket.socket:
    """Return a connection to the first of these addresses that accepts one."""
    for address in addresses:
        with suppress(OSError):
            opened = socket.create_connection((address, port), CONNECT_SECONDS)
            opened.settimeout(SEND_SECONDS)
            return opened
    raise ConnectionError(f"no connection to {' or '.join(addresses)}, port {port}")


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Webhook:
    """Notices as JSON by HTTPS, signed as Standard Webhooks has it (https://www.standardwebhooks.com)."""

    name = "webhook"

    def __init__(self, url: SecretStr, secret_file: Path | None, private_hosts: Collection[str] | None) -> None:
        """Only `private_hosts` may have a private address; any host if None."""
        # Its path may contain a secret: nothing but the host is ever shown.
        parts = urlsplit(url.get_secret_value())
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        self._secret_file = secret_file
        self._private_hosts = (self._host,) if private_hosts is None else private_hosts

    def send(self, notice: Mapping[str, str] | None, now: float) -> None:
        """Send a notice, or only connect if there is none. Raise Undelivered."""
        context = ssl.create_default_context()
        with (
            connected(self._host, self._port, self._private_hosts) as plain,
            context.wrap_socket(plain, server_hostname=self._host) as secured,
        ):
            headers, body = self._signed(notice or {"id": ""}, int(now))
            if notice is None:
                return
            connection = HTTPSConnection(self._host, self._port, context=context)
            connection.sock = secured
            connection.request("POST", self._target, body, headers)
            status = connection.getresponse().status
            if not 200 <= status < 300:
                said = " (redirects are not followed)" if 300 <= status < 400 else ""
                raise Undelivered(f"{self._host} answered {status}{said}")

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

"""Webhook and mail: each notice travels over TLS, to an address that was checked, in bounded time."""

import base64
import hashlib
import hmac
import json
import smtplib
import socket
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.urls import is_public
from tessera.shared.version import VERSION

CONNECT_SECONDS = 5.0
MAX_ADDRESSES = 3
"""Addresses of a host that are tried."""
SEND_SECONDS = 20.0
"""Maximum time from the connection to the receiver's answer, however slowly it sends that."""
MIN_KEY_BYTES = 24

log = structlog.get_logger()


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

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        # Its path may contain a secret: nothing but the host is ever shown.
        url = urlsplit(settings.webhook_url.get_secret_value() if settings.webhook_url else "")
        self._host, self._port = url.hostname or "", url.port or 443
        self._target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"

    def send(self, notice: Mapping[str, str] | None, now: float) -> None:
        """Send a notice, or only connect if there is none. Raise Undelivered."""
        context = ssl.create_default_context()
        with (
            connected(self._host, self._port, self._settings.notice_private_hosts) as plain,
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
        body, file = json.dumps(dict(notice)).encode(), self._settings.webhook_secret_file
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


class Mail:
    """Notices by mail, over TLS from the start (`smtps`) or before anything else is said (`smtp`, STARTTLS)."""

    name = "mail"

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        url = urlsplit(settings.smtp_url or "")
        self._is_tls = url.scheme == "smtps"
        self._host, self._port = url.hostname or "", url.port or (465 if self._is_tls else 587)
        self._user = unquote(url.username or "")
        self._domain = (settings.mail_from or "").rpartition("@")[2]

    def send(self, notice: Mapping[str, str] | None, now: float) -> None:
        """Send a notice, or only connect and sign in if there is none. Raise Undelivered."""
        context, file = ssl.create_default_context(), self._settings.smtp_password_file
        with connected(self._host, self._port, self._settings.notice_private_hosts) as plain:
            server = smtplib.SMTP(local_hostname=self._domain, timeout=SEND_SECONDS)
            server.sock = context.wrap_socket(plain, server_hostname=self._host) if self._is_tls else plain
            # The name against which `starttls` verifies the certificate.
            vars(server)["_host"] = self._host
            try:
                server.getreply()
                if not self._is_tls:
                    server.starttls(context=context)
                if self._user and file:
                    server.login(self._user, _password(file))
                if notice and (refused := server.send_message(self._message(notice))):
                    log.warning("notice.recipients_refused", count=len(refused))
            finally:
                # After the message was taken, a fault of the farewell is none of its.
                with suppress(OSError):
                    server.quit()
                server.close()

    def _message(self, notice: Mapping[str, str]) -> EmailMessage:
        message = EmailMessage()
        message["Subject"] = f"Tessera: {notice['title']}"
        message["From"], message["To"] = self._settings.mail_from, ", ".join(self._settings.mail_to)
        # The same at each attempt, so that programs show a repeated mail once.
        message["Message-ID"] = f"<{notice['id']}@{self._domain}>"
        message["Auto-Submitted"] = "auto-generated"
        message.set_content("{title}\n\n{link}\n\n{code}, {at}\n".format_map(notice))
        return message


def _password(file: Path) -> str:
    """Return the password in a file. Raise Undelivered for one that no sign-in can carry."""
    try:
        return file.read_text(encoding="ascii").strip()
    except UnicodeError:
        raise Undelivered(f"{file} has a character beyond ASCII; use a password of ASCII characters") from None


Channel = Webhook | Mail


def channels(settings: CoordinatorSettings) -> list[Channel]:
    """Return the channels of the settings."""
    found: list[Channel] = [Webhook(settings)] if settings.webhook_url else []
    return [*found, Mail(settings)] if settings.smtp_url else found

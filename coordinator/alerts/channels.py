"""Webhook and mail: each notice travels over TLS, to an address that was checked, in bounded time."""

import smtplib
import ssl
from collections.abc import Mapping
from contextlib import suppress
from email.message import EmailMessage
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.client.webhook import SEND_SECONDS, Undelivered, Webhook, connected

log = structlog.get_logger()


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
    found: list[Channel] = []
    if url := settings.webhook_url:
        found.append(Webhook(url, settings.webhook_secret_file, settings.notice_private_hosts))
    return [*found, Mail(settings)] if settings.smtp_url else found

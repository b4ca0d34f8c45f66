"""Receivers of the coordinator's audit: a file, syslog over TLS, a webhook, and OTLP logs."""

import json
import os
import re
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from tessera.shared.api.admin import AuditEntry
from tessera.shared.client.notice_channels import MAX_PORT, Undelivered, connected, post
from tessera.shared.version import VERSION

FORMS = "file:///FOLDER/FILE, syslog+tls://HOST:6514, https://HOST/PATH or otlp+https://HOST:4318/v1/logs"
_URL = re.compile(r"(syslog\+tls|https|otlp\+https)://([A-Za-z0-9.-]+)(?::([0-9]{1,5}))?(/[!-~]*)?")

PRIORITY = 13 * 8 + 6
"""Facility 'log audit' and severity 'informational' (RFC 5424, section 6.2.1)."""
MAX_SEQUENCE = 2**31 - 1
BLOCK_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 16


class AuditSink(Protocol):
    def send(self, entries: Sequence[AuditEntry]) -> None:
        """Send entries in their order and return once the receiver has them; without any, only check that it can be
        reached. Raises Undelivered: the receiver may then have some of them."""


def line_of(entry: AuditEntry) -> bytes:
    """Return an entry as one line of JSON, with its digests: `tessera audit verify --file` reads such lines."""
    return entry.model_dump_json().encode() + b"\n"


@dataclass(frozen=True)
class FileSink:
    """Lines at the end of a file, which is opened at each batch, so that it may be moved away between two."""

    path: Path

    def send(self, entries: Sequence[AuditEntry]) -> None:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                if not entries:
                    return
                # A crash may have left a part of a line, whose entry is sent again.
                file.truncate(_end_of_lines(file))
                file.write(b"".join(map(line_of, entries)))
                file.flush()
                os.fsync(file.fileno())
            # The name of a new file.
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as fault:
            raise Undelivered(f"{self.path} cannot be written: {fault.strerror or fault}") from fault


def _end_of_lines(file: BinaryIO) -> int:
    """Return the number of bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        if (last := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + last + 1
        end = begin
    return 0


@dataclass(frozen=True)
class SyslogSink:
    """Messages of RFC 5424 over TLS, each behind its length (RFC 5425). Each batch has a connection of its own."""

    host: str
    port: int
    context: ssl.SSLContext

    def send(self, entries: Sequence[AuditEntry]) -> None:
        with connected(self.host, self.port, self.context) as secured:
            for entry in entries:
                message = syslog_message(entry)
                secured.sendall(b"%d %b" % (len(message), message))
            # Syslog has no acknowledgement. A receiver answers the end of the session, or closes the connection,
            # behind the last message (RFC 5425, section 4.4); one that died resets the connection or is silent.
            with suppress(ssl.SSLEOFError, ssl.SSLZeroReturnError):
                secured.unwrap()


def syslog_message(entry: AuditEntry) -> bytes:
    host = re.sub(r"[^!-~]", "", socket.gethostname())[:255] or "-"
    sequence = (entry.seq - 1) % MAX_SEQUENCE + 1
    head = f'<{PRIORITY}>1 {entry.at.isoformat()} {host} tessera - audit [meta sequenceId="{sequence}"] '
    return head.encode() + line_of(entry).rstrip()


@dataclass(frozen=True)
class HttpSink:
    """Requests by HTTPS: lines of JSON, or log records of OTLP in JSON."""

    host: str
    port: int
    target: str
    is_otlp: bool
    context: ssl.SSLContext
    authorization_file: Path | None
    """The value of the header `Authorization`, read at each request."""

    def send(self, entries: Sequence[AuditEntry]) -> None:
        kind = "application/json" if self.is_otlp else "application/x-ndjson"
        body = _otlp(entries) if self.is_otlp else b"".join(map(line_of, entries))
        with connected(self.host, self.port, self.context) as secured:
            headers = {"Content-Type": kind, "User-Agent": f"Tessera/{VERSION}"}
            if file := self.authorization_file:
                headers["Authorization"] = file.read_text(encoding="utf-8-sig").strip()
            if not entries:
                return
            said = post(secured, self.host, self.target, body, headers, MAX_ANSWER_BYTES if self.is_otlp else 0)
        if rejected := _rejected(said):
            raise Undelivered(f"{self.host} rejected log records: {rejected}")


def _otlp(entries: Sequence[AuditEntry]) -> bytes:
    """Return a request of OTLP's log service in its JSON form."""
    records = [
        {
            "timeUnixNano": str(round(entry.at.timestamp() * 1e6) * 1_000),
            "severityNumber": 9,
            "severityText": "INFO",
            "eventName": f"tessera.audit.{entry.action}",
            "body": {"stringValue": line_of(entry).decode().rstrip()},
            "attributes": [
                {"key": "tessera.audit.seq", "value": {"intValue": str(entry.seq)}},
                *(
                    {"key": f"tessera.audit.{name}", "value": {"stringValue": value}}
                    for name in ("actor", "action", "subject", "run", "digest")
                    if (value := getattr(entry, name)) is not None
                ),
            ],
        }
        for entry in entries
    ]
    resource = {"service.name": "tessera-coordinator", "service.version": VERSION}
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in resource.items()]
    scope = {"scope": {"name": "tessera.audit"}, "logRecords": records}
    return json.dumps({"resourceLogs": [{"resource": {"attributes": attributes}, "scopeLogs": [scope]}]}).encode()


def _rejected(answer: bytes) -> str:
    """Return the reason of a partial success; empty if the receiver has all records."""
    try:
        partial = json.loads(answer or b"{}").get("partialSuccess") or {}
        return (
            str(partial.get("errorMessage") or "no reason given")[:200]
            if int(partial.get("rejectedLogRecords", 0))
            else ""
        )
    except (ValueError, AttributeError, TypeError):
        # An answer with a status of success in another form, such as protobuf.
        return ""


def audit_sink(url: str, ca_file: Path | None, authorization_file: Path | None) -> AuditSink:
    """Return the sink of a URL. Raise ValueError with the fault and its remedy."""
    if url.startswith("file:"):
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute() or not path.name:
            raise ValueError(f"{url} names no file: write file:///FOLDER/FILE")
        if not path.parent.is_dir():
            raise ValueError(f"the folder {path.parent} does not exist: create it, or correct {url}")
        return FileSink(path)
    found = _URL.fullmatch(url)
    if not found or int(found[3] or 1) > MAX_PORT or (found[1] == "syslog+tls" and found[4] not in (None, "/")):
        raise ValueError(f"must be {FORMS}")
    scheme, host, port, path_ = found.groups()
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as fault:
        raise ValueError(f"{ca_file} cannot be used: {fault.strerror or fault}; name a PEM file of CAs") from None
    if scheme == "syslog+tls":
        return SyslogSink(host, int(port or 6514), context)
    is_otlp = scheme == "otlp+https"
    target = path_ if path_ and path_ != "/" else "/v1/logs" if is_otlp else "/"
    return HttpSink(host, int(port or 443), target, is_otlp, context, authorization_file)

"""The audit sent to real receivers: every entry arrives, in order, whatever fails in between."""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import trustme
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from sqlalchemy import select, text

from tessera.coordinator.alerts import audit_sink as audit_sink_module
from tessera.coordinator.alerts.attention import LAG_SECONDS
from tessera.coordinator.alerts.audit_sink import BATCH, AuditShipper
from tessera.coordinator.audit_sinks import PRIORITY, FileSink, audit_sink
from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import AuditRow
from tessera.shared.api.admin import AuditEntry
from tessera.shared.api.audit_chain import first_broken
from tessera.shared.client.notice_channels import Undelivered
from tests.support.cli import tessera
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.processes import CoordinatorProcess
from tests.support.scripted import Answer, Asked, answering_by


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def receiving(authority: trustme.CA, tmp_path: Path) -> ssl.SSLContext:
    """A receiver's TLS as localhost; the CA's certificate is in ca.pem."""
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def written(coordinator: LiveCoordinator, count: int) -> None:
    """Write this many entries to the audit."""
    database = coordinator.services.database
    with database.transaction() as session:
        for number in range(count):
            audit.record(session, database.now(), "me", "act", f"s{number}", detail="ü")


def last_of(coordinator: LiveCoordinator) -> int:
    with coordinator.services.database.snapshot() as session:
        return len(session.scalars(select(AuditRow.seq)).all())


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent but by the test."""
    monkeypatch.setattr(audit_sink_module, "LOOK_SECONDS", 3600.0)


def shipper_of(coordinator: LiveCoordinator) -> AuditShipper:
    assert coordinator.services.shipper
    return coordinator.services.shipper


def entries_in(lines: bytes) -> list[AuditEntry]:
    """The entries of JSON lines without repeats, which form an intact chain."""
    entries = [AuditEntry.model_validate_json(line) for line in dict.fromkeys(lines.splitlines())]
    assert first_broken(entries) is None
    return entries


# ---------------------------------------------------------------- file


def test_a_file_gets_each_entry_when_it_is_written_and_can_be_verified_alone(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with LiveCoordinator(tmp_path / "c", audit_sink=file.as_uri()) as coordinator:
        admin = coordinator.client()
        for name in ("north", "south"):
            admin.create_site(name)
            until(lambda: file.exists() and len(entries_in(file.read_bytes())) == last_of(coordinator))
        head = list(admin.audit())[-1].digest
        (south,) = (known for known, name in admin.audit_names().items() if name == "south")
    assert south in file.read_text()
    verified = tessera("audit", "verify", "--file", str(file), "--head", head)
    assert verified.returncode == 0, verified.stderr
    assert head in verified.stdout
    file.write_text(file.read_text().replace(south, "site-0"))
    assert "was changed" in tessera("audit", "verify", "--file", str(file)).stderr
    file.write_text("{}\n")
    assert "give --key-file" in tessera("audit", "verify", "--file", str(file)).stderr


@pytest.mark.usefixtures("by_hand")
def test_a_line_that_a_crash_has_torn_is_written_again_whole(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with LiveCoordinator(tmp_path / "c", audit_sink=file.as_uri()) as coordinator:
        shipper = shipper_of(coordinator)
        written(coordinator, 3)
        shipper.ship()
        written(coordinator, 2 * BATCH)
        line = FileSink(file)
        for torn in (b'{"seq":', b"x" * 200_000):
            with file.open("ab") as broken:
                broken.write(torn)
            # To see whether it can be written repairs nothing: another process may be in the middle of a line.
            line.send(())
            assert file.read_bytes().endswith(torn)
            shipper.ship()
            written(coordinator, 1)
            shipper.ship()
            assert [entry.seq for entry in entries_in(file.read_bytes())] == [*range(1, last_of(coordinator) + 1)]
        # Moved away, as logs are.
        file.rename(tmp_path / "old.jsonl")
        written(coordinator, 1)
        shipper.ship()
        whole = (tmp_path / "old.jsonl").read_bytes() + file.read_bytes()
        assert len(entries_in(whole)) == last_of(coordinator)
        assert file.stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------- syslog


class SyslogReceiver:
    """A receiver of RFC 5425, which reads a connection to its end, and then does `at_end`."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.messages: list[bytes] = []
        self.at_end: Callable[[ssl.SSLSocket], object] = ssl.SSLSocket.unwrap
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        # Wakes `accept`.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                raw, _ = self._listening.accept()
            except OSError:
                return
            with suppress(OSError), self.context.wrap_socket(raw, server_side=True) as line:
                data = b""
                while piece := line.recv(1 << 16):
                    data += piece
                self.messages += frames(data)
                self.at_end(line)


def frames(data: bytes) -> Iterator[bytes]:
    """Yield the whole messages of a stream in octet counting (RFC 6587, section 3.4.1)."""
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or len(rest) < int(length):
            return
        yield rest[: int(length)]
        data = rest[int(length) :]


def reset(line: ssl.SSLSocket) -> None:
    """End a connection as a machine does that lost its power and is back."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def closed(line: ssl.SSLSocket) -> None:
    """End a connection without TLS's own ending, as some receivers do."""


def syslog_seqs(messages: list[bytes]) -> list[int]:
    found = []
    for message in messages:
        head = re.fullmatch(
            rb"<%d>1 (\S+T\S+\+00:00) \S+ tessera - audit \[meta sequenceId=\"(\d+)\"\] (\{.*\})" % PRIORITY, message
        )
        assert head, message
        entry = AuditEntry.model_validate_json(head[3])
        assert (int(head[2]), head[1].decode()) == (entry.seq, entry.at.isoformat())
        found.append(entry.seq)
    return found


@pytest.mark.usefixtures("by_hand")
def test_syslog_gets_all_entries_in_order_and_those_of_a_lost_connection_again(
    tmp_path: Path, receiving: ssl.SSLContext
) -> None:
    with SyslogReceiver(receiving) as receiver:
        settings = {"audit_sink": f"syslog+tls://localhost:{receiver.port}", "audit_sink_ca": tmp_path / "ca.pem"}
        with LiveCoordinator(tmp_path / "c", **settings) as coordinator:
            shipper = shipper_of(coordinator)
            written(coordinator, BATCH + 7)
            shipper.ship()
            receiver.at_end = closed
            written(coordinator, 1)
            shipper.ship()
            first = last_of(coordinator)
            assert syslog_seqs(receiver.messages) == [*range(1, first + 1)]
            # The receiver has read everything, and dies before it says so.
            receiver.at_end = reset
            written(coordinator, 1)
            with pytest.raises(Undelivered):
                shipper.ship()
            receiver.at_end = ssl.SSLSocket.unwrap
            written(coordinator, 1)
            shipper.ship()
            assert syslog_seqs(receiver.messages) == [*range(1, first + 2), first + 1, first + 2]


# ---------------------------------------------------------------- webhook and OTLP


class Receiver:
    """A receiver of requests, which answers with `answer`."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answer = Answer(204, b"")

    @contextmanager
    def at(self, tls: ssl.SSLContext) -> Iterator[int]:
        with answering_by(lambda _: self.answer, self.asked, tls) as url:
            yield port_of(url)


@pytest.mark.usefixtures("by_hand")
def test_what_a_webhook_does_not_take_is_sent_again_and_people_hear_of_it(
    tmp_path: Path, receiving: ssl.SSLContext
) -> None:
    receiver, clock, secret = Receiver(), Clock(), tmp_path / "authorization"
    secret.write_text("Bearer s3cret\n")
    with receiver.at(receiving) as port:
        settings = {
            "audit_sink": f"https://localhost:{port}/audit?of=tessera",
            "audit_sink_ca": tmp_path / "ca.pem",
            "audit_sink_authorization_file": secret,
        }
        with LiveCoordinator(tmp_path / "c", clock=clock, **settings) as coordinator:
            shipper, viewer = shipper_of(coordinator), coordinator.http("viewer")
            written(coordinator, 3)
            receiver.answer = Answer(503)
            with pytest.raises(Undelivered, match="localhost answered 503"):
                shipper.ship()

            def concerns() -> list[dict[str, Any]]:
                found = viewer.get("/v1/admin/status").json()["needs_attention"]
                return [one for one in found if one["code"] == "audit-sink"]

            def unsent_seconds() -> float:
                (found,) = re.findall(
                    r"^tessera_audit_unsent_seconds (\S+)$", viewer.get("/metrics").text, re.MULTILINE
                )
                return float(found)

            assert concerns() == []
            clock.advance(LAG_SECONDS + 1)
            (concern,) = concerns()
            assert concern["detail"].endswith("localhost answered 503")
            assert unsent_seconds() == LAG_SECONDS + 1
            receiver.answer = Answer(204, b"")
            shipper.ship()
            assert (concerns(), unsent_seconds()) == ([], 0)
            first, second = receiver.asked
            assert first.body == second.body
            assert second.path == "/audit?of=tessera"
            assert (second.headers["Authorization"], second.headers["Content-Type"]) == (
                "Bearer s3cret", "application/x-ndjson",
            )  # fmt: skip
            assert len(entries_in(second.body)) == last_of(coordinator)
            shipper.ship()
            assert len(receiver.asked) == 2
            secret.unlink()
            written(coordinator, 1)
            with pytest.raises(Undelivered, match="authorization cannot be read"):
                shipper.ship()


@pytest.mark.usefixtures("by_hand")
def test_otlp_logs_are_what_the_protocol_describes_and_a_partial_success_is_none(
    tmp_path: Path, receiving: ssl.SSLContext
) -> None:
    receiver = Receiver()
    with receiver.at(receiving) as port:
        settings = {"audit_sink": f"otlp+https://localhost:{port}", "audit_sink_ca": tmp_path / "ca.pem"}
        with LiveCoordinator(tmp_path / "c", **settings) as coordinator:
            shipper = shipper_of(coordinator)
            written(coordinator, 2)
            receiver.answer = Answer(200, b'{"partialSuccess": {"rejectedLogRecords": "1", "errorMessage": "full"}}')
            with pytest.raises(Undelivered, match="rejected log records: full"):
                shipper.ship()
            receiver.answer = Answer(200, b'{"partialSuccess": {}}')
            shipper.ship()
            asked = receiver.asked[-1]
            assert (asked.path, asked.headers["Content-Type"]) == ("/v1/logs", "application/json")
            # Strict: an unknown field or a value of another type is refused.
            request = json_format.Parse(asked.body, ExportLogsServiceRequest())
            records = request.resource_logs[0].scope_logs[0].log_records
            entries = entries_in(b"\n".join(record.body.string_value.encode() for record in records))
            assert len(entries) == last_of(coordinator)
            told = {one.key: one.value.int_value or one.value.string_value for one in records[-1].attributes}
            assert told["tessera.audit.seq"] == entries[-1].seq
            assert told["tessera.audit.action"] == "act"
            assert records[-1].time_unix_nano == round(entries[-1].at.timestamp() * 1e6) * 1000


# ---------------------------------------------------------------- crashes


def test_a_conductor_killed_between_sending_and_storing_loses_no_entry(
    tmp_path: Path, receiving: ssl.SSLContext
) -> None:
    asked: list[Asked] = []
    running: list[CoordinatorProcess] = []
    kills = [1]

    def taken(_: Asked) -> Answer:
        """The request has arrived. Its sender is killed once before the answer."""
        if kills[0]:
            kills[0] -= 1
            for child in psutil.Process(running[0].process.pid).children():
                child.kill()
                child.wait()
        return Answer(204, b"")

    with answering_by(taken, asked, receiving) as url:
        sink = {"audit_sink": f"https://localhost:{port_of(url)}/", "audit_sink_ca": tmp_path / "ca.pem"}
        coordinator = CoordinatorProcess(tmp_path / "c", **sink)
        running.append(coordinator)
        coordinator.launch()
        try:
            until(coordinator._ready)
            admin = coordinator.admin()
            for number in range(5):
                admin.create_site(f"s{number}")
            chain = list(admin.audit())

            def received() -> list[int]:
                return [json.loads(line)["seq"] for each in asked for line in each.body.splitlines()]

            until(lambda: kills == [0] and len(asked) > 1 and received()[-1] == len(chain))
            assert received().count(1) > 1
            assert entries_in(b"".join(each.body for each in asked)) == chain
        finally:
            coordinator.__exit__()


# ---------------------------------------------------------------- refusals


@pytest.mark.both_databases
def test_a_request_whose_entry_cannot_be_written_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path) as coordinator:
        admin, engine = coordinator.http(), coordinator.services.database.engine
        # A coordinator closes a connection on which it failed.
        admin.headers["Connection"] = "close"
        admin.post("/v1/sites", json={"name": "north"})
        reader = admin.post("/v1/admin/tokens", json={"name": "reader", "role": "viewer"}).json()["id"]
        (site,) = admin.get("/v1/sites").json()["items"]
        tokens = admin.get("/v1/admin/tokens").json()
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE audit RENAME TO away"))
        refused = [
            admin.post("/v1/sites", json={"name": "south"}).status_code,
            admin.post(f"/v1/sites/{site['id']}/suspend").status_code,
            admin.post("/v1/admin/tokens", json={"name": "n", "role": "viewer"}).status_code,
            admin.delete(f"/v1/admin/tokens/{reader}").status_code,
        ]
        assert min(refused) >= 500
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE away RENAME TO audit"))
        assert admin.get("/v1/sites").json()["items"] == [site]
        assert admin.get("/v1/admin/tokens").json() == tokens


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ("syslog://logs.example", "must be file:///FOLDER/FILE, syslog+tls://"),
        ("http://logs.example/x", "must be file:///FOLDER/FILE"),
        ("https://user:pw@logs.example/x", "must be file:///FOLDER/FILE"),
        ("https://logs.example:99999/x", "must be file:///FOLDER/FILE"),
        ("syslog+tls://logs.example/path", "must be file:///FOLDER/FILE"),
        ("file:audit.jsonl", "names no file: write file:///FOLDER/FILE"),
        ("file://elsewhere/var/log/audit.jsonl", "names no file"),
        ("file:///", "names no file"),
        ("file:///no/such/folder/audit.jsonl", "the folder /no/such/folder does not exist: create it"),
    ],
)
def test_a_sink_that_cannot_be_meant_stops_the_start_with_the_reason(sink: str, said: str) -> None:
    refused = tessera("coordinator", "config", "show", TESSERA_AUDIT_SINK=sink)
    assert refused.returncode == 2
    assert f"audit_sink: {said}" in refused.stderr.replace(sink + " names", "names")


def test_a_missing_file_of_cas_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.pem cannot be used: No such file or directory; name a PEM file"):
        audit_sink("https://logs.example/", tmp_path / "none.pem", None)

"""Notices of what needs a person, to real receivers: signed, once, and in bounded attempts."""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import SecretStr, ValidationError
from sqlalchemy import update

from tessera.coordinator.alerts.attention import AWAY_SECONDS, LATELY_SECONDS
from tessera.coordinator.alerts.notices import FORGET_SECONDS, RETRY_SECONDS
from tessera.coordinator.db.tables import EnrolmentRow, RunRow
from tessera.coordinator.services import Services, assemble
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.cohort import Cohort
from tessera.shared.client import notice_channels
from tessera.shared.client.notice_channels import Command, Undelivered, Webhook
from tessera.worker.governance.notices import NoticeSettings
from tests.support.cli import tessera
from tests.support.coordinator import ROOMY, Clock, LiveCoordinator, until
from tests.support.databases import url_in
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.paths import ROOT
from tests.support.scripted import Answer, Asked, answering_by
from tests.support.storage import add_run

SECRET = f"whsec_{base64.b64encode(b'k' * 24).decode()}"
PAGE = "https://tessera.example/page"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A receiver's TLS as localhost and as hooks.example, whose CA this process trusts."""
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return receiving_tls(authority)


def receiving_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "hooks.example").configure_cert(context)
    return context


class Receiver:
    """A webhook's receiver, which answers with `status`."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.status, self.headers = 204, {}
        self.port = 0

    def answer(self, asked: Asked) -> Answer:
        return Answer(self.status, b"", self.headers)

    @property
    def titles(self) -> list[str]:
        return [json.loads(asked.body)["title"] for asked in self.asked]


@pytest.fixture
def receiver(trusted: ssl.SSLContext) -> Iterator[Receiver]:
    receiver = Receiver()
    with answering_by(receiver.answer, receiver.asked, trusted) as url:
        receiver.port = int(url.rpartition(":")[2])
        yield receiver


def hook(folder: Path, port: int, host: str = "localhost", **more: Any) -> dict[str, Any]:
    """The settings of a webhook on this machine."""
    (folder / "secret").write_text(SECRET + "\n")
    return {
        "public_url": "https://tessera.example/",
        "webhook_url": f"https://{host}:{port}/path-secret?key=query-secret",
        "webhook_secret_file": folder / "secret",
        **more,
    }


@contextmanager
def serving(folder: Path, clock: Clock, **settings: Any) -> Iterator[Services]:
    """The parts of a process that serves, without its server."""
    places = {"database_url": url_in(folder), "blob_url": str(folder / "blobs"), "staging_dir": folder / "staging"}
    services = assemble(CoordinatorSettings(**places, **{**ROOMY, **settings}), clock, "serve")
    yield services
    services.database.close()


def paused(services: Services, run_id: str = "digits", resumed_at: float = 0.0) -> None:
    with services.database.transaction() as session:
        row = session.get(RunRow, run_id) or add_run(session, run_id)
        row.state, row.resumed_at, row.reason = "paused", resumed_at, "merge failed: loss 0.123 of patient 7"


def is_genuine(asked: Asked, now: float, secret: str = SECRET) -> bool:
    """By the code of the documents."""
    code: dict[str, Any] = {}
    document = (ROOT / "docs/operating/notices.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", document, re.DOTALL)[0], code)  # noqa: S102 (of the documents)
    check: Callable[..., bool] = code["is_genuine"]
    return check(secret, {name.lower(): value for name, value in asked.headers.items()}, asked.body, now)


def test_a_notice_is_signed_and_has_a_name_a_code_and_a_link_alone(tmp_path: Path, receiver: Receiver) -> None:
    clock = Clock()
    with serving(tmp_path, clock, **hook(tmp_path, receiver.port)) as services:
        paused(services)
        services.notifiers[0].look()
    (asked,) = receiver.asked
    body = json.loads(asked.body)
    assert body == {
        "id": asked.headers["webhook-id"],
        "at": "2027-01-15T08:00:00+00:00",
        "code": "run-paused",
        "title": "digits is paused",
        "link": f"{PAGE}/runs/digits",
    }
    assert (asked.method, asked.path) == ("POST", "/path-secret?key=query-secret")
    assert asked.headers["Host"] == f"localhost:{receiver.port}"
    assert is_genuine(asked, clock.at)
    assert not is_genuine(asked, clock.at + 301)
    assert not is_genuine(asked, clock.at, f"whsec_{base64.b64encode(b'l' * 24).decode()}")
    asked.body = asked.body.replace(b"paused", b"mended")
    assert not is_genuine(asked, clock.at)


def test_a_worker_s_notice_is_signed_too(tmp_path: Path, receiver: Receiver) -> None:
    given = hook(tmp_path, receiver.port)
    url, secret = SecretStr(given["webhook_url"]), given["webhook_secret_file"]
    notice = {"id": "7", "code": "site-decides", "title": "Worker w waits for: approval of demo"}
    (worker,) = NoticeSettings(webhook=url, webhook_secret_file=secret).channels
    worker.send(notice, 1_800_000_000)
    (asked,) = receiver.asked
    assert (json.loads(asked.body), is_genuine(asked, 1_800_000_000)) == (notice, True)


def test_a_command_gets_each_notice_once_and_no_setting_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_PUBLIC_URL", "https://tessera.example")
    command = ("/bin/sh", "-c", f"cat >> {tmp_path}/sent; env >> {tmp_path}/environment")
    with serving(tmp_path, Clock(), public_url="https://tessera.example", notice_command=command) as services:
        paused(services)
        for _ in range(2):
            services.notifiers[0].look()
    notice = json.loads((tmp_path / "sent").read_text())
    assert (notice["code"], notice["link"]) == ("run-paused", f"{PAGE}/runs/digits")
    assert "TESSERA_" not in (tmp_path / "environment").read_text()


def test_notices_of_every_channel_are_counted(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path) as coordinator:
        counted = coordinator.http("viewer").get("/metrics").text
    assert set(re.findall(r'tessera_notices_total\{channel="(\w+)"', counted)) == {Command.name, Webhook.name}


@pytest.mark.both_databases
def test_a_condition_is_notified_once_over_a_restart_and_by_two_replicas(tmp_path: Path, receiver: Receiver) -> None:
    clock, settings = Clock(), hook(tmp_path, receiver.port)
    with serving(tmp_path, clock, **settings) as one, serving(tmp_path, clock, **settings) as other:
        paused(one)
        looks = [threading.Thread(target=services.notifiers[0].look) for services in (one, other)]
        for look in looks:
            look.start()
        for look in looks:
            look.join()
        other.notifiers[0].look()
    # Nothing was looked at for longer than a condition that has gone is remembered.
    clock.advance(2 * FORGET_SECONDS)
    with serving(tmp_path, clock, **settings) as again:
        again.notifiers[0].look()
        assert receiver.titles == ["digits is paused"]
        # It was resumed, and paused again before anyone looked.
        paused(again, resumed_at=clock.at)
        again.notifiers[0].look()
        assert receiver.titles == ["digits is paused"] * 2


def test_a_condition_that_returns_is_notified_again_after_it_was_gone_for_an_hour(
    tmp_path: Path, receiver: Receiver
) -> None:
    clock = Clock()
    with serving(tmp_path, clock, **hook(tmp_path, receiver.port, disk_reserve_bytes=1 << 52)) as services:
        (notifier,), disk = services.notifiers, services.disk

        def look(reserve_bytes: int, after_seconds: float) -> int:
            clock.advance(after_seconds)
            disk._reserve_bytes = reserve_bytes
            notifier.look()
            return len(receiver.asked)

        assert look(1 << 52, 0) == 1
        assert look(0, FORGET_SECONDS) == 1
        # It is the same one, and lasts on from here.
        assert look(1 << 52, -1) == 1
        assert look(0, FORGET_SECONDS + 1) == 1
        assert look(1 << 52, 0) == 2


def test_a_process_that_dies_while_it_sends_leaves_the_notice_to_another(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Ends it as SIGKILL does: nothing of it is done after this."""

    def killed(*_: object) -> None:
        raise Killed

    clock, settings = Clock(), hook(tmp_path, receiver.port)
    with serving(tmp_path, clock, **settings) as one, serving(tmp_path, clock, **settings) as other:
        paused(one)
        with monkeypatch.context() as patched:
            patched.setattr(notice_channels, "connected", killed)
            with pytest.raises(Killed):
                one.notifiers[0].look()
        other.notifiers[0].look()
        assert receiver.asked == []
        clock.advance(RETRY_SECONDS[0])
        other.notifiers[0].look()
        assert receiver.titles == ["digits is paused"]


def test_a_clock_that_is_set_back_puts_no_notice_off_until_it_has_caught_up(
    tmp_path: Path, receiver: Receiver
) -> None:
    clock = Clock()
    receiver.status = 503
    with serving(tmp_path, clock, **hook(tmp_path, receiver.port)) as services:
        paused(services)
        services.notifiers[0].look()
        clock.advance(-86_400)
        services.notifiers[0].look()
        clock.advance(RETRY_SECONDS[-1])
        services.notifiers[0].look()
        assert receiver.titles == ["digits is paused"] * 2


def test_attempts_are_few_with_longer_and_longer_pauses_and_of_one_id(tmp_path: Path, receiver: Receiver) -> None:
    clock = Clock()
    receiver.status = 503
    with serving(tmp_path, clock, **hook(tmp_path, receiver.port)) as services:
        (notifier,) = services.notifiers
        paused(services)
        notifier.look()
        for count, pause in enumerate(RETRY_SECONDS, start=1):
            clock.advance(pause - 1)
            notifier.look()
            assert len(receiver.asked) == count
            clock.advance(1)
            notifier.look()
        assert (len(receiver.asked), notifier.sent, notifier.failed) == (len(RETRY_SECONDS) + 1, 0, 1)
        assert len({asked.headers["webhook-id"] for asked in receiver.asked}) == 1
        receiver.status = 200
        clock.advance(86_400)
        notifier.look()
        # Another condition is told of none the less.
        paused(services, "scans")
        notifier.look()
        assert (receiver.titles[-1], notifier.sent, notifier.failed) == ("scans is paused", 1, 1)
        assert len(receiver.asked) == len(RETRY_SECONDS) + 2


def undelivered(settings: dict[str, Any]) -> str:
    """What a channel says that could not send; never a part of the URL beside its host."""
    given = CoordinatorSettings(**settings)
    with pytest.raises(Undelivered) as caught:
        given.notice_channels[0].send(
            {"id": "1", "code": "test", "title": "t", "link": PAGE, "at": "now"}, 1_800_000_000.0
        )
    assert "path-secret" not in str(caught.value)
    assert "query-secret" not in str(caught.value)
    return str(caught.value)


def test_a_redirect_is_not_followed(tmp_path: Path, receiver: Receiver) -> None:
    receiver.status, receiver.headers = 307, {"Location": f"https://localhost:{receiver.port}/elsewhere"}
    assert undelivered(hook(tmp_path, receiver.port)) == "localhost answered 307 (redirects are not followed)"
    assert len(receiver.asked) == 1


def test_a_receiver_of_another_authority_or_without_tls_gets_nothing(tmp_path: Path, trusted: ssl.SSLContext) -> None:
    for tls in (receiving_tls(trustme.CA()), None):
        asked: list[Asked] = []
        with answering_by(lambda _: Answer(), asked, tls) as url:
            told = undelivered(hook(tmp_path, int(url.rpartition(":")[2])))
        assert "no trusted certificate" in told if tls else "does not speak TLS" in told
        assert asked == []


def test_what_stops_a_notice_is_told_with_its_remedy(tmp_path: Path, trusted: ssl.SSLContext) -> None:
    with answering_by(lambda _: Answer(), [], receiving_tls(trustme.CA())) as url:
        given = hook(tmp_path, int(url.rpartition(":")[2]))
        told = undelivered(given)
        assert told.startswith("localhost has no trusted certificate (")
        assert told.endswith("; for your own CA, set SSL_CERT_FILE")
    with answering_by(lambda _: Answer(), [], trusted) as url:
        given = hook(tmp_path, int(url.rpartition(":")[2]))
        absent = tmp_path / "absent"
        assert undelivered(given | {"webhook_secret_file": absent}) == (
            f"{absent} cannot be read: No such file or directory"
        )
        for written in (b"whsec_%", b"whsec_\xff\x00"):
            (tmp_path / "secret").write_bytes(written)
            assert "write whsec_ and 24 or more bytes in base64" in undelivered(given)
    # A label of 64 letters is too long for DNS, so no resolver is asked.
    unknown = undelivered(hook(tmp_path, 443, "a" * 64))
    assert unknown.endswith("has no address in DNS; correct the name, or check this machine's DNS")


@pytest.mark.parametrize(
    ("variable", "value", "example"),
    [
        ("TESSERA_NOTICE_COMMAND", "secret", '["/usr/local/bin/tell-admins"]'),
        ("TESSERA_OIDC_ROLES", "secret=admin", '{"tessera-admins": "admin"}'),
    ],
)
def test_a_list_that_is_not_json_is_refused_with_an_example(variable: str, value: str, example: str) -> None:
    said = tessera("coordinator", "config", "show", **{variable: value})
    assert said.returncode == 2
    assert said.stderr == f"setting {variable}: must be JSON, such as {example}\n"


def test_a_receiver_that_answers_byte_by_byte_is_cut_off(
    tmp_path: Path, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_channels, "SEND_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            raw, _ = listening.accept()
            with suppress(OSError), trusted.wrap_socket(raw, server_side=True) as line:
                line.recv(1 << 16)
                line.sendall(b"HTTP/1.1 ")
                # Each byte comes long before the time of a single read is over.
                while not never.wait(0.02):
                    line.sendall(b"x")

        never = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        assert undelivered(hook(tmp_path, listening.getsockname()[1]))
        thread.join(30)
        assert not thread.is_alive()


def test_people_hear_of_what_lasts_at_sites_and_of_strangers_once(tmp_path: Path, receiver: Receiver) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, **hook(tmp_path, receiver.port)) as coordinator:
        (notifier,), model = coordinator.services.notifiers, small_model()
        database = coordinator.services.database

        def told(after_seconds: float = 0.0) -> list[str]:
            before = len(receiver.asked)
            clock.advance(after_seconds)
            notifier.look()
            return receiver.titles[before:]

        run = start_run(coordinator.client(), model, values(model), name="cats", cohort=Cohort(size=1), rounds=2)
        # A run that has just begun waits for its workers, which is nothing to tell.
        assert told() == []
        assert told(AWAY_SECONDS - 1) == []
        worker = ScriptedWorker(coordinator.client("site", "north"))
        worker.train(worker.take())
        assert told(2) == []
        # The worker ends. At first the run waits, and then the site is away as well.
        assert told(100) == []
        assert set(told(AWAY_SECONDS)) == {"north is away", "cats waits for workers"}
        with database.transaction() as session:
            for number in range(3):
                session.add(enrolment(str(number), clock.at))
        assert told() == ["3 workers wait for enrolment"]
        with database.transaction() as session:
            session.add(enrolment("9", clock.at + 1))
        assert told() == []
        with database.transaction() as session:
            session.execute(update(EnrolmentRow).where(EnrolmentRow.id == "0").values(state="declined"))
            session.execute(update(RunRow).where(RunRow.id == run.id).values(state="paused", updated_at=clock.at))
        assert set(told()) == {"3 workers wait for enrolment", "cats is paused"}
        counted = coordinator.http("viewer").get("/metrics").text
        assert f'tessera_notices_total{{channel="webhook",outcome="sent"}} {len(receiver.asked)}.0' in counted
        page = coordinator.http("viewer").get("/v1/admin/status").text
        assert "secret" not in page


def test_people_hear_of_a_task_that_fails_more_than_a_day_after_its_offer(tmp_path: Path, receiver: Receiver) -> None:
    clock, model = Clock(), small_model()
    settings = hook(tmp_path, receiver.port, lease_seconds=LATELY_SECONDS)
    with LiveCoordinator(tmp_path, clock=clock, **settings) as coordinator:
        worker = ScriptedWorker(coordinator.client("site", "north")).enrol()
        cohort = Cohort(deadline_seconds=2 * LATELY_SECONDS)
        start_run(coordinator.client(), model, values(model), cohort=cohort)
        task = worker.take()
        clock.advance(LATELY_SECONDS - 1)
        worker.client.heartbeat(task.id, task.token)
        clock.advance(3600)
        worker.fail(task)
        coordinator.services.notifiers[0].look()
        assert "1 task failed within a day" in receiver.titles

        def codes() -> set[str]:
            with coordinator.services.database.snapshot() as session:
                return {alert.code for alert in coordinator.services.alerts(session, clock.at)}

        clock.advance(LATELY_SECONDS)
        assert "tasks-failed" in codes()
        clock.advance(1)
        assert "tasks-failed" not in codes()


def enrolment(name: str, at: float) -> EnrolmentRow:
    return EnrolmentRow(
        id=name, code=name, secret_hash=name, state="pending", site="s", worker="w", device="", version="",
        address="", created_at=at, expires_at=at + 900,
    )  # fmt: skip


def test_what_cannot_be_delivered_is_told_by_doctor_which_also_sends_a_test(
    tmp_path: Path, receiver: Receiver
) -> None:
    places = {"database_url": url_in(tmp_path), "blob_url": f"{tmp_path}/blobs", "staging_dir": f"{tmp_path}/staging"}
    given = {**places, **hook(tmp_path, receiver.port), "port": 1}
    variables = {f"TESSERA_{name.upper()}": str(value) for name, value in given.items()}

    def doctor(*options: str) -> tuple[str, str]:
        said = tessera("coordinator", "doctor", "--json", *options, **variables)
        assert "path-secret" not in said.stdout + said.stderr
        (found,) = [one for one in json.loads(said.stdout)["findings"] if one["name"] == "webhook"]
        return found["verdict"], found["detail"]

    assert doctor()[0] == "ok"
    assert receiver.asked == []
    assert doctor("--notify") == ("ok", "a test notice was taken")
    assert receiver.titles == ["This is a test: notices arrive"]
    for text in ("secret", "whsec_c2hvcnQ=", "whsec_%"):
        (tmp_path / "secret").write_text(text)
        verdict, detail = doctor()
        assert verdict == "fail", detail
    shown = tessera("coordinator", "config", "show", **variables)
    assert shown.returncode == 0, shown.stderr
    assert "path-secret" not in shown.stdout
    assert "***" in shown.stdout


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"public_url": None}, "require public_url"),
        ({"webhook_secret_file": None}, "webhook_url and webhook_secret_file require each other"),
        ({"webhook_url": "http://hooks.example/path-secret"}, "must be https://HOST/PATH"),
        ({"webhook_url": "https://user:path-secret@hooks.example/"}, "must be https://HOST/PATH"),
        ({"webhook_url": "https://hooks.example/path-secret\r\nX: y"}, "must be https://HOST/PATH"),
        ({"webhook_url": "https://hooks.example:99999/path-secret"}, "a port of at most 65535"),
    ],
)
def test_settings_that_notify_nobody_are_refused_without_what_is_secret(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said) as refused:
        CoordinatorSettings(**{**hook(tmp_path, 1), **wrong})
    assert "path-secret" not in str(refused.value)


def test_a_notifier_looks_by_itself(tmp_path: Path, receiver: Receiver) -> None:
    """Beside a server, in a thread of its own, once its workers had time to call."""
    with serving(tmp_path, Clock(), **hook(tmp_path, receiver.port, liveness_seconds=0.01)) as services:
        paused(services)
        (notifier,) = services.notifiers
        notifier.start()
        until(lambda: notifier.sent == 1)
        notifier.end()

"""`tessera worker join` and `rotate` against a real coordinator, and what they leave on the disk."""

from __future__ import annotations

import json
import signal
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import Result
from typer.testing import CliRunner

from tessera.coordinator.auth.tokens import issue_token
from tessera.coordinator.db.workers import create_site
from tessera.shared.api.admin import Approval, Enrolment, TokenSpec
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.client.client import Client
from tessera.shared.problems import Unauthenticated
from tessera.worker.cli import join
from tessera.worker.cli.worker import app
from tessera.worker.enrolment import NEXT, prepare, rotate, wait_for
from tessera.worker.settings import SettingsError
from tessera.worker.state.atomic_files import write_secret
from tests.support.coordinator import LiveCoordinator, until
from tests.support.scripted import Answer, Asked, answering, answering_by


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path_factory.mktemp("live"), enrolments_per_minute=1_000) as coordinator:
        yield coordinator


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for its admission asks more often than the coordinator wants."""
    monkeypatch.setattr(join, "wait_for", partial(wait_for, sleep=lambda _: time.sleep(0.05)))


def say(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == code, done.output
    return done


def decided(live: LiveCoordinator, folder: Path, approve: bool) -> Result:
    """Joins, and has an administrator decide."""
    admin = live.client()

    def waiting() -> Enrolment | None:
        return next(iter(admin.enrolments()), None)

    with ThreadPoolExecutor(1) as pool:
        arguments = ["join", live.url, "--site", "north", "--name", "gpu-1", "--config", str(folder / "worker.toml")]
        joined = pool.submit(say, *arguments, code=0 if approve else 3)
        asked = until(waiting)
        if approve:
            admin.approve(asked.id, Approval(code=asked.code, site="north", create_site=True))
        else:
            admin.decline(asked.id)
        done = joined.result(20)
    assert asked.code in done.output
    return done


def test_an_interrupted_join_says_that_the_same_command_continues(live: LiveCoordinator, tmp_path: Path) -> None:
    admin, main_thread = live.client(), threading.get_ident()

    def interrupt() -> Enrolment:
        asked = until(lambda: next(iter(admin.enrolments()), None))
        signal.pthread_kill(main_thread, signal.SIGINT)
        return asked

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(interrupt)
        done = say("join", live.url, "--site", "north", "--config", str(tmp_path / "worker.toml"), code=130)
    admin.decline(asked.result().id)
    assert "stopped; the same command continues" in done.stderr


def secret_in(folder: Path) -> str:
    return (folder / "worker.token").read_text().strip()


def test_a_machine_with_nothing_on_it_is_a_worker_after_a_code_was_told(
    live: LiveCoordinator, tmp_path: Path
) -> None:
    done = decided(live, tmp_path, approve=True)
    secret = secret_in(tmp_path)
    assert secret not in done.output
    assert (tmp_path / "worker.token").stat().st_mode & 0o777 == 0o600
    settings = tomllib.loads((tmp_path / "worker.toml").read_text())
    assert (settings["url"], settings["name"], settings["token_file"]) == (
        live.url,
        "gpu-1",
        str(tmp_path / "worker.token"),
    )
    # All that is left to be said is where the data are.
    with (tmp_path / "worker.toml").open("a") as file:
        file.write('[datasets.digits]\nkind = "digits"\n')
    say("check", "--config", str(tmp_path / "worker.toml"))
    # Joining again finds it done.
    say("join", live.url, "--site", "north", "--config", str(tmp_path / "worker.toml"))
    assert secret_in(tmp_path) == secret


def test_one_that_is_declined_says_so_and_may_ask_again(live: LiveCoordinator, tmp_path: Path) -> None:
    assert "declined" in decided(live, tmp_path, approve=False).output
    secret = secret_in(tmp_path)
    decided(live, tmp_path, approve=True)
    assert secret_in(tmp_path) == secret


@pytest.mark.parametrize("odd", [Answer(204, b""), Answer(302, b"", {"Location": "http://sign.in"}), Answer()])
def test_a_sign_in_page_does_not_end_the_wait_for_an_administrator(odd: Answer) -> None:
    pending = Enrolment(
        id="e", code="WDJB-MJHT", state="pending", site="north", worker="w", created_at=0, expires_in_seconds=60
    )
    approved = pending.model_copy(update={"state": "approved"}).model_dump_json().encode()
    with answering(odd, odd, Answer(200, approved)) as (url, asked), Client(url, "t", verify=False) as client:
        assert wait_for(client, pending, sleep=lambda _: None).state == "approved"
    assert len(asked) == 3


def test_an_enrolment_token_in_a_file_admits_without_anybody(live: LiveCoordinator, tmp_path: Path) -> None:
    if "south" not in [site.name for site in live.client().sites()]:
        live.client().create_site("south")
    issued = live.client().issue_token(
        TokenSpec(name="join-south", role="enrolment", site="south", uses=1, expires_in_days=1)
    )
    (tmp_path / "ticket").write_text(f"{issued.secret}\n")
    arguments = ["join", live.url, "--config", str(tmp_path / "worker.toml"), "--json"]
    done = say(*arguments, "--token-file", str(tmp_path / "ticket"))
    enrolment = json.loads(done.stdout)
    assert (enrolment["state"], enrolment["site"]) == ("approved", "south")
    (tmp_path / "worker.token").unlink()
    assert "used up" in say(*arguments, "--token-file", str(tmp_path / "ticket"), code=3).output


def test_an_enrolment_whose_answer_was_lost_is_found_by_the_same_command(
    live: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "PATIENCE_SECONDS", 0.1)
    if "west" not in [site.name for site in live.client().sites()]:
        live.client().create_site("west")
    ticket = TokenSpec(name="join-west", role="enrolment", site="west", uses=1, expires_in_days=1)
    (tmp_path / "ticket").write_text(live.client().issue_token(ticket).secret)
    asked: list[Asked] = []
    is_back = False

    def forwarded(ask: Asked) -> Answer:
        if not is_back and ask is not asked[0]:
            return Answer(503)
        headers = {name: ask.headers[name] for name in ("Authorization", "Content-Type")}
        with live.bare() as http:
            answer = http.request(ask.method, ask.path, headers=headers, content=ask.body)
        about = {"Content-Type": answer.headers["Content-Type"]}
        return Answer(answer.status_code, answer.content, about, breaks_after=None if is_back else 0)

    with answering_by(forwarded, asked) as url:
        arguments = ["join", url, "--config", str(tmp_path / "worker.toml"), "--token-file", str(tmp_path / "ticket")]
        say(*arguments, code=1)
        is_back = True
        assert "admitted as a worker of site west" in say(*arguments).output


def test_settings_that_are_there_are_kept_and_what_they_lack_is_told(tmp_path: Path) -> None:
    config = tmp_path / "worker.toml"
    config.write_text('url = "https://a"\n[datasets.x]\nkind = "digits"\n')
    place = prepare(config, "https://a", "gpu-1", {})
    assert config.read_text().startswith('url = "https://a"\n[datasets.x]')
    assert place.missing == (
        f'token_file = "{tmp_path}/worker.token"',
        'name = "gpu-1"',
        f'state_dir = "{tmp_path}/state"',
    )
    assert prepare(config, "https://a", None, {}).secret == place.secret


def test_a_region_that_joins_with_its_settings_can_be_checked_as_it_is_told(
    live: LiveCoordinator, tmp_path: Path
) -> None:
    config, inner = tmp_path / "regional.toml", tmp_path / "inner.token"
    inner.write_text(live.token("orchestrator"))
    own = f'[region]\nurl = "{live.url}"\ntoken_file = "{inner}"\n[datasets.data]\nkind = "region"\n'
    config.write_text(own)
    live.client().create_site("regions")
    ticket = TokenSpec(name="join-region", role="enrolment", site="regions", uses=1, expires_in_days=1)
    (tmp_path / "ticket").write_text(live.client().issue_token(ticket).secret)
    arguments = ["join", live.url, "--config", str(config), "--token-file", str(tmp_path / "ticket")]
    told = say(*arguments).stderr.splitlines()
    top = [line.partition("regional.toml: ")[2] for line in told if line.startswith("write at the top of")]
    assert [line.partition(" ")[0] for line in top] == ["url", "token_file", "name", "state_dir"]
    config.write_text("\n".join([*top, own]))
    assert told[-1] == f"then: tessera worker doctor --config {config}, and tessera regional --config {config}"
    # Fewer sites than region.min_sites warn, and do not fail.
    assert "region.min_sites" in say("doctor", "--no-probe", "--config", str(config)).stdout


def test_an_option_that_the_settings_contradict_is_a_line_to_write(tmp_path: Path) -> None:
    first, second = tmp_path / "old.pem", tmp_path / "new.pem"
    prepare(tmp_path / "worker.toml", "https://a", "w", {"ca_bundle": first})
    assert prepare(tmp_path / "worker.toml", "https://a", "w", {"ca_bundle": first}).missing == ()
    place = prepare(tmp_path / "worker.toml", "https://a", "gpu-1", {"ca_bundle": second})
    assert place.missing == (f'ca_bundle = "{second}"', 'name = "gpu-1"')


def test_the_secret_for_one_coordinator_is_never_shown_to_another(tmp_path: Path) -> None:
    prepare(tmp_path / "worker.toml", "https://a", "w", {})
    with pytest.raises(SettingsError, match="is for https://a"):
        prepare(tmp_path / "worker.toml", "https://b", "w", {})
    (tmp_path / "worker.toml").unlink()
    with pytest.raises(SettingsError, match="holds a secret, and no settings name its coordinator; choose"):
        prepare(tmp_path / "worker.toml", "https://b", "w", {})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--token-file", "x", "--site", "a"], "either the site"), ([], "either the site")],
)
def test_a_worker_says_its_site_or_shows_a_token(tmp_path: Path, arguments: list[str], told: str) -> None:
    done = say("join", "http://127.0.0.1:9", "--config", str(tmp_path / "w.toml"), *arguments, code=2)
    assert told in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "arguments", "code", "told"),
    [
        ("http://127.0.0.1:9", ["--site", "bad site!"], 2, "letters, digits, dots"),
        ("http://127.0.0.1:9", ["--site", "a", "--name", "é"], 2, "letters, digits, dots"),
        ("http://192.0.2.1:9", ["--site", "a"], 1, "is plain HTTP"),
        ("ftp://127.0.0.1:9", ["--site", "a"], 1, "is not a coordinator's URL"),
        ("http://127.0.0.1:9", ["--site", "a"], 1, "no answer from the coordinator at http://127.0.0.1:9: "),
        ("https://127.0.0.1:9", ["--site", "a", "--ca-bundle", "none.pem"], 1, "none.pem cannot be used"),
    ],
)
def test_a_wish_that_reaches_nobody_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, arguments: list[str], code: int, told: str
) -> None:
    monkeypatch.setattr(join, "PATIENCE_SECONDS", 0.1)
    done = CliRunner().invoke(app, ["join", url, "--config", str(tmp_path / "w.toml"), *arguments])
    said = done.output + str(done.exception or "")
    assert (done.exit_code, told in " ".join(said.replace("│", "").split())) == (code, True), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "code"),
    [(Answer(404, b"<html>"), 1), (Answer(401, b"<html>"), 1), (Answer(200, b'{"welcome": true}'), 1)],
)
def test_an_answer_of_another_web_server_leaves_nothing_behind(tmp_path: Path, answer: Answer, code: int) -> None:
    with answering(answer) as (url, _):
        done = CliRunner().invoke(app, ["join", url, "--site", "a", "--config", str(tmp_path / "w.toml")])
    assert done.exit_code == code, done.output
    assert list(tmp_path.iterdir()) == []


def test_the_refusal_of_a_coordinator_leaves_the_settings_to_go_on_with(
    live: LiveCoordinator, tmp_path: Path
) -> None:
    (tmp_path / "ticket").write_text(new_secret("enrolment"))
    config = tmp_path / "w.toml"
    say("join", live.url, "--token-file", str(tmp_path / "ticket"), "--config", str(config), code=3)
    assert tomllib.loads(config.read_text())["url"] == live.url


# ---------------------------------------------------------------- rotation


def settings_in(live: LiveCoordinator, folder: Path, secret: str) -> Path:
    write_secret(folder / "token", secret)
    lines: dict[str, Any] = {"url": live.url, "token_file": str(folder / "token"), "name": "w", "state_dir": "s"}
    config = folder / "worker.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    with config.open("a") as file:
        file.write('[datasets.digits]\nkind = "digits"\n')
    return config


def test_a_worker_s_secret_is_replaced_by_one_of_its_own_making(live: LiveCoordinator, tmp_path: Path) -> None:
    old = live.token("site", "rotating")
    config = settings_in(live, tmp_path, old)
    done = say("rotate", "--config", str(config))
    new = (tmp_path / "token").read_text().strip()
    assert new != old
    assert new not in done.output
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / f"token{NEXT}").exists()
    say("check", "--config", str(config))


def test_a_rotation_that_was_cut_off_is_done_by_doing_it_again(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator", rotation_grace_seconds=0) as live:
        old, new = live.token("site", "a"), new_secret("site")
        write_secret(tmp_path / "token", old)
        write_secret(tmp_path / f"token{NEXT}", new)

        def connect(secret: str) -> Client:
            return Client(live.url, secret, patience_seconds=0, verify=False)

        # The coordinator was told, and the process killed before it renamed the file; the old secret is over.
        with connect(old) as client:
            client.rotate(hash_of(new))
        rotate(connect, tmp_path / "token")
        assert (tmp_path / "token").read_text().strip() == new
        write_secret(tmp_path / "token", new_secret("site"))
        with pytest.raises(Unauthenticated):
            rotate(connect, tmp_path / "token")


def test_what_is_rotated_is_a_file(live: LiveCoordinator, tmp_path: Path) -> None:
    config = settings_in(live, tmp_path, "x")
    config.write_text(config.read_text().replace("token_file", "token"))
    assert "token_file" in say("rotate", "--config", str(config), code=2).output


def test_who_is_admitted_no_more_is_told_what_a_worker_can_do(live: LiveCoordinator, tmp_path: Path) -> None:
    config = str(settings_in(live, tmp_path, live.token("site", "leaving")))
    admin = live.client()
    admin.revoke_token(next(token.id for token in admin.tokens() if token.site == "leaving"))
    for command in ("check", "rotate"):
        told = say(command, "--config", config, code=3).output
        assert "this token was revoked" in told
        assert "join again: tessera worker join URL --site NAME" in told
        assert "--token-file or TESSERA_TOKEN_FILE" not in told


def test_an_enrolment_token_that_has_expired_is_for_an_administrator_to_replace(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        with live.services.database.transaction() as session:
            create_site(session, 0, "test", "north")
            ticket = TokenSpec(name="t", role="enrolment", site="north", uses=1, expires_in_days=1)
            # A day from 1970.
            secret = issue_token(session, 0, "test", ticket)[1]
        (tmp_path / "ticket").write_text(secret)
        config = str(tmp_path / "worker.toml")
        done = say("join", live.url, "--token-file", str(tmp_path / "ticket"), "--config", config, code=3)
    assert "this token has expired. Ask an administrator for another.\n" in done.output


# ---------------------------------------------------------------- TLS


def test_a_worker_joins_and_works_with_the_certificates_it_joined_with(tmp_path: Path) -> None:
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("worker@north.example")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    client.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    tls = {"tls_cert": tmp_path / "server.pem", "tls_client_ca": tmp_path / "ca.pem"}
    with LiveCoordinator(tmp_path / "coordinator", **tls) as live:
        with live.services.database.transaction() as session:
            create_site(session, live.services.database.now(), "test", "north")
            ticket = TokenSpec(name="t", role="enrolment", site="north", uses=1, expires_in_days=1)
            secret = issue_token(session, live.services.database.now(), "test", ticket)[1]
        (tmp_path / "ticket").write_text(secret)
        config = str(tmp_path / "worker.toml")
        shown = ["--ca-bundle", str(tmp_path / "ca.pem"), "--client-cert", str(tmp_path / "client.pem")]
        say("join", live.url, "--token-file", str(tmp_path / "ticket"), "--config", config, *shown)
        with Path(config).open("a") as file:
            file.write('[datasets.digits]\nkind = "digits"\n')
        # From here on the settings say it.
        say("check", "--config", config)
        say("rotate", "--config", config)
        settings = Path(config).read_text()
        Path(config).write_text(settings.replace("ca.pem", "none.pem"))
        assert "ca_bundle: " in say("check", "--config", config, code=2).output

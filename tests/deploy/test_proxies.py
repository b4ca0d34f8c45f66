"""Tessera behind real proxies, with the configurations of docs/operating/proxies.md, and what `doctor` says of wrong
ones."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.shared.api.admin import Approval
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, RunSpec, Training
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.client.transport import tls_context
from tessera.shared.diagnostics import Finding, examined
from tessera.shared.methods.base import MethodSpec
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.doctor import checks
from tessera.worker.settings import WorkerSettings
from tests.support.cli import forked
from tests.support.coordinator import LiveCoordinator, until
from tests.support.processes import CoordinatorProcess, Process
from tests.support.proxies import NAME, PATH, Folder, Running, block, folder, installed, proxy

pytestmark = pytest.mark.long

PUBLIC = f"https://{NAME}{PATH}"

VIT = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "id2label": {str(digit): str(digit) for digit in range(10)},
}
UPDATE_BYTES = 1_500_000
"""Less than its update: more than a body may have where a proxy allows 1 MB."""

FRONT = {
    "nginx": block("nginx"),
    # 1 MB, buffers, and 60 s.
    "nginx's defaults": re.sub(
        r" +(client_max_body_size|proxy_request_buffering|proxy_read_timeout).*\n", "", block("nginx")
    ),
    "haproxy": block("haproxy"),
    "caddy": block("caddy"),
}


@pytest.fixture(scope="module")
def files() -> Iterator[Folder]:
    with folder() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    at = tmp_path_factory.mktemp("vit")
    (at / "vit.json").write_text(json.dumps(VIT))
    made = ("model", "init", str(at / "model"), "--config", str(at / "vit.json"))
    done = forked(*made, "--head", "image-classification", "--random", "--seed", "1")
    assert done.returncode == 0, done.stderr
    return ModelFolder.open(at / "model")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    settings = {"behind_proxy": "true", "public_url": PUBLIC, "lease_seconds": 600}
    with CoordinatorProcess(tmp_path / "coordinator", **settings) as coordinator:
        yield coordinator


@contextmanager
def joined(
    url: str, admin: Client, at: Path, given: dict[str, Path], environment: dict[str, str] | None = None
) -> Iterator[Process]:
    """A worker that has joined by this URL and runs."""
    variables = {f"TESSERA_WORKER_{name.upper()}": str(file) for name, file in given.items()} | (environment or {})
    config = at / "worker.toml"
    arguments = [
        "tessera.shared.cli",
        "worker",
        "join",
        url,
        "--site",
        "north",
        "--name",
        "w",
        "--config",
        str(config),
    ]
    joins = Process(at, "join", arguments, variables)
    try:
        until(lambda: joins.popen.poll() is not None or list(admin.enrolments()))
        (asked,) = admin.enrolments()
        admin.approve(asked.id, Approval(code=asked.code, site="north", create_site=True))
        assert joins.popen.wait(60) == 0, joins.log.read_text()
    finally:
        joins.kill()
    text = config.read_text().replace("[policy]", '[datasets.digits]\nkind = "digits"\n[policy]', 1)
    config.write_text(f'threads = 1\npoll_seconds = 2\ndevice = "cpu"\n{text}')
    runs = Process(at, "worker", ["tessera.shared.cli", "worker", "run", "--config", str(config)], variables)
    try:
        yield runs
    finally:
        runs.kill()


def trained(client: Client, model: ModelFolder, rounds: int = 2) -> Run:
    """A run, once its rounds are done, each with an update of the whole model."""
    uploaded = upload_model(client, model)
    spec = RunSpec(
        name="behind",
        method=MethodSpec(name="fedavg"),
        model=uploaded.model,
        version=uploaded.version,
        dataset="digits",
        rounds=rounds,
        cohort=Cohort(size=1),
        training=Training(epochs=1, batch_size=256),
        codec="raw",
    )
    run = client.create_run(spec)
    until(lambda: client.run(run.id).state in ("completed", "failed"), seconds=300)
    assert client.run(run.id).state == "completed"
    sent = [task.upload_bytes for round_ in client.rounds(run.id) for task in round_.tasks if task.kind == "train"]
    assert min(sent) > UPDATE_BYTES
    return run


def curled(url: str, at: Folder, *more: str) -> subprocess.Popen[str]:
    """A request over HTTP/2, as browsers send it."""
    path = shutil.which("curl") or pytest.skip("needs curl: apt-get install curl")
    keys = ["--cacert", at.path / "ca.pem", "--cert", at.path / "client.pem", "--key", at.path / "client.key"]
    command = [path, "--silent", "--no-buffer", "--http2", "--noproxy", "*", *map(str, keys), *more, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def sees_the_dashboard(way: Running, token: str, at: Folder, run: Run) -> None:
    """Sign in and look at a run, as a browser does."""
    headers = {"Origin": way.root}
    with httpx.Client(verify=tls_context(*at.files.values()), headers=headers, follow_redirects=True) as http:
        overview = http.post(f"{way.url}/page/sign-in", data={"token": token})
        assert (overview.status_code, str(overview.url)) == (200, f"{way.url}/page/")
        assert f'href="{PATH}/page/runs/{run.id}"' in overview.text
        assert http.get(f"{way.url}/page/runs/{run.id}").status_code == 200
    style = re.search(r'href="([^"]*page\.css[^"]*)"', overview.text)
    assert style
    fetched = curled(
        f"{way.root}{style[1]}", at, "--output", os.devnull, "--write-out", "%{http_version} %{http_code}"
    )
    assert fetched.communicate(timeout=60)[0] == "2 200"


@pytest.mark.parametrize("name", FRONT)
def test_a_federation_works_behind_a_proxy(
    name: str, served: CoordinatorProcess, files: Folder, model: ModelFolder, tmp_path: Path
) -> None:
    program = name.partition("'")[0]
    token = (served.folder / "admin.token").read_text().strip()
    with (
        proxy(program, FRONT[name], files, served.url) as way,
        Client.from_options(way.url, token, **files.files) as admin,
        joined(way.url, admin, tmp_path, files.files) as worker,
    ):
        events = curled(f"{way.url}/v1/events", files, "--header", f"Authorization: Bearer {token}")
        run = trained(admin, model)
        # As it happens: the stream does not end.
        assert events.stdout
        assert next(line for line in events.stdout if line.startswith("data: "))
        assert events.poll() is None
        events.kill()
        events.communicate()
        sees_the_dashboard(way, token, files, run)
        exported = io.BytesIO()
        admin.export(run.id, exported)
        assert len(exported.getvalue()) > UPDATE_BYTES
        assert not worker.said("coordinator-away")
        told = doctor(
            WorkerSettings.model_validate(settings_of(way.url, files, served.site_token("south"), tmp_path))
        )
        assert {one.name for one in told if one.verdict == "fail"} == set(), told
        limited = [one.detail for one in told if one.name == "bodies"]
        assert len(limited) == (2 if name == "nginx's defaults" else 0), limited
        assert ("too large body" in way.logged()) == (name == "nginx's defaults")


# ---------------------------------------------------------------- what doctor names

WAY = ("coordinator", "token", "line")


def settings_of(url: str, at: Folder | None, token: str, folder: Path, **more: Any) -> dict[str, Any]:
    given = {
        "url": url,
        "token": token,
        "name": "w",
        "state_dir": folder / "state",
        "poll_seconds": 1,
        "device": "cpu",
    }
    return {**given, **(at.files if at else {}), "datasets": {"digits": {"kind": "digits"}}, **more}


def doctor(settings: WorkerSettings) -> list[Finding]:
    """What the checks of the way to the coordinator find."""
    return list(examined((name, check) for name, check in checks(settings, probe=True) if name in WAY))


def replaced(program: str, old: str, new: str) -> str:
    text = block(program)
    assert old in text
    return text.replace(old, new)


LOCATION = "location /tessera/ {"
SLASH = "8470/;"
FAULTS: dict[str, tuple[str, str, dict[str, Any], str, str, str]] = {
    # Program, its configuration, what differs at the worker, the check that fails, what it says, the line that helps.
    "no token passes nginx": (
        "nginx", replaced("nginx", LOCATION, f'{LOCATION} proxy_set_header Authorization "";'), {},
        "token", "carries no bearer token", "proxy_set_header Authorization $http_authorization",
    ),
    "no token passes HAProxy": (
        "haproxy", replaced("haproxy", "use_backend", "http-request del-header Authorization\n    use_backend"), {},
        "token", "carries no bearer token", "no http-request del-header Authorization",
    ),
    "no token passes Caddy": (
        "caddy", replaced("caddy", "127.0.0.1:8470", "127.0.0.1:8470 {\n header_up -Authorization\n}"), {},
        "token", "carries no bearer token", "no header_up -Authorization",
    ),
    "nginx limits bodies": (
        "nginx", replaced("nginx", "client_max_body_size 0", "client_max_body_size 1m"), {},
        "bodies", "refuses bodies of 2.1 MB, not of 1.0 MB", "client_max_body_size 0",
    ),
    "HAProxy limits bodies": (
        "haproxy",
        replaced("haproxy", "use_backend", (
            "http-request deny deny_status 413 if { req.hdr(content-length) -m int gt 1000000 }\n    use_backend"
        )), {},
        "bodies", "refuses bodies of 1.0 MB, not of 524.3 kB", "remove the rule with",
    ),
    "nginx holds bodies back": (
        "nginx", replaced("nginx", "buffering off", "buffering on"), {},
        "bodies", "until they are complete", "proxy_request_buffering off",
    ),
    "nginx does not wait": (
        "nginx", replaced("nginx", "proxy_read_timeout 75s", "proxy_read_timeout 1s"), {"poll_seconds": 30},
        "long poll", "claims wait 30 s", "proxy_read_timeout 75s",
    ),
    "HAProxy does not wait": (
        "haproxy", replaced("haproxy", "timeout server 75s", "timeout server 1s"), {"poll_seconds": 30},
        "long poll", "claims wait 30 s", "timeout server 75s",
    ),
    "Caddy does not wait": (
        "caddy",
        replaced("caddy", "127.0.0.1:8470", (
            "127.0.0.1:8470 {\n transport http {\n response_header_timeout 1s\n}\n}"
        )), {"poll_seconds": 30},
        "long poll", "claims wait 30 s", "remove response_header_timeout",
    ),
    "nginx leaves the path": (
        "nginx", replaced("nginx", SLASH, SLASH.replace("/", "")), {},
        "coordinator", "GET /tessera/version: Not Found", "with the last slash",
    ),
    "Caddy leaves the path": (
        "caddy", replaced("caddy", "handle_path", "handle"), {},
        "coordinator", "GET /tessera/version: Not Found", "handle_path",
    ),
    "the URL lacks the path": (
        "nginx", block("nginx"), {"path": ""},
        "coordinator", "HTTP 404", "with the path that its operator chose",
    ),
    "the URL has the path twice": (
        "haproxy", block("haproxy"), {"path": "/tessera/tessera"},
        "coordinator", "GET /tessera/version: Not Found", '/tessera": the coordinator is there',
    ),
    "the URL has a path too many": (
        "nginx", replaced("nginx", LOCATION, "location / {"), {},
        "coordinator", "Not Found", '": the coordinator is there',
    ),
    "nginx asks for a password": (
        "nginx", replaced("nginx", LOCATION, f"{LOCATION} auth_basic N; auth_basic_user_file /etc/tessera/none;"),
        {}, "coordinator", "HTTP 401", "auth_basic off",
    ),
    "a page to sign in": (
        "nginx", replaced("nginx", "proxy_pass http://127.0.0.1:8470/", "return 302 https://login.example/"), {},
        "coordinator", "to https://login.example/", "asks to sign in",
    ),
    "a page that blocks": (
        "nginx", replaced("nginx", "proxy_pass http://127.0.0.1:8470/", (
            "default_type text/html; return 200 '<h1>Accept the terms of this network</h1>'"
        )), {},
        "coordinator", "Accept the terms of this network", "ask the operator of the proxy",
    ),
    "nginx is shown no certificate": (
        "nginx", block("nginx"), {"client_cert": None, "client_key": None},
        "coordinator", "No required SSL certificate", "client_cert and client_key",
    ),
    "HAProxy is shown no certificate": (
        "haproxy", block("haproxy"), {"client_cert": None, "client_key": None},
        "coordinator", "", "client_cert and client_key",
    ),
    "Caddy is shown no certificate": (
        "caddy", block("caddy"), {"client_cert": None, "client_key": None},
        "coordinator", "", "client_cert and client_key",
    ),
    "Caddy has another name": (
        "caddy", block("caddy"), {"host": "127.0.0.1"},
        "coordinator", "HTTP 421", "a host name in the URL that the configuration",
    ),
    "no coordinator behind nginx": (
        "nginx", replaced("nginx", "127.0.0.1:8470", "127.0.0.1:9"), {},
        "coordinator", "HTTP 502", "that the coordinator runs",
    ),
}  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path / "live", behind_proxy=True, max_wait_seconds=60) as coordinator:
        yield coordinator


def resolved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let this process's resolver find this machine under a name too."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **kw: resolve("localhost" if host == name else host, *more, **kw)
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_doctor_names_what_a_proxy_does_and_the_line_that_fixes_it(
    fault: str, live: LiveCoordinator, files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved(monkeypatch, NAME)
    program, configuration, more, check, said, line = FAULTS[fault]
    more = {"host": NAME, "path": PATH, **more}
    with proxy(program, configuration, files, live.url) as way:
        url = f"https://{more.pop('host')}:{way.port}{more.pop('path')}"
        settings = WorkerSettings.model_validate(
            settings_of(url, files, live.token("site", "north"), tmp_path, **more)
        )
        found = [one for one in doctor(settings) if one.verdict != "ok" and one.name == check]
    assert [one.detail for one in found if said in one.detail], found
    assert [one.remedy for one in found if line in one.remedy], found


def test_an_upload_goes_through_a_caddy_that_limits_bodies(live: LiveCoordinator, files: Folder) -> None:
    limited = replaced("caddy", "reverse_proxy", "request_body {\n max_size 1MB\n}\nreverse_proxy")
    data = os.urandom(UPDATE_BYTES)
    with (
        proxy("caddy", limited, files, live.url) as way,
        Client.from_options(way.url, live.token("orchestrator"), **files.files) as client,
    ):
        assert client.read_blob(client.put_bytes(data)) == data
        assert client._transfers._piece_bytes < len(data)


# ---------------------------------------------------------------- before a worker

PASSWORD = "un@heard-of"
SHOWN = "un%40heard-of"


@pytest.fixture
def strict(live: LiveCoordinator, files: Folder) -> Iterator[Running]:
    """nginx before a coordinator that wants no certificate of clients: an inspection of TLS has none to show."""
    text = re.sub(r" +ssl_(client_certificate|verify_client).*\n", "", block("nginx"))
    with proxy("nginx", text, files, live.url) as way:
        yield way


def only(squid: Running, *, exempt: str = "", user: str = "") -> dict[str, str]:
    """The environment of a worker that reaches other networks by Squid alone."""
    own = {"HTTPS_PROXY": f"http://{user}127.0.0.1:{squid.port}", "NO_PROXY": exempt}
    return {**own, **{name.lower(): value for name, value in own.items()}}


def signed_in(files: Folder) -> str:
    """Squid's configuration with a password, and its file."""
    installed("squid")
    hashed = subprocess.run(
        ["openssl", "passwd", "-apr1", "-stdin"], input=PASSWORD, capture_output=True, text=True, check=True
    )
    (files.path / "passwords").write_text(f"north:{hashed.stdout}")
    return block("squid")


def inspecting(files: Folder, *, exempt: bool) -> str:
    """Squid's configuration that inspects TLS, and its folder of certificates."""
    installed("squid")
    kept = files.path / "certificates"
    if not kept.exists():
        made = ["/usr/lib/squid/security_file_certgen", "-c", "-s", str(kept), "-M", "4MB"]
        subprocess.run(made, check=True, capture_output=True)
    text = block("squid", 1)
    return text if exempt else re.sub(r"acl exempt.*\n|ssl_bump splice.*\n", "", text)


def test_a_worker_works_by_a_squid_that_asks_for_a_password_and_nothing_shows_it(
    live: LiveCoordinator, files: Folder, strict: Running, model: ModelFolder, tmp_path: Path
) -> None:
    trusted = {"ca_bundle": files.path / "ca.pem"}
    with (
        proxy("squid", signed_in(files), files, port=strict.port) as squid,
        joined(
            f"https://{NAME}:{strict.port}{PATH}", live.client(), tmp_path, trusted,
            only(squid, user=f"north:{SHOWN}@"),
        ) as worker,
    ):  # fmt: skip
        trained(live.client(), model, rounds=1)
        told = forked(
            "worker", "doctor", "--config", str(tmp_path / "worker.toml"), **only(squid, user=f"north:{SHOWN}@")
        )
        assert told.returncode == 0, told.stdout
        assert f"http://north:***@127.0.0.1:{squid.port}" in told.stdout
        assert f"CONNECT {NAME}:{strict.port}" in squid.logged()
    said = [worker.log.read_text(), (tmp_path / "join.log").read_text(), told.stdout, told.stderr]
    said += [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    assert [text for text in said if PASSWORD in text or SHOWN in text] == []


@pytest.mark.parametrize("exempt", [True, False], ids=["exempt", "inspected"])
def test_a_worker_works_by_a_squid_that_inspects_tls(
    live: LiveCoordinator, files: Folder, strict: Running, model: ModelFolder, tmp_path: Path, *, exempt: bool
) -> None:
    trusted = {"ca_bundle": files.path / ("ca.pem" if exempt else "inspection-ca.pem")}
    url = f"https://{NAME}:{strict.port}{PATH}"
    with (
        proxy("squid", inspecting(files, exempt=exempt), files, port=strict.port) as squid,
        joined(url, live.client(), tmp_path, trusted, only(squid)) as worker,
    ):
        trained(live.client(), model, rounds=1)
        assert not worker.said("coordinator-away")
        # What was inspected is logged as requests, and the rest as tunnels alone.
        assert (f"POST {url}" in squid.logged()) != exempt


@pytest.mark.parametrize(
    ("environment", "check", "said", "line"),
    [
        ({}, "dns", f"{NAME} has no address", "set HTTPS_PROXY=http://PROXY:PORT"),
        ({"exempt": NAME}, "dns", f"{NAME} has no address", "take the host out of NO_PROXY"),
        ({"user": ""}, "coordinator", "407 Proxy Authentication Required", "HTTPS_PROXY=http://USER:PASSWORD@"),
        ({"user": "north:wrong@"}, "coordinator", "407", "HTTPS_PROXY=http://USER:PASSWORD@"),
    ],
    ids=["not-used", "exempt", "no-password", "wrong-password"],
)
def test_doctor_names_a_squid_that_is_not_used_or_not_signed_in_to(
    environment: dict[str, str], check: str, said: str, line: str, live: LiveCoordinator, files: Folder,
    strict: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with proxy("squid", signed_in(files), files, port=strict.port) as squid:
        for name in ("HTTPS_PROXY", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        for name, value in (only(squid, **environment) if environment else {}).items():
            monkeypatch.setenv(name, value)
        found = of_a_worker(strict, files.path / "ca.pem", live, tmp_path)
    assert said in found[check].detail
    assert line in found[check].remedy
    assert "wrong" not in found[check].detail
    if "exempt" in environment:
        assert found["proxy"].detail == "none: NO_PROXY lists the coordinator's host"


def test_doctor_names_who_signed_what_an_inspection_presents(
    live: LiveCoordinator, files: Folder, strict: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy("squid", inspecting(files, exempt=False), files, port=strict.port) as squid:
        for name, value in only(squid).items():
            monkeypatch.setenv(name, value)
        found = of_a_worker(strict, files.path / "ca.pem", live, tmp_path)["coordinator"]
    assert "is not trusted" in found.detail
    assert "signed by" in found.detail
    assert "North inspection" in found.detail
    assert "if a proxy of your own network inspects TLS" in found.remedy


def of_a_worker(strict: Running, trusted: Path, live: LiveCoordinator, at: Path) -> dict[str, Finding]:
    given = settings_of(
        f"https://{NAME}:{strict.port}{PATH}", None, live.token("site", "north"), at, ca_bundle=trusted
    )
    return {one.name: one for one in doctor(WorkerSettings.model_validate(given))}

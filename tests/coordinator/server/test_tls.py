"""Ways through the network: TLS with an authority made on the fly, certificates of clients, and proxies."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tessera.coordinator.alerts.certificate import CertificateFiles, examine
from tessera.coordinator.server.http_limits import (
    BadCertificate,
    InsecureBindError,
    PortInUseError,
    require_free,
    require_private,
)
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.client.client import Client
from tessera.shared.client.transport import Unreachable, Untrusted, tls_context
from tessera.shared.problems import Invalid
from tests.support.cli import tessera
from tests.support.coordinator import WAIT_SECONDS, LiveCoordinator
from tests.support.proxying import proxying
from tests.support.raw import connected, rest


@dataclass(frozen=True)
class Authority:
    """A CA and what it issued: a server's certificate and a client's, as files."""

    ca: Path
    server: Path
    client: Path
    key: Path

    @classmethod
    def made(cls, folder: Path, name: str = "127.0.0.1") -> Authority:
        authority = trustme.CA()
        server, client = authority.issue_cert(name), authority.issue_cert("worker@north.example")
        made = cls(folder / "ca.pem", folder / "server.pem", folder / "client.pem", folder / "client.key")
        authority.cert_pem.write_to_path(made.ca)
        server.private_key_and_cert_chain_pem.write_to_path(made.server)
        client.cert_chain_pems[0].write_to_path(made.client)
        client.private_key_pem.write_to_path(made.key)
        return made


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("another"))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[LiveCoordinator]:
    """A coordinator that speaks TLS."""
    with LiveCoordinator(tmp_path_factory.mktemp("tls"), tls_cert=authority.server) as live:
        yield live


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[LiveCoordinator]:
    """One that wants to be shown certificates, too."""
    settings = {"tls_cert": authority.server, "tls_client_ca": authority.ca}
    with LiveCoordinator(tmp_path_factory.mktemp("strict"), **settings) as live:
        yield live


@pytest.mark.parametrize(
    ("suite", "taken"), [("ECDHE-ECDSA-AES128-SHA256", False), ("ECDHE-ECDSA-AES128-GCM-SHA256", True)]
)
def test_suites_without_authenticated_encryption_are_refused(
    serving: LiveCoordinator, authority: Authority, suite: str, taken: bool
) -> None:
    context = ssl.create_default_context(cafile=authority.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(suite)
    address = ("127.0.0.1", serving._socket.getsockname()[1])
    with socket.create_connection(address) as raw:
        try:
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as secured:
                assert taken, secured.cipher()
        except ssl.SSLError:
            assert not taken


def reached(live: LiveCoordinator, *files: Path | None, patience: float = 0) -> str:
    """The version that a coordinator tells a client with these files. Raises Problem."""
    with Client(live.url, live.token("admin"), verify=tls_context(*files), patience_seconds=patience) as client:
        return client.about().version


def test_a_coordinator_whose_authority_is_known_is_reached(serving: LiveCoordinator, authority: Authority) -> None:
    assert serving.url.startswith("https://")
    assert reached(serving, authority.ca)
    with Client(serving.url, serving.token("admin"), verify=tls_context(authority.ca)) as client:
        # More than buffers hold, so that limits on time are at work on a connection with TLS too.
        data = bytes(range(256)) * (1 << 14)
        assert client.read_blob(client.put_bytes(data)) == data


def test_one_whose_authority_is_not_known_is_refused_with_what_to_do(
    serving: LiveCoordinator, another: Authority
) -> None:
    for files in ((), (another.ca,)):
        with pytest.raises(Untrusted, match="is not trusted: ") as refused:
            reached(serving, *files)
        assert "ca_bundle" in refused.value.advice
        assert "TESSERA_CA_BUNDLE" in refused.value.advice
        assert not refused.value.retryable


def test_connections_that_begin_no_handshake_count_and_end_soon(tmp_path: Path, authority: Authority) -> None:
    limits = {"max_connections_per_address": 2, "header_timeout_seconds": 1.0}
    with LiveCoordinator(tmp_path, tls_cert=authority.server, **limits) as live, connected(live) as first:
        with connected(live) as second, connected(live) as third:
            # Beyond the limit: closed, since nothing can be said before the handshake.
            assert rest(third) == b""
            assert rest(first) == rest(second) == b""
        # The server counts a connection until it has seen its end.
        assert reached(live, authority.ca, patience=WAIT_SECONDS)


def test_a_client_that_does_not_answer_the_end_of_tls_does_not_hold_its_connection(
    tmp_path: Path, authority: Authority
) -> None:
    settings = {"tls_cert": authority.server, "header_timeout_seconds": 1.0}
    with LiveCoordinator(tmp_path, **settings) as live, connected(live) as line:
        silent = tls_context(authority.ca).wrap_socket(line, server_hostname="127.0.0.1")
        with socket.socket(fileno=silent.detach()) as below:
            # Less than the 30 s that TLS waits for an answer by default.
            below.settimeout(25)
            assert rest(below)


NOW = datetime(2030, 6, 1, tzinfo=UTC)


def certificate(folder: Path, starts: int, ends: int, *names: str) -> Path:
    """A certificate that is valid from so many days after `NOW` until so many days after it, with its key and CA."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    dates = {"not_before": NOW + timedelta(starts), "not_after": NOW + timedelta(ends)}
    issued = authority.issue_cert(*(names or ("127.0.0.1",)), **dates)
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return folder / "server.pem"


@pytest.mark.parametrize(
    ("starts", "ends", "verdict", "said"),
    [
        (-30, -1, "fail", "expired at 2030-05-31"),
        (1, 90, "fail", "is not valid before 2030-06-02"),
        (-30, 29, "warn", "expires at 2030-06-30"),
        (-30, 31, "ok", "for 127.0.0.1 until 2030-07-02"),
    ],
)
def test_an_expired_certificate_is_not_called_well(
    tmp_path: Path, starts: int, ends: int, verdict: str, said: str
) -> None:
    settings = CoordinatorSettings(tls_cert=certificate(tmp_path, starts, ends))
    (found,) = examine(settings, NOW)
    assert (found.name, found.verdict) == ("tls", verdict)
    assert said in found.detail


def test_a_certificate_that_ends_is_a_condition_that_needs_a_person(
    serving: LiveCoordinator, authority: Authority
) -> None:
    chain = x509.load_pem_x509_certificates(authority.server.read_bytes())
    ends = min(one.not_valid_after_utc for one in chain)

    def told(at: datetime) -> list[tuple[str, str]]:
        with serving.services.database.snapshot() as session:
            found = serving.services.alerts(session, at.timestamp())
            return [(alert.title, alert.weight) for alert in found if alert.code == "certificate"]

    assert told(ends - timedelta(days=31)) == []
    assert ("A certificate expires soon", "warn") in told(ends - timedelta(days=29))
    assert ("A certificate is not valid", "bad") in told(ends)


def test_a_chain_in_the_wrong_order_and_an_expired_client_ca_are_found(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    server, of_clients = certificate(tmp_path, -1, 90), certificate(tmp_path / "clients", -9, -1)
    server.write_bytes(server.read_bytes() + (tmp_path / "clients" / "ca.pem").read_bytes())
    found = list(examine(CoordinatorSettings(tls_cert=server, tls_client_ca=of_clients), NOW))
    assert [(one.verdict, "did not issue" in one.detail, "expired at" in one.detail) for one in found] == [
        ("warn", True, False),
        ("fail", False, True),
    ]


def test_a_certificate_without_a_name_or_for_clients_alone_is_found(tmp_path: Path) -> None:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(NOW).not_valid_after(NOW + timedelta(90))
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    file = tmp_path / "x.pem"
    file.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    found = [one.detail for one in examine(CoordinatorSettings(tls_cert=file), NOW + timedelta(1))]
    assert ["no host name" in found[0], "not for servers" in found[1]] == [True, True]


def test_a_renewed_certificate_reaches_a_running_coordinator(tmp_path: Path) -> None:
    served, renewed = tmp_path / "served", tmp_path / "renewed"
    for folder in (served, renewed):
        folder.mkdir()
    first, second = Authority.made(served), Authority.made(renewed)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(first.server)
    files = CertificateFiles(CoordinatorSettings(tls_cert=first.server))

    def is_reached(authority: Authority) -> bool:
        client, server = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = tls_context(authority.ca).wrap_bio(client, server, server_hostname="127.0.0.1")
        theirs = context.wrap_bio(server, client, server_side=True)
        for _ in range(3):
            for end in (ours, theirs):
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError:
                    return False
        return ours.version() is not None

    assert is_reached(first)
    # Half of a renewal: the key is not there yet.
    whole = second.server.read_bytes()
    first.server.write_bytes(whole[whole.index(b"-----BEGIN CERTIFICATE") :])
    os.utime(first.server, ns=(1, 1))
    files.refresh(context)
    assert is_reached(first)
    first.server.write_bytes(whole)
    os.utime(first.server, ns=(2, 2))
    files.refresh(context)
    assert is_reached(second)
    assert not is_reached(first)


@pytest.mark.parametrize(
    ("starts", "ends", "name", "remedy"),
    [(-9999, -9000, "127.0.0.1", "renew"), (9000, 9999, "127.0.0.1", "clock"), (-9999, 9999, "x.example", "URL")],
)
def test_a_failed_handshake_tells_an_expired_certificate_from_an_unknown_authority(
    tmp_path: Path, starts: int, ends: int, name: str, remedy: str
) -> None:
    file = certificate(tmp_path, starts, ends, name)
    with (
        LiveCoordinator(tmp_path / "live", tls_cert=file) as live,
        pytest.raises(Untrusted) as refused,
    ):
        reached(live, tmp_path / "ca.pem")
    assert remedy in refused.value.advice
    assert "ca_bundle" not in refused.value.advice


def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    elsewhere = Authority.made(tmp_path, "elsewhere.example")
    with (
        LiveCoordinator(tmp_path / "live", tls_cert=elsewhere.server) as live,
        pytest.raises(Untrusted, match=r"not valid for '127\.0\.0\.1'"),
    ):
        reached(live, elsewhere.ca)


def test_a_coordinator_may_want_to_be_shown_a_certificate(
    strict: LiveCoordinator, authority: Authority, another: Authority
) -> None:
    assert reached(strict, authority.ca, authority.client, authority.key)
    for shown in ((), (another.client, another.key)):
        with pytest.raises(Unreachable) as refused:
            reached(strict, authority.ca, *shown)
        assert "client_cert" in refused.value.advice


def test_a_server_that_says_that_it_wants_a_certificate_is_quoted(authority: Authority) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(authority.server)
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def turn_away() -> None:
            connection, _ = server.accept()
            with connection, suppress(ssl.SSLError):
                context.wrap_socket(connection, server_side=True)

        pool.submit(turn_away)
        url = f"https://127.0.0.1:{server.getsockname()[1]}"
        with (
            Client(url, verify=tls_context(authority.ca), patience_seconds=0) as client,
            pytest.raises(Untrusted, match="certificate required") as refused,
        ):
            client.about()
    assert "client_cert" in refused.value.advice


def test_plain_http_where_tls_is_spoken_and_the_reverse_are_told_apart(
    serving: LiveCoordinator, standing: LiveCoordinator, authority: Authority
) -> None:
    with (
        Client(standing.url.replace("http:", "https:"), verify=tls_context(authority.ca)) as client,
        pytest.raises(Untrusted, match="does not speak TLS"),
    ):
        client.about()


def test_files_that_cannot_be_used_are_named(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "empty").touch()
    for files, named in (
        ((tmp_path / "none",), "ca_bundle: "),
        ((tmp_path / "empty",), "ca_bundle: "),
        ((None, tmp_path / "empty"), "client_cert: "),
        ((None, authority.client, tmp_path / "none"), "client_cert: "),
        ((None, None, authority.key), "client_key: "),
    ):
        with pytest.raises(Invalid, match=named):
            tls_context(*files)


def test_commands_take_the_same_files_from_their_environment(strict: LiveCoordinator, authority: Authority) -> None:
    files = {"CA_BUNDLE": authority.ca, "CLIENT_CERT": authority.client, "CLIENT_KEY": authority.key}
    given = {f"TESSERA_{name}": str(file) for name, file in files.items()}
    connection = {"TESSERA_URL": strict.url, "TESSERA_TOKEN": strict.token("admin")}
    shown = tessera("admin", "status", **connection, **given)
    assert (shown.returncode, "workers" in shown.stdout) == (0, True), shown.stderr
    refused = tessera("admin", "status", **connection)
    assert (refused.returncode, "is not trusted" in refused.stderr) == (1, True), refused.stderr
    assert "TESSERA_CA_BUNDLE" in refused.stderr


# ---------------------------------------------------------------- proxies


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a proxy was asked for, which the environment names for all requests."""
    with proxying() as (url, asked):
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv("HTTPS_PROXY", url)
        monkeypatch.setenv("HTTP_PROXY", url)
        yield asked


def test_a_proxy_that_the_environment_names_is_gone_through(
    proxies: list[str], strict: LiveCoordinator, authority: Authority
) -> None:
    assert reached(strict, authority.ca, authority.client, authority.key)
    # It sees where to, and nothing else.
    assert proxies == [f"CONNECT {strict.url.removeprefix('https://')}"]


def test_plain_http_goes_through_it_too_unless_the_host_is_excepted(
    proxies: list[str], standing: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reached(standing)
    assert proxies == [f"GET {standing.url}/version"]
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert reached(standing)
    assert len(proxies) == 1


# ---------------------------------------------------------------- what is served without TLS


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "tessera.example"])  # noqa: S104 (is refused)
def test_other_machines_are_not_served_in_plain_http(host: str, authority: Authority) -> None:
    with pytest.raises(InsecureBindError, match="TESSERA_BEHIND_PROXY"):
        require_private(CoordinatorSettings(host=host))
    require_private(CoordinatorSettings(host=host, behind_proxy=True))
    require_private(CoordinatorSettings(host=host, tls_cert=authority.server))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_is(host: str) -> None:
    require_private(CoordinatorSettings(host=host))


def test_serve_says_what_is_wrong_before_it_opens_anything(tmp_path: Path) -> None:
    settings = {"TESSERA_DATABASE_URL": f"sqlite:///{tmp_path}/t.db"}
    exposed = tessera("coordinator", "serve", "--migrate", TESSERA_HOST="0.0.0.0", **settings)  # noqa: S104
    assert (exposed.returncode, "TESSERA_TLS_CERT" in exposed.stderr) == (2, True), exposed.stderr
    missing = tessera("coordinator", "serve", TESSERA_TLS_CERT=str(tmp_path / "none.pem"), **settings)
    assert (missing.returncode, "none.pem" in missing.stderr) == (2, True), missing.stderr
    partial = tessera("coordinator", "serve", TESSERA_TLS_KEY=str(tmp_path / "key.pem"), **settings)
    assert (partial.returncode, "require TESSERA_TLS_CERT" in partial.stderr) == (2, True), partial.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_start_is_refused_where_any_address_of_the_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        both = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        with pytest.raises(PortInUseError, match=f"'127.0.0.1', {port}"):
            require_free(CoordinatorSettings(host="localhost", port=port))


def test_serve_begins_nothing_where_something_listens_already(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        settings = {"TESSERA_DATABASE_URL": f"sqlite:///{tmp_path}/t.db", "TESSERA_PORT": port}
        taken = tessera("coordinator", "serve", "--migrate", **settings)
    assert (taken.returncode, taken.stderr.count("\n")) == (2, 1), taken.stderr
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in taken.stderr
    assert "TESSERA_PORT" in taken.stderr
    # No token was shown that nobody would be shown again.
    assert list(tmp_path.iterdir()) == []


def test_which_of_a_certificate_and_its_key_is_wrong_is_told(tmp_path: Path, authority: Authority) -> None:
    words, locked = tmp_path / "words.pem", tmp_path / "locked.key"
    words.write_text("no PEM\n")
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for certificate_file, key, told in (
        (authority.client, authority.server, "server.pem has not the key of the first certificate in .*client.pem"),
        (authority.client, words, "words.pem has no private key in PEM"),
        (words, authority.key, "words.pem has no certificate in PEM"),
        (authority.client, None, "client.pem has no private key in PEM"),
        (authority.client, tmp_path / "none.key", "none.key cannot be read: No such file"),
        (authority.client, locked, "locked.key is encrypted; `openssl pkey"),
    ):
        with pytest.raises(BadCertificate, match=told):
            require_private(CoordinatorSettings(tls_cert=certificate_file, tls_key=key))
        with pytest.raises(Invalid, match=told):
            tls_context(None, certificate_file, key)


def test_a_certificate_without_its_key_serves_nothing(authority: Authority) -> None:
    with pytest.raises(BadCertificate, match=r"client\.pem.*TESSERA_TLS_KEY"):
        require_private(CoordinatorSettings(tls_cert=authority.client))

"""Patience: what is tried again, how often, after how long, and what is not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.client import transport as transport_module
from tessera.shared.client.client import Client
from tessera.shared.client.transport import Credential, HttpTransport, IntermediaryFault, NotUnderstood, Unreachable
from tessera.shared.problems import (
    PROBLEMS,
    Forbidden,
    Invalid,
    Problem,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from tessera.shared.urls import proxy_of
from tests.support.scripted import Answer, Asked, answering

PROBLEM = {"Content-Type": "application/problem+json"}


def refusal(code: str, **headers: str) -> Answer:
    problem = PROBLEMS[code]("as scripted")
    body = problem.document().model_dump_json().encode()
    return Answer(problem.status, body, PROBLEM | {k.replace("_", "-"): v for k, v in headers.items()})


def transport(url: str, pauses: list[float], **options: Any) -> HttpTransport:
    return HttpTransport(url, options.pop("token", "secret"), verify=False, sleep=pauses.append, **options)


@contextmanager
def asking(*answers: Answer, **options: Any) -> Iterator[tuple[HttpTransport, list[Asked], list[float]]]:
    """Yield a transport to a server with these answers, the requests that come there, and the transport's pauses."""
    pauses: list[float] = []
    with answering(*answers) as (url, asked), closing(transport(url, pauses, **options)) as http:
        yield http, asked, pauses


@pytest.mark.parametrize("code", ["unavailable", "too-many-requests", "server-fault", "upload-busy"])
def test_what_may_pass_is_tried_again(code: str) -> None:
    with asking(refusal(code), refusal(code), Answer(body=b"done")) as (http, asked, pauses):
        assert http.request("GET", "/x").content == b"done"
    assert len(asked) == 3
    assert len(pauses) == 2


def test_the_address_of_a_page_is_refused_with_that_of_the_coordinator() -> None:
    for answer in (
        Answer(303, headers={"Location": "/page/sign-in"}),
        Answer(404, headers={"Content-Type": "text/html"}),
    ):
        with answering(answer) as (url, _):
            http = transport(f"{url}/page", [])
            with pytest.raises(IntermediaryFault) as refused:
                http.request("GET", "/v1/runs")
            http.close()
        assert refused.value.advice.startswith(f"Use {url} as the URL")


def test_a_broken_line_is_tried_again_once_something_has_answered() -> None:
    with asking(Answer(), Answer(body=b"cut", breaks_after=1), Answer(body=b"done"), awaits_start=False) as (
        http,
        asked,
        pauses,
    ):
        http.request("GET", "/x")
        assert http.request("GET", "/x").content == b"done"
    assert (len(asked), len(pauses)) == (3, 1)


@pytest.mark.parametrize("code", ["not-found", "lease-lost", "invalid", "unauthenticated", "offset-mismatch"])
def test_what_will_not_pass_is_not(code: str) -> None:
    with asking(refusal(code)) as (http, asked, pauses), pytest.raises(PROBLEMS[code]):
        http.request("GET", "/x")
    assert (len(asked), pauses) == (1, [])


def test_a_proxy_that_is_in_the_way_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    with answering(Answer(407)) as (url, asked), socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        proxies = {
            f"http://me:hunter2@127.0.0.1:{dead.getsockname()[1]}": "by the proxy {}: Connection refused",
            url.replace("//", "//me:hunter2@"): "the proxy {} requires authentication (HTTP 407)",
        }
        for proxy, told in proxies.items():
            # What names no scheme is taken for http, and its password is one all the same.
            for named in (proxy, proxy.removeprefix("http://")):
                monkeypatch.setenv("http_proxy", named)
                http = transport("http://tessera.example", [], patience_seconds=0)
                with pytest.raises(Unreachable) as refused:
                    http.request("GET", "/x")
                http.close()
                assert told.format(proxy.replace("hunter2", "***")) in refused.value.detail
                assert refused.value.advice.startswith("The cause may be the proxy")
    assert {ask.path for ask in asked} == {"http://tessera.example/x"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Replaces what libraries read from the environment while they build a client."""
    names = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir", "sslkeylogfile")
    for name in names:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def replace(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return replace


EMPTY, NO_PEM = "/dev/null", __file__


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", "socksio has to be installed"),
        ("HTTPS_PROXY", "ftp://127.0.0.1", "it begins neither with http://"),
        ("https_proxy", "http://proxy:port", "its port is no number"),
        ("HTTPS_PROXY", "http://me:hunter2/@proxy", "its port is no number"),
        ("HTTPS_PROXY", "http://proxy:3128\r", "carriage return"),
        ("HTTPS_PROXY", '"http://proxy:3128"', "quotation mark"),
        ("HTTPS_PROXY", "http://", "it names no host"),
        ("SSL_CERT_FILE", "/nonexistent.pem", "No such file"),
        ("SSL_CERT_FILE", EMPTY, "no certificate or crl found"),
        ("SSL_CERT_FILE", NO_PEM, "no certificate or crl found"),
        ("SSL_CERT_DIR", "/nonexistent", "openssl rehash"),
        ("SSLKEYLOGFILE", "/nonexistent/keys", "No such file"),
    ],
)
def test_a_variable_that_libraries_read_and_cannot_use_is_named(
    environment: Callable[[dict[str, str]], None], variable: str, value: str, reason: str
) -> None:
    environment({variable: value})
    with pytest.raises(Invalid, match=f"^{variable}: .*{reason}") as refusal:
        Client.from_options("https://tessera.example").close()
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"])
def test_a_file_of_the_environment_is_not_taken_for_a_client_certificate(
    environment: Callable[[dict[str, str]], None], variable: str
) -> None:
    environment({variable: "/nonexistent/file"})
    with pytest.raises(Invalid, match=f"^{variable}"):
        Client.from_options("https://tessera.example", client_cert=Path(__file__)).close()


def test_a_proxy_of_another_scheme_does_not_matter(environment: Callable[[dict[str, str]], None]) -> None:
    environment({"HTTPS_PROXY": "socks5://127.0.0.1:1"})
    with asking(Answer()) as (http, asked, _):
        http.request("GET", "/x")
    assert len(asked) == 1


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:1\r",
        "https://tessera.example ",
        '"https://tessera.example"',
        "https://::1:8470",
        "https://[::1",
        "https://tessera.example:84700",
        "https://tessera..example",
        f"https://{'t' * 64}.example",
        "https://-\u00e4.example",
    ],
)
def test_a_url_that_no_client_can_use_is_named(url: str) -> None:
    with pytest.raises(Invalid, match=r"URL .* cannot be used") as refusal:
        Client.from_environment({"url": url}).close()
    assert refusal.value.advice.startswith("Correct")
    with pytest.raises(Invalid):
        Client(url).close()


@pytest.mark.parametrize("token", ['"tessera_admin_x"', "tessera admin", "tessera\radmin", "\ufefftessera"])
def test_a_token_with_foreign_characters_is_not_sent(token: str) -> None:
    with pytest.raises(Invalid, match="characters that no token has"):
        Client.from_options("http://127.0.0.1", token).close()


@pytest.mark.parametrize(
    ("listed", "host", "is_covered"),
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("tessera.example, 10.0.0.0/8", "10.1.2.3", True),
        ("10.1.2.3/8", "10.9.9.9", True),
        ("fd00::/8", "[fd00::1]", True),
        ("[fd00::1]", "[fd00::1]", True),
        ("[fd00::1]:8470", "[fd00::1]:8470", True),
        ("[fd00::1]:8470", "[fd00::1]:8471", False),
        ("10.1.2.3:8470", "10.1.2.3:8470", True),
        ("10.1.2.3:443", "10.1.2.3", False),
        ("::/0", "10.1.2.3", False),
        ("hospital.example", "tessera.hospital.example", True),
        (".hospital.example", "TESSERA.hospital.example.", True),
        ("*.hospital.example", "tessera.hospital.example", True),
        ("hospital.example", "otherhospital.example", False),
        ("Hospital.Example other.example", "hospital.example", True),
        ("*", "tessera.example", True),
        ("", "tessera.example", False),
        (",", "tessera.example", False),
    ],
)
def test_ranges_names_and_ports_in_no_proxy_are_honoured(
    environment: Callable[[dict[str, str]], None], listed: str, host: str, *, is_covered: bool
) -> None:
    environment({"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": listed})
    assert (proxy_of(f"http://{host}") is None) == is_covered


def test_a_host_in_a_range_of_no_proxy_is_reached_directly(environment: Callable[[dict[str, str]], None]) -> None:
    environment({"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.0/8"})
    with asking(Answer(), patience_seconds=0) as (http, asked, _):
        http.request("GET", "/x")
    assert len(asked) == 1


def test_retry_after_is_honoured() -> None:
    with asking(refusal("too-many-requests", Retry_After="7"), Answer()) as (http, _, pauses):
        http.request("GET", "/x")
    assert pauses == [7.0]


def test_a_retry_after_beyond_its_patience_is_given_up_at_once() -> None:
    with (
        asking(refusal("too-many-requests", Retry_After="9999"), patience_seconds=5) as (http, asked, pauses),
        pytest.raises(TooManyRequests),
    ):
        http.request("GET", "/x")
    assert (len(asked), pauses) == (1, [])


def test_pauses_grow_and_are_jittered_below_their_bound() -> None:
    with asking(*[refusal("unavailable")] * 10, Answer()) as (http, _, pauses):
        http.request("GET", "/x")
    bounds = [min(0.1 * 2**n, 15.0) for n in range(10)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))


def test_a_broken_connection_is_tried_again() -> None:
    with asking(Answer(body=b"broken off", breaks_after=3), Answer(body=b"whole")) as (http, asked, _pauses):
        assert http.request("GET", "/x").content == b"whole"
    assert len(asked) == 2


def test_nobody_there_is_unreachable_and_says_what_to_check() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        http = transport(url, [], patience_seconds=0)
        with pytest.raises(Unreachable, match="Check the URL"):
            http.request("GET", "/x")
        http.close()
    assert issubclass(Unreachable, Unavailable)


def page(status: int, **headers: str) -> Answer:
    """What a proxy or a sign-in page says by itself."""
    return Answer(status, b"<html>an odd page</html>", {"Content-Type": "text/html", **headers})


@pytest.mark.parametrize(
    ("answer", "said", "remedy"),
    [
        (page(200), "HTTP 200 OK", "Check the URL"),
        (page(302, Location="https://portal.example/in"), "text/html), to https://portal.exa", "sign in"),
        (page(307, Location="/page/sign-in"), "to /page/sign-in", "without the path of a page"),
        (page(401), "HTTP 401 Unauthorized", "credentials of its own"),
        (page(403), "HTTP 403 Forbidden", "operator of the proxy"),
        (Answer(404, b"nothing here"), "HTTP 404 Not Found", "Check the URL"),
        (Answer(404, b'{"message": "no route"}', {"Content-Type": "application/json"}), "HTTP 404", "Check the URL"),
        (page(405), "HTTP 405 Method Not Allowed", "PATCH"),
        (page(413), "HTTP 413 Request Entity Too Large", "client_max_body_size"),
        (page(422), "HTTP 422", "Check the URL"),
        (Answer(500), "HTTP 500 Internal Server Error", "Check the URL"),
        (page(502), "HTTP 502 Bad Gateway", "that the coordinator runs"),
        (page(599), "HTTP 599 (", "Check the URL"),
    ],
)
def test_an_answer_that_no_coordinator_wrote_is_not_told_as_the_coordinators(
    answer: Answer, said: str, remedy: str
) -> None:
    with asking(answer) as (http, _, _):
        asks: list[Callable[[], object]] = [
            lambda: http.once("POST", "/x", content=b"x" * 7_200_000),
            lambda: http.stream("/x", {}).__enter__(),
            lambda: next(http.listen("/x")),
        ]
        refusals = []
        for ask in asks:
            with pytest.raises(IntermediaryFault) as refusal:
                ask()
            refusals.append(refusal.value)
    for refused in refusals:
        assert "in between, not the coordinator, answered" in refused.detail
        assert said in refused.detail
        assert remedy in refused.advice
    assert refusals[0].detail.endswith("; the request had a body of 7.2 MB")
    assert "body" not in refusals[1].detail


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(401, b"not json", PROBLEM), IntermediaryFault),
        (Answer(403, b'{"title": "Blocked", "status": 403}', PROBLEM), IntermediaryFault),
        (page(401), IntermediaryFault),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_gateway_s_own_problem_document_is_no_refusal_of_the_coordinator(
    answer: Answer, kind: type[Exception], method: str
) -> None:
    with asking(answer) as (http, _, _), pytest.raises(Problem) as refusal:
        http.once(method, "/x")
    # A refusal of HEAD has no body: it may be a coordinator's, and nothing lasting follows from it.
    unknown = method == "HEAD" and answer.headers == PROBLEM
    assert isinstance(refusal.value, Unauthenticated | Forbidden if unknown else kind)
    assert not refusal.value.from_document


def test_a_page_in_place_of_the_coordinator_is_quoted_by_its_first_words() -> None:
    text = b"<html><head><title>x</title></head><body><h1>Blocked</h1>\n by Corporate &amp; Proxy" + b" word" * 100
    for status in (403, 200):
        with (
            asking(Answer(status, text, {"Content-Type": "text/html", "Server": "squid"})) as (http, _, _),
            pytest.raises(IntermediaryFault, match=r"squid.*: 'Blocked by Corporate &amp; Proxy word") as page,
        ):
            http.once("GET", "/x")
        assert len(page.value.detail) < 400


def test_a_proxy_cannot_put_a_client_to_sleep_for_a_day() -> None:
    with asking(page(429, **{"Retry-After": "86400"})) as (http, _, _), pytest.raises(IntermediaryFault) as refusal:
        http.once("GET", "/x")
    assert refusal.value.retry_after_seconds == 30


def test_an_upload_whose_offset_a_proxy_removed_fails_as_the_line_does() -> None:
    with asking(Answer(204, b"")) as (http, _, _), pytest.raises(NotUnderstood, match="has no Upload-Offset"):
        http.once("HEAD", "/x").header("Upload-Offset")


@pytest.mark.parametrize("awaits_start", [True, False])
def test_an_intermediarys_page_is_tried_again_only_if_it_may_pass(awaits_start: bool) -> None:
    for status, tries in ((503, 2), (429, 2), (413, 1), (403, 1), (200, 1)):
        with (
            asking(page(status), Answer(), awaits_start=awaits_start) as (http, asked, _),
            suppress(IntermediaryFault),
        ):
            http.request("GET", "/x")
        assert len(asked) == tries


@pytest.mark.parametrize(("status", "tries"), [(401, 2), (403, 2), (404, 2), (302, 2), (200, 2), (405, 1), (413, 1)])
def test_a_page_amid_a_coordinators_answers_does_not_end_what_waits_for_it(status: int, tries: int) -> None:
    with asking(Answer(), page(status), Answer(), awaits_start=False) as (http, asked, _):
        http.request("GET", "/x")
        with suppress(IntermediaryFault):
            http.request("GET", "/x")
    assert len(asked) == 1 + tries


def test_an_answer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # No piece of it is late, however busy this machine is.
    monkeypatch.setattr(transport_module, "WHOLE_ANSWER", 1 / 60)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                try:
                    while True:
                        connection.sendall(b" ")
                        time.sleep(0.02)
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        patient = transport(f"http://127.0.0.1:{server.getsockname()[1]}", [], answer_seconds=60)
        began_at = time.monotonic()
        with pytest.raises(NotUnderstood, match="has not ended after 1 s"):
            patient.request("GET", "/version")
        assert time.monotonic() - began_at >= 1
        patient.close()
        thread.join()


def test_an_answer_is_as_long_as_its_reader_allows() -> None:
    with answering(Answer(body=b"x" * 101)) as (url, _):
        brief = transport(url, [], max_answer_bytes=100)
        with pytest.raises(NotUnderstood, match="longer than 100 bytes"):
            brief.request("GET", "/version")
        brief.close()


def test_a_token_that_is_refused_is_read_anew_once() -> None:
    secrets = iter(["second", "third"])
    no = refusal("unauthenticated")
    token = Credential("first", lambda: next(secrets))
    with asking(no, Answer(), no, token=token, patience_seconds=0) as (http, asked, _):
        http.request("GET", "/x")
        # What is refused twice is not tried a third time.
        with pytest.raises(Unauthenticated):
            http.request("GET", "/y")
    shown = [ask.headers["Authorization"] for ask in asked]
    assert shown == ["Bearer first", "Bearer second", "Bearer second", "Bearer third"]


def test_a_token_that_is_the_same_when_read_anew_is_not_tried_again() -> None:
    token = Credential("same", lambda: "same")
    with asking(refusal("unauthenticated"), token=token) as (http, asked, _), pytest.raises(Unauthenticated):
        http.request("GET", "/x")
    assert len(asked) == 1

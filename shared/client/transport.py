"""HTTP with retries; refusals become problems."""

from __future__ import annotations

import math
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin

import httpcore
import httpx
from httpx import codes
from opentelemetry.trace import SpanKind

from tessera.shared.client.bulk import BULK, PIECE_BYTES, BulkTransport, FilePart
from tessera.shared.diagnostics import pem_fault, reason_of
from tessera.shared.json_limits import bounded
from tessera.shared.problems import (
    MEDIA_TYPE,
    PAGES,
    Invalid,
    Problem,
    ProblemDocument,
    ServerFault,
    Unauthenticated,
    Unavailable,
    kind_of_status,
    problem_from,
)
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import HEADER
from tessera.shared.urls import proxy_of, without_password

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

MAX_PAUSE_SECONDS = 15.0
MAX_ANSWER_BYTES = 64 << 20

ANSWER_SECONDS = 60.0
"""The time limit for an answer to begin, and for each of its pieces."""

WHOLE_ANSWER = 10
"""The time limit for a whole answer in memory, in multiples of the limit for a piece."""

SILENCE_SECONDS = 30.0
"""The time after which a stream of events without any is taken to be broken: twice the interval of keep-alives."""

# By way of a proxy, where httpx's own transport is used: its default of 64 KiB takes 50 % more CPU.
httpcore.HTTP11Connection.READ_NUM_BYTES = PIECE_BYTES

SHOW_CERTIFICATE = (
    "--client-cert and --client-key for commands and `tessera worker join`, client_cert and client_key in a worker's "
    "settings."
)

PEM_FILES = (
    "Name a file that this user may use, in PEM for certificates and keys; unset a variable that is not needed."
)

BY_PROXY = (
    "The cause may be the proxy that the environment sets: check that it runs, admits this user "
    "(HTTPS_PROXY=http://USER:PASSWORD@PROXY:PORT, special characters as %40 for @) and reaches the coordinator, or "
    "add the coordinator's host to NO_PROXY."
)


class Unreachable(Unavailable):
    """A coordinator that did not answer: nothing listens there, or every connection broke."""

    title = "The coordinator cannot be reached"
    remedy = "Check the URL and the network, and that the coordinator runs."


class NotUnderstood(ServerFault):
    """An answer that does not fit this version of the API."""

    code = "answer-not-understood"
    title = "The coordinator's answer is not understood"
    meaning = "The answer does not fit this version of the API."
    causes = ("a client and a coordinator of different versions", "a proxy that changes or cuts answers")
    remedy = (
        "Compare the versions on both sides (GET /version); the older one needs an update. If they are equal, "
        "something between them may have answered or changed the answer: check the URL and the proxies on the way."
    )
    retryable = False


class IntermediaryFault(ServerFault):
    """An answer that no coordinator wrote: of a proxy, a gateway, a firewall or a sign-in page on the way.

    `sent_bytes` is the size of the request's body.
    """

    code = "intermediary-answer"
    title = "Something else answered in place of the coordinator"
    meaning = "No coordinator wrote the answer: it is a page, a redirect or an error of something on the way."
    causes = ("a wrong URL", "a proxy, gateway or firewall that refuses the request", "a page that asks to sign in")
    remedy = (
        "Check the URL: its host, port and path. If they are right, ask the operator of the proxy, firewall or "
        "network in between to let these requests through."
    )

    def __init__(self, answer: HttpAnswer) -> None:
        status, size = answer.status_code, answer.sent_bytes
        about = [value[:60] for name in ("Server", "Content-Type") if (value := answer.headers.get(name))]
        phrase = f"HTTP {status} {codes.get_reason_phrase(status)}".rstrip()
        detail = f"a proxy or page in between, not the coordinator, answered {answer.request} with {phrase}"
        detail += f" ({', '.join(about)})" if about else ""
        detail += f", to {answer.headers['Location'][:200]}" if "Location" in answer.headers else ""
        if words := _words(answer.content):
            detail += f": {words!r}"
        detail += f"; the request had a body of {size / 1e6:.1f} MB" if size >= SHOWN_BYTES else ""
        after = _retry_after(answer)
        before, is_page, _ = answer.request.partition("/page")
        remedy = _INTERMEDIARIES.get(300 if 300 <= status < 400 else status)
        if is_page:
            remedy = f"Use {before.partition(' ')[2]} as the URL: the path of a page is for browsers."
        super().__init__(
            detail,
            remedy=remedy,
            retry_after_seconds=None if after is None else min(after, MAX_PAGE_SECONDS),
            headers=dict(answer.headers),
        )
        self.answer_status = status
        self.is_body_limit = status == codes.REQUEST_ENTITY_TOO_LARGE
        self.is_rule = self.is_body_limit or status == codes.METHOD_NOT_ALLOWED
        self.retryable = status >= 500 or status in (codes.REQUEST_TIMEOUT, codes.TOO_MANY_REQUESTS)


SHOWN_BYTES = 50_000
"""Size from which a request's body may be the reason of an intermediary's refusal."""

SHOWN_WORDS = 120
"""Characters of a page's text that its error quotes."""

MAX_PAGE_SECONDS = 30.0
"""Upper limit on the `Retry-After` of a page that no coordinator wrote."""

_MARKUP = re.compile(r"(?is)<(head|script|style)\b.*?</\1\s*>|<[^>]*>")

_BEHIND = "Check that the coordinator runs, and that the proxy in front of it reaches it."
UNLIMITED = (
    "nginx: client_max_body_size 0; HAProxy: remove the rule with req.body_size or content-length; Caddy: remove "
    "request_body; Traefik: remove the middleware buffering"
)
"""The line of configuration by which a proxy takes bodies of any size."""
PATIENT = (
    "nginx: proxy_read_timeout 75s; HAProxy: timeout server 75s; Caddy: remove response_header_timeout; Traefik: "
    "responseHeaderTimeout = 0"
)
"""The line of configuration by which a proxy waits longer for an answer than any claim does."""
_INTERMEDIARIES = {
    300: "A token does not follow redirects. If the coordinator itself has moved there, use that URL, without the "
    "path of a page. Otherwise something in between asks to sign in, or the URL is another service's.",
    400: f"If it asks for a certificate of this client: {SHOW_CERTIFICATE}",
    401: "Something in between asks for credentials of its own, which no client of Tessera has: have its operator "
    "exempt the coordinator (nginx: auth_basic off).",
    405: "Have the proxy in between let the methods GET, HEAD, POST, PATCH and DELETE through.",
    413: f"Have the operator of the proxy in between allow larger bodies of requests ({UNLIMITED}).",
    421: "Use a host name in the URL that the configuration of the proxy has.",
    502: _BEHIND,
    503: _BEHIND,
    504: f"{_BEHIND} If so, it waits too short a time for answers ({PATIENT}).",
}


class Untrusted(Unreachable):
    """A TLS handshake that failed because one side does not trust the other. Not retried."""

    code = "untrusted"
    title = "The TLS handshake failed"
    meaning = (
        "The client does not trust the coordinator's certificate, or the coordinator does not trust the client's."
    )
    causes = (
        "a certificate of an institution's own CA",
        "another host name",
        "an expired certificate",
        "a wrong clock",
    )
    remedy = (
        "Check the host name in the URL, and give the CA that issued the coordinator's certificate: --ca-bundle "
        "(for `tessera worker join` also TESSERA_WORKER_CA_BUNDLE, for other commands TESSERA_CA_BUNDLE), or "
        "ca_bundle in a worker's settings."
    )
    retryable = False


class Credential(httpx.Auth):
    """A token whose secret may change while it is in use; `reread` returns the present one.

    Transports in several threads may share one.
    """

    def __init__(self, secret: str, reread: Callable[[], str | None] = lambda: None) -> None:
        self.secret = secret
        self._reread = reread

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.secret}"
        yield request

    def renewed(self, refused: str) -> bool:
        """Read the secret again and return True if it differs from the refused one."""
        self.secret = self._reread() or self.secret
        return self.secret != refused


class HttpTransport:
    """An httpx client that retries temporary failures until no byte has moved for `patience_seconds`.

    Every request of the API is safe to repeat: reads by nature, creations by their idempotency key, and reports on a
    task by its token.
    """

    def __init__(
        self,
        url: str,
        token: str | Credential | None,
        *,
        patience_seconds: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        verify: bool | ssl.SSLContext = True,
        answer_seconds: float = ANSWER_SECONDS,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        awaits_start: bool = True,
    ) -> None:
        # Uncompressed, so that no answer can grow in this process beyond the bytes sent.
        headers = {"Accept-Encoding": "identity"}
        timeout = httpx.Timeout(answer_seconds, connect=min(10.0, answer_seconds))
        self._credential = token if isinstance(token, Credential) else Credential(token) if token else None
        context = tls_context() if verify is True else verify or httpx.create_ssl_context(verify=False)
        proxy = proxy_of(url)
        self._proxy = without_password(proxy) if proxy else None
        try:
            self._http = httpx.Client(
                base_url=url,
                headers=headers,
                timeout=timeout,
                verify=context,
                auth=self._credential,
                proxy=proxy,
                transport=None if proxy else BulkTransport(context),
                # httpx would fail for a proxy of another scheme that it cannot use, and knows no ranges in NO_PROXY.
                trust_env=False,
            )
        except httpx.InvalidURL as fault:
            raise Invalid(f"the coordinator's URL {url!r} cannot be used: {fault}", remedy="Correct it.") from fault
        self._patience_seconds = patience_seconds
        self._sleep = sleep
        self._whole_seconds = WHOLE_ANSWER * answer_seconds
        self._max_answer_bytes = max_answer_bytes
        self._awaits_start = awaits_start
        self._is_known = False

    def close(self) -> None:
        self._http.close()

    def trace(self, traceparent: str | None) -> None:
        """Assign later requests to the trace of this traceparent, or to none."""
        self._http.headers.pop(HEADER, None)
        if traceparent is not None:
            self._http.headers[HEADER] = traceparent

    def request(self, method: str, path: str, **options: Any) -> HttpAnswer:
        """Send a request, with retries, and return its answer. Raises Problem for a refusal."""
        return self.patiently(lambda: self.once(method, path, **options))

    def once(self, method: str, path: str, **options: Any) -> HttpAnswer:
        """Send a request once. Raises Problem for a refusal and Unreachable without an answer."""
        with self._sent(method, path, options) as response:
            answer = self._read(response)
        if not response.is_success:
            raise problem_of(answer)
        return answer

    def send_file(self, method: str, path: str, headers: dict[str, str], part: FilePart) -> HttpAnswer:
        """Send a request once, with a part of a file as its body. Raises as `once`."""
        headers = {**headers, "Content-Length": str(len(part))}
        return self.once(method, path, headers=headers, content=part, extensions={BULK: True})

    @contextmanager
    def stream(
        self, path: str, headers: dict[str, str], *, method: str = "GET", content: str | None = None
    ) -> Iterator[httpx.Response]:
        """Send a request once, and yield the response with its body unread: one that may be large."""
        options = {"headers": headers, "content": content, "extensions": {BULK: True}}
        with self._sent(method, path, options) as response:
            if not response.is_success:
                raise problem_of(self._read(response))
            yield response

    def listen(self, path: str) -> Iterator[bytes]:
        """Send a request once, and yield the pieces of its answer as they arrive, until it ends or is silent.

        Raises Problem for a refusal, and Unreachable. Without a span, which would be the parent of the requests that
        the caller sends between two pieces.
        """
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=10.0)
        with unreachable_errors(self._proxy), self._http.stream("GET", path, timeout=timeout) as response:
            if not response.is_success or _is_page(response):
                raise problem_of(self._read(response))
            yield from response.iter_raw()

    @contextmanager
    def _sent(self, method: str, path: str, options: dict[str, Any]) -> Iterator[httpx.Response]:
        # The request's span is a child of the present one, if any, or else of the transport's trace.
        parent = None if spans.present() else self._http.headers.get(HEADER)
        attributes = {"http.request.method": method}
        with (
            spans.span(method, kind=SpanKind.CLIENT, parent=parent, attributes=attributes),
            unreachable_errors(self._proxy),
        ):
            if present := spans.present():
                options = {**options, "headers": {**options.get("headers", {}), HEADER: present}}
            with self._http.stream(method, path, **options) as response:
                if self._proxy and response.status_code == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
                    raise Unreachable(f"the proxy {self._proxy} requires authentication (HTTP 407)", remedy=BY_PROXY)
                if response.is_success and _is_page(response):
                    raise IntermediaryFault(self._read(response))
                # The client asked for none. Few bytes could expand to any number, and no length would hold.
                encoding = response.headers.get("Content-Encoding", "identity")
                if response.is_success and encoding != "identity":
                    raise NotUnderstood(f"the answer has Content-Encoding {encoding[:40]!r}, which was not asked for")
                yield response

    def _read(self, response: httpx.Response) -> HttpAnswer:
        content = bytearray()
        give_up_at = time.monotonic() + self._whole_seconds
        for piece in response.iter_raw():
            content += piece
            if len(content) > self._max_answer_bytes:
                raise NotUnderstood(f"the answer is longer than {self._max_answer_bytes} bytes")
            if time.monotonic() > give_up_at:
                raise NotUnderstood(f"the answer has not ended after {self._whole_seconds:g} s")
        return _answer_of(response, bytes(content))

    def patiently(self, attempt: Callable[[], T], moved: Callable[[], int] = lambda: 0) -> T:
        """Retry `attempt` until it succeeds, fails for a lasting reason, or makes no progress for `patience_seconds`.

        The time runs from the first failure, and restarts at each failure before which `moved` (bytes transferred)
        has grown, so that a transfer may take any time while it advances. A refused token is read again, once.
        Until a coordinator has answered, the URL may be wrong: nothing is repeated for a page or an answer of another
        kind, nor without `awaits_start` for no answer. Later, both may pass, unless a page refuses the method or the
        size.
        """
        give_up_at, before = math.inf, -1
        pause = 0.1
        renewed = False
        while True:
            sent = self._credential.secret if self._credential else ""
            try:
                result = attempt()
                self._is_known = True
                return result
            except Problem as problem:
                if isinstance(problem, Unauthenticated) and not renewed and self._credential:
                    renewed = self._credential.renewed(sent)
                    if renewed:
                        continue
                if (there := moved()) > before:
                    give_up_at, before, pause = time.monotonic() + self._patience_seconds, there, 0.1
                asked = problem.retry_after_seconds
                wait = asked if asked is not None else random.uniform(pause / 2, pause)  # noqa: S311 (jitter)
                self._is_known = self._is_known or problem.from_document
                if self._is_known and isinstance(problem, IntermediaryFault | NotUnderstood):
                    lasts = isinstance(problem, IntermediaryFault) and problem.is_rule
                else:
                    may_start = self._is_known or self._awaits_start
                    lasts = not problem.retryable or (isinstance(problem, Unreachable) and not may_start)
                if lasts or time.monotonic() + wait > give_up_at:
                    raise
            self._sleep(wait)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)


@dataclass(frozen=True)
class HttpAnswer:
    """A whole answer in memory, and the method and URL of its request with the size of its body."""

    status_code: int
    headers: httpx.Headers
    content: bytes = b""
    request: str = "a request"
    sent_bytes: int = 0

    def header(self, name: str) -> str:
        """Return a header. Raises NotUnderstood if there is none."""
        if name not in self.headers:
            raise NotUnderstood(f"the answer to {self.request} has no {name}")
        return self.headers[name]


def _answer_of(response: httpx.Response, content: bytes = b"") -> HttpAnswer:
    request = response.request
    sent_bytes = int(request.headers.get("Content-Length", 0))
    asked = f"{request.method} {request.url.copy_with(userinfo=b'', query=None)}"
    return HttpAnswer(response.status_code, response.headers, content, asked, sent_bytes)


def _is_page(response: httpx.Response) -> bool:
    """Return True if an answer is for people: a coordinator sends a client none."""
    kind = str(response.headers.get("Content-Type", ""))
    return kind.startswith(("text/html", "text/plain", "application/xhtml"))


@contextmanager
def unreachable_errors(proxy: str | None = None) -> Iterator[None]:
    """Convert httpx's errors without an answer to Unreachable."""
    try:
        yield
    except httpx.RequestError as fault:
        if tls := _cause(fault, ssl.SSLError):
            raise _untrusted(tls) from fault
        by = f" by the proxy {proxy}" if proxy else ""
        url = fault.request.url
        at = f"{url.scheme}://{url.netloc.decode('ascii')}"
        detail, remedy = f"no answer from the coordinator at {at}{by}: {_reason(fault)}", None
        if proxy:
            remedy = BY_PROXY
        elif isinstance(fault, httpx.RemoteProtocolError) and url.scheme == "https":
            # This may be a restart, or a TLS 1.3 server that rejects a missing client certificate.
            detail = f"the coordinator closed the connection without an answer: {fault}"
            remedy = f"Check that it runs. If it requires a client certificate: {SHOW_CERTIFICATE}"
        elif isinstance(fault, httpx.RemoteProtocolError):
            remedy = "Check that it runs; if it speaks TLS, the URL begins with https://."
        raise Unreachable(detail, remedy=remedy) from fault
    except httpx.InvalidURL as fault:
        raise Unreachable(f"the coordinator's URL cannot be read: {fault}") from fault


_NAME = (
    "Use a URL with a name or address that the certificate has (subjectAltName), or have the coordinator's operator "
    "get one for this URL."
)
CERTIFICATE_REMEDIES = {
    9: "The certificate is not valid yet: check this machine's clock, and when the certificate begins.",
    10: "Have the coordinator's operator renew the certificate; if that was done, check this machine's clock.",
    62: _NAME,
    64: _NAME,
}
"""Remedies by OpenSSL's codes of verification (X509_V_ERR); for the others the CA is missing."""


def _cause(fault: BaseException, kind: type[E]) -> E | None:
    """Return the error of this kind that caused httpx's error, if any."""
    cause: BaseException | None = fault
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause


def _reason(fault: httpx.RequestError) -> str:
    if isinstance(fault, httpx.TimeoutException):
        return "it takes too long"
    system = _cause(fault, OSError)
    return (system.strerror if system else None) or str(fault) or "the connection broke"


def _untrusted(fault: ssl.SSLError) -> Unreachable:
    reason = (fault.reason or str(fault)).replace("_", " ").lower()
    if isinstance(fault, ssl.SSLCertVerificationError):
        detail = f"the server's certificate is not trusted: {fault.verify_message}"
        return Untrusted(detail, remedy=CERTIFICATE_REMEDIES.get(fault.verify_code))
    if "certificate required" in reason or "alert" in reason:
        return Untrusted(
            f"the coordinator rejects this client's certificate, or requires one: {reason}",
            remedy=f"Set a certificate of a CA that the coordinator trusts: {SHOW_CERTIFICATE}",
        )
    if "wrong version number" in reason:
        return Untrusted("the server does not speak TLS", remedy="Check the port; http:// is for loopback alone.")
    return Unreachable(f"the TLS connection broke: {reason}")


def tls_context(
    ca_bundle: Path | None = None, client_cert: Path | None = None, client_key: Path | None = None
) -> ssl.SSLContext:
    """Return the TLS context of a client. A bundle of CAs replaces the default ones.

    Raises Invalid that names an unusable file.
    """
    environment = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"), os.environ.get("SSLKEYLOGFILE")
    if not (ca_bundle or client_cert or client_key):
        return _usual_tls(*environment)
    if ca_bundle:
        with _usable_files(f"ca_bundle: {ca_bundle}"):
            context = ssl.create_default_context(cafile=ca_bundle)
    else:
        context = _environment_tls(*environment)
    if client_key and not client_cert:
        raise Invalid("client_key: it is set without a client_cert", remedy=PEM_FILES)
    if client_cert:
        try:
            context.load_cert_chain(client_cert, client_key)
        except OSError as fault:
            reason = pem_fault(fault, client_cert, client_key)
            raise Invalid(f"client_cert: {reason}", remedy=PEM_FILES) from fault
    return context


@contextmanager
def _usable_files(named: str) -> Iterator[None]:
    """Convert an error of TLS files to Invalid that names them, or the variable that Python's own TLS reads."""
    try:
        yield
    except OSError as fault:
        if (key_log := os.environ.get("SSLKEYLOGFILE")) and str(fault.filename) == key_log:
            named = f"SSLKEYLOGFILE: {key_log}"
        raise Invalid(f"{named} cannot be used: {reason_of(fault)}", remedy=PEM_FILES) from fault


def _environment_tls(cert_file: str | None, cert_dir: str | None, _: str | None) -> ssl.SSLContext:
    """Return a context with the CAs that the environment prescribes, or else those of certifi."""
    if cert_file:
        with _usable_files(f"SSL_CERT_FILE: {cert_file}"):
            return httpx.create_ssl_context()
    folders = [Path(folder) for folder in cert_dir.split(os.pathsep)] if cert_dir else []
    if folders and not any(any(folder.glob("[0-9a-f]*.[0-9]*")) for folder in folders):
        # OpenSSL would trust nothing, without a word.
        detail = f"SSL_CERT_DIR: {cert_dir} has no certificate under a name that `openssl rehash` gives"
        raise Invalid(detail, remedy="Correct or unset SSL_CERT_DIR, or give a file of CAs in SSL_CERT_FILE.")
    with _usable_files(f"SSL_CERT_DIR: {cert_dir}" if cert_dir else "the file of CAs of the package certifi"):
        return httpx.create_ssl_context()


_usual_tls = lru_cache(maxsize=4)(_environment_tls)
"""Clients without files of their own share a context: to read the CAs takes longer than most commands."""


def may_pass(problem: Problem) -> bool:
    """Return True if a problem may pass by itself: a coordinator says so, or the line failed, so that no coordinator
    wrote the answer, or not as it arrived."""
    return problem.retryable or isinstance(problem, Unreachable | NotUnderstood | IntermediaryFault)


def problem_of(answer: HttpAnswer) -> Problem:
    """Return the problem in an answer, or an IntermediaryFault for one that no coordinator wrote.

    Gateways send problem documents too, without the members that a coordinator's have.
    """
    headers = dict(answer.headers)
    if answer.status_code < 400 or not answer.headers.get("Content-Type", "").startswith(MEDIA_TYPE):
        return IntermediaryFault(answer)
    if answer.request.startswith("HEAD "):
        # It has no body to judge by, so that nothing lasting may follow from it.
        return kind_of_status(answer.status_code)(f"HTTP {answer.status_code}", headers=headers)
    try:
        document = ProblemDocument.model_validate_json(bounded(answer.content))
    except ValueError:
        return IntermediaryFault(answer)
    problem = problem_from(document, _retry_after(answer), headers)
    if re.fullmatch(rf"{PAGES}/[a-z0-9-]{{1,64}}", document.type):
        # A proxy may serve the coordinator, and so these pages, under a path.
        root, is_api, _ = answer.request.partition(" ")[2].partition("/v1/")
        problem.page = root + document.type if is_api else urljoin(root, document.type)
    return problem


def _retry_after(answer: HttpAnswer) -> float | None:
    header = answer.headers.get("Retry-After", "")
    return float(header) if header.isdecimal() else None


def _words(content: bytes) -> str:
    """Return the first words of a page without its markup."""
    return " ".join(_MARKUP.sub(" ", content[: 1 << 14].decode(errors="replace")).split())[:SHOWN_WORDS]

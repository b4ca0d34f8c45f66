"""HTTP with patience: requests that are safe to repeat are repeated, and refusals become problems."""

from __future__ import annotations

import math
import random
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpcore
import httpx
from opentelemetry.trace import SpanKind
from pydantic import ValidationError

from tessera.shared.problems import (
    MEDIA_TYPE,
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
from tessera.shared.urls import proxy_of

T = TypeVar("T")

MAX_PAUSE_SECONDS = 15.0
MAX_ANSWER_BYTES = 64 << 20

ANSWER_SECONDS = 60.0
"""How long is waited for an answer to begin, or to go on."""

WHOLE_ANSWER = 10
"""How many times as long an answer that is held whole may take to its end, though it goes on all the while."""


READ_BYTES = 1 << 18
"""Of an answer at a time. In the library's own pieces of 64 KiB a download takes half as much CPU again."""
httpcore.HTTP11Connection.READ_NUM_BYTES = READ_BYTES

SHOW_CERTIFICATE = (
    "client_cert and client_key in a worker's settings, TESSERA_CLIENT_CERT and TESSERA_CLIENT_KEY for commands."
)

BY_PROXY = (
    "It may be the proxy, which the environment names: check that it runs, lets this user in and reaches the "
    "coordinator, or name the coordinator's host in NO_PROXY."
)


class Unreachable(Unavailable):
    """No answer came: nothing listens there, or the connection broke each time it was tried."""

    title = "The coordinator cannot be reached"
    remedy = "Check the URL and the network, and that the coordinator runs."


class NotUnderstood(ServerFault):
    """The coordinator's answer is not what this version of the API has there."""

    code = "answer-not-understood"
    title = "The coordinator's answer is not understood"
    remedy = "Compare the versions on both sides (GET /version); the older one needs an update."
    retryable = False


class Untrusted(Unreachable):
    """One side could not show the other who it is. To try again would not help."""

    code = "untrusted"
    title = "TLS does not come about"
    remedy = (
        "Check the name in the URL, and give the CA that issued the coordinator's certificate: ca_bundle in a "
        "worker's settings, TESSERA_CA_BUNDLE for commands."
    )
    retryable = False


class Credential(httpx.Auth):
    """A token that may be given another secret while it is in use: `reread` says what it is now.

    Several transports may share one, from several threads.
    """

    def __init__(self, secret: str, reread: Callable[[], str | None] = lambda: None) -> None:
        self.secret = secret
        self._reread = reread

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.secret}"
        yield request

    def renewed(self, refused: str) -> bool:
        """Return whether there is another secret than the one that was refused."""
        self.secret = self._reread() or self.secret
        return self.secret != refused


class Transport:
    """An httpx client that repeats what failed for a passing reason, until nothing moved for `patience_seconds`.

    Every request of the API may be repeated: reads by nature, creations by their idempotency key, and reports on a
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
    ) -> None:
        # Not compressed, so that no answer can grow in this process beyond what was sent.
        headers = {"Accept-Encoding": "identity"}
        timeout = httpx.Timeout(answer_seconds, connect=min(10.0, answer_seconds))
        self._credential = token if isinstance(token, Credential) else Credential(token) if token else None
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, verify=verify, auth=self._credential
        )
        # As the client has it, which looks at the environment once.
        self._proxy = proxy_of(url)
        self._patience_seconds = patience_seconds
        self._sleep = sleep
        self._whole_seconds = WHOLE_ANSWER * answer_seconds
        self._max_answer_bytes = max_answer_bytes

    def close(self) -> None:
        self._http.close()

    def trace(self, traceparent: str | None) -> None:
        """All requests from now on belong to the trace that this names, or to none."""
        self._http.headers.pop(HEADER, None)
        if traceparent is not None:
            self._http.headers[HEADER] = traceparent

    def request(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request, again if need be, and returns its answer. Raises Problem for a refusal."""
        return self.patiently(lambda: self.once(method, path, **options))

    def once(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request one time. Raises Problem for a refusal and Unreachable if no answer came."""
        with self._sent(method, path, options) as response:
            answer = self._read(response)
            _require_success(answer)
        return answer

    @contextmanager
    def stream(
        self, path: str, headers: dict[str, str], *, method: str = "GET", content: str | None = None
    ) -> Iterator[httpx.Response]:
        """Open a response whose body is read as it comes; tries one time."""
        with self._sent(method, path, {"headers": headers, "content": content}) as response:
            if not response.is_success:
                _require_success(self._read(response))
            yield response

    @contextmanager
    def _sent(self, method: str, path: str, options: dict[str, Any]) -> Iterator[httpx.Response]:
        with self._spanning(method), reaching(self._proxy):
            # Of the request's own span, which is the present one in here.
            traced = self._traced(options)
            with self._http.stream(method, path, **traced) as response:
                if self._proxy and response.status_code == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
                    raise Unreachable(f"the proxy {self._proxy} wants to know who asks (HTTP 407)", remedy=BY_PROXY)
                yield response

    def _spanning(self, method: str) -> AbstractContextManager[None]:
        """Return a span for a request; within the present one if there is one, or else where all of ours belong."""
        parent = None if spans.present() else self._http.headers.get(HEADER)
        return spans.span(method, kind=SpanKind.CLIENT, parent=parent, attributes={"http.request.method": method})

    @staticmethod
    def _traced(options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a request that names the present span as its parent."""
        present = spans.present()
        return {**options, "headers": {**options.get("headers", {}), HEADER: present}} if present else options

    def _read(self, response: httpx.Response) -> Answer:
        """Read an answer, as far as any answer of the API can be long, in bytes and in time."""
        content = bytearray()
        give_up_at = time.monotonic() + self._whole_seconds
        for piece in response.iter_raw():
            content += piece
            if len(content) > self._max_answer_bytes:
                raise NotUnderstood(f"the answer is longer than {self._max_answer_bytes} bytes")
            if time.monotonic() > give_up_at:
                raise NotUnderstood(f"the answer has not ended after {self._whole_seconds:g} s")
        return Answer(response.status_code, response.headers, bytes(content))

    def patiently(self, attempt: Callable[[], T], moved: Callable[[], int] = lambda: 0) -> T:
        """Run `attempt` until it ends in anything but a retryable problem, or patience runs out.

        Patience begins with the first failure, and anew with each after which `moved` (bytes that got through) has
        grown: a transfer may take as long as it likes while it gets on. A token that is refused is read anew, once.
        """
        give_up_at, before = math.inf, -1
        pause = 0.1
        renewed = False
        while True:
            shown = self._credential.secret if self._credential else ""
            try:
                return attempt()
            except Problem as problem:
                if isinstance(problem, Unauthenticated) and not renewed and self._credential:
                    renewed = self._credential.renewed(shown)
                    if renewed:
                        continue
                if (there := moved()) > before:
                    give_up_at, before, pause = time.monotonic() + self._patience_seconds, there, 0.1
                asked = problem.retry_after_seconds
                wait = asked if asked is not None else random.uniform(pause / 2, pause)  # noqa: S311 (jitter)
                if not problem.retryable or time.monotonic() + wait > give_up_at:
                    raise
            self._sleep(wait)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)


@dataclass(frozen=True)
class Answer:
    """An answer that is held whole."""

    status_code: int
    headers: httpx.Headers
    content: bytes


def _require_success(answer: Answer) -> None:
    """Raise the problem of every status that is not 2xx. A redirect is one too: the token must not follow it."""
    if 300 <= answer.status_code < 400:
        to = answer.headers.get("Location", "nowhere")[:200]
        raise NotUnderstood(f"the coordinator redirects to {to}", remedy="Give the URL that it redirects to.")
    if answer.status_code >= 400:
        raise problem_of(answer)


@contextmanager
def reaching(proxy: str | None = None) -> Iterator[None]:
    """Turn httpx's failures to get an answer into Unreachable."""
    try:
        yield
    except httpx.RequestError as fault:
        if tls := _tls_fault(fault):
            raise _untrusted(tls) from fault
        by = f" by the proxy {proxy}" if proxy else ""
        said = f"no answer from the coordinator{by}: {type(fault).__name__}: {fault}"
        if proxy:
            raise Unreachable(said, remedy=BY_PROXY) from fault
        if isinstance(fault, httpx.RemoteProtocolError) and fault.request.url.scheme == "https":
            # Which may be a restart, or how a server with TLS 1.3 turns away who shows no certificate.
            raise Unreachable(
                f"the coordinator hung up without an answer: {fault}",
                remedy=f"Check that it runs. Should it want to be shown a certificate: {SHOW_CERTIFICATE}",
            ) from fault
        if isinstance(fault, httpx.RemoteProtocolError):
            raise Unreachable(
                said, remedy="Check that it runs; if it speaks TLS, the URL begins with https://."
            ) from fault
        raise Unreachable(said) from fault
    except httpx.InvalidURL as fault:
        raise Unreachable(f"the coordinator's URL cannot be read: {fault}") from fault


def _tls_fault(fault: BaseException) -> ssl.SSLError | None:
    """Return what TLS itself complained of, behind httpx's own words."""
    cause: BaseException | None = fault
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _untrusted(fault: ssl.SSLError) -> Unreachable:
    reason = (fault.reason or str(fault)).replace("_", " ").lower()
    if isinstance(fault, ssl.SSLCertVerificationError):
        return Untrusted(f"the certificate that is shown there is not trusted: {fault.verify_message}")
    if "certificate required" in reason or "alert" in reason:
        return Untrusted(
            f"the coordinator does not take this client's certificate, or wants one: {reason}",
            remedy=f"Give a certificate of a CA that the coordinator takes: {SHOW_CERTIFICATE}",
        )
    if "wrong version number" in reason:
        return Untrusted("what listens there speaks no TLS", remedy="Check the port; http:// is for loopback alone.")
    return Unreachable(f"TLS broke off: {reason}")


def tls_context(
    ca_bundle: Path | None = None, client_cert: Path | None = None, client_key: Path | None = None
) -> ssl.SSLContext:
    """Return whom to trust, and what to be trusted by. A bundle of CAs takes the place of those that are trusted
    otherwise.

    Raises Invalid naming the file that cannot be used.
    """
    remedy = "Give PEM files that this user may read."
    try:
        context = ssl.create_default_context(cafile=ca_bundle) if ca_bundle else httpx.create_ssl_context()
    except OSError as fault:
        raise Invalid(f"ca_bundle: {ca_bundle} cannot be used: {fault}", remedy=remedy) from fault
    if client_key and not client_cert:
        raise Invalid("client_key: there is no client_cert that it belongs to", remedy=remedy)
    if client_cert:
        try:
            context.load_cert_chain(client_cert, client_key)
        except OSError as fault:
            named = f"{client_cert} and {client_key}" if client_key else f"{client_cert}"
            raise Invalid(f"client_cert: {named} cannot be used: {fault}", remedy=remedy) from fault
    return context


def problem_of(response: Answer) -> Problem:
    """Return the problem that a response carries; what is not problem+json (a proxy's page, say) is told by its
    status."""
    retry_after = _seconds(response.headers.get("Retry-After"))
    headers = dict(response.headers)
    if response.headers.get("Content-Type", "").startswith(MEDIA_TYPE):
        try:
            document = ProblemDocument.model_validate_json(response.content)
        except ValidationError:
            pass
        else:
            return problem_from(document, retry_after, headers)
    kind = kind_of_status(response.status_code)
    return kind(f"HTTP {response.status_code}", retry_after_seconds=retry_after, headers=headers)


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdecimal() else None

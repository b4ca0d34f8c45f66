"""HTTP with patience: requests that are safe to repeat are repeated, and refusals become problems."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from shared.problems import (
    MEDIA_TYPE,
    Problem,
    ProblemDocument,
    ServerFault,
    Unavailable,
    kind_of_status,
    problem_from,
)

T = TypeVar("T")

LONGEST_PAUSE_SECONDS = 15.0
ANSWER_SECONDS = 60.0


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


class Transport:
    """An httpx client that repeats what failed for a passing reason, for up to `patience_seconds` a request.

    Every request of the API may be repeated: reads by nature, creations by their idempotency key, and reports on a
    task by its token.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        patience_seconds: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        verify: bool | ssl.SSLContext = True,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=10.0)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, verify=verify)
        self._patience_seconds = patience_seconds
        self._sleep = sleep

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Sends a request, again if need be, and returns its answer. Raises Problem for a refusal."""
        return self.patiently(lambda: self.once(method, path, **options))

    def once(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Sends a request one time. Raises Problem for a refusal and Unreachable if no answer came."""
        with reaching():
            response = self._http.request(method, path, **options)
        if response.status_code >= 400:
            raise problem_of(response)
        return response

    @contextmanager
    def stream(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """Opens a response whose body is read as it comes; tries one time."""
        with reaching(), self._http.stream("GET", path, headers=headers) as response:
            if response.status_code >= 400:
                response.read()
                raise problem_of(response)
            yield response

    def patiently(self, attempt: Callable[[], T]) -> T:
        """Runs `attempt` until it ends in anything but a retryable problem, or patience runs out."""
        give_up_at = time.monotonic() + self._patience_seconds
        pause = 0.1
        while True:
            try:
                return attempt()
            except Problem as problem:
                asked = problem.retry_after_seconds
                wait = asked if asked is not None else random.uniform(pause / 2, pause)  # noqa: S311 (jitter)
                if not problem.retryable or time.monotonic() + wait > give_up_at:
                    raise
            self._sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


@contextmanager
def reaching() -> Iterator[None]:
    """Turns httpx's failures to get an answer into Unreachable."""
    try:
        yield
    except httpx.TransportError as fault:
        raise Unreachable(f"no answer from the coordinator: {type(fault).__name__}: {fault}") from fault
    except httpx.InvalidURL as fault:
        raise Unreachable(f"the coordinator's URL cannot be read: {fault}") from fault


def problem_of(response: httpx.Response) -> Problem:
    """The problem that a response carries; what is not problem+json (a proxy's page, say) is told by its status."""
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

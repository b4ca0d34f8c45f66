"""Token-bucket rate limiting (sustained rate and burst) per caller.

Counts are kept in this process alone: a limit need not be exact, and idle polls must cost no database anything.
"""

import threading
import time
from collections.abc import Callable

from tessera.shared.problems import Problem, QuotaExceeded, TooManyRequests
from tessera.shared.urls import networks_of

MAX_KEYS = 16_384
"""Most recent callers that are remembered; a forgotten one has a whole burst again."""

WIDER = 10
"""Rate of an IPv6 /48, which holds 65,536 /64s, as a multiple of that of a /64."""

ANONYMOUS = 10
"""Rate of browsers without a session, as a multiple of `auth_failures_per_minute`: many people may share
an address."""


BURST_SECONDS = 10
"""Requests that a token may send at once, in seconds of `requests_per_second`."""

DECLARATIONS_PER_HOUR = 10_000
"""Changes of the declarations of a site's workers."""


class Rate:
    """A bucket of `burst` requests for each key, refilled with `per_second`.

    Stored as the instant when the bucket is full again (the 'generic cell rate algorithm' of ITU-T I.371).
    """

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1 / per_second
        self._slack = (burst - 1) / per_second
        self._clock = clock
        self._full_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, key: str) -> float:
        """Take one request from the bucket and return 0.0, or return the seconds until there is one."""
        with self._lock:
            now = self._clock()
            # Removed and inserted again, so that the first key is the least recently used.
            full_at = max(self._full_at.pop(key, now), now)
            wait = full_at - now - self._slack
            self._full_at[key] = full_at if wait > 0 else full_at + self._interval
            if len(self._full_at) > MAX_KEYS:
                del self._full_at[next(iter(self._full_at))]
        return max(wait, 0.0)


class AddressRate:
    """A rate for each address, which is a /64 in IPv6, and ten times as much for each /48."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        wider = WIDER * per_minute
        self._rates = Rate(per_minute / 60, per_minute, clock), Rate(wider / 60, wider, clock)

    def take(self, address: str) -> float:
        """Take a request as `Rate.take` does."""
        return max(rate.take(network) for rate, network in zip(self._rates, networks_of(address), strict=False))


class CallerRates:
    """Rate limits per token, and per address for requests without a valid one.

    A request with a valid token is never refused because of others behind the same proxy.
    """

    def __init__(
        self,
        per_second: float,
        auth_failures_per_minute: int,
        enrolments_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = Rate(per_second, max(1.0, BURST_SECONDS * per_second), clock)
        self._sign_ins = Rate(auth_failures_per_minute / 60, auth_failures_per_minute, clock)
        self._declarations = Rate(DECLARATIONS_PER_HOUR / 3600, DECLARATIONS_PER_HOUR, clock)
        self._failures = AddressRate(auth_failures_per_minute, clock)
        self._anonymous = AddressRate(ANONYMOUS * auth_failures_per_minute, clock)
        self._enrolments = AddressRate(enrolments_per_minute, clock)

    def count_request(self, token_id: str) -> None:
        """Raise TooManyRequests if the token sends too many requests."""
        detail = "this token sends too many requests (setting requests_per_second)"
        _require(self._tokens.take(token_id), TooManyRequests, detail)

    def count_sign_in(self, token_id: str) -> None:
        """Raise TooManyRequests if the token begins too many sessions, each with an entry in the audit chain."""
        self.count_request(token_id)
        detail = "this token or person signs in too often (setting auth_failures_per_minute)"
        _require(self._sign_ins.take(token_id), TooManyRequests, detail)

    def count_declaration(self, site_id: str) -> None:
        """Raise QuotaExceeded if the site's workers change their declarations too often."""
        detail = f"the workers of this site change their declarations more than {DECLARATIONS_PER_HOUR} times an hour"
        _require(self._declarations.take(site_id), QuotaExceeded, detail)

    def count_failure(self, address: str) -> None:
        """Raise TooManyRequests if the address sends too many requests without a valid token."""
        detail = "too many requests without a valid token came from your address (setting auth_failures_per_minute)"
        remedy = "Use a valid token; wait as long as Retry-After says before trying another."
        _require(self._failures.take(address), TooManyRequests, detail, remedy)

    def count_anonymous(self, address: str) -> None:
        """Raise TooManyRequests if the address sends the dashboard too many requests without a session."""
        detail = "too many requests without a session came from your address (setting auth_failures_per_minute)"
        remedy = "Wait as long as Retry-After says, then sign in."
        _require(self._anonymous.take(address), TooManyRequests, detail, remedy)

    def count_enrolment(self, address: str) -> None:
        """Raise TooManyRequests if the address sends too many enrolment requests."""
        detail = "too many enrolment requests came from your address (setting enrolments_per_minute)"
        _require(self._enrolments.take(address), TooManyRequests, detail)


def _require(wait: float, problem: type[Problem], detail: str, remedy: str | None = None) -> None:
    if wait:
        raise problem(detail, remedy=remedy, retry_after_seconds=wait)

"""How often somebody may ask: so many requests a second in the long run, and so many at once.

Counted in this process alone: what bounds work need not be exact, and idle polls are to cost no database anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tessera.shared.problems import QuotaExceeded, TooManyRequests
from tessera.shared.urls import networks_of

MAX_KEYS = 16_384
"""Callers that are remembered, the latest of them; one who is forgotten begins with a whole burst."""


WIDER = 10
"""Times as much as a /64 of IPv6 a /48 may ask, in which there are 65,536 of them."""

STRANGERS = 10
"""Times `auth_failures_per_minute` a browser may be sent to sign in: behind one address there may be many people."""


class Rate:
    """A bucket for each key that holds `burst` requests and is filled with `per_second`.

    Written as the instant at which the bucket will be full again (the 'generic cell rate algorithm' of ITU-T I.371).
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1 / per_second
        self._slack = (burst - 1) / per_second
        self._clock = clock
        self._full_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, key: str) -> float:
        """0.0, and one request fewer in the bucket; or the seconds until there is one."""
        with self._lock:
            now = self._clock()
            # Taken out and put in again, so that the first is the one that was not used for longest.
            full_at = max(self._full_at.pop(key, now), now)
            wait = full_at - now - self._slack
            self._full_at[key] = full_at if wait > 0 else full_at + self._interval
            if len(self._full_at) > MAX_KEYS:
                del self._full_at[next(iter(self._full_at))]
        return max(wait, 0.0)


class AddressRate:
    """A rate for each address: for each /64 of IPv6, and ten times as much for each /48."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        wider = WIDER * per_minute
        self._rates = Rate(per_minute / 60, per_minute, clock), Rate(wider / 60, wider, clock)

    def take(self, address: str) -> float:
        """As `Rate.take`."""
        return max(rate.take(network) for rate, network in zip(self._rates, networks_of(address), strict=False))


class Admission:
    """Bounds the requests of each token, and of each address those that show no valid one.

    Who shows a valid token is never refused for what others do behind the same proxy.
    """

    def __init__(
        self,
        per_second: float,
        burst: int,
        auth_failures_per_minute: int,
        enrolments_per_minute: int,
        declarations_per_hour: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = Rate(per_second, burst, clock)
        self._declarations = Rate(declarations_per_hour / 3600, declarations_per_hour, clock)
        self._failures = AddressRate(auth_failures_per_minute, clock)
        self._strangers = AddressRate(STRANGERS * auth_failures_per_minute, clock)
        self._enrolments = AddressRate(enrolments_per_minute, clock)

    def asked(self, token_id: str) -> None:
        """Raise TooManyRequests."""
        if wait := self._tokens.take(token_id):
            raise TooManyRequests(
                "this token asks too often (settings requests_per_second, request_burst)", retry_after_seconds=wait
            )

    def declares(self, site_id: str) -> None:
        """Raise QuotaExceeded."""
        if wait := self._declarations.take(site_id):
            raise QuotaExceeded(
                "the workers of this site change too often what they declare (setting declarations_per_hour)",
                retry_after_seconds=wait,
            )

    def failed(self, address: str) -> None:
        """Raise TooManyRequests."""
        if wait := self._failures.take(address):
            raise TooManyRequests(
                "too many requests without a valid token came from your address (setting auth_failures_per_minute)",
                remedy="Use a valid token; wait as long as Retry-After says before trying another.",
                retry_after_seconds=wait,
            )

    def strayed(self, address: str) -> None:
        """Count a refusal at the page of whoever is not signed in. Raises TooManyRequests."""
        if wait := self._strangers.take(address):
            raise TooManyRequests(
                "too many requests without a session came from your address (setting auth_failures_per_minute)",
                remedy="Sign in; wait as long as Retry-After says before.",
                retry_after_seconds=wait,
            )

    def enrols(self, address: str) -> None:
        """Raise TooManyRequests."""
        if wait := self._enrolments.take(address):
            raise TooManyRequests(
                "too many workers asked from your address to be admitted (setting enrolments_per_minute)",
                retry_after_seconds=wait,
            )

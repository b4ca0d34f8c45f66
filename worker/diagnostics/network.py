"""What lies between here and a coordinator, looked at step by step."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx

from tessera.shared.api.admin import About
from tessera.shared.client.transport import BY_PROXY
from tessera.shared.diagnostics.checks import Finding, fail, ok, warn
from tessera.shared.schema import PROTOCOL
from tessera.shared.urls import is_loopback, proxy_of

CONNECT_SECONDS = 10.0
EXPIRES_SOON = timedelta(days=21)
SKEW_SECONDS = 30.0


def way_to(url: str, verify: ssl.SSLContext) -> Iterator[Finding]:
    """Name, proxy, connection, TLS, answer, protocol and clock of the coordinator at `url`, as far as one gets."""
    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    proxy = proxy_of(url)
    if proxy:
        yield ok("proxy", f"requests go by {proxy}")
    else:
        yield ok("proxy", "none")
        found = list(_direct(host, port))
        yield from found
        if found[-1].verdict == "fail":
            return
    if tls and not proxy:
        found = list(_tls(host, port, verify))
        yield from found
        if found[-1].verdict == "fail":
            return
    elif not tls and is_loopback(host):
        yield ok("tls", "none, and none is needed on this machine")
    elif not tls:
        yield fail("tls", "the URL is http: whoever is on the way reads the token and every update", "Use https.")
    yield from _answer(url, verify, proxy)


def _direct(host: str, port: int) -> Iterator[Finding]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as fault:
        yield fail("dns", f"{host} has no address: {fault.strerror}", "Check the name in `url`, and the resolver.")
        return
    addresses = sorted({str(address[4][0]) for address in found})
    yield ok("dns", f"{host} is {', '.join(addresses[:4])}")
    began_at = time.monotonic()
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as fault:
        reason = fault.strerror or str(fault)
        yield fail("tcp", f"no connection to {host}:{port}: {reason}", "Check the port, the firewall and the proxy.")
        return
    yield ok("tcp", f"port {port} takes connections, in {1000 * (time.monotonic() - began_at):.0f} ms")


def _tls(host: str, port: int, verify: ssl.SSLContext) -> Iterator[Finding]:
    try:
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as plain,
            verify.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            certificate, version = wrapped.getpeercert() or {}, wrapped.version()
    except ssl.SSLCertVerificationError as fault:
        yield fail("tls", f"the certificate is not trusted: {fault.verify_message}", "Ask for the CA, and the name.")
        return
    except (ssl.SSLError, OSError) as fault:
        yield fail("tls", f"TLS does not come about: {fault}", "Check that https is spoken on this port.")
        return
    yield expiry(certificate, version or "TLS", datetime.now(UTC))


def expiry(certificate: Mapping[str, object], version: str, now: datetime) -> Finding:
    """Return what a certificate that is trusted says of how long it will be."""
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
    told = f"{version}, a trusted certificate until {ends:%Y-%m-%d}"
    if ends - now < EXPIRES_SOON:
        return warn("tls", told, "Ask the coordinator's operator to renew it.")
    return ok("tls", told)


def _answer(url: str, verify: ssl.SSLContext, proxy: str | None) -> Iterator[Finding]:
    try:
        answer = httpx.get(f"{url.rstrip('/')}/version", verify=verify, timeout=CONNECT_SECONDS)
        about = About.model_validate_json(answer.raise_for_status().content)
    except (httpx.HTTPError, ValueError) as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        # Where there is a proxy nothing was tried before, and what answered may have been the proxy.
        remedy = BY_PROXY if proxy else "Check the URL's path and host."
        yield fail("coordinator", f"no answer from a coordinator: {reason[:200]}", remedy)
        return
    yield ok("coordinator", f"version {about.version}")
    spoken = f"it speaks protocols {about.protocol_min} to {about.protocol_max}, this worker {PROTOCOL}"
    if about.protocol_min <= PROTOCOL <= about.protocol_max:
        yield ok("protocol", spoken)
    else:
        yield fail("protocol", spoken, "Install a worker of the coordinator's version.")
    yield clock(answer.headers.get("Date"), datetime.now(UTC))


def clock(date: str | None, now: datetime) -> Finding:
    """Return how far this machine's clock is from the one that wrote a Date header, in whole seconds."""
    if date is None:
        return warn("clock", "the coordinator sends no Date", "Check this machine's clock otherwise.")
    skew = (now - parsedate_to_datetime(date)).total_seconds()
    # The header leaves out the fraction of its second, and was on its way for a while.
    told = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the coordinator's"
    told = "within two seconds of the coordinator's" if abs(skew) <= 2 else told
    if abs(skew) <= SKEW_SECONDS:
        return ok("clock", told)
    return warn("clock", told, "Set it by NTP: hours, approvals and certificates go by it.")

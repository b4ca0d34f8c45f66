"""Checks of the proxies between a worker and its coordinator, with the line of configuration that fixes a fault."""

import ssl
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx
from cryptography import x509

from tessera.shared.api.admin import About
from tessera.shared.client.client import Client
from tessera.shared.client.transfers import LEAST_PIECE_BYTES
from tessera.shared.client.transport import (
    BY_PROXY,
    PATIENT,
    UNLIMITED,
    HttpTransport,
    IntermediaryFault,
    Unreachable,
    Untrusted,
)
from tessera.shared.diagnostics import Finding, fail, ok, warn
from tessera.shared.problems import NotFound, Problem
from tessera.shared.units import size

CONNECT_SECONDS = 10.0

LARGEST_BYTES = 1 << 30
"""The largest body whose refusal is looked for."""

HELD_SECONDS = 5.0
"""The coordinator refuses too long a claim by its head. Without an answer by then, something holds it back."""

CA_REMEDY = (
    "Set ca_bundle to a file (PEM) with the CA that signed it. The coordinator's operator has it; if a proxy of your "
    "own network inspects TLS, that proxy's operator. It replaces the CAs of the system."
)
STRIPPED = (
    "The token was sent: something in between removes the header Authorization (nginx: proxy_set_header "
    "Authorization $http_authorization; HAProxy: no http-request del-header Authorization; Caddy: no header_up "
    "-Authorization)."
)


def is_stripped(problem: Problem) -> bool:
    """Return True if the coordinator received no token, though one was sent."""
    return problem.from_document and "no bearer token" in problem.detail


def without_proxy(url: str) -> str:
    """Return the reason why requests to a URL do not go by a proxy."""
    proxies, scheme = getproxies(), urlsplit(url).scheme
    if proxies.get(scheme) or proxies.get("all"):
        return "none: NO_PROXY lists the coordinator's host"
    others = [f"{name.upper()}_PROXY" for name in proxies if name in ("http", "https")]
    return f"none: {others[0]} is not for {scheme}:// URLs" if others else "none"


def signer(url: str, proxy: str | None = None) -> str:
    """Return the signer of the untrusted certificate that a server presents, as the end of a detail."""
    context = httpx.create_ssl_context(verify=False)
    options: dict[str, Any] = {"verify": context, "proxy": proxy, "timeout": CONNECT_SECONDS, "trust_env": False}
    # Nothing secret is sent. A server that wants a client's certificate may answer nothing.
    with suppress(httpx.HTTPError, ValueError), httpx.Client(**options) as http, http.stream("GET", url) as answer:
        presented = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(True)
        issuer = x509.load_der_x509_certificate(presented or b"").issuer
        return f"; it is signed by {issuer.rfc4514_string()}"
    return ""


def unanswered(url: str, verify: ssl.SSLContext, proxy: str | None, fault: Exception) -> Finding:
    """Return the finding on a URL at which no coordinator answered `GET /version`."""
    detail = f"no answer from a coordinator: {str(fault).splitlines()[0][:300]}"
    page = fault if isinstance(fault, IntermediaryFault) else None
    # Behind a proxy no earlier check ran, and the answer may be the proxy's.
    remedy = BY_PROXY if proxy else "Check the URL's path and host."
    if isinstance(fault, Untrusted):
        detail, remedy = detail + signer(url, proxy), fault.advice if fault.advice != fault.remedy else CA_REMEDY
    elif isinstance(fault, NotFound) or (page and page.answer_status == httpx.codes.NOT_FOUND):
        remedy = _path_remedy(url, verify, is_page=page is not None)
    elif isinstance(fault, Problem) and (page or not proxy):
        remedy = fault.advice
    return fail("coordinator", detail, remedy)


def _path_remedy(url: str, verify: ssl.SSLContext, *, is_page: bool) -> str:
    """Return the remedy where the URL's path leads to a page, or to a coordinator that does not know it."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    # Each path above it, the longest first.
    while path:
        path = path.rpartition("/")[0]
        if _is_coordinator(found := parts._replace(path=path).geturl(), verify):
            return f'Set url = "{found}": the coordinator is there.'
    if is_page:
        return (
            "No proxy there passes this path on to a coordinator. Set `url` with the path that its operator chose, "
            "such as https://hospital.example/tessera."
        )
    return (
        f"A proxy passes {parts.path} on to the coordinator, which does not know it. Have it take the path off "
        "(nginx: proxy_pass http://COORDINATOR:8470/ with the last slash; HAProxy: http-request replace-path; Caddy: "
        "handle_path), or set TESSERA_PUBLIC_URL at the coordinator to a URL with this path."
    )


def _is_coordinator(url: str, verify: ssl.SSLContext) -> bool:
    transport = HttpTransport(url, None, patience_seconds=0.0, verify=verify, answer_seconds=CONNECT_SECONDS)
    with closing(transport), suppress(Problem, ValueError):
        return bool(About.model_validate_json(transport.once("GET", "/version").content))
    return False


def bodies(client: Client) -> Iterator[Finding]:
    """Yield findings on bodies of requests: a proxy refuses them, or holds them back. Sends their first bytes."""
    count, refused = LARGEST_BYTES, None
    while count >= LEAST_PIECE_BYTES:
        try:
            client.announce_claim(count, HELD_SECONDS)
        except IntermediaryFault as page:
            if not page.is_body_limit:
                break
            count, refused = count // 2, page
        except Unreachable:
            detail = "something in between holds bodies back until they are complete: progress and limits lag behind"
            remedy = "nginx: proxy_request_buffering off; HAProxy: no option http-buffer-request."
            yield warn("bodies", detail, remedy)
            break
        except Problem:
            break
    if refused:
        detail = f"something in between refuses bodies of {size(2 * count)}, not of {size(count)}: {refused.detail}"
        yield warn("bodies", f"{detail}. Uploads go on in smaller pieces, which takes longer", f"{UNLIMITED}.")


def long_poll(client: Client, seconds: int) -> Finding:
    """Return a finding on answers that take as long as the worker's claims wait for a task."""
    began_at = time.monotonic()
    try:
        client.wait_as_claim(seconds)
    except (IntermediaryFault, Unreachable) as fault:
        took = time.monotonic() - began_at
        detail = f"a request that waits for its answer was ended after {took:.0f} s, and claims wait {seconds} s"
        return fail("long poll", f"{detail}: {fault.detail}", f"{PATIENT}. Or set poll_seconds below it.")
    return ok("long poll", f"an answer may take {seconds} s")

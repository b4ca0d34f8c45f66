"""Properties of hosts and URLs that follow from their text."""

import os
import re
from ipaddress import IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tessera.shared.problems import Invalid

PLAIN_HTTP = "TESSERA_PLAIN_HTTP"
"""The environment variable that lets commands speak plain HTTP to other machines."""

# Up to the last @ before a slash, or else to the first: what reads database URLs lets passwords have slashes.
_PASSWORD = re.compile(r"(://[^:/?#@]*):(?:[^/?#]*|[^@]*)@")
_OPTION = re.compile(r"([?&][^=&]*(?:password|passwd|passphrase|secret|token|access_key)=)[^&]*", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Return whether what is sent there stays on this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_UNICAST = IPv6Network("2000::/3")


def is_public(address: str) -> bool:
    """Return whether an address is one of the public internet, and does not stand for one of IPv4 that may not be."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        return found.is_global and found in _UNICAST and found.sixtofour is None
    return found.is_global and not found.is_multicast


def networks_of(address: str) -> tuple[str, ...]:
    """Return what requests from an address are counted by, the narrowest first: an IPv4 address by itself; one of
    IPv6 by its /64, of which a single machine may use every address, and by its /48, which a single customer may
    have."""
    try:
        found = ip_address(address)
    except ValueError:
        return (address,)
    if not isinstance(found, IPv6Address):
        return (str(found),)
    if found.ipv4_mapped:
        return (str(found.ipv4_mapped),)
    return tuple(str(IPv6Network((int(found), length), strict=False)) for length in (64, 48))


def without_password(url: str) -> str:
    """Return a URL as it may be shown: whose it is stays, what opens it does not, neither before the host nor as an
    option behind it (`?password=`, as libpq has it)."""
    return _OPTION.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment has requests to `url` go by, as it may be shown."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = None if proxy_bypass(parts.hostname or "") else proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    return without_password(proxy if "://" in proxy else f"http://{proxy}")


def require_private(url: str) -> None:
    """Raise Invalid for a URL that would send secrets to another machine in plain HTTP, unless the environment
    declares the network trusted."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Invalid(f"{url!r} is not a coordinator's URL", remedy="Give one that begins with https://.")
    trusted = os.environ.get(PLAIN_HTTP, "").lower() in ("1", "true", "yes")
    if parts.scheme == "http" and not (is_loopback(parts.hostname) or trusted):
        raise Invalid(
            f"{without_password(url)} is plain HTTP: any machine on the way could read the token and all else",
            remedy=f"Use https://, or set {PLAIN_HTTP}=true where the network in between is to be trusted.",
        )

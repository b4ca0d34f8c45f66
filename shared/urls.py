"""Properties of hosts and URLs that follow from their text."""

import os
import re
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from tessera.shared.problems import Invalid

PLAIN_HTTP = "TESSERA_PLAIN_HTTP"
"""The environment variable that lets commands speak plain HTTP to other machines."""

# Up to the last @ before a slash, or else to the first: what reads database URLs lets passwords have slashes.
_PASSWORD = re.compile(r"(://[^:/?#@]*):(?:[^/?#]*|[^@]*)@")
_OPTION = re.compile(r"([?&][^=&]*(?:password|passwd|passphrase|secret|token|access_key)=)[^&]*", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Return True if what is sent there stays on this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def networks_of(address: str) -> tuple[str, ...]:
    """Return the networks by which requests from an address are counted, the narrowest first: an IPv4 address by
    itself; an IPv6 address by its /64, as a single machine may use every address in it, and by its /48, as a single
    customer may have one."""
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


def parts_of(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ValueError with the reason, without a password, if no client can use it."""
    if not url.isprintable() or _FOREIGN.search(url):
        raise ValueError(
            "it has a space, a quotation mark or a control character, such as the carriage return of a file with "
            "Windows line ends"
        )
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(
            "its port is no number below 65536, or an IPv6 address is not in brackets (https://[2001:db8::1]:8470)"
        ) from None
    try:
        (parts.hostname or "").encode("idna")
    except UnicodeError:
        raise ValueError("its host is no host name") from None
    return parts


_FOREIGN = re.compile(r"""[\s"'<>\\\u2018-\u201f\u00ab\u00bb]""")


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment prescribes for requests to `url`, with its password. Raises Invalid."""
    parts = _usable(url)
    proxies = getproxies()
    kind = next((kind for kind in (parts.scheme, "all") if proxies.get(kind)), None)
    if kind is None or _bypasses_proxy(parts, proxies.get("no", "")):
        return None
    proxy = proxies[kind] if "://" in proxies[kind] else f"http://{proxies[kind]}"
    if reason := _unusable_proxy(proxy):
        variable = next((name for name in os.environ if name.lower() == f"{kind}_proxy"), "the system's proxy")
        raise Invalid(
            f"{variable}: the proxy {without_password(proxy)!r} cannot be used: {reason}",
            remedy=f"Correct or unset {variable}, or add the host of {without_password(url)} to NO_PROXY.",
        )
    return proxy


def _unusable_proxy(proxy: str) -> str | None:
    try:
        parts = parts_of(proxy)
    except ValueError as fault:
        return str(fault)
    if parts.scheme not in ("http", "https", "socks5", "socks5h"):
        return "it begins neither with http:// nor with https:// or socks5://"
    if parts.scheme.startswith("socks") and find_spec("socksio") is None:
        return "for SOCKS the package socksio has to be installed (`pip install socksio`)"
    return None if parts.hostname else "it names no host"


def _bypasses_proxy(parts: SplitResult, listed: str) -> bool:
    """Return True if NO_PROXY lists a URL's host: by name or address, by a parent domain, or by a range."""
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return proxy_bypass(host) or any(_covers(entry, host, port) for entry in re.split(r"[,\s]+", listed.lower()))


def _covers(entry: str, host: str, port: int) -> bool:
    with_port = re.fullmatch(r"(\[[^]]*\]|[^:]*):(\d+)", entry)
    entry, own_port = with_port.groups() if with_port else (entry, port)
    if int(own_port) != port:
        return False
    with suppress(ValueError):
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    name = entry.removeprefix("*").strip(".")
    return entry == "*" or (name != "" and f".{host}".endswith(f".{name}"))


def _usable(url: str) -> SplitResult:
    try:
        return parts_of(url)
    except ValueError as fault:
        raise Invalid(
            f"the URL {without_password(url)!r} cannot be used: {fault}",
            remedy="Correct TESSERA_URL or --url (at a worker `url` in its settings, or TESSERA_WORKER_URL).",
        ) from None


def require_private(url: str) -> None:
    """Raise Invalid for a URL that cannot be used, and for one that would send secrets to another machine in plain
    HTTP, unless the environment declares the network trusted."""
    parts = _usable(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Invalid(f"{url!r} is not a coordinator's URL", remedy="Give one that begins with https://.")
    trusted = os.environ.get(PLAIN_HTTP, "").lower() in ("1", "true", "yes")
    if parts.scheme == "http" and not (is_loopback(parts.hostname) or trusted):
        raise Invalid(
            f"{without_password(url)} is plain HTTP: any machine on the way could read the token and all else",
            remedy=f"Use https://, or set {PLAIN_HTTP}=true where the network in between is to be trusted.",
        )

"""Hosts and URLs, as far as their text tells."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def without_password(url: str) -> str:
    """A URL as it may be shown: whose it is stays, what opens it does not."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    at = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{at}"))

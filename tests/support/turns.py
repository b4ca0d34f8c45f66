"""Requests that go to several servers by turns, as a proxy without sticky sessions sends them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import httpx

from tessera.shared.client.client import Client

C = TypeVar("C", bound=Client)


class ByTurns(httpx.BaseTransport):
    def __init__(self, urls: Sequence[str]) -> None:
        self._next = itertools.cycle([httpx.URL(url) for url in urls])
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = next(self._next)
        request.url = request.url.copy_with(host=url.host, port=url.port)
        return self._transport.handle_request(request)

    def close(self) -> None:
        self._transport.close()


def by_turns(client: C, urls: Sequence[str]) -> C:
    """The client, whose requests go to these servers from here on."""
    client._transport._http._transport = ByTurns(urls)
    return client

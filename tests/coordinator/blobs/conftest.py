from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stores import Bucket


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The bucket of the module's server, which is empty again afterwards, and the environment that leads to it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.empty()

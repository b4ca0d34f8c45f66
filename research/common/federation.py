"""A coordinator and workers as real processes on loopback, as an administrator starts them, with default settings."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx

import tessera
from common.processes import HOST, Processes, await_true, free_port
from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client

Options = Mapping[str, Any]
"""Those of a data set, as a worker's settings have them."""

READY_SECONDS = 60.0
ROUND_SECONDS = 900.0

_COUNTER = re.compile(r"^tessera_(received|sent)_bytes_total (\S+)$", re.MULTILINE)


class Federation:
    """Used with `with`, which leaves no process behind. `methods` is a folder of methods beside the product's."""

    def __init__(self, folder: Path, methods: Path) -> None:
        self._folder = folder
        self._methods = {"TESSERA_METHODS": str(methods)}
        self._processes = Processes(folder)
        self._url = f"http://{HOST}:{free_port()}"
        self._workers = 0

    def __enter__(self) -> Self:
        home = self._folder / "coordinator"
        home.mkdir(parents=True)
        settings = {
            "TESSERA_DATABASE_URL": f"sqlite:///{home / 'tessera.db'}",
            "TESSERA_BLOB_URL": str(home / "blobs"),
            "TESSERA_STAGING_DIR": str(home / "staging"),
            "TESSERA_PORT": self._url.rpartition(":")[2],
            "TESSERA_ADMIN_TOKEN_FILE": str(home / "admin-token"),
            **self._methods,
        }
        try:
            self._processes.start("coordinator", _tessera("coordinator", "serve", "--migrate"), settings)
            await_true(self._is_ready, READY_SECONDS, "the coordinator is ready")
            self._token = (home / "admin-token").read_text(encoding="ascii").strip()
            self._session = tessera.connect(self._url, self._token)
        except BaseException:
            self._processes.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        self._session.client.close()
        self._processes.stop()

    def _is_ready(self) -> bool:
        self._processes.check()
        with suppress(httpx.TransportError):
            return httpx.get(f"{self._url}/healthz/ready", timeout=5).is_success
        return False

    @property
    def client(self) -> Client:
        return self._session.client

    def start_worker(
        self,
        site: str,
        dataset: str,
        options: Options,
        name: str,
        audit_key: bytes,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start `tessera worker run` for a new site with one data set. Training seeds follow from the audit key."""
        home, client = self._folder / site, self.client
        home.mkdir()
        client.create_site(site)
        secret = client.issue_token(TokenSpec(name=site, role="site", site=site)).secret
        settings = {"url": self._url, "token": secret, "name": name, "state_dir": str(home / "state")}
        settings["audit_key"] = audit_key.hex()
        # JSON's strings, numbers and lists are TOML's.
        lines = [f"{key} = {json.dumps(value)}" for key, value in {**settings, "device": "cpu", "threads": 1}.items()]
        lines += [f"[datasets.{dataset}]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
        (home / "worker.toml").write_text("\n".join(lines), encoding="utf-8")
        command = _tessera("worker", "run", "--config", str(home / "worker.toml"))
        self._processes.start(site, command, {**self._methods, **environment})
        self._workers += 1

    def run(self, spec: Mapping[str, Any], model: Path) -> Run:
        """Start a run once all workers wait, and return it when it has ended."""
        client = self._session.client
        await_true(self._all_wait, READY_SECONDS + 30 * self._workers, "the workers are waiting")
        started, rounds = self._session.start(spec, model=model), int(spec["rounds"])
        await_true(
            lambda: self._has_ended(started.id), ROUND_SECONDS * rounds, "the run has ended", every_seconds=0.2
        )
        return client.run(started.id)

    def _all_wait(self) -> bool:
        self._processes.check()
        return sum(worker.live for worker in self._session.client.workers()) >= self._workers

    def _has_ended(self, run: str) -> bool:
        self._processes.check()
        now = self._session.client.run(run)
        if now.state not in ("running", "completed"):
            raise RuntimeError(f"the run was {now.state}: {now.reason}")
        return now.state == "completed"

    def moved(self) -> dict[str, int]:
        """Return the bytes that the coordinator `received` and `sent`, as it counts them itself."""
        headers = {"Authorization": f"Bearer {self._token}"}
        answer = httpx.get(f"{self._url}/metrics", headers=headers, timeout=30)
        return {name: int(float(value)) for name, value in _COUNTER.findall(answer.text)}


def _tessera(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tessera.shared.cli", *arguments]

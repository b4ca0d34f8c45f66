"""A coordinator and workers as real processes on loopback, as an administrator starts them, with default settings."""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import httpx

from benchmarks.measuring import await_true
from benchmarks.network import HOST, Certificates, Moved
from tessera.examples.processes import ROOT, Processes, tessera
from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.runs import Round, Run, RunSpec
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import InitialModel, upload_model

Options = Mapping[str, Any]
"""Those of a data set, as a worker's settings have them."""

DATASET = "nothing"
PAIRS = "pairs"
"""Images with texts, for models that take both."""
READY_SECONDS = 60.0
OPENING_SECONDS = 60.0
"""Time within which a run's first round opens, if any workers can take part."""
ROUND_SECONDS = 900.0

_COUNTER = re.compile(r"^tessera_(received|sent)_bytes_total (\S+)$", re.MULTILINE)


class Federation:
    """Used with `with`, which leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        certificates: Certificates | None = None,
        root: Path = ROOT,
        *,
        conduct: bool = True,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.certificates = certificates
        self.processes = Processes(folder, root)
        # Of the checkout whose code runs.
        (drift,) = root.glob("benchmarks/*/drift.py")
        self._methods = {"TESSERA_METHODS": str(drift.parent)}
        self.port = free_port()
        self.url = f"{'https' if certificates else 'http'}://{HOST}:{self.port}"
        self._verify = certificates.client_context() if certificates else True
        self.workers: list[str] = []
        self._begun = 0
        self._settings = settings
        self._words = () if conduct else ("--no-conduct",)

    def __enter__(self) -> Self:
        try:
            self._start_coordinator()
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        if hasattr(self, "admin"):
            self.admin.close()
        self.processes.stop()

    def _start_coordinator(self) -> None:
        home = self.folder / "coordinator"
        home.mkdir(parents=True)
        settings = {
            "database_url": f"sqlite:///{home / 'tessera.db'}",
            "blob_url": home / "blobs",
            "staging_dir": home / "staging",
            "port": self.port,
            "admin_token_file": home / "admin-token",
            **self._settings,
        }
        if certificates := self.certificates:
            settings |= {"tls_cert": certificates.server, "tls_key": certificates.key}
        self.environment = {f"TESSERA_{name.upper()}": str(value) for name, value in settings.items()} | self._methods
        self.processes.start(
            "coordinator", tessera("coordinator", "serve", "--migrate", *self._words), self.environment
        )
        await_true(self._ready, READY_SECONDS, "the coordinator is ready")
        self.admin_token = (home / "admin-token").read_text(encoding="ascii").strip()
        self.admin = Client(self.url, self.admin_token, verify=self._verify)

    def _ready(self) -> bool:
        self.processes.check()
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/healthz/ready", timeout=5, verify=self._verify).is_success
        return False

    @property
    def coordinator_pid(self) -> int:
        return self.processes.pid("coordinator")

    @property
    def worker_pids(self) -> list[int]:
        return [self.processes.pid(name) for name in self.workers]

    def site_token(self, site: str) -> str:
        self.admin.create_site(site)
        return self.admin.issue_token(TokenSpec(name=site, role="site", site=site)).secret

    def start_workers(self, count: int, examples: Mapping[str, Path | Options], **settings: Any) -> None:
        """Start `tessera worker run` for that many new sites, each with these data sets, and wait until all wait."""
        for _ in range(count):
            self.start_worker(f"site-{len(self.workers) + 1}", examples, **settings)
        self.await_workers()

    def start_worker(self, site: str, examples: Mapping[str, Path | Options], **settings: Any) -> None:
        """Start `tessera worker run` for a new site with these data sets. `settings` are the worker's.

        A data set is a file of tensors, or options with their `kind`.
        """
        home = self.folder / site
        home.mkdir()
        options = {
            "url": self.url,
            "token": self.site_token(site),
            "name": "w",
            "state_dir": str(home / "state"),
            "device": "cpu",
            "threads": 1,
            **settings,
        }
        if self.certificates:
            options["ca_bundle"] = str(self.certificates.ca)
        # JSON's strings, numbers and lists are TOML's.
        lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        for dataset, given in examples.items():
            each = {"kind": "arrays", "file": str(given)} if isinstance(given, Path) else given
            lines += [f"[datasets.{dataset}]", *(f"{key} = {json.dumps(value)}" for key, value in each.items())]
        (home / "worker.toml").write_text("\n".join(lines), encoding="utf-8")
        self.processes.start(site, tessera("worker", "run", "--config", str(home / "worker.toml")), self._methods)
        self.workers.append(site)

    def await_workers(self) -> None:
        """Wait until all workers wait for tasks. Raises TimeoutError."""
        await_true(self._all_live, READY_SECONDS + 10 * len(self.workers), "the workers are waiting", 0.1)

    def _all_live(self) -> bool:
        self.processes.check()
        return sum(worker.live for worker in self.admin.workers()) >= len(self.workers)

    def moved(self) -> Moved:
        """Return the bytes of uploads and blobs so far, as the coordinator counts them itself."""
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        answer = httpx.get(f"{self.url}/metrics", headers=headers, timeout=30, verify=self._verify)
        found = {name: int(float(value)) for name, value in _COUNTER.findall(answer.text)}
        return Moved(found["received"], found["sent"])

    def moved_in(self, run: Run) -> Moved:
        """Return the bytes of a run's rounds after the first, as their tasks have them."""
        tasks = [task for each in self.admin.rounds(run.id) if each.number > 1 for task in each.tasks]
        return Moved(sum(task.upload_bytes for task in tasks), sum(task.download_bytes for task in tasks))

    def begin(
        self,
        model: InitialModel,
        rounds: int,
        cohort: int | Options,
        method: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> Run:
        """Uploads a model and starts a run of so many rounds on it."""
        uploaded = upload_model(self.admin, model)
        self._begun += 1
        wanted = {
            "name": "benchmark",
            "dataset": DATASET,
            "method": method or {"name": "drift"},
            "rounds": rounds,
            # Another for each: of what a run before has made to the bit, nothing would have to travel.
            "seed": self._begun,
            "cohort": {"size": cohort, "quorum": cohort, "max_attempts": 1} if isinstance(cohort, int) else cohort,
            "model": uploaded.model,
            "version": uploaded.version,
            **spec,
        }
        return self.admin.create_run(RunSpec.model_validate(wanted), key=uuid.uuid4().hex)

    def await_version(self, run: Run, number: int, every_seconds: float = 0.02) -> None:
        """Wait until the run has committed that version.

        Raises RuntimeError if the run stops before, or opens no round within OPENING_SECONDS, and TimeoutError after
        ROUND_SECONDS.
        """
        give_up_at = monotonic() + OPENING_SECONDS
        opened = False

        def there() -> bool:
            nonlocal opened
            self.processes.check()
            now = self.admin.run(run.id)
            if now.state not in ("running", "completed"):
                problems = [str(task.problem) for round_ in self.admin.rounds(run.id) for task in round_.tasks]
                raise RuntimeError(f"the run was {now.state}: {now.reason}; {problems}")
            opened = opened or now.bounds is not None
            if not opened and monotonic() > give_up_at:
                raise RuntimeError(
                    f"no round was opened in {OPENING_SECONDS:.0f} s: {ineligibilities(self.admin, run)}"
                )
            return now.version.number >= number

        await_true(there, ROUND_SECONDS, f"version {number}", every_seconds)

    def spans(self, run: Run) -> list[float]:
        """The seconds from opening to commit of each round, as the coordinator wrote them down."""
        committed = {version.number: version.created_at for version in self.admin.versions(run.id)}
        rounds: Sequence[Round] = [round_ for round_ in self.admin.rounds(run.id) if round_.version is not None]
        return [(committed[round_.version] - round_.opened_at).total_seconds() for round_ in rounds if round_.version]


def ineligibilities(admin: Client, run: Run) -> str:
    """Return why workers cannot take part in a run."""
    preview = admin.preview_run(run.spec)
    reasons = sorted({reason.detail for worker in preview.workers for reason in worker.ineligibilities})
    return f"{preview.eligible} of {preview.quorum} sites are eligible: {'; '.join(reasons) or 'no worker is live'}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""A whole federation on one machine: a coordinator, institutions that train, a laboratory that evaluates."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np

from tessera.examples.processes import Processes, tessera
from tessera.shared.api.admin import TokenSpec
from tessera.shared.client.client import Client
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.schema import TaskKind
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.partition.schemes import Dirichlet
from tessera.worker.settings import HELD_OUT_KEY_FILE, DataSource

# They import torch. The processes of a demo start meanwhile.
if TYPE_CHECKING:
    from tessera.worker import inventory
    from tessera.worker.data.partition import division
else:
    inventory = DeferredModule("tessera.worker.inventory")
    division = DeferredModule("tessera.worker.data.partition.division")

VIT = Path(__file__).parent / "digits/vit.json"

SITES = ("alder-clinic", "birch-hospital", "cedar-institute", "dune-university")
LABORATORY = "reference-lab"
WORKER = "worker-1"

TRAIN_DATA = "digits"
TEST_DATA = "digits-test"

# Each digit is divided among the sites in proportions drawn from Dirichlet(0.1): most have seen only some of them.
ALPHA = 0.1
SEED = 0

CLASSES = 10
READY_SECONDS = 60.0


@dataclass(frozen=True)
class Holding:
    """A site's data: its name, and its part of the digits."""

    site: str
    dataset: str
    source: DataSource
    kind: TaskKind | None
    """The tasks of its worker: training or evaluation; both if None."""


def holdings() -> tuple[Holding, ...]:
    """Return each site's data. No other site has the laboratory's images."""
    parts = (
        Dirichlet(scheme="dirichlet", count=len(SITES), index=index, alpha=ALPHA, seed=SEED)
        for index in range(len(SITES))
    )
    training = (DataSource(kind="digits", part=part) for part in parts)
    return (
        *(Holding(site, TRAIN_DATA, source, "train") for site, source in zip(SITES, training, strict=True)),
        Holding(LABORATORY, TEST_DATA, DataSource(kind="digits", split="test", use="evaluate"), "evaluate"),
    )


def label_counts(holding: Holding) -> list[int]:
    """Return a site's number of images per digit."""
    labels = inventory.load_source(holding.source).tensors["labels"].numpy()
    return [int(count) for count in np.bincount(labels, minlength=CLASSES)]


class Federation:
    """The demo's processes and their folders."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder = folder
        self.processes = processes
        self.url = f"http://127.0.0.1:{_free_port()}"
        self.compute: dict[str, object] = {}
        """The table `compute` of each worker's settings."""
        self.tables: dict[str, str] = {}
        """More of a worker's settings, as TOML, by site."""

    def start_coordinator(self, more: Mapping[str, str] | None = None) -> None:
        """Start a coordinator on a new database and an empty store, with `more` in its environment, and return when
        it is ready."""
        home = self.folder / "coordinator"
        home.mkdir()
        settings = {
            "TESSERA_DATABASE_URL": f"sqlite:///{home / 'tessera.db'}",
            "TESSERA_BLOB_URL": str(home / "blobs"),
            "TESSERA_STAGING_DIR": str(home / "staging"),
            "TESSERA_HOST": "127.0.0.1",
            "TESSERA_PORT": self.url.rpartition(":")[2],
            "TESSERA_ADMIN_TOKEN_FILE": str(self._admin_token_file),
            **(more or {}),
        }
        self.processes.start("coordinator", tessera("coordinator", "serve", "--migrate"), settings)
        self._await_ready()

    @property
    def _admin_token_file(self) -> Path:
        return self.folder / "coordinator" / "admin-token"

    def _await_ready(self) -> None:
        give_up_at = time.monotonic() + READY_SECONDS
        while time.monotonic() < give_up_at:
            self.processes.check()
            try:
                if httpx.get(f"{self.url}/healthz/ready", timeout=5).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"the coordinator was not ready after {READY_SECONDS:.0f} s; see coordinator.log")

    def admin(self) -> Client:
        return Client(self.url, self._admin_token_file.read_text(encoding="ascii").strip())

    @property
    def access(self) -> dict[str, str]:
        """The environment variables by which commands and `tessera.connect` find the coordinator."""
        return {"TESSERA_URL": self.url, "TESSERA_TOKEN_FILE": str(self._admin_token_file)}

    def start_worker(self, admin: Client, holding: Holding) -> None:
        """Admit a site and start its worker."""
        token_file = self.admit(admin, holding.site)
        settings = self._worker_settings(holding, token_file.parent, token_file) + self.tables.get(holding.site, "")
        (token_file.parent / "worker.toml").write_text(settings, encoding="utf-8")
        self.restart_worker(holding.site)

    def admit(self, admin: Client, site: str) -> Path:
        """Admit a site, and return the file of a token for that site only, in the site's folder."""
        home = self.home(site)
        home.mkdir(exist_ok=True)
        admin.create_site(site)
        issued = admin.issue_token(TokenSpec(name=site, role="site", site=site))
        token_file = home / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(issued.secret, encoding="ascii")
        return token_file

    def restart_worker(self, site: str) -> None:
        """Start the worker of a site that has its settings."""
        config = self.home(site) / "worker.toml"
        self.processes.start(site, tessera("worker", "run", "--config", str(config)), {})

    def home(self, site: str) -> Path:
        """Return the folder of a site."""
        return self.folder / site

    def add_base(self, sites: Sequence[str], base: Path, head: str = "causal-lm") -> None:
        """Let each of these sites add the base that lies in a folder, as it would at an institution."""
        for site in sites:
            config = str(self.home(site) / "worker.toml")
            added = tessera("worker", "cache", "add", str(base), "--config", config, "--head", head)
            self.processes.start(f"{site}-base", added, {})
        for site in sites:
            self.processes.finish(f"{site}-base")

    def _worker_settings(self, holding: Holding, home: Path, token_file: Path) -> str:
        lines = [
            f"url = {_toml(self.url)}",
            f"token_file = {_toml(str(token_file))}",
            f"name = {_toml(WORKER)}",
            f"state_dir = {_toml(str(home / 'state'))}",
            # A real site's key is secret, and two federations never train alike.
            f"audit_key = {_toml(sha256(holding.site.encode()).hexdigest())}",
            f"kinds = {_toml([holding.kind] if holding.kind else ['train', 'evaluate'])}",
            'device = "cpu"',
            "threads = 1",
            # A real site keeps the default: the examples here are public, and nobody has to wait.
            "duration_quantum_seconds = 0.01",
            *(["[compute]"] if self.compute else []),
            *(f"{name} = {_toml(value)}" for name, value in self.compute.items()),
            "",
            f"[datasets.{holding.dataset}]",
            f"kind = {_toml(holding.source.kind)}",
            *(f"{name} = {_toml(value)}" for name, value in holding.source.options.items()),
        ]
        if holding.source.use == "evaluate":
            lines.append('use = "evaluate"')
        if holding.source.held_out:
            lines.append(f"held_out = {holding.source.held_out}")
            # A real site's key is made by its worker; here the same images are held out in every demo.
            (home / "state").mkdir()
            (home / "state" / HELD_OUT_KEY_FILE).write_text(division.key_of_seed(SEED).hex(), encoding="ascii")
        if part := holding.source.part:
            values = ", ".join(f"{name} = {_toml(value)}" for name, value in part.model_dump().items())
            lines.append(f"part = {{ {values} }}")
        return "\n".join(lines) + "\n"

    def await_workers(self, admin: Client, wanted: int = len(SITES) + 1) -> Iterator[int]:
        """Yield the number of workers until all have joined."""
        there = 0
        while there < wanted:
            self.processes.check()
            there = sum(worker.live for worker in admin.workers())
            yield there
            time.sleep(0.2)

    def make_model(self, *options: str, name: str = "model") -> ModelFolder:
        """Create a model with these options of `tessera model init` in the folder `name`; without options, a ViT with
        random weights."""
        out = self.folder / name
        options = options or ("--config", str(VIT), "--head", "image-classification", "--random")
        options = (*options, "--seed", str(SEED))
        self.processes.start("model-init", tessera("model", "init", str(out), *options), {})
        self.processes.finish("model-init")
        return ModelFolder.open(out)


def _toml(value: object) -> str:
    # JSON's numbers are TOML's, and a JSON string is a TOML basic string as long as it is ASCII, which `json.dumps`
    # sees to.
    return json.dumps(value)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

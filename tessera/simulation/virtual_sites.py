"""The virtual sites: their data, loaded when they participate, and the state that each stores on disk."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from tessera.shared.client.transfers import Progress
from tessera.shared.methods.base import Participant
from tessera.shared.problems import Invalid
from tessera.simulation.blob_folder import Folder
from tessera.worker.data.content import content_digest, row_settings
from tessera.worker.data.dataset import Dataset
from tessera.worker.state.blob_cache import BlobTooLarge, Row, Source
from tessera.worker.state.hash_chain import derived
from tessera.worker.task.environment import TRAINING_SEEDS

WORKER = "worker"
"""The name of each virtual site's only worker."""


@dataclass(frozen=True)
class VirtualSite:
    """A virtual site's data, or a function that loads them, and the declarations of its worker."""

    data: Dataset | Callable[[], Dataset]
    resources: Mapping[str, float] = field(default_factory=dict)
    weight: int = 1
    """In exact secure sums."""
    audit_key: bytes | None = field(default=None, repr=False)
    """A worker's `audit_key`, to repeat its training. Without one, nothing is mixed into training seeds but, in
    secure sums, the site's name."""

    changes: Mapping[int, Dataset | Callable[[], Dataset]] = field(default_factory=dict)
    """Data that take the place of the earlier ones from a round on, by the round."""

    def since(self, number: int) -> int:
        """Return the round from which on the site holds the data of round `number`; 0 for its first data."""
        return max((first for first in self.changes if first <= number), default=0)

    def load(self, since: int = 0) -> Dataset:
        data = self.changes[since] if since else self.data
        return data if isinstance(data, Dataset) else data()


@dataclass(frozen=True)
class DataSizes:
    """The sizes of a site's data, and a digest of the content that results depend on."""

    examples: int
    held_out: int
    content: str

    @classmethod
    def of(cls, data: Dataset) -> Self:
        parts = [data] if data.held_out is None else [data, data.held_out]
        content = hashlib.sha256("".join(map(_content, parts)).encode()).hexdigest()[:16]
        held_out = data.held_out.examples if data.held_out else 0
        return cls(data.examples, held_out, content)


def _content(data: Dataset) -> str:
    about = hashlib.sha256(row_settings(data))
    # Tensors in memory are hashed as a whole.
    if data.sources is not None or data.on_disk:
        for each in data.identities():
            about.update(each)
    return content_digest(data, np.frombuffer(about.digest(), np.uint8))


class VirtualSites:
    """All sites, sorted by name. At most `loaded` loaded data sets are in memory at once."""

    def __init__(self, sites: Mapping[str, Dataset | VirtualSite], loaded: int) -> None:
        if not sites:
            raise Invalid("a federation needs a site", remedy="Give one at least.")
        self._sites = {
            name: site if isinstance(site, VirtualSite) else VirtualSite(site) for name, site in sorted(sites.items())
        }
        self._places = {name: place for place, name in enumerate(self._sites)}
        self._loaded = lru_cache(maxsize=loaded)(lambda name, since: self._sites[name].load(since))
        self.holdings = {
            name: {since: DataSizes.of(self._loaded(name, since)) for since in (0, *sorted(site.changes))}
            for name, site in self._sites.items()
        }
        """The holdings of each site, by the round from which on it has them."""

    def dataset(self, site: str, number: int) -> Dataset:
        """Return a site's data in round `number`."""
        return self._loaded(site, self._sites[site].since(number))

    def since(self, site: str, number: int) -> int:
        """Return the round from which on a site has its data of round `number`; 0 for its first data."""
        return self._sites[site].since(number)

    def holding(self, site: str, number: int) -> DataSizes:
        return self.holdings[site][self._sites[site].since(number)]

    def place(self, site: str) -> int:
        """Return the site's index among the sites, sorted by name."""
        return self._places[site]

    def site_of(self, worker: str) -> str:
        return worker.removesuffix(f"/{WORKER}")

    def identity(self) -> dict[str, Any]:
        """Return the data of each site that the results depend on, as JSON."""
        found = {}
        for name, site in self._sites.items():
            declared = {"resources": dict(site.resources), "weight": site.weight}
            key = hashlib.sha256(site.audit_key).hexdigest() if site.audit_key else None
            later = {str(since): asdict(held) for since, held in self.holdings[name].items()}
            found[name] = {**later.pop("0"), **declared, "key": key, **({"changes": later} if later else {})}
        return found

    def weight(self, site: str) -> int:
        """Return a site's weight in exact secure sums."""
        return self._sites[site].weight

    def seed_key(self, site: str, *, in_sum: bool) -> bytes | None:
        """Return the key of a site's training seeds."""
        if key := self._sites[site].audit_key:
            return derived(key, TRAINING_SEEDS)
        return site.encode() if in_sum else None

    def participant(self, site: str, number: int) -> Participant:
        """Return a site as round `number` sees it."""
        return Participant(worker_of(site), self.holding(site, number).examples, self._sites[site].resources, site)


def worker_of(site: str) -> str:
    return f"{site}/{WORKER}"


class SharedDiskCache:
    """The cache of a worker that shares its coordinator's disk, and reads blobs in place.

    A blob counts as downloaded if the worker did not hold it after its last task, as with a cache of its own that has
    room for one version. Implements `worker.task.environment.Shelf`.
    """

    def __init__(self, folder: Folder, held: frozenset[str]) -> None:
        self._folder = folder
        self._held = held
        self._fetched: set[str] = set()

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def path(self, digest: str) -> Path:
        return self._folder.path(digest)

    def put(self, digest: str, pieces: Iterable[bytes | memoryview], max_bytes: int) -> bool:
        """Raise NotImplementedError: the simulation reads blobs in place and stores none here."""
        raise NotImplementedError

    def fetch_all(self, wanted: Mapping[str, int], source: Row, progress: Progress | None = None) -> None:
        """Do nothing: blobs are read in place."""

    @contextmanager
    def pinning(self) -> Iterator[None]:
        yield

    def in_memory(self, digest: str) -> bytes | None:
        return self._folder.small(digest)

    def fetch(self, digest: str, max_bytes: int, source: Source, progress: Progress | None = None) -> Path:
        size = self._folder.size(digest)
        if size > max_bytes:
            raise BlobTooLarge(f"{digest} has more than the {max_bytes} bytes that it may have")
        if progress and digest not in self._held and digest not in self._fetched:
            progress(size)
        self._fetched.add(digest)
        return self._folder.place(digest)

    def kept(self, version: set[str]) -> frozenset[str]:
        """Return the blobs that the worker holds after the task: fetched, and of the current version."""
        return frozenset(self._fetched | (self._held & version))

"""The data sets and the devices that a worker's settings name."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tessera.shared.diagnostics import reason_of
from tessera.worker.data.dataset import Dataset, Loaders
from tessera.worker.data.dataset_info import Inventory
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.data.registry import load
from tessera.worker.devices import device_name, device_names
from tessera.worker.errors import DataError
from tessera.worker.settings import DataSettings, DataSource, DataSources, DeviceName, SettingsError, WorkerSettings
from tessera.worker.state.atomic_files import secret_key

GPU_LOADERS = 2
"""Number of loaders for a GPU unless the settings say otherwise. On a CPU a thread keeps up."""


def load_source(
    source: DataSource, key: bytes = b"", prepared: PreparedFolder = NOT_KEPT, loaders: Loaders | None = None
) -> Dataset:
    """Return the data set. `key` decides which examples are held out. Raises DataError."""
    return load(
        source.kind,
        source.options,
        part=source.part,
        held_out=source.held_out,
        opt_out=source.opt_out,
        key=key,
        prepared=prepared,
        loaders=loaders,
    )


def prepared_of(settings: DataSettings, name: str) -> PreparedFolder:
    """Return the folder of the files made from a data set, which only a running worker writes."""
    return PreparedFolder(settings.sources.prepared / name) if isinstance(settings, WorkerSettings) else NOT_KEPT


def loaders_of(sources: DataSources, *, cuda: bool) -> LoaderProcesses | None:
    """Return the processes that read data sets on disk for such a device, or None if a thread does."""
    count = sources.loaders if sources.loaders is not None else GPU_LOADERS * cuda
    return LoaderProcesses(count, pinned=cuda) if count else None


def held_out_key(sources: DataSources, *, make: bool) -> bytes:
    """Return the secret key that decides which examples are held out, or b"" if none are.

    Without `make`, a missing key file is not written, and a public key is returned. Raises SettingsError.
    """
    if not any(source.held_out for source in sources.datasets.values()):
        return b""
    path = sources.held_out_key_file
    try:
        return secret_key(path) if make or path.exists() else key_of_seed(0)
    except (OSError, ValueError) as fault:
        raise SettingsError(
            f"held_out_key_file: {path} cannot be used: {reason_of(fault)}. Restore it from a backup"
        ) from fault


def datasets_of(sources: DataSources, *, cuda: bool = False, make: bool = False) -> dict[str, Dataset]:
    """Return the data sets, by name, for a GPU (`cuda`) or the CPU. Raises SettingsError naming the wrong option.

    A running worker has the key and the prepared files made (`make`), and those of other data sets removed.
    """
    key, loaders = held_out_key(sources, make=make), loaders_of(sources, cuda=cuda)
    loaded: dict[str, Dataset] = {}
    for name, source in sources.datasets.items():
        with named(name):
            loaded[name] = load_source(source, key, PreparedFolder(sources.prepared / name, writable=make), loaders)
    if make and sources.prepared.is_dir():
        for left in sources.prepared.iterdir():
            if left.name not in loaded:
                shutil.rmtree(left, ignore_errors=True)
    return loaded


def inventory_of(sources: Mapping[str, DataSource], datasets: Mapping[str, Dataset]) -> Inventory:
    """Return the facts about data sets loaded from these sources."""
    trained = [data for name, data in datasets.items() if sources[name].use == "train"]
    groups = {group for data in trained for group in data.groups or ()}
    return Inventory({name: data.info for name, data in datasets.items()}, len(groups))


@contextmanager
def named(dataset: str) -> Iterator[None]:
    """Turn a DataError into a SettingsError that names the data set."""
    try:
        yield
    except DataError as fault:
        raise SettingsError(f"datasets.{dataset}.{fault}") from fault


def device_of(name: DeviceName) -> torch.device:
    """Return the device to train on; `auto` is a GPU if there is one. Raises SettingsError for a missing GPU."""
    return torch.device(device_name(name, torch.cuda.device_count()))


def devices_of(settings: WorkerSettings) -> tuple[torch.device, ...]:
    """Return the devices that train together. Raises SettingsError for a missing one."""
    return tuple(map(torch.device, device_names(settings, torch.cuda.device_count)))


def describe(*devices: torch.device) -> str:
    """Return the devices' names in at most 64 printable ASCII characters."""
    first = devices[0]
    name = f"{first} {torch.cuda.get_device_name(first)}" if first.type == "cuda" else str(first)
    return _of_all(devices, "".join(letter for letter in name if " " <= letter <= "~"))


def gpu_name(devices: Sequence[torch.device]) -> str | None:
    """Return the GPUs' name in at most 64 characters; None for CPUs."""
    first = devices[0]
    return _of_all(devices, torch.cuda.get_device_name(first)) if first.type == "cuda" else None


def _of_all(devices: Sequence[torch.device], name: str) -> str:
    return (f"{len(devices)} x {name}" if len(devices) > 1 else name)[:64]

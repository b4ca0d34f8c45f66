"""The data sets, the device and the mapping files that a worker's settings name."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from tessera.shared.diagnostics import reason_of
from tessera.worker.data.dataset import Dataset, Loaders
from tessera.worker.data.dataset_info import Inventory
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.opt_out import read_opt_out
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.model.layouts import MappingError, MappingFile, read_mapping
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


def opt_outs_of(sources: DataSources) -> dict[str, frozenset[bytes]]:
    """Return the groups in the opt-out list of each data set that has one. Raises SettingsError."""
    lists = dict[str, frozenset[bytes]]()
    for name, source in sources.datasets.items():
        if source.opt_out is not None:
            with named(name):
                lists[name] = read_opt_out(source.opt_out)
    return lists


@contextmanager
def named(dataset: str) -> Iterator[None]:
    """Turn a DataError into a SettingsError that names the data set."""
    try:
        yield
    except DataError as fault:
        raise SettingsError(f"datasets.{dataset}.{fault}") from fault


def mappings_of(files: Iterable[Path]) -> dict[str, MappingFile]:
    """Return the site's mappings, by the model type that each describes. Raises SettingsError for an invalid one."""
    try:
        found = [read_mapping(file) for file in files]
    except MappingError as fault:
        raise SettingsError(f"mappings: {fault}") from fault
    by_type = {mapping.model_type: mapping for mapping in found}
    if len(by_type) < len(found):
        raise SettingsError("mappings: two files describe the same model type")
    return by_type


def device_of(name: DeviceName) -> torch.device:
    """Return the device to train on; `auto` is a GPU if there is one. Raises SettingsError for a missing GPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"device: there is no {device} here, of {torch.cuda.device_count()} CUDA devices")
    return device


def devices_of(settings: WorkerSettings) -> tuple[torch.device, ...]:
    """Return the devices that train together. Raises SettingsError for a missing one."""
    found = _devices_of(settings)
    if settings.compute.shard and len(found) == 1:
        raise SettingsError(f"compute.shard divides a model among several devices, and {found[0]} is one: remove it")
    return found


def _devices_of(settings: WorkerSettings) -> tuple[torch.device, ...]:
    if settings.devices == 1:
        return (device_of(settings.device),)
    if sys.platform != "linux":
        raise SettingsError("devices: several need Linux; leave devices out")
    if isinstance(settings.devices, tuple):
        if settings.device != "auto":
            raise SettingsError("device and devices name devices both: leave device out")
        return _listed(settings.devices)
    if settings.device == "cpu" and settings.devices != "all":
        return (torch.device("cpu"),) * settings.devices
    if settings.device not in ("auto", "cuda"):
        raise SettingsError(f"devices: there is one {settings.device}: leave device or devices out")
    here = torch.cuda.device_count()
    count = here if settings.devices == "all" else settings.devices
    if not 0 < count <= here:
        raise SettingsError(
            f"devices: {settings.devices} GPUs are asked for and {here} are here: lower devices, or set device to cpu"
        )
    return tuple(torch.device("cuda", place) for place in range(count))


def _listed(names: Iterable[DeviceName]) -> tuple[torch.device, ...]:
    found = tuple(map(device_of, names))
    if len({each.type for each in found}) != 1:
        raise SettingsError("devices: name either GPUs or cpu, at least one")
    if len(found) > 1 and torch.device("cuda") in found:
        raise SettingsError("devices: name each GPU by its number, as in cuda:0")
    if twice := sorted({str(each) for each in found if each.type == "cuda" and found.count(each) > 1}):
        raise SettingsError(f"devices: {', '.join(twice)} twice: name each once")
    return found


def describe(*devices: torch.device) -> str:
    """Return the devices' names in at most 64 printable ASCII characters."""
    first = devices[0]
    name = f"{first} {torch.cuda.get_device_name(first)}" if first.type == "cuda" else str(first)
    several = f"{len(devices)} x " if len(devices) > 1 else ""
    return "".join(letter for letter in several + name if " " <= letter <= "~")[:64]

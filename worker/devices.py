"""The names of the devices that a worker's settings ask for. Imports no torch, so that the agent needs none."""

import subprocess
import sys
from collections.abc import Callable, Iterable

from tessera.worker.settings import DeviceName, SettingsError, WorkerSettings


def count_gpus() -> int:
    """Return the number of GPUs that torch sees, in another process."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)  # noqa: S603  (our own)


def device_name(name: DeviceName, gpus: int) -> str:
    """Return the name of a device of a machine with this number of GPUs; `auto` is a GPU if there is one. Raises
    SettingsError for a missing GPU."""
    if name == "cpu" or (name == "auto" and not gpus):
        return "cpu"
    name = "cuda" if name == "auto" else name
    if int(name.partition(":")[2] or 0) >= gpus:
        raise SettingsError(f"device: there is no {name} here, of {gpus} CUDA devices")
    return name


def device_names(settings: WorkerSettings, gpus: Callable[[], int]) -> tuple[str, ...]:
    """Return the names of the devices that train together. Raises SettingsError for a missing one."""
    found = _device_names(settings, gpus)
    if settings.compute.shard and len(found) == 1:
        raise SettingsError(f"compute.shard divides a model among several devices, and {found[0]} is one: remove it")
    return found


def _device_names(settings: WorkerSettings, gpus: Callable[[], int]) -> tuple[str, ...]:
    if settings.devices == 1:
        return (device_name(settings.device, gpus()),)
    if isinstance(settings.devices, tuple):
        if settings.device != "auto":
            raise SettingsError("device and devices name devices both: leave device out")
        here = gpus()
        return _listed(device_name(name, here) for name in settings.devices)
    if settings.device == "cpu" and settings.devices != "all":
        return ("cpu",) * settings.devices
    if settings.device not in ("auto", "cuda"):
        raise SettingsError(f"devices: there is one {settings.device}: leave device or devices out")
    here = gpus()
    count = here if settings.devices == "all" else settings.devices
    if not 0 < count <= here:
        raise SettingsError(
            f"devices: {settings.devices} GPUs are asked for and {here} are here: lower devices, or set device to cpu"
        )
    return tuple(f"cuda:{place}" for place in range(count))


def _listed(names: Iterable[str]) -> tuple[str, ...]:
    found = tuple(names)
    if len({name.partition(":")[0] for name in found}) != 1:
        raise SettingsError("devices: name either GPUs or cpu, at least one")
    if len(found) > 1 and "cuda" in found:
        raise SettingsError("devices: name each GPU by its number, as in cuda:0")
    if twice := sorted({name for name in found if name != "cpu" and found.count(name) > 1}):
        raise SettingsError(f"devices: {', '.join(twice)} twice: name each once")
    return found

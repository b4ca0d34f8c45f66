"""Whether a worker could do its work here: the way to the coordinator, machine, data, policy, line."""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.diagnostics.checks import Check, Finding, fail, ok, warn
from tessera.shared.host_memory import available_bytes
from tessera.shared.methods.registry import methods
from tessera.shared.problems import Forbidden, NotFound, Problem, Unauthenticated
from tessera.worker.data.registry import DataError, Dataset
from tessera.worker.diagnostics.network import way_to
from tessera.worker.governance.descriptions import policy_in_words, size
from tessera.worker.inventory import device_of, held_out_key, load_source
from tessera.worker.settings import DataSource, SettingsError, WorkerSettings, tls_of, token_of
from tessera.worker.state.atomic_files import temporary_file

WRITTEN_BYTES = 32 << 20
SLOW_BYTES_PER_SECOND = 20e6
MIN_FREE_BYTES = 1 << 30
PROBE_BYTES = 1 << 18
MATMUL_ROWS = 1024


def checks(settings: WorkerSettings, *, probe: bool) -> Iterator[tuple[str, Check]]:
    """Yield what is looked at, in order. With `probe`, 256 KiB of noise are uploaded, which the coordinator
    removes."""
    verify = tls_of(settings)
    connect = partial(Client, settings.url, patience_seconds=0, verify=verify)
    yield "coordinator", lambda: way_to(settings.url, verify)
    yield "token", lambda: _token(settings, connect)
    yield "disk", lambda: _disk(settings)
    yield "device", lambda: _device(settings)
    for name, source in settings.datasets.items():
        yield f"data {name}", partial(_dataset, settings, name, source)
    yield "policy", lambda: _policy(settings)
    yield "line", lambda: _line(settings, connect, probe=probe)


def _token(settings: WorkerSettings, connect: Callable[..., Client]) -> Iterator[Finding]:
    try:
        token = token_of(settings)
    except SettingsError as fault:
        yield fail("token", str(fault), "Put the token there, as an administrator issued it.")
        return
    path = settings.token_file
    if settings.token is None and path and path.stat().st_mode & 0o077:
        yield warn("token", f"{path} is readable by others than its owner", f"chmod 600 {path}")
    try:
        with connect(token) as client:
            # A lease that there is not may be renewed by a site's token alone.
            client.heartbeat("0", 0)
    except NotFound as problem:
        if problem.from_document:
            yield ok("token", "admitted, for a site")
            return
        yield fail("token", problem.detail, problem.advice)
    except (Unauthenticated, Forbidden) as problem:
        known = isinstance(problem, Forbidden)
        remedy = "Ask an administrator for a token of role site." if known else problem.advice
        yield fail("token", f"not admitted: {problem.detail}", remedy)
    except Problem as problem:
        yield fail("token", f"it could not be tried: {problem.detail}", problem.advice)


def _disk(settings: WorkerSettings) -> Iterator[Finding]:
    folder = settings.state_dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(folder).free
    told = f"{size(free)} free at {folder}"
    if free < MIN_FREE_BYTES:
        yield fail("disk", told, "Free some: a model, its updates and the cache lie there.")
    elif free < settings.cache_bytes:
        yield warn("disk", f"{told}, less than cache_bytes ({size(settings.cache_bytes)})", "Lower cache_bytes.")
    else:
        yield ok("disk", told)
    piece = os.urandom(1 << 20)
    began_at = time.monotonic()
    with temporary_file(folder) as (_, file):
        for _ in range(WRITTEN_BYTES // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    rate = WRITTEN_BYTES / (time.monotonic() - began_at)
    told = f"writes {size(int(rate))} a second"
    yield (
        ok("disk", told) if rate >= SLOW_BYTES_PER_SECOND else warn("disk", told, "Use a faster disk for state_dir.")
    )


def _device(settings: WorkerSettings) -> Iterator[Finding]:
    try:
        device = device_of(settings.device)
    except SettingsError as fault:
        yield fail("device", str(fault), "Set `device` to cpu, or to a GPU that there is.")
        return
    cuda = device.type == "cuda"
    if cuda:
        free, whole = torch.cuda.mem_get_info(device)
        told = f"{device} {torch.cuda.get_device_name(device)}, {size(free)} of {size(whole)} free"
    else:
        told = f"{device}, {torch.get_num_threads()} threads"
    yield ok("device", told)
    yield _memory(settings.policy.max_model_bytes)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        seconds = _matmul_seconds(device, dtype)
        rate = 2 * MATMUL_ROWS**3 / seconds / 1e9
        yield ok("device", f"multiplies {name} matrices at {rate:.0f} GFLOP/s")


def _memory(max_model_bytes: int) -> Finding:
    told = f"models of up to {size(max_model_bytes)} (max_model_bytes), {size(available_bytes())} of memory"
    if max_model_bytes > available_bytes():
        return warn("memory", told, "Lower policy.max_model_bytes: a larger model ends the worker.")
    return ok("memory", told)


def _matmul_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Return how long a product of two square matrices takes, the second time. Raises RuntimeError for a wrong
    product."""
    eye = torch.eye(MATMUL_ROWS, device=device, dtype=dtype)
    seconds = 0.0
    for _ in range(2):
        began_at = time.monotonic()
        product = eye @ eye
        wrong = not torch.equal(product, eye)
        seconds = time.monotonic() - began_at
        if wrong:
            raise RuntimeError(f"{device} multiplies {dtype} wrongly")
    return max(seconds, 1e-9)


def _dataset(settings: WorkerSettings, name: str, source: DataSource) -> Iterator[Finding]:
    if not settings.policy.allows_dataset(name):
        yield ok(f"data {name}", "kept from runs by the policy, and not loaded")
        return
    began_at = time.monotonic()
    try:
        loaded = load_source(source, held_out_key(settings, make=False))
    except (DataError, SettingsError) as fault:
        yield fail(f"data {name}", str(fault), f"Mend datasets.{name} in the settings, or the files that it names.")
        return
    seconds = time.monotonic() - began_at
    yield ok(f"data {name}", f"{_told(loaded)}, loaded in {seconds:.1f} s")
    if "train" not in settings.kinds and source.use == "train" and loaded.held_out is None:
        remedy = f"Set datasets.{name}.use = 'evaluate' if nothing trains on it."
        yield warn(f"data {name}", "no version is measured on it, and this worker does nothing else", remedy)


def _policy(settings: WorkerSettings) -> Iterator[Finding]:
    policy = settings.policy
    yield from (ok("policy", sentence) for sentence in policy_in_words(policy))
    for rule in ("orchestrators", "methods", "datasets", "models"):
        if getattr(policy, rule) == ():
            remedy = f"Name some, or leave policy.{rule} out, which allows any."
            yield warn("policy", f"{rule} is empty: whatever a run asks for is refused", remedy)
    # Not before it is needed: transformers takes seconds.
    models = importlib.import_module("transformers").CONFIG_MAPPING if policy.models else ()
    for rule, named, known, where in (
        ("methods", policy.methods, methods(), "is installed"),
        ("datasets", policy.datasets, settings.datasets, "is in the settings"),
        ("models", policy.models, models, "is known to transformers"),
    ):
        for name in sorted(set(named or ()) - set(known)):
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Mend or remove it in policy.{rule}."
            yield warn("policy", f"{rule}: nothing called {name!r} {where}", remedy)


def _told(loaded: Dataset) -> str:
    classes = loaded.classes
    known = f", {len(torch.bincount(classes.clamp(min=0)).nonzero())} classes" if classes is not None else ""
    held_out = f", {loaded.held_out.examples} held out" if loaded.held_out else ""
    return f"{loaded.examples} examples{known}{held_out}"


def _line(settings: WorkerSettings, connect: Callable[..., Client], *, probe: bool) -> Iterator[Finding]:
    """Yield how fast bytes go and come, and what that is for the runs that this worker takes part in."""
    with connect(token_of(settings)) as client:
        rate = None
        if probe:
            began_at = time.monotonic()
            client.put_bytes(os.urandom(PROBE_BYTES))
            rate = PROBE_BYTES / (time.monotonic() - began_at)
            yield ok("line", f"uploads {size(int(rate))} a second, by {size(PROBE_BYTES)} of noise")
        own = [task for task in client.tasks() if task.worker.partition("/")[2] == settings.name]
        if most := settings.policy.max_upload_bytes_per_second:
            rate = min(rate or most, most)
        for run, last in sorted(under_way(own).items()):
            about = client.run(run)
            yield ok("runs", forecast(about.spec.name, last, client.model(about.spec.model).nbytes, rate))


def under_way(tasks: Iterable[TaskView]) -> dict[str, TaskView | None]:
    """Return the runs that ask for something now, each with its latest task here whose update was accepted."""
    own = list(tasks)
    live = {task.run for task in own if task.state in ("offered", "leased")}
    accepted = {task.run: task for task in own if task.is_accepted and task.kind == "train"}
    return {run: accepted.get(run) for run in live}


def forecast(name: str, last: TaskView | None, model_bytes: int, rate: float | None) -> str:
    """Return what the last update says of the next ones, or else the whole model. `rate` is in bytes a second."""
    sent = last.upload_bytes if last else model_bytes
    seconds = sent / rate if rate else None
    long = "" if seconds is None else f", about {seconds:.0f} s" if seconds >= 1 else ", less than a second"
    if last is None:
        return f"run {name} has a task here, and sends at most its whole model: {size(sent)} a round{long}"
    return f"run {name} sends {size(sent)} a round{long}; the last fetched {size(last.download_bytes)}"

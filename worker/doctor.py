"""The checks of `tessera worker doctor`: route to the coordinator, token, machine, data, policy, bandwidth."""

import difflib
import importlib
import os
import re
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch

from tessera.shared.api.admin import About
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.client.notice_channels import Channel, Undelivered
from tessera.shared.client.transport import CERTIFICATE_REMEDIES, HttpTransport
from tessera.shared.diagnostics import Check, Finding, fail, ok, reason_of, warn
from tessera.shared.host_memory import available_bytes
from tessera.shared.methods.registry import methods
from tessera.shared.model.dataset_schema import PIXELS
from tessera.shared.model.selectors import ineffective, kept_back
from tessera.shared.model.spec import Model
from tessera.shared.problems import Forbidden, Invalid, NotFound, Problem, Unauthenticated
from tessera.shared.run_settings import NO_PROTECTION, WEAK_EPSILON
from tessera.shared.schema import PROTOCOL
from tessera.shared.units import size
from tessera.shared.updates.model_folder import ModelFolder
from tessera.shared.urls import is_loopback, proxy_of, without_password
from tessera.shared.version import install_line
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.dataset_info import augments_images
from tessera.worker.data.loaders import SHARED_MEMORY
from tessera.worker.deltas import check_deltas
from tessera.worker.errors import ConfigError, DataError
from tessera.worker.executor.slurm.examination import findings
from tessera.worker.faults.disk import unwritable
from tessera.worker.faults.way import (
    CA_REMEDY,
    CONNECT_SECONDS,
    STRIPPED,
    bodies,
    is_stripped,
    long_poll,
    signer,
    unanswered,
    without_proxy,
)
from tessera.worker.governance.descriptions import ANY_BLOCK, policy_in_words
from tessera.worker.governance.notices import TEST
from tessera.worker.governance.policy import Policy
from tessera.worker.inventory import (
    devices_of,
    held_out_key,
    inventory_of,
    load_source,
    loaders_of,
    prepared_of,
)
from tessera.worker.model.four_bits import REMEDY, library
from tessera.worker.settings import DataSource, RegionSettings, SettingsError, WorkerSettings, tls_of, token_of
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.audit import ROLLED_BACK, StateRolledBack
from tessera.worker.state.database import StateDatabase, StateError, file_system
from tessera.worker.stores import own_folders
from tessera.worker.training.optimization.precision import multiplies_bfloat16

WRITTEN_BYTES = 32 << 20
SLOW_BYTES_PER_SECOND = 20e6
MIN_FREE_BYTES = 1 << 30
MIN_SHARED_BYTES = 256 << 20
"""The four batches of two loaders take 150 MiB if each has 256 images of 224 x 224 pixels."""
PROBE_BYTES = 1 << 18
MATMUL_ROWS = 1024
COMPILERS = ("g++", "clang++", "c++")

WHAT_LEAVES = (
    "may_send", "never_send", "never_send_if_present", "max_upload_bytes", "max_run_upload_bytes", "require_privacy",
    "approve_runs", "airlock"
)  # fmt: skip
"""Rules of a policy. A site sets at least one of them; without any, everything may leave unseen."""
OPEN_REMEDY = (
    "Add one of these lines to [policy] in the settings: approve_runs = true, airlock = true, "
    'never_send = ["*embeddings*"], max_run_upload_bytes = 1_000_000_000'
)


def checks(
    settings: WorkerSettings, *, probe: bool, model: Path | None = None, notify: bool = False
) -> Iterator[tuple[str, Check]]:
    """Yield the name of each check and the check, in order.

    With `probe`, one of them uploads 256 KiB of noise, which the coordinator removes. `model`: a model folder, whose
    blocks the policy is tried on. With `notify`, each channel of notices gets a test notice.
    """
    verify = tls_of(settings)
    connect = partial(Client, settings.url, patience_seconds=0, verify=verify)
    yield "coordinator", lambda: way_to(settings.url, verify)
    yield "token", lambda: _token(settings, connect)
    yield "disk", lambda: _disk(settings)
    yield "state", lambda: _state(settings)
    yield "device", lambda: _device(settings)
    if slurm := settings.slurm:
        yield "slurm", lambda: findings(slurm, settings.state_dir)
    if settings.region:
        yield "region", partial(_region, settings.region)
    for name, source in settings.datasets.items() if settings.region is None else ():
        yield f"data {name}", partial(_dataset, settings, name, source)
    yield "policy", lambda: _policy(settings)
    if model:
        yield "policy", lambda: effects(settings.policy, ModelFolder.open(model).model, f"in {model}")
    for channel in settings.notices.channels:
        yield f"notices by {channel.name}", partial(_notices, channel, notify=notify)
    yield "line", lambda: _line(settings, connect, probe=probe)


def _notices(channel: Channel, *, notify: bool) -> Iterator[Finding]:
    name = f"notices by {channel.name}"
    try:
        channel.send(TEST if notify else None, time.time())
    except Undelivered as fault:
        yield fail(name, str(fault), "Correct [notices] in the settings.")
    else:
        yield ok(name, "a test notice was taken" if notify else "set up; send a test notice with --notify")


def _region(region: RegionSettings) -> Iterator[Finding]:
    with Client.from_options(
        region.url, token_file=region.token_file, ca_bundle=region.ca_bundle, patience_seconds=0
    ) as client:
        sites = {worker.site for worker in client.workers() if not (worker.suspended or worker.revoked)}
    about = f"{without_password(region.url)} answers, with {len(sites)} sites"
    if len(sites) < region.min_sites:
        yield warn("region", f"{about}; {region.min_sites} are needed (region.min_sites)", "Admit more sites there.")
    else:
        yield ok("region", about)


def _token(settings: WorkerSettings, connect: Callable[..., Client]) -> Iterator[Finding]:
    try:
        token = token_of(settings)
    except SettingsError as fault:
        yield fail("token", str(fault), "Put the token there, as an administrator issued it.")
        return
    path = settings.token_file
    if settings.token is None and path and path.stat().st_mode & 0o077:
        yield warn("token", f"users other than its owner can read {path}", f"chmod 600 {path}")
    try:
        with connect(token) as client:
            try_token(client)
    except (Unauthenticated, Forbidden) as problem:
        known = isinstance(problem, Forbidden)
        remedy = "Ask an administrator for a token of role site." if known else problem.advice
        remedy = STRIPPED if is_stripped(problem) else remedy
        yield fail("token", f"not admitted: {problem.detail}", remedy)
    except Problem as problem:
        yield fail("token", f"the check failed: {problem.detail}", problem.advice)
    else:
        yield ok("token", "admitted, for a site")


def try_token(client: Client) -> None:
    """Renew a lease that does not exist, which needs a site's token. Raises Problem if the token is not admitted."""
    try:
        client.heartbeat("0", 0)
    except NotFound as problem:
        if not problem.from_document:
            raise


def _state(settings: WorkerSettings) -> Iterator[Finding]:
    for folder in own_folders(settings):
        database = StateDatabase.of(folder)
        try:
            journal, rolled_back = database.check(), database.note(ROLLED_BACK)
        except (StateError, OSError) as fault:
            yield fail("state", str(fault), "The worker does not start until then.")
            continue
        if rolled_back:
            detail = f"{StateRolledBack.code}: the files are older than results that the coordinator has accepted"
            yield fail("state", detail, StateRolledBack.remedy)
        if journal == "wal":
            yield ok("state", f"{database.path} is intact")
        elif journal:
            detail = (
                f"{database.path} is intact. Its file system, {file_system(database.path)}, is one of a network: it "
                "has a rollback journal, which is slower, and needs working file locks"
            )
            yield warn("state", detail, "Name a folder on a local disk, unless workers on several machines share it.")


def _disk(settings: WorkerSettings) -> Iterator[Finding]:
    folder = settings.state_dir
    try:
        yield from _written(folder, settings)
    except OSError as fault:
        remedy = "Free some space, or make it writable: the worker claims nothing until a write works."
        yield fail("disk", unwritable(folder, reason_of(fault), WRITTEN_BYTES), remedy)


def _written(folder: Path, settings: WorkerSettings) -> Iterator[Finding]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(folder).free
    detail = f"{size(free)} free at {folder}"
    if free < MIN_FREE_BYTES:
        yield fail("disk", detail, "Free some space: models, updates and the cache are stored there.")
    elif free < settings.cache_bytes:
        yield warn("disk", f"{detail}, less than cache_bytes ({size(settings.cache_bytes)})", "Lower cache_bytes.")
    else:
        yield ok("disk", detail)
    piece = os.urandom(1 << 20)
    began_at = time.monotonic()
    with temporary_file(folder) as (_, file):
        for _ in range(WRITTEN_BYTES // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    rate = WRITTEN_BYTES / (time.monotonic() - began_at)
    detail = f"writes {size(int(rate))} a second"
    yield (
        ok("disk", detail)
        if rate >= SLOW_BYTES_PER_SECOND
        else warn("disk", detail, "Use a faster disk for state_dir.")
    )


def _device(settings: WorkerSettings) -> Iterator[Finding]:
    try:
        devices = devices_of(settings)
    except SettingsError as fault:
        yield fail("device", str(fault), "Set `device` to cpu, or `device` and `devices` to GPUs of this machine.")
        return
    device = devices[0]
    for each in devices:
        if each.type == "cuda":
            free, whole = torch.cuda.mem_get_info(each)
            detail = f"{each} {torch.cuda.get_device_name(each)}, {size(free)} of {size(whole)} free"
        else:
            detail = f"{each}, {torch.get_num_threads() // len(devices)} threads"
        yield ok("device", detail)
    yield _compute(settings)
    yield _memory(settings.policy.max_model_bytes)
    yield from _shared_memory(settings, cuda=device.type == "cuda")
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        if dtype is torch.bfloat16 and device.type == "cpu" and not multiplies_bfloat16():
            detail = "has no instructions for bfloat16, and computes runs in bfloat16 and float16 in float32"
            yield ok("device", f"{detail}; a base whose weights are in 16 bits is slow here: use one in float32")
            continue
        rate = 2 * MATMUL_ROWS**3 / _matmul_seconds(device, dtype) / 1e9
        yield ok("device", f"multiplies {name} matrices at {rate:.0f} GFLOP/s")


def _compute(settings: WorkerSettings) -> Finding:
    tf32, compiles = settings.compute.tf32, settings.compute.compile
    detail = f"TF32 is {'on' if tf32 else 'off'}, compilation is {'on' if compiles else 'off'} (compute)"
    if settings.compute.base_bits:
        detail += ", bases beside adapters are in 4 bits"
        try:
            library()
        except ConfigError as fault:
            return fail("compute", f"{detail}: {fault}", REMEDY)
    if compiles and not any(map(shutil.which, COMPILERS)):
        return warn(
            "compute", f"{detail}, and there is no C++ compiler", "Install g++, or set compute.compile = false."
        )
    return ok("compute", detail)


def _memory(max_model_bytes: int) -> Finding:
    detail = f"models of up to {size(max_model_bytes)} (max_model_bytes), {size(available_bytes())} of memory"
    if max_model_bytes > available_bytes():
        return warn("memory", detail, "Lower policy.max_model_bytes: a model larger than the memory ends the worker.")
    return ok("memory", detail)


def _shared_memory(settings: WorkerSettings, *, cuda: bool) -> Iterator[Finding]:
    """Yield a warning if loaders have little memory to share with the worker."""
    loaders = loaders_of(settings.sources, cuda=cuda)
    whole = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    if loaders and whole < MIN_SHARED_BYTES:
        detail = f"{size(whole)} at {SHARED_MEMORY} for the batches of {loaders.count} loaders"
        yield warn("loaders", detail, "Start the container with --shm-size=1g, or set loaders = 0.")


def _matmul_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of a product of two square matrices, after one to warm up.

    Raises RuntimeError for a wrong product.
    """
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
        yield ok(f"data {name}", "not loaded: the policy keeps it from runs")
        return
    began_at = time.monotonic()
    try:
        loaded = load_source(source, held_out_key(settings.sources, make=False), prepared_of(settings, name))
    except (DataError, SettingsError) as fault:
        yield fail(f"data {name}", str(fault), f"Fix datasets.{name} in the settings, or the files that it names.")
        return
    try:
        check_deltas(settings, inventory_of(settings.datasets, {name: loaded}))
    except SettingsError as fault:
        yield fail(f"data {name}", str(fault), "Change it: the worker does not start with it.")
    seconds = time.monotonic() - began_at
    contents = _contents(loaded, has_own_key=settings.sources.held_out_key_file.exists())
    yield ok(f"data {name}", f"{contents}, loaded in {seconds:.1f} s")
    warnings = loaded.report.warnings(held_out=loaded.held_out is not None)
    yield from (warn(f"data {name}", detail, remedy) for detail, remedy in warnings)
    least = settings.policy.min_evaluation_examples
    measured = loaded.examples if source.use == "evaluate" else loaded.held_out.examples if loaded.held_out else None
    if "evaluate" in settings.kinds and measured is not None and measured < least:
        detail = (
            f"versions are not measured on it: {measured} examples are fewer than min_evaluation_examples, {least}"
        )
        more = "Name more examples" if source.use == "evaluate" else f"Raise datasets.{name}.held_out"
        yield warn(f"data {name}", detail, f"{more}, or lower policy.min_evaluation_examples.")
    if PIXELS in loaded.inputs and "train" in settings.kinds and not augments_images():
        remedy = f"If it should take part in them: {install_line('augmentation')}"
        yield warn(f"data {name}", "this worker is offered no run that changes images in training", remedy)
    if "train" not in settings.kinds and source.use == "train" and loaded.held_out is None:
        remedy = f"Set datasets.{name}.use = 'evaluate' if nothing trains on it."
        yield warn(f"data {name}", "this worker only evaluates, and evaluates nothing on it", remedy)


def _policy(settings: WorkerSettings) -> Iterator[Finding]:
    policy = settings.policy
    default = Policy()
    is_open = all(getattr(policy, rule) == getattr(default, rule) for rule in WHAT_LEAVES)
    for sentence in policy_in_words(policy):
        if is_open and sentence.startswith(ANY_BLOCK):
            yield warn("policy", f"{sentence} No person approves it.", OPEN_REMEDY)
        elif NO_PROTECTION in sentence:
            yield warn("policy", sentence, f"Set epsilon to {WEAK_EPSILON:g} or less.")
        else:
            yield ok("policy", sentence)
    for name in policy.all_never_sent:
        if not re.search(r"[*?\[.]", name):
            remedy = f"Did you mean '*{name}*'? `tessera worker doctor --model FOLDER` tries it on a model."
            yield warn("policy", f"never_send: {name!r} is no pattern, but one block's whole name", remedy)
    for rule in ("orchestrators", "studies", "methods", "datasets", "models"):
        if getattr(policy, rule) == ():
            remedy = f"Name some, or remove policy.{rule} to allow any."
            yield warn("policy", f"{rule} is empty: every run is refused", remedy)
    # Imported late, because transformers takes seconds.
    models = importlib.import_module("transformers").CONFIG_MAPPING if policy.models else ()
    for rule, named, known, where in (
        ("methods", policy.methods, methods(), "is installed"),
        ("datasets", policy.datasets, settings.datasets, "is in the settings"),
        ("models", policy.models, models, "is known to transformers"),
    ):
        for name in sorted(set(named or ()) - set(known)):
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Correct or remove it in policy.{rule}."
            yield warn("policy", f"{rule}: nothing called {name!r} {where}", remedy)


def _contents(loaded: Dataset, *, has_own_key: bool) -> str:
    classes = loaded.classes
    known = f", {len(torch.bincount(classes.clamp(min=0)).nonzero())} classes" if classes is not None else ""
    about = "approximately " if loaded.held_out and not has_own_key else ""
    held_out = f", {loaded.held_out.examples} held out" if loaded.held_out else ""
    if opted_out := loaded.report.opted_out:
        held_out += f", {opted_out.examples} left out by opt_out"
    unknown = loaded.report.unknown_tokens
    words = "" if unknown is None else f", {unknown:.1%} of tokens unknown"
    words = ", converted with each run's own tokenizer" if loaded.texts else words
    return f"{about}{loaded.examples} examples{known}{held_out}{words}"


def _line(settings: WorkerSettings, connect: Callable[..., Client], *, probe: bool) -> Iterator[Finding]:
    """Yield the upload rate, and the time that it means for each run of this worker."""
    with connect(token_of(settings)) as client:
        rate = None
        if probe:
            began_at = time.monotonic()
            client.put_bytes(os.urandom(PROBE_BYTES))
            rate = PROBE_BYTES / (time.monotonic() - began_at)
            yield ok("line", f"uploads {size(int(rate))} a second, by {size(PROBE_BYTES)} of noise")
            yield from bodies(client)
            # Nothing is between a worker and a coordinator on one machine.
            if not is_loopback(urlsplit(settings.url).hostname or ""):
                yield long_poll(client, settings.poll_seconds)
        own = [task for task in client.tasks() if task.worker.partition("/")[2] == settings.name]
        if most := settings.policy.max_upload_bytes_per_second:
            rate = min(rate or most, most)
        for run, last in sorted(under_way(own).items()):
            about = client.run(run)
            model = client.model(about.spec.model)
            yield ok("runs", forecast(about.spec.name, last, model.nbytes, rate))
            yield from effects(settings.policy, model, f"of run {about.spec.name}")


def effects(policy: Policy, model: Model, which: str) -> Iterator[Finding]:
    """Yield the blocks of a model that each rule of the policy keeps back, and a fault for a rule without effect."""
    for rule, detail in ineffective(policy.never_send, policy.may_send, model.blocks):
        yield fail("policy", f"{rule}, for the model {which}: {detail}", f"Change policy.{rule}: the run is refused.")
    for sentence in kept_back(policy.all_never_sent, model.blocks):
        yield ok("policy", f"for the model {which}, {sentence}")


def under_way(tasks: Iterable[TaskView]) -> dict[str, TaskView | None]:
    """Return the ids of runs with an open task, each with the latest task whose update was accepted."""
    own = list(tasks)
    live = {task.run for task in own if task.state in ("offered", "leased")}
    accepted = {task.run: task for task in own if task.is_accepted and task.kind == "train"}
    return {run: accepted.get(run) for run in live}


def forecast(name: str, last: TaskView | None, model_bytes: int, rate: float | None) -> str:
    """Return the expected upload of a round, from the last update or the whole model. `rate` is in bytes a second."""
    sent = last.upload_bytes if last else model_bytes
    seconds = sent / rate if rate else None
    long = "" if seconds is None else f", about {seconds:.0f} s" if seconds >= 1 else ", less than a second"
    if last is None:
        return f"run {name} has a task here, and sends at most its whole model: {size(sent)} a round{long}"
    return f"run {name} sends {size(sent)} a round{long}; the last fetched {size(last.download_bytes)}"


EXPIRES_SOON = timedelta(days=21)
SKEW_SECONDS = 30.0


def way_to(url: str, verify: ssl.SSLContext) -> Iterator[Finding]:
    """Yield proxy, DNS, connection, TLS, answer, protocol and clock of the coordinator, up to the first failure."""
    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    try:
        proxy = proxy_of(url)
    except Invalid as fault:
        yield fail("proxy", fault.detail, fault.advice)
        return
    if proxy:
        yield ok("proxy", f"requests go by {without_password(proxy)}")
    else:
        yield ok("proxy", without_proxy(url))
        found = list(_direct(host, port))
        yield from found
        if found[-1].verdict == "fail":
            return
    if tls and not proxy:
        found = list(_tls(url, host, port, verify))
        yield from found
        if found[-1].verdict == "fail":
            return
    elif not tls and is_loopback(host):
        yield ok("tls", "none, and none is needed for a coordinator on this machine")
    elif not tls:
        yield fail(
            "tls", "the URL is http: anyone on the network path can read the token and every update", "Use https."
        )
    yield from _answer(url, verify, proxy)


def _direct(host: str, port: int) -> Iterator[Finding]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as fault:
        yield fail(
            "dns",
            f"{host} has no address: {fault.strerror}",
            "Check the host name in `url`, and this machine's resolver. Where a proxy alone reaches other networks, "
            "set HTTPS_PROXY=http://PROXY:PORT in the worker's environment, and take the host out of NO_PROXY.",
        )
        return
    addresses = sorted({str(address[4][0]) for address in found})
    yield ok("dns", f"{host} is {', '.join(addresses[:4])}")
    began_at = time.monotonic()
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as fault:
        reason = fault.strerror or str(fault)
        yield fail("tcp", f"no connection to {host}:{port}: {reason}", "Check the port, the firewall and the proxy.")
        return
    yield ok("tcp", f"port {port} takes connections, in {1000 * (time.monotonic() - began_at):.0f} ms")


def _tls(url: str, host: str, port: int, verify: ssl.SSLContext) -> Iterator[Finding]:
    try:
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as plain,
            verify.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            certificate, version = wrapped.getpeercert() or {}, wrapped.version()
    except ssl.SSLCertVerificationError as fault:
        yield fail(
            "tls",
            f"the certificate is not trusted: {fault.verify_message}{signer(url)}",
            CERTIFICATE_REMEDIES.get(fault.verify_code, CA_REMEDY),
        )
        return
    except (ssl.SSLError, OSError) as fault:
        yield fail("tls", f"the TLS handshake failed: {reason_of(fault)}", "Check that this port serves https.")
        return
    yield expiry(certificate, version or "TLS", datetime.now(UTC))


def expiry(certificate: Mapping[str, object], version: str, now: datetime) -> Finding:
    """Return a finding on the time until a trusted certificate expires."""
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
    detail = f"{version}, a trusted certificate until {ends:%Y-%m-%d}"
    if ends - now < EXPIRES_SOON:
        return warn("tls", detail, "Ask the coordinator's operator to renew it.")
    return ok("tls", detail)


def _answer(url: str, verify: ssl.SSLContext, proxy: str | None) -> Iterator[Finding]:
    try:
        transport = HttpTransport(url, None, patience_seconds=0.0, verify=verify, answer_seconds=CONNECT_SECONDS)
        with closing(transport):
            answer = transport.once("GET", "/version")
        about = About.model_validate_json(answer.content)
    except (Problem, ValueError) as fault:
        yield unanswered(url, verify, proxy, fault)
        return
    yield ok("coordinator", f"version {about.version}")
    spoken = f"it speaks protocols {about.protocol_min} to {about.protocol_max}, this worker {PROTOCOL}"
    if about.protocol_min <= PROTOCOL <= about.protocol_max:
        yield ok("protocol", spoken)
    else:
        yield fail("protocol", spoken, "Install a worker of the coordinator's version.")
    yield clock(answer.headers.get("Date"), datetime.now(UTC))


def clock(date: str | None, now: datetime) -> Finding:
    """Return a finding on the difference between this machine's clock and a Date header, in whole seconds."""
    if date is None:
        return warn("clock", "the coordinator sends no Date", "Check this machine's clock in another way.")
    skew = (now - parsedate_to_datetime(date)).total_seconds()
    # The header has no fractions of a second, and took a while to arrive.
    detail = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the coordinator's"
    detail = "within two seconds of the coordinator's" if abs(skew) <= 2 else detail
    if abs(skew) <= SKEW_SECONDS:
        return ok("clock", detail)
    return warn("clock", detail, "Synchronise it by NTP: opening hours, approvals and certificates depend on it.")

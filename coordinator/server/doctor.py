"""Checks of the needs of a coordinator: database, blobs, disk, limits, and safe settings."""

import importlib
import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import make_url, select
from sqlalchemy.exc import SQLAlchemyError

from tessera.coordinator.alerts.attention import Alert
from tessera.coordinator.alerts.audit_sink import AuditShipper
from tessera.coordinator.alerts.certificate import examine
from tessera.coordinator.alerts.notices import Notifier
from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import (
    CHECK_SECONDS,
    SCHEMA_FAULTS,
    Database,
    DatabaseDamaged,
    DatabaseInUse,
    reason_of,
)
from tessera.coordinator.db.tables import AuditRow
from tessera.coordinator.dossier.archive import require_key
from tessera.coordinator.limits.memory import WATERMARK, Memory
from tessera.coordinator.server.http_limits import (
    OTHER_FILES,
    BadCertificate,
    InsecureBindError,
    PortInUseError,
    require_free,
    require_private,
)
from tessera.coordinator.services import Services
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared import environment
from tessera.shared.client.notice_channels import Undelivered
from tessera.shared.diagnostics import Check, Finding, fail, ok, warn
from tessera.shared.problems import Conflict
from tessera.shared.urls import is_loopback, without_password

PROBE_BYTES = 1 << 20

SKEW_SECONDS = 5.0


class _Undo(Exception):
    """Rolls back a test transaction."""


def checks(services: Services, *, notify: bool = False) -> Iterator[tuple[str, Check]]:
    """Yield the checks in order. They leave nothing behind, except for a notice if `notify`."""
    settings = services.settings
    yield "database", lambda: _database(services)
    yield "clock", lambda: _clock(services)
    yield "blobs", lambda: _blobs(services)
    yield "disk", lambda: _disk(services)
    yield "address", lambda: _address(services)
    yield "files", lambda: _files(settings)
    yield "memory", lambda: _memory(services.memory)
    if settings.oidc_issuer:
        yield "provider", lambda: _provider(settings)
    for notifier in services.notifiers:
        yield notifier.channel.name, partial(_notices, notifier, notify=notify)
    if services.shipper:
        yield "audit sink", partial(_sink, services.shipper)
    if settings.signing_key.exists():
        yield "signing key", lambda: _signing(settings.signing_key)
    yield "settings", lambda: (*_unknown(), *insecure(settings))


def _database(services: Services) -> Iterator[Finding]:
    database = services.database
    try:
        with database.engine.connect() as connection:
            version = ".".join(map(str, connection.dialect.server_version_info or ()))
    except SQLAlchemyError as fault:
        yield fail(
            "database", f"{database.shown} cannot be used: {reason_of(fault)}", "Correct TESSERA_DATABASE_URL."
        )
        return
    yield ok("database", f"{database.url.get_backend_name()} {version} at {database.shown}")
    try:
        yield from _contents(database)
    except DatabaseDamaged as damage:
        yield fail("file", reason_of(damage), "Stop the coordinator and restore a backup.")


def _contents(database: Database) -> Iterator[Finding]:
    """Yield the findings in the file and its tables. Raise DatabaseDamaged."""
    began_at = time.monotonic()
    if database.check():
        yield ok("file", f"intact, read in {time.monotonic() - began_at:.1f} s")
    else:
        remedy = "Check a copy on a faster disk: `sqlite3 FILE 'PRAGMA quick_check'`."
        yield warn("file", f"not read to its end in {CHECK_SECONDS:.0f} s; nothing wrong so far", remedy)
    schema = database.schema()
    if schema == "current":
        yield ok("schema", "up to date")
    elif schema == "ahead":
        yield warn("schema", *SCHEMA_FAULTS[schema])
    else:
        yield fail("schema", *SCHEMA_FAULTS[schema])
        return
    began_at = time.monotonic()
    with suppress(_Undo), database.transaction() as session:
        audit.record(session, database.now(), "doctor", "doctor.try", "nothing")
        session.scalars(select(AuditRow.seq).where(AuditRow.actor == "doctor")).one()
        raise _Undo
    yield ok("write", f"written and rolled back in {1000 * (time.monotonic() - began_at):.0f} ms")


def _clock(services: Services) -> Iterator[Finding]:
    skew = time.time() - services.database.now()
    detail = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the database's, which decides every deadline"
    yield ok("clock", detail) if abs(skew) <= SKEW_SECONDS else warn("clock", detail, "Set both by NTP.")


def _blobs(services: Services) -> Iterator[Finding]:
    blobs = services.blobs
    began_at = time.monotonic()
    stored = blobs.put([os.urandom(PROBE_BYTES)])
    blobs.rehash(stored)
    seconds = time.monotonic() - began_at
    blobs.discard(stored.digest, time.time() + SKEW_SECONDS)
    where = without_password(services.settings.blob_url)
    yield ok("blobs", f"written, read, hashed and removed 1 MiB at {where} in {1000 * seconds:.0f} ms")
    # Checked when the store was opened.
    yield ok("staging", f"{services.settings.staging_dir} is on the file system of the blobs")


def _disk(services: Services) -> Iterator[Finding]:
    if shortage := services.disk.shortage():
        yield fail("disk", shortage, "Free disk space, or add a disk.")
    else:
        reserve = services.settings.disk_reserve_bytes
        yield ok("disk", f"free space exceeds the reserve of {reserve} bytes, and there is room for files")


def _address(services: Services) -> Iterator[Finding]:
    settings = services.settings
    listens = f"{settings.host}:{settings.port}"
    try:
        require_free(settings)
        yield ok("address", f"{listens} is free")
    except PortInUseError as in_use:
        try:
            services.database.hold("serve")
        except DatabaseInUse:
            yield ok("address", f"{listens} is in use, perhaps by the running coordinator of this database")
        else:
            yield warn("address", str(in_use), "If that is not this coordinator, `serve` will not start.")
    try:
        require_private(settings)
    except (InsecureBindError, BadCertificate) as refusal:
        yield fail("tls", str(refusal), "Until then `serve` refuses to start.")
        return
    if settings.tls_cert is not None:
        yield from examine(settings, datetime.now(UTC))
    elif is_loopback(settings.host):
        yield ok("tls", "only this machine can connect; other machines need a TLS proxy here")
    else:
        yield warn("tls", f"{listens} is behind a proxy, by its setting", "Allow only the proxy to connect to it.")


def _provider(settings: CoordinatorSettings) -> Iterator[Finding]:
    # Its libraries are slow to import.
    oidc = importlib.import_module("tessera.coordinator.auth.oidc")
    try:
        keys = oidc.OIDCVerifier(settings).fetched()
    except oidc.ProviderFault as fault:
        yield fail("provider", str(fault), "Its tokens are not accepted until it responds.")
    else:
        yield ok("provider", f"{settings.oidc_issuer} has {len(keys)} signing keys")


def _notices(notifier: Notifier, *, notify: bool) -> Iterator[Finding]:
    name, test = notifier.channel.name, Alert("test", "This is a test: notices arrive", "", link="/")
    try:
        notifier.channel.send(notifier.notice(test) if notify else None, notifier.database.now())
        yield ok(name, "a test notice was taken" if notify else "can be reached; send a test notice with --notify")
    except Undelivered as fault:
        yield fail(name, str(fault), "Until then notices wait, and are given up after three hours.")


def _sink(shipper: AuditShipper) -> Iterator[Finding]:
    try:
        shipper.sink.send(())
        yield ok("audit sink", f"{shipper.url} can be reached")
    except Undelivered as fault:
        yield fail("audit sink", str(fault), "Until then entries wait; none is lost.")


def _signing(path: Path) -> Iterator[Finding]:
    try:
        yield ok("signing key", f"signs dossiers, with the fingerprint {require_key(path).fingerprint}")
    except Conflict as refusal:
        yield fail("signing key", refusal.detail, refusal.advice)


def _files(settings: CoordinatorSettings) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_connections + OTHER_FILES
    if hard in (resource.RLIM_INFINITY, -1) or hard >= needed:
        yield ok("files", f"{needed} open files are permitted")
    else:
        remedy = "Raise it (LimitNOFILE, ulimit -n), or lower TESSERA_MAX_CONNECTIONS."
        yield warn("files", f"{hard} open files are permitted, but {needed} may be needed", remedy)


def _memory(memory: Memory) -> Iterator[Finding]:
    share = memory.share()
    detail = f"{100 * share:.0f} % of the limit is in use" if share else "no limit is set"
    remedy = "Give it more memory, or set TESSERA_MEMORY_LIMIT_BYTES."
    yield ok("memory", detail) if share < WATERMARK else warn("memory", detail, remedy)


def _folders(settings: CoordinatorSettings) -> set[Path]:
    """Return the folders of this machine that hold sites' data."""
    url = make_url(settings.database_url)
    of_database = [Path(url.database).parent] if url.get_backend_name() == "sqlite" and url.database else []
    of_blobs = [] if "://" in settings.blob_url else [Path(settings.blob_url)]
    return {*of_database, *of_blobs, settings.staging_dir}


def _unknown() -> Iterator[Finding]:
    """Warn of variables that look like settings. One that misspells a setting was refused earlier."""
    for variable, _ in environment.unknown(os.environ, CoordinatorSettings.model_fields):
        remedy = "List all with `tessera coordinator config show`."
        yield warn("settings", f"{variable} is not a setting and has no effect", remedy)


def insecure(settings: CoordinatorSettings) -> Iterator[Finding]:
    """Yield unsafe settings, or that there are none."""
    findings = tuple(_insecure(settings))
    yield from findings or (ok("settings", "none is known to be unsafe"),)


def _insecure(settings: CoordinatorSettings) -> Iterator[Finding]:
    for path, secret in (
        (settings.admin_token_file, "the administrator's token"),
        (settings.signing_key, "the key that signs dossiers"),
    ):
        if path and path.exists() and path.stat().st_mode & 0o077:
            yield fail("settings", f"other users may read {secret} in {path}", f"chmod 600 {path}")
    for folder in _folders(settings):
        if folder.is_dir() and folder.stat().st_mode & 0o077:
            detail = f"other users of this machine may read {folder}, which holds updates and hashes of tokens"
            yield warn("settings", detail, f"chmod 700 {folder}")
    url = urlsplit(settings.database_url)
    remote = url.scheme.startswith("postgresql") and not is_loopback(url.hostname or "localhost")
    if remote and "sslmode=verify-full" not in url.query:
        remedy = "Add ?sslmode=verify-full to TESSERA_DATABASE_URL."
        yield warn("settings", "the database server is on another machine and is not verified", remedy)
    # Blobs in a folder have a limit without it: half of the disk (`services`).
    if settings.site_bytes_per_day is None and "://" in settings.blob_url:
        yield warn("settings", "a site may announce any number of bytes", "Set TESSERA_SITE_BYTES_PER_DAY.")

"""Whether a coordinator could do its work here: database, blobs, disk, limits, and what of its settings is unsafe."""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import make_url, select

from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import DatabaseInUse
from tessera.coordinator.db.tables import AuditRow
from tessera.coordinator.limits.memory import WATERMARK, Memory
from tessera.coordinator.server.http_limits import (
    BadCertificate,
    InsecureBindError,
    PortInUseError,
    require_free,
    require_private,
)
from tessera.coordinator.services import Services
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.diagnostics import Check, Finding, fail, ok, warn
from tessera.shared.urls import is_loopback, without_password

SPARE_FILES = 1_024
"""What `serve` needs beside its connections."""

PROBE_BYTES = 1 << 20

PREFIX = "TESSERA_"
OF_COMMANDS = ("URL", "TOKEN", "TOKEN_FILE", "CA_BUNDLE", "CLIENT_CERT", "CLIENT_KEY", "PLAIN_HTTP", "METHODS")
"""Read by all commands, or by those of whoever asks a coordinator, and often set beside its settings."""
OF_OTHERS = ("WORKER_", "TEST_")
SKEW_SECONDS = 5.0


class _Undo(Exception):
    """Ends a transaction that was only tried."""


def checks(services: Services) -> Iterator[tuple[str, Check]]:
    """Yield what is looked at, in order. Nothing that is written stays."""
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
    yield "settings", lambda: (*unknown(os.environ), *insecure(settings))


def _database(services: Services) -> Iterator[Finding]:
    database = services.database
    with database.engine.connect() as connection:
        version = ".".join(map(str, connection.dialect.server_version_info or ()))
    yield ok("database", f"{database.url.get_backend_name()} {version} at {database.shown}")
    if database.at_head():
        yield ok("schema", "at head")
    elif database.at_head_or_later():
        yield warn("schema", "later than this version of the code knows", "Install the newer version here too.")
    else:
        yield fail("schema", "behind this version of the code", "Run `tessera coordinator migrate`.")
        return
    began_at = time.monotonic()
    try:
        _write_in_vain(services)
    except _Undo:
        yield ok("write", f"written and taken back in {1000 * (time.monotonic() - began_at):.0f} ms")


def _write_in_vain(services: Services) -> None:
    """Write to the database and take it back. Raises _Undo if all went well."""
    with services.database.transaction() as session:
        audit.record(session, services.database.now(), "doctor", "doctor.try", "nothing")
        session.scalars(select(AuditRow.seq).where(AuditRow.actor == "doctor")).one()
        raise _Undo


def _clock(services: Services) -> Iterator[Finding]:
    skew = time.time() - services.database.now()
    told = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the database's, which judges every deadline"
    yield ok("clock", told) if abs(skew) <= SKEW_SECONDS else warn("clock", told, "Set both by NTP.")


def _blobs(services: Services) -> Iterator[Finding]:
    blobs = services.blobs
    began_at = time.monotonic()
    stored = blobs.put([os.urandom(PROBE_BYTES)])
    # It reads what it hashes.
    blobs.rehash(stored)
    seconds = time.monotonic() - began_at
    blobs.discard(stored.digest, time.time() + SKEW_SECONDS)
    where = without_password(services.settings.blob_url)
    yield ok("blobs", f"written, read, hashed and removed 1 MiB at {where} in {1000 * seconds:.0f} ms")
    # Opening the store refuses a staging folder elsewhere.
    yield ok("staging", f"{services.settings.staging_dir} is where finishing an upload is a rename")


def _disk(services: Services) -> Iterator[Finding]:
    reserve = services.settings.disk_reserve_bytes
    if services.disk.has():
        yield ok("disk", f"more is free than the reserve of {reserve} bytes")
    else:
        yield fail("disk", f"less is free than the reserve of {reserve} bytes", "Free some, or add a disk.")


def _address(services: Services) -> Iterator[Finding]:
    settings = services.settings
    listens = f"{settings.host}:{settings.port}"
    try:
        require_free(settings)
        yield ok("address", f"{listens}, which is free")
    except PortInUseError as taken:
        try:
            services.database.hold("serve")
        except DatabaseInUse:
            yield ok("address", f"{listens}, where the coordinator of this database may be the one that listens")
        else:
            yield warn("address", str(taken), "If that is not this coordinator, `serve` will not start.")
    try:
        require_private(settings)
    except (InsecureBindError, BadCertificate) as refusal:
        yield fail("tls", str(refusal), "Until then `serve` refuses to start.")
        return
    if settings.tls_cert is not None:
        yield ok("tls", f"served, with {settings.tls_cert}")
    elif is_loopback(settings.host):
        yield ok("tls", "this machine alone reaches it; others through a proxy here, which has to speak TLS")
    else:
        yield warn("tls", f"{listens} is said to be behind a proxy", "See to it that nobody else reaches it.")


def _provider(settings: CoordinatorSettings) -> Iterator[Finding]:
    # Loaded for this alone: its libraries take long.
    oidc = importlib.import_module("tessera.coordinator.auth.oidc")
    try:
        keys = oidc.OIDCVerifier(settings).fetched()
    except oidc.ProviderFault as fault:
        yield fail("provider", str(fault), "Nobody is admitted with its tokens until it answers.")
    else:
        yield ok("provider", f"{settings.oidc_issuer} has {len(keys)} keys that sign")


def _files(settings: CoordinatorSettings) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_connections + SPARE_FILES
    if hard in (resource.RLIM_INFINITY, -1) or hard >= needed:
        yield ok("files", f"{needed} open files are permitted")
    else:
        remedy = "Raise it (LimitNOFILE, ulimit -n), or lower TESSERA_MAX_CONNECTIONS."
        yield warn("files", f"{hard} open files are permitted, {needed} may be needed", remedy)


def _memory(memory: Memory) -> Iterator[Finding]:
    share = memory.share()
    told = f"{100 * share:.0f} % of the limit is in use" if share else "no limit is set"
    remedy = "Give it more, or say in TESSERA_MEMORY_LIMIT_BYTES what there is."
    yield ok("memory", told) if share < WATERMARK else warn("memory", told, remedy)


def _folders(settings: CoordinatorSettings) -> set[Path]:
    """Return where what belongs to sites lies on this machine."""
    url = make_url(settings.database_url)
    of_database = [Path(url.database).parent] if url.get_backend_name() == "sqlite" and url.database else []
    of_blobs = [] if "://" in settings.blob_url else [Path(settings.blob_url)]
    return {*of_database, *of_blobs, settings.staging_dir}


def unknown(environment: Iterable[str]) -> Iterator[Finding]:
    """Variables that look like settings and are none: a misspelt one would leave its default in force."""
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        known = name.lower() in CoordinatorSettings.model_fields or name in OF_COMMANDS or name.startswith(OF_OTHERS)
        if name == variable or known:
            continue
        (near, *_) = (*get_close_matches(name.lower(), CoordinatorSettings.model_fields, n=1), "")
        remedy = (
            f"{PREFIX}{near.upper()} is one."
            if near
            else "See `tessera coordinator config show` for those there are."
        )
        yield warn("settings", f"{variable} is no setting and does nothing here", remedy)


def insecure(settings: CoordinatorSettings) -> Iterator[Finding]:
    """Yield what of the settings lets in more than it should."""
    found = 0
    path = settings.admin_token_file
    if path and path.exists() and path.stat().st_mode & 0o077:
        found += 1
        yield fail("settings", f"{path} holds an administrator's token and others may read it", f"chmod 600 {path}")
    for folder in _folders(settings):
        if folder.is_dir() and folder.stat().st_mode & 0o077:
            found += 1
            told = f"other users of this machine may look into {folder}, where the updates and hashes of tokens are"
            yield warn("settings", told, f"chmod 700 {folder}")
    url = urlsplit(settings.database_url)
    elsewhere = url.scheme.startswith("postgresql") and not is_loopback(url.hostname or "localhost")
    if elsewhere and "sslmode=verify-full" not in url.query:
        found += 1
        remedy = "Add ?sslmode=verify-full to TESSERA_DATABASE_URL."
        yield warn("settings", "the database is elsewhere, and its server is not verified", remedy)
    if settings.site_bytes_per_day is None:
        found += 1
        yield warn("settings", "a site may announce any number of bytes", "Set TESSERA_SITE_BYTES_PER_DAY.")
    if not found:
        yield ok("settings", "none that is known to be unsafe")

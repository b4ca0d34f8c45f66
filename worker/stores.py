"""The stores that a worker's settings name: its key, audit, ledger, run history, inbox and airlock; mappings and
opt-out lists.

Needs no torch, so that the commands that only read them start at once.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from tessera.shared.diagnostics import reason_of
from tessera.shared.near_names import unread
from tessera.worker.governance.airlock import Airlock
from tessera.worker.governance.approvals import Inbox
from tessera.worker.governance.described_data import DescribedData
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.model.layouts import MappingError, MappingFile, read_mapping
from tessera.worker.settings import ENVIRONMENT_PREFIX, DataSources, SettingsError, WorkerSettings
from tessera.worker.state.atomic_files import KEY_BYTES, secret_key
from tessera.worker.state.audit import Audit
from tessera.worker.state.database import StateDatabase, StateError
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.state.site_keys import KEYS_FOLDER, AgreementLog, Keyring, SumParty

STATE_ID = "state-id"
"""The note of the random id of the state folder, by which the coordinator recognises a restarted worker."""


def own_folders(settings: WorkerSettings) -> list[Path]:
    """Return the folders to which the worker writes, the state folder first. Each has a database."""
    others = (settings.runs_dir, settings.inbox_dir, settings.ledger_dir, settings.audit_dir)
    return list(dict.fromkeys([settings.state_dir, *filter(None, others)]))


def state_id_of(settings: WorkerSettings) -> str:
    """Return the id of the state folder. A missing one is created. Raises SettingsError."""
    database = StateDatabase.of(settings.state_dir)
    try:
        with database.writing():
            state_id = database.note(STATE_ID) or token_hex(KEY_BYTES)
            database.set_note(STATE_ID, state_id)
    except (StateError, OSError) as fault:
        raise SettingsError(f"state_dir: {fault}") from fault
    return str(state_id)


def ledger_of(settings: WorkerSettings) -> Ledger:
    """Return the ledger of the privacy that runs have spent. Raises SettingsError."""
    shared = {name: source.ledger for name, source in settings.datasets.items() if source.ledger}
    return Ledger(settings.ledger_dir or settings.state_dir, audit_key_of(settings), shared)


def run_history_of(settings: WorkerSettings) -> RunHistory:
    """Return the history of the runs that this worker has seen."""
    return RunHistory(settings.runs_dir or settings.state_dir, settings.name)


def described_data_of(settings: WorkerSettings) -> DescribedData:
    return DescribedData(settings.runs_dir or settings.state_dir)


def inbox_of(settings: WorkerSettings) -> Inbox:
    """Return the runs that wait for a person's approval."""
    return Inbox(settings.inbox_dir or settings.state_dir, every_run=settings.policy.approve_runs)


def airlock_of(settings: WorkerSettings) -> Airlock:
    """Return the updates that wait for a person's release."""
    return Airlock(settings.state_dir)


def audit_of(settings: WorkerSettings) -> Audit:
    """Return the audit of this worker's actions. Raises SettingsError."""
    folder = settings.audit_dir or settings.state_dir
    shared = not folder.resolve().is_relative_to(settings.state_dir.resolve())
    return Audit(folder, settings.name, audit_key_of(settings), shared=shared)


def audit_key_of(settings: WorkerSettings) -> bytes:
    """Return the key that protects audit and ledgers. A missing key file is created. Raises SettingsError."""
    if settings.audit_key is not None:
        with suppress(ValueError):
            if len(key := bytes.fromhex(settings.audit_key.get_secret_value())) == KEY_BYTES:
                return key
        raise SettingsError(
            f"audit_key: is not {2 * KEY_BYTES} hexadecimal digits; `openssl rand -hex 32` prints a key"
        )
    state = settings.state_dir.resolve()
    if not state.name:
        raise SettingsError(f"state_dir: {state} has no parent folder for the key; name a folder of the worker's own")
    shared = {"ledger_dir": settings.ledger_dir, "audit_dir": settings.audit_dir}
    elsewhere = [name for name, folder in shared.items() if folder and not folder.resolve().is_relative_to(state)]
    if settings.audit_key_file is None and elsewhere:
        raise SettingsError(
            f"{elsewhere[0]}: is outside state_dir, so that other workers may share it, and all of them need the "
            f"same key: name its file in audit_key_file, such as {state}.key, or set {ENVIRONMENT_PREFIX}AUDIT_KEY"
        )
    path = settings.audit_key_file or state.with_name(f"{state.name}.key")
    if any(folder and path.resolve().is_relative_to(folder.resolve()) for folder in (state, *shared.values())):
        raise SettingsError(
            f"audit_key_file: {path} is in a folder that the key protects; put it outside state_dir, ledger_dir and "
            "audit_dir"
        )
    try:
        return secret_key(path)
    except (OSError, ValueError) as fault:
        raise SettingsError(
            f"audit_key_file: {path} can be neither read nor created: {reason_of(fault)}. Name a file on a lasting "
            f"disk, or set {ENVIRONMENT_PREFIX}AUDIT_KEY to the output of `openssl rand -hex 32`"
        ) from fault


def sum_party_of(settings: WorkerSettings) -> SumParty | None:
    """Return this site in secure sums, with its keys; None if it takes part in none. Raises SettingsError."""
    given = settings.secure_sums
    if given is None:
        return None
    keys = Keyring(settings.state_dir / KEYS_FOLDER)
    try:
        keys.public(given.site)
    except (OSError, ValueError) as fault:
        raise SettingsError(f"secure_sums: the keys in {keys.folder} cannot be used: {fault}") from fault
    party = SumParty(
        given.site,
        keys,
        given.roster,
        given.quorum,
        given.helper,
        None,
        weight=given.weight,
        embeddings=given.embeddings,
    )
    return replace(party, agreements=AgreementLog(settings.state_dir, audit_key_of(settings), party.fingerprint))


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


def opt_outs_of(sources: DataSources) -> dict[str, bytes]:
    """Return a digest of the opt-out list of each data set that has one. Raises SettingsError."""
    lists = dict[str, bytes]()
    for name, path in ((name, source.opt_out) for name, source in sources.datasets.items() if source.opt_out):
        try:
            lists[name] = hashlib.sha256(path.read_bytes()).digest()
        except OSError as fault:
            reason = unread(path, fault)
            raise SettingsError(
                f"datasets.{name}.opt_out: {path} cannot be read, so that no task starts: {reason}"
            ) from fault
    return lists

"""The files that a worker's settings name: its key, audit, ledger, run history, inbox and airlock.

Needs no torch, so that the commands that only read them start at once.
"""

from contextlib import suppress

from tessera.worker.governance.airlock import AIRLOCK_FOLDER, Airlock
from tessera.worker.governance.approvals import INBOX_FOLDER, Inbox
from tessera.worker.governance.run_history import RUNS_FOLDER, RunHistory
from tessera.worker.settings import ENVIRONMENT_PREFIX, SettingsError, WorkerSettings
from tessera.worker.state.atomic_files import KEY_BYTES, secret_key
from tessera.worker.state.audit import AUDIT_FOLDER, Audit
from tessera.worker.state.privacy_ledger import LEDGER_FOLDER, Ledger


def ledger_of(settings: WorkerSettings) -> Ledger:
    """Return the ledger of the privacy that runs spend of this worker's data sets. Raises SettingsError."""
    shared = {name: source.ledger for name, source in settings.datasets.items() if source.ledger}
    return Ledger(settings.ledger_dir or settings.state_dir / LEDGER_FOLDER, audit_key_of(settings), shared)


def run_history_of(settings: WorkerSettings) -> RunHistory:
    """Return this worker's history of runs."""
    return RunHistory(settings.runs_dir or settings.state_dir / RUNS_FOLDER, settings.name)


def inbox_of(settings: WorkerSettings) -> Inbox:
    """Return the inbox, in which runs wait for a person's approval."""
    return Inbox(settings.inbox_dir or settings.state_dir / INBOX_FOLDER)


def airlock_of(settings: WorkerSettings) -> Airlock:
    """Return the airlock, in which updates wait for a person's release."""
    return Airlock(settings.state_dir / AIRLOCK_FOLDER)


def audit_of(settings: WorkerSettings) -> Audit:
    """Return this worker's audit log. Raises SettingsError."""
    return Audit(settings.audit_dir or settings.state_dir / AUDIT_FOLDER, settings.name, audit_key_of(settings))


def audit_key_of(settings: WorkerSettings) -> bytes:
    """Return the key that protects audit and ledgers; create its file if it does not exist. Raises SettingsError."""
    if settings.audit_key is not None:
        with suppress(ValueError):
            if len(key := bytes.fromhex(settings.audit_key.get_secret_value())) == KEY_BYTES:
                return key
        raise SettingsError(
            f"audit_key: is not {2 * KEY_BYTES} hexadecimal digits; `openssl rand -hex 32` makes them"
        )
    state = settings.state_dir.resolve()
    if not state.name:
        raise SettingsError(
            f"state_dir: beside {state} there is no place for a key; name a folder of the worker's own"
        )
    shared = {"ledger_dir": settings.ledger_dir, "audit_dir": settings.audit_dir}
    elsewhere = [name for name, folder in shared.items() if folder and not folder.resolve().is_relative_to(state)]
    if settings.audit_key_file is None and elsewhere:
        raise SettingsError(
            f"{elsewhere[0]}: lies outside of state_dir, where other workers may share it, and all of them need the "
            f"same key: name its file in audit_key_file, such as {state}.key, or set {ENVIRONMENT_PREFIX}AUDIT_KEY"
        )
    path = settings.audit_key_file or state.with_name(f"{state.name}.key")
    if any(folder and path.resolve().is_relative_to(folder.resolve()) for folder in (state, *shared.values())):
        raise SettingsError(
            f"audit_key_file: {path} lies in a folder that it protects; put it outside of state_dir, ledger_dir and "
            "audit_dir"
        )
    try:
        return secret_key(path)
    except (OSError, ValueError) as fault:
        raise SettingsError(
            f"audit_key_file: {path} can be neither read nor made: {fault}. Name a file elsewhere that lasts, or set "
            f"{ENVIRONMENT_PREFIX}AUDIT_KEY to what `openssl rand -hex 32` prints"
        ) from fault

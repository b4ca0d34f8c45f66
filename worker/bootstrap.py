"""The composition root of a worker: its parts, built from its settings."""

import math
import sys
from dataclasses import replace

import structlog

from tessera.shared.client.client import Client
from tessera.worker.data.dataset_info import Inventory
from tessera.worker.deltas import check_deltas
from tessera.worker.devices import count_gpus, device_names
from tessera.worker.errors import ExecutorEnded
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.launcher import RankSettings
from tessera.worker.executor.regional import RegionalExecutor
from tessera.worker.executor.script import ScriptExecutor
from tessera.worker.executor.slurm.executor import SlurmExecutor, SlurmScriptExecutor
from tessera.worker.settings import SettingsError, WorkerSettings, credential_of, tls_of
from tessera.worker.state.atomic_files import sweep
from tessera.worker.state.audit import signed_sets
from tessera.worker.state.base_cache import BaseCache
from tessera.worker.state.base_sources import BaseSources
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.checkpoints import Checkpoints
from tessera.worker.state.database import StateDatabase, StateError
from tessera.worker.state.hash_chain import derived
from tessera.worker.state.vault import Vault
from tessera.worker.stores import (
    airlock_of,
    audit_key_of,
    audit_of,
    described_data_of,
    inbox_of,
    ledger_of,
    mappings_of,
    own_folders,
    run_history_of,
    sum_party_of,
)
from tessera.worker.task.environment import TRAINING_SEEDS
from tessera.worker.task.runner import TaskRunner


def executor_of(settings: WorkerSettings) -> ProcessExecutor:
    """Return the executor of a worker with these settings, started. Raises SettingsError for missing devices."""
    if sys.platform != "linux":
        raise SettingsError("a worker needs Linux, which ends the processes that execute tasks with it")
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Before others write there.
    sweep(settings.state_dir)
    # The first rank looks whether a single device is there.
    devices = (settings.device,) if settings.devices == 1 else device_names(settings, count_gpus)
    script, slurm = settings.own_script, settings.slurm
    ranks = RankSettings(
        devices=devices,
        threads=settings.threads,
        sandboxed=True,
        console=settings.logs_to_console,
        base_bits=settings.compute.base_bits,
        sources=settings.sources,
    )
    given = (ranks, settings.state_dir, settings.compute, settings.micro_batch)
    if settings.region:
        verify = tls_of(settings)
        parent = Client(settings.url, credential_of(settings), verify=verify, patience_seconds=0)
        executor: ProcessExecutor = RegionalExecutor(settings.region, settings.name, parent, settings.url, *given)
    elif slurm:
        executor = SlurmScriptExecutor(script, *given, slurm) if script else SlurmExecutor(*given, slurm)
    else:
        executor = ScriptExecutor(script, *given) if script else ProcessExecutor(*given)
    executor.start()
    return executor


def runner_of(client: Client, settings: WorkerSettings, executor: ProcessExecutor) -> tuple[TaskRunner, Inventory]:
    """Return the runner of a worker with these settings, and the facts about its data sets and devices.

    Raises SettingsError for unusable files, such as a modified audit or ledger, and ExecutorEnded.
    """
    audit, ledger, party = audit_of(settings), ledger_of(settings), sum_party_of(settings)
    try:
        for folder in own_folders(settings):
            StateDatabase.of(folder).check()
        entries = audit.read()
        ledger.expect(audit.ledger_heads(entries))
        if party and party.agreements:
            party.agreements.expect(signed_sets(entries, party.fingerprint))
        for name in settings.datasets:
            ledger.read(name)
        for others, name in ledger.others(settings.datasets):
            others.read(name)
    except StateError as fault:
        raise SettingsError(str(fault)) from fault
    except OSError as fault:
        # Nothing can be recorded there, so the worker does nothing.
        structlog.get_logger("worker").error("audit-not-read", detail=str(fault))
    vault_folder = settings.state_dir / "vault"
    airlock_of(settings).sweep()
    inventory = executor.inventory()
    check_deltas(settings, inventory)
    runner = TaskRunner(
        coordinator=client,
        datasets=inventory.datasets,
        for_evaluation=frozenset(name for name, source in settings.datasets.items() if source.use == "evaluate"),
        divided=frozenset(name for name, source in settings.datasets.items() if source.part),
        executor=executor,
        vault=Vault(vault_folder),
        shelf=Cache(settings.state_dir / "cache", settings.cache_bytes),
        scratch=settings.state_dir,
        name=settings.name,
        kinds=settings.all_kinds,
        own_script=settings.own_script is not None,
        regional=settings.region is not None,
        sums=party,
        mappings=mappings_of(settings.mappings),
        resources={str(name): most for name, most in settings.resources.items()},
        # The sites of a region have the examples, and their ledgers.
        ledger=None if settings.region else ledger,
        history=run_history_of(settings),
        described=described_data_of(settings),
        class_names={name: source.class_names for name, source in settings.datasets.items()},
        audit=audit,
        bases=BaseSources(BaseCache(settings.state_dir), settings.base_sources, tls_of(settings)),
        checkpoints=None if settings.region else Checkpoints(vault_folder),
        duration_quantum_seconds=settings.duration_quantum_seconds,
        checkpoint_seconds=60 * settings.checkpoint_minutes or math.inf,
        seed_key=derived(audit_key_of(settings), TRAINING_SEEDS),
    )
    return with_rules(runner, settings), inventory


def with_data(
    runner: TaskRunner, settings: WorkerSettings, executor: ProcessExecutor
) -> tuple[TaskRunner, Inventory]:
    """Return the runner with its data sets loaded again, and the facts about them. Raises SettingsError."""
    try:
        inventory = executor.reload(settings.sources)
    except ExecutorEnded as ended:
        raise SettingsError(str(ended)) from ended
    check_deltas(settings, inventory)
    # Fingerprints and contents are computed again: an overlap or a checkpoint of the earlier rows is none of these.
    return replace(runner, datasets=inventory.datasets, fingerprints={}, contents={}), inventory


def with_rules(runner: TaskRunner, settings: WorkerSettings) -> TaskRunner:
    """Return the runner with the policy and the budgets of these settings."""
    return replace(
        runner,
        policy=settings.policy,
        allowances=settings.allowances,
        inbox=inbox_of(settings) if settings.policy.approve_runs or settings.secure_sums else None,
        airlock=airlock_of(settings) if settings.policy.airlock else None,
    )

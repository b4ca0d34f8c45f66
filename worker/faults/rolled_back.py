"""Adoption after a restore: of a worker's older state, or of a run of a coordinator that was restored."""

from collections.abc import Iterator

from tessera.shared.api.runs import Run
from tessera.shared.api.tasks import Receipt, TaskView
from tessera.shared.client.client import Client
from tessera.shared.run_settings import Budget, rho_of
from tessera.worker.settings import WorkerSettings, tls_of, token_of
from tessera.worker.state.audit import NO_HEAD, ROLLED_BACK, Audit
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger, LedgerPage, NoisyFigures, of_training
from tessera.worker.state.vault import Vault
from tessera.worker.stores import audit_of, run_history_of


def adopt_rolled_back(settings: WorkerSettings, audit: Audit, ledger: Ledger) -> dict[str, int] | None:
    """Adopt the state if the worker stopped for it. Return the number of lost uses charged to each data set's ledger;
    None if it did not stop.

    Each lease of a task that the audit does not know counts, whether or not its result was accepted. Raises Problem
    if the coordinator does not answer, and ChainError.
    """
    database = StateDatabase.of(settings.state_dir)
    if (head := database.note(ROLLED_BACK)) is None:
        return None
    known = {(entry.task, entry.token) for entry in audit.read()}
    charged: dict[str, int] = {}
    runs: dict[str, Run] = {}
    merged: dict[str, Receipt] = {}
    vault = Vault(settings.state_dir / "vault")
    with Client(settings.url, token_of(settings), verify=tls_of(settings)) as client:
        # By their rounds, since the coordinator's clock may have been set back: the last receipt counts.
        for task in sorted(client.tasks(), key=lambda task: task.round):
            if task.worker.rpartition("/")[2] != settings.name or task.kind not in ("train", "evaluate"):
                continue
            run = runs[task.run] = runs.get(task.run) or client.run(task.run)
            about = (task.run, run.spec.name, task.round, task.id)
            refs = [TaskRef(*about, token) for token in range(1, task.token + 1)]
            lost = [ref for ref in refs if head != NO_HEAD and (ref.task, ref.token) not in known]
            for name in _datasets(run, task, settings) if lost else ():
                with ledger.page(name) as page:
                    # An adoption that was interrupted has charged some.
                    paid = {(entry.task, entry.token) for entry in page.entries}
                    for ref in lost:
                        if (ref.task, ref.token) not in paid:
                            _charge(page, run, task, ref, settings.policy.figures_privacy)
                            charged[name] = charged.get(name, 0) + 1
            if task.receipt and task.receipt.state == "merged":
                merged[task.run] = task.receipt
        # Of an older update, whose outcome the restored folder does not know: it would replace what is adopted.
        vault.settle(client.task)
    history = run_history_of(settings)
    for name, receipt in merged.items():
        if vault.lacks(receipt, name, kept=history.kept_by(name, receipt.task)):
            vault.adopt(name, receipt)
    audit.record("chain.adopt", None, head=head, charged=dict(charged))
    database.set_note(ROLLED_BACK, None)
    return charged


def adopt_restored_run(settings: WorkerSettings, named: str) -> str:
    """Let a run go on after its coordinator was restored, with the tensors that it keeps here; return its id.

    The ledgers keep their charges. Raises ValueError unless one run here has this name or id.
    """
    run = run_history_of(settings).adopt(named)
    Vault(settings.state_dir / "vault").adopt(run, None)
    audit_of(settings).record_of_run("chain.adopt", run, named)
    return run


def _datasets(run: Run, task: TaskView, settings: WorkerSettings) -> Iterator[str]:
    """Yield the site's data sets that a task may have used."""
    evaluation = run.spec.evaluation
    central = evaluation.dataset if evaluation and task.kind == "evaluate" else None
    yield from (name for name in {run.spec.dataset, central} if name in settings.datasets)


def _charge(page: LedgerPage, run: Run, task: TaskView, lost: TaskRef, figures: Budget | None) -> None:
    """Charge a lost task: like the run's last one of its kind in the ledger; without one, an evaluation by the site's
    own rule for `figures`; without that, as unbounded."""
    of_run = [entry for entry in page.entries if entry.run == task.run and entry.target]
    trained = of_training(of_run)
    alike = trained if task.kind == "train" else [entry for entry in of_run if entry not in trained]
    if alike and alike[-1].target:
        last = alike[-1]
        events = [
            event for entry in alike if (entry.task, entry.token) == (last.task, last.token) for event in entry.events
        ]
        page.spend(lost, last.examples, alike[-1].target, events, unit=last.unit)
    elif task.kind == "evaluate" and figures:
        # Of the version, and of the site's own model.
        page.spend(lost, task.examples or 0, figures, [NoisyFigures(rho=rho_of(figures))] * 2)
    elif task.kind == "evaluate" or run.spec.privacy is None:
        page.exact(lost, task.examples or 0, "evaluation" if task.kind == "evaluate" else "training")
    else:
        page.exact(lost, task.examples or 0, "lost")

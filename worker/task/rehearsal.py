"""The rehearsal of a run's training. Only a report of it leaves."""

from __future__ import annotations

from typing import Any

from tessera.shared.api.rehearsals import Rehearsal
from tessera.shared.methods.base import LocalResult
from tessera.worker.task.admission import AdmittedTask
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.fetch import fetch
from tessera.worker.task.handover import FetchedVersion
from tessera.worker.task.upload import Egress
from tessera.worker.training.progress import rounded


def rehearse(run: TaskRun, admission: AdmittedTask) -> Rehearsal:
    """Rehearse an admitted task, throw the result away, and return the report. Raises as a task that trains."""
    env, task, account = run.env, run.task, admission.account
    run.report.begin("fetching")
    with env.shelf.pinning():
        began_at = env.clock()
        fetched = fetch(run, admission.dataset)
        nbytes_moved, seconds_moved = fetched.transfer
        checked = env.clock() - began_at - seconds_moved
        outcome = env.executor.execute(run, fetched, account, None)
        assert outcome.result  # noqa: S101  (of a task that trains)
        nbytes = _update_bytes(run, fetched, outcome.result)
    figures = dict(outcome.result.metrics)
    if env.hidden:
        # Such a task may have left its memory to this process.
        figures.pop("host_bytes", None)
    found: dict[str, Any] = {
        name: rounded(max(0.0, value)) if name.endswith("_seconds") else int(value) for name, value in figures.items()
    }
    rates = (env.resources.get("upload_bytes_per_second"), env.policy.max_upload_bytes_per_second)
    own = [base.block.nbytes for name, base in fetched.bases.items() if name not in fetched.document.external]
    return Rehearsal(
        **found,
        synthetic=env.rehearses_synthetic(task),
        examples=outcome.examples,
        check_seconds=rounded(max(0.0, checked)),
        fetch_seconds=rounded(seconds_moved),
        download_bytes=nbytes_moved,
        version_bytes=sum(own),
        sent_bytes=sum(block.nbytes for block in task.plan.sent(fetched.blocks)),
        update_bytes=nbytes,
        upload_bytes_per_second=min(filter(None, rates), default=None),
        epsilon=rounded(account.forecast(found["steps"])) if account and found["steps"] else None,
    )


def _update_bytes(run: TaskRun, fetched: FetchedVersion, result: LocalResult) -> int:
    """Return the size of the update as it would be sent, once its egress is checked. Raises as `Egress.checked`."""
    task = run.task
    if task.secure_sums:
        run.wait_for_quantum(run.check)
        return sum(block.numel for block in task.plan.sent(fetched.blocks)) * task.secure_sums.bits // 8
    with Egress(run).checked(result, fetched) as update:
        return update.nbytes

"""The description of a data set. Only disclosed counts of it leave, alone or in a secure sum."""

from __future__ import annotations

from tessera.shared.api.descriptions import Description, TableName
from tessera.shared.methods.base import LocalResult
from tessera.shared.privacy.noise import NoiseSource, secret_key
from tessera.shared.rounds.count_table import CountTable
from tessera.shared.run_settings import Budget
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import Array, digest_of
from tessera.worker.errors import TaskFailure
from tessera.worker.governance.described_data import Answers
from tessera.worker.governance.policy import ClientPrivacyFloor, require
from tessera.worker.privacy.disclosed_counts import SubjectTables, disclosed_counts, noisy_counts
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.fetch import read_manifest
from tessera.worker.task.handover import FetchedVersion, TaskOutcome
from tessera.worker.task.secure_sums import check_values, counted


def describe(run: TaskRun) -> Description:
    """Return the description of the task's data set, as the site's rules let it leave. Raises PolicyViolation,
    TaskFailure, LedgerError and the exceptions of `run.check`."""
    env, name = run.env, run.task.dataset
    run.report.begin("describing")
    rule, noise, grouped = env.policy.disclosure, _noise(run), env.datasets[name].groups is not None
    found = env.executor.subjects(run, name)

    def make() -> Description:
        counts = _counts(run, found, noise)
        return Description(
            unit="group" if grouped else "example",
            minimum=rule.minimum,
            step=rule.step,
            counts={table: _trimmed(each) for table, each in counts.items()},
            class_names=env.class_names.get(name, ()),
            unknown_tokens=None if noise else found.unknown_tokens,
            epsilon=noise.epsilon if noise else None,
        )

    if env.described is None:
        return make()
    answers = Answers(Description, "max_descriptions", env.policy.max_descriptions, "described")
    return env.described.answer(answers, name, "", found.digests, rule, make)


def summed(run: TaskRun, terms: Terms, description: Description) -> tuple[FetchedVersion, TaskOutcome]:
    """Return a data set's counts as the update of a table that all sites start from, with this table. Raises
    PolicyViolation for another table, TaskFailure and Problem."""
    table, task = CountTable(run.task.dataset), run.task
    manifest = read_manifest(run)
    ((block, raw),) = table.blocks()
    if (task.model, manifest.blocks) != (table.model_digest, {block.name: digest_of(raw)}):
        # Sums from other values would hide from this site that its counts are in two of them.
        said = f"the run does not start from the table for counts of {task.dataset!r}"
        raise TaskFailure("invalid-version", f"{said}: begin it by `tessera data compare`")
    check_values(terms, manifest)
    values = counted(run, terms, table, description.counts)
    base = BlobTensor(run.env.scratch, block, data=bytes(raw))
    fetched = FetchedVersion(table.model, None, manifest, (block,), {block.name: base})
    examples = run.env.datasets[task.dataset].examples
    return fetched, TaskOutcome(examples, LocalResult({block.name: values}))


def _noise(run: TaskRun) -> Budget | None:
    """Return the privacy of the counts; None if they have no noise. Raises PolicyViolation."""
    policy, rules = run.env.policy, run.env.privacy_rules(run.task.dataset)
    require(
        run.task.describe or not policy.require_secure_sums,
        "describe",
        "this site sends nothing that is of it alone (policy.require_secure_sums), as counts of its data are",
    )
    of_examples = all(not isinstance(rule, ClientPrivacyFloor) and rule.unit == "example" for rule in rules)
    detail = "this site protects groups or itself as a whole, and counts have no noise for them"
    require(of_examples, "describe", detail)
    require(
        not rules or policy.figures_privacy is not None,
        "describe",
        "this site has a rule of privacy, and without policy.figures_privacy counts of its data have no noise",
    )
    return policy.figures_privacy


def _counts(run: TaskRun, found: SubjectTables, noise: Budget | None) -> dict[TableName, Array]:
    rule, examples = run.env.policy.disclosure, len(found.subjects)
    if noise is None:
        run.journal.note_exact(examples, "description")
        return disclosed_counts(found.subjects, found.tables, rule)
    rho = run.journal.reserve_figures(examples, noise.epsilon, noise.delta)
    return noisy_counts(found.subjects, found.tables, rule, rho, NoiseSource(secret_key()))


def _trimmed(counts: Array) -> tuple[int, ...]:
    """Return the counts without zeros at the end, whose number could depend on a suppressed class."""
    shown = counts.nonzero()[0]
    return tuple(counts[: shown[-1] + 1].tolist()) if len(shown) else ()

"""The description of a data set. Only disclosed counts of it leave."""

from __future__ import annotations

from tessera.shared.api.descriptions import Description, TableName
from tessera.shared.privacy.noise import NoiseSource, secret_key
from tessera.shared.run_settings import Budget
from tessera.shared.tensors.lazy import Array
from tessera.worker.governance.policy import ClientPrivacyFloor, require
from tessera.worker.privacy.disclosed_counts import SubjectTables, disclosed_counts, noisy_counts
from tessera.worker.task.environment import TaskRun


def describe(run: TaskRun) -> Description:
    """Return the description of the task's data set, as the site's rules let it leave. Raises PolicyViolation,
    TaskFailure, LedgerError and the exceptions of `run.check`."""
    env, name = run.env, run.task.dataset
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
    return env.described.describe(name, found.digests, rule, env.policy.max_descriptions, make)


def _noise(run: TaskRun) -> Budget | None:
    """Return the privacy of the counts; None if they have no noise. Raises PolicyViolation."""
    policy, rules = run.env.policy, run.env.privacy_rules(run.task.dataset)
    require(
        not policy.require_secure_sums,
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

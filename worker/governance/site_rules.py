"""The rules that a site sets for one worker's tasks: its policy, and its data sets' privacy budgets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera.shared.api.tasks import Task
from tessera.shared.run_settings import Budget
from tessera.worker.governance.policy import Allowance, ClientPrivacyFloor, Policy, PrivacyFloor


@dataclass(frozen=True, kw_only=True)
class SiteRules:
    """The site's rules, for the agent's half of a task and for the executor's."""

    policy: Policy = field(default_factory=Policy)
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    """Privacy budgets by data set."""
    full_precision: bool = False
    """True in a simulation, which no figures leave: they are exact under each rule."""

    def privacy_rules(self, dataset: str) -> list[PrivacyFloor | ClientPrivacyFloor | Allowance]:
        """Return the site's rules of privacy for a data set."""
        policy = self.policy
        rules = (
            policy.require_privacy,
            policy.require_client_privacy,
            policy.max_weekly_privacy,
            policy.max_total_privacy,
            self.allowances.get(dataset),
        )
        return [rule for rule in rules if rule]

    def rounds_figures(self, task: Task) -> bool:
        """Return True if figures over examples leave in a task only as rounded sums (`privacy.bounded_figures`).

        Elsewhere exact updates reveal more than exact figures. A central data set belongs to no site that takes part.
        """
        if self.full_precision:
            return False
        hidden = task.privacy or task.client_privacy or task.secure_sums
        is_central = task.kind == "evaluate" and not task.held_out
        policy = self.policy
        rounded = policy.figures == "rounded" or policy.figures_privacy
        by_site = bool(rounded) or policy.require_secure_sums or bool(self.privacy_rules(task.dataset))
        return by_site or (bool(hidden) and not is_central)

    def hides_cause(self, task: Task) -> bool:
        """Return True if the cause of a task's failure, which may depend on an example, is for this site's log alone.

        In an attack a version of the coordinator's choice computes each example.
        """
        return not task.trains and (task.kind == "attack" or self.rounds_figures(task))

    def rehearses_synthetic(self, task: Task) -> bool:
        """Return True if a rehearsal trains on synthetic rows: in private runs, in secure sums and under a rule of
        privacy, also on another data set, which may share examples. Elsewhere the times of tasks leave too."""
        return task.is_covered or bool(self.allowances or self.privacy_rules(task.dataset))

    def privacy_of_figures(self, task: Task) -> Budget | None:
        """Return the privacy of one evaluation's figures; None if they have no noise."""
        return self.policy.figures_privacy if self.rounds_figures(task) else None

    def hides(self, task: Task) -> bool:
        """Return True if the course of a task may reveal nothing of an example."""
        if task.kind == "rehearse":
            # A new process loads the data set, in a time that depends on the examples.
            return self.rehearses_synthetic(task)
        return self.rounds_figures(task) if task.kind in ("evaluate", "attack") else task.is_covered

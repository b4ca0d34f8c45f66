"""The check of a site's rules of privacy against the sizes of its data sets. Imports no torch."""

from tessera.shared.run_settings import InvalidDelta, UnitBudget, check_delta
from tessera.worker.data.dataset_info import DatasetInfo, Inventory
from tessera.worker.governance.policy import PrivacyFloor
from tessera.worker.settings import SettingsError, WorkerSettings


def check_deltas(settings: WorkerSettings, inventory: Inventory) -> None:
    """Raise SettingsError for a rule of privacy whose delta would permit the release of whole examples, or groups, of
    these data sets, or of the whole site: a run with such a delta is refused too."""
    policy, datasets = settings.policy, inventory.datasets
    trained = {name: data for name, data in datasets.items() if settings.datasets[name].use == "train"}
    of_each: list[tuple[str, PrivacyFloor | UnitBudget | None]] = [
        ("policy.require_privacy", policy.require_privacy),
        ("policy.max_weekly_privacy", policy.max_weekly_privacy),
    ]
    rules = [(key, rule, data) for key, rule in of_each for data in trained.values()]
    for name, data in trained.items():
        own = settings.datasets[name].privacy
        rules.append((f"datasets.{name}.privacy" if own else "privacy", own or settings.privacy, data))
    whole = DatasetInfo(sum(data.examples for data in trained.values()), groups=inventory.groups)
    rules.append(("policy.max_total_privacy", policy.max_total_privacy, whole))
    try:
        for key, rule, data in rules:
            if rule and (units := data.units(rule.unit)):
                check_delta(rule.delta, units, rule.unit, f"{key}.delta")
        if noise := policy.figures_privacy:
            for data in datasets.values():
                check_delta(noise.delta, data.examples, "example", "policy.figures_privacy.delta")
        if (of_site := policy.require_client_privacy) and (sums := settings.secure_sums):
            check_delta(of_site.delta, len({*sums.roster, sums.site}), "site", "policy.require_client_privacy.delta")
    except InvalidDelta as fault:
        raise SettingsError(str(fault)) from None

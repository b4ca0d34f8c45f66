"""The documents of a dossier: what was trained, by whom, on how much data, how well, and under which promises."""

from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services


def documents(services: Services, caller: Principal, run_id: str, number: int) -> dict[str, bytes]:
    """Return the files of the dossier on a version of a run, by name, from one snapshot of the caller's rows.

    Raise NotFound for an unknown run or version, and Gone for a version whose manifest is no longer kept.
    """
    raise NotImplementedError(services, caller, run_id, number)

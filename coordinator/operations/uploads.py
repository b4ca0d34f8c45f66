"""Uploads of the running coordinator, and updates that come with their submission."""

from __future__ import annotations

from tessera.coordinator.blobs.uploads import Upload, Uploads
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.coordinator.telemetry.metrics import RECEIVED_BYTES
from tessera.shared.problems import Fault, Invalid


def uploads_of(services: Services) -> Uploads:
    return Uploads(
        services.database,
        services.blobs,
        services.room,
        services.quota,
        services.settings.idle_seconds,
        RECEIVED_BYTES.inc,
        services.uploading,
    )


def store_inline(services: Services, caller: Principal, digest: str, data: bytes) -> Upload:
    """Store an update that came with its submission as if it had been uploaded. Raise Invalid if it is too long."""
    if len(data) > (most := services.settings.submission_bytes):
        fault = Fault(pointer="/data", detail=f"{len(data)} bytes; at most {most} come with a submission")
        raise Invalid("the update is too long for its submission", errors=[fault], remedy="Upload it first.")
    uploads = uploads_of(services)
    uploads.received(len(data))
    services.memory.require()
    upload = uploads.announce(caller.owner, digest, len(data), site_id=caller.site_id)
    uploads.keep(upload, data)
    return upload

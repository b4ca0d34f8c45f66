"""Whether a process can do its work."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError

from tessera.coordinator.services import Services
from tessera.shared.api.admin import Readiness


def readiness(services: Services) -> Readiness:
    """Return whether the schema is this version's or a later one and the store takes bytes, with what is lacking."""
    try:
        schema = services.database.at_head_or_later()
    except SQLAlchemyError:
        schema = False
    writable = services.blobs.writable()
    return Readiness(
        ready=schema and writable,
        schema_at_head=schema,
        store_writable=writable,
        store_has_space=services.room.has(),
    )

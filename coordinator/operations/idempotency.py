"""Idempotency keys: repetitions of a request get its first response, from any process."""

import hashlib
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import IdempotencyRow
from tessera.coordinator.domain.principal import Principal
from tessera.shared.problems import KeyReused
from tessera.shared.schema import canonical

A = TypeVar("A", bound=BaseModel)


def once(
    session: Session,
    now: float,
    caller: Principal,
    key: str | None,
    request: BaseModel,
    kind: type[A],
    create: Callable[[], A],
) -> A:
    """Return `create()` on the first use of a caller's key, and that first result on later ones.

    Raises KeyReused if the key came with another body before. Without a key every request creates.
    """
    if key is None:
        return create()
    fingerprint = hashlib.sha256(type(request).__name__.encode() + canonical(request)).hexdigest()
    before = session.get(IdempotencyRow, (caller.owner, key))
    if before is None:
        answer = create()
        stored = answer.model_dump(mode="json")
        session.add(IdempotencyRow(owner=caller.owner, key=key, fingerprint=fingerprint, body=stored, created_at=now))
        return answer
    if before.fingerprint != fingerprint:
        raise KeyReused(f"the key {key!r} was used before for another request")
    return kind.model_validate(before.body)

"""Settings of studies: immutable, without unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def in_one_line(refusal: ValidationError) -> str:
    """Return each error as `dotted.key: message`."""
    found = refusal.errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'plan'}: {each['msg']}" for each in found)

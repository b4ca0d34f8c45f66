"""The caller of a request: its role, and the site or person that it acts for."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.shared.schema import TokenRole

PERSON = "person:"


@dataclass(frozen=True)
class Principal:
    """Who calls: the holder of a token, or a person whom the OpenID provider vouches for."""

    token_id: str
    name: str
    role: TokenRole
    site_id: str | None

    @property
    def owner(self) -> str:
        """Whose uploads and idempotency keys these are. A site's workers share theirs."""
        return f"site:{self.site_id}" if self.site_id else f"token:{self.token_id}"

    @classmethod
    def person(cls, name: str, role: TokenRole) -> Principal:
        return cls(PERSON + name, name, role, None)

    @property
    def is_person(self) -> bool:
        return self.token_id.startswith(PERSON)

    @property
    def actor(self) -> str:
        """What the audit chain calls this caller."""
        return f"{self.role}:{self.name}"

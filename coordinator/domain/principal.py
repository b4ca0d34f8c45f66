"""The caller of a request: its role, and the site or person that it acts for."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.shared.schema import TokenRole

PERSON = "person:"


@dataclass(frozen=True)
class Principal:
    """A caller: the holder of a token, or a person authenticated by the OpenID provider."""

    token_id: str
    name: str
    role: TokenRole
    site_id: str | None
    pseudonym: str | None = None
    """The audit's name of the caller's site."""

    @property
    def owner(self) -> str:
        """The owner of the caller's uploads and idempotency keys. A site's workers share one."""
        return f"site:{self.site_id}" if self.site_id else f"token:{self.token_id}"

    @classmethod
    def person(cls, name: str, role: TokenRole) -> Principal:
        return cls(PERSON + name, name, role, None)

    @property
    def is_person(self) -> bool:
        return self.token_id.startswith(PERSON)

    @property
    def actor(self) -> str:
        """The caller's name in the audit chain: a site by its pseudonym, others by name."""
        return f"{self.role}:{self.pseudonym or self.name}"

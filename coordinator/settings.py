"""The coordinator's settings, read once from the environment (`TESSERA_...`)."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from tessera.coordinator.audit_sinks import FORMS, AuditSink, audit_sink
from tessera.shared.client.notice_channels import Channel, WebhookUrl, channels
from tessera.shared.environment import refuse_misspelt
from tessera.shared.schema import Bytes, BytesOrZero
from tessera.shared.urls import is_loopback

PersonRole = Literal["admin", "orchestrator", "viewer"]
"""Roles of people, the strongest first. Sites have tokens of their own."""

JSON_EXAMPLES = {
    "oidc_roles": '{"tessera-admins": "admin"}',
    "notice_command": '["/usr/local/bin/tell-admins"]',
}
"""The settings whose values are JSON, with examples."""


def _secrets_in_files(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings whose values are in files: users who may inspect a container see its variables. Raise
    ValueError."""
    for name in ("database_url", "webhook_url"):
        if (file := given.get(f"{name}_file")) is None:
            continue
        if name in given:
            raise ValueError(f"{name} and {name}_file are both set; unset one of them")
        try:
            yield name, Path(file).read_text(encoding="utf-8-sig").strip()
        except OSError as fault:
            raise ValueError(f"{name}_file: {file} cannot be read: {fault.strerror}") from None


def data_dir() -> Path:
    """Return the default folder of a coordinator's data, which is the same wherever the coordinator is started."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        # Relative paths in this variable are invalid (XDG Base Directory Specification).
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError:
            # A user without a home has no better place.
            return Path("tessera-data").absolute()
    return state / "tessera" / "coordinator"


class CoordinatorSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="TESSERA_",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        # `_read_json` does it, and says what is wrong.
        enable_decoding=False,
    )

    database_url: str = Field(
        default_factory=lambda: f"sqlite:///{data_dir()}/tessera.db",
        description="database of runs, rounds and tasks: SQLite, or postgresql://...",
    )
    database_url_file: Path | None = Field(default=None, description="file with the database's URL, in place of it")
    database_connections: PositiveInt = Field(
        default=20, description="maximum PostgreSQL connections of one process, not counting a few for signals"
    )
    blob_url: str = Field(
        default_factory=lambda: f"{data_dir()}/blobs", description="blob store: a folder, or s3://bucket/prefix"
    )
    staging_dir: Path = Field(
        default_factory=lambda: data_dir() / "staging",
        description="folder of unfinished uploads; on the file system of the blobs, so that a finished upload is "
        "a rename",
    )
    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; every other address requires TLS. 0.0.0.0 means all IPv4 addresses and "
        "no IPv6 ones, :: the reverse",
    )
    port: int = Field(default=8470, ge=1, le=65535, description="port to listen on")
    tls_cert: Path | None = Field(default=None, description="TLS certificate and its chain (PEM)")
    tls_key: Path | None = Field(default=None, description="key of the certificate, if it is in a separate file")
    tls_client_ca: Path | None = Field(
        default=None, description="CAs (PEM); every client must present a certificate of one of them"
    )
    behind_proxy: bool = Field(
        default=False, description="a proxy terminates TLS; permits other addresses without TLS"
    )
    admin_token_file: Path | None = Field(
        default=None,
        description="file for the first administrator token, which is valid for a day; if unset, it is printed on a "
        "terminal",
    )
    oidc_issuer: str | None = Field(
        default=None, description="OpenID provider whose tokens are accepted, spelled exactly as in its iss claim"
    )
    oidc_audience: str | None = Field(default=None, description="required audience of these tokens")
    oidc_keys_url: str | None = Field(
        default=None, description="URL of the provider's keys, if it is not on the host that the provider announces"
    )
    oidc_client_id: str | None = Field(
        default=None, description="client id of the dashboard at the provider; enables sign-in there"
    )
    oidc_client_secret_file: Path | None = Field(
        default=None, description="file with the client secret, if there is one; read at each sign-in"
    )
    oidc_scope: str = Field(default="openid", description="OAuth scopes that the dashboard requests")
    oidc_token_url: str | None = Field(
        default=None, description="token endpoint, if it is not on the provider's host"
    )
    public_url: str | None = Field(
        default=None,
        description="URL of this coordinator in browsers, for example https://tessera.example; with the path that a "
        "proxy serves it under, if any, as in https://hospital.example/tessera",
    )
    oidc_role_claim: str = Field(
        default="roles",
        description="claim that lists a person's roles; dots descend into it, as in realm_access.roles",
    )
    oidc_roles: dict[str, PersonRole] = Field(
        default={},
        description="maps values of that claim to Tessera's roles, as JSON; a person without a mapped value has "
        "no permissions",
    )
    webhook_url: WebhookUrl | None = Field(
        default=None, description="https:// URL to which a notice is posted when something needs a person"
    )
    webhook_url_file: Path | None = Field(default=None, description="file with this URL, in place of it")
    webhook_secret_file: Path | None = Field(
        default=None, description="file with the key that signs these notices: whsec_ and base64; read at each notice"
    )
    notice_command: list[str] = Field(
        default=[],
        description="program and arguments, as a JSON list, started for each notice, with the notice as JSON on its "
        "input",
    )
    lease_seconds: PositiveFloat = Field(
        default=60.0, le=86_400, description="duration of a task's lease without a heartbeat"
    )
    max_wait_seconds: PositiveFloat = Field(default=60.0, description="longest long poll of a claim for a task")
    liveness_seconds: PositiveFloat = Field(
        default=90.0, description="duration for which a silent worker counts as live"
    )
    cohort_wait_seconds: NonNegativeFloat = Field(
        default=10.0,
        description="time to wait before each round for the full cohort; then a quorum suffices. Without a cohort "
        "size, the first round waits for all sites, and each after a merge opens at once with a quorum",
    )
    tick_seconds: PositiveFloat = Field(
        default=0.5, description="interval at which the conductor checks for work without a wakeup"
    )
    heartbeat_file: Path | None = Field(
        default=None,
        description="file that the conducting process touches at every check; for health checks, because it has "
        "no port; by default conductor in the staging folder",
    )
    evaluation_seconds: PositiveFloat = Field(
        default=600.0, description="time that a finished run waits for live workers to evaluate its last version"
    )
    inline_bytes: Bytes = Field(default=65_536, description="blobs up to this size are stored in the database")
    max_upload_bytes: Bytes = Field(default=64 << 30, description="maximum size of a blob")
    max_body_bytes: Bytes = Field(default=1 << 20, description="maximum size of a JSON body")
    submission_bytes: BytesOrZero = Field(
        default=65_536,
        le=1 << 19,
        description="an update up to this size may travel inside its submission, and the changes of a version "
        "inside its tasks",
    )
    idle_timeout_seconds: PositiveFloat = Field(
        default=120.0, description="maximum pause within an upload or a response before the connection is closed"
    )
    header_timeout_seconds: PositiveFloat = Field(
        default=10.0, description="maximum time for a request's head; maximum pause within a JSON body"
    )
    body_memory_bytes: Bytes = Field(
        default=128 << 20,
        ge=16 << 20,
        description="maximum memory for the bodies of requests in progress per process, besides those of uploads; "
        "half of it per site, other token or person, a sixteenth for all callers without a token",
    )
    max_connections: PositiveInt = Field(default=16_384, description="maximum number of open connections per process")
    max_connections_per_address: PositiveInt | None = Field(
        default=None,
        description="the same per address; if unset, a quarter of them, or no limit behind a proxy, whose address "
        "all of them have",
    )
    requests_per_second: PositiveFloat = Field(
        default=1_000.0, description="sustained request rate per token and process; ten seconds' worth at once"
    )
    auth_failures_per_minute: PositiveInt = Field(
        default=60,
        description="requests without a valid token per address and minute, and sign-ins per token, per process",
    )
    session_seconds: PositiveFloat = Field(
        default=28_800.0, le=7 * 86_400, description="duration of a session on the dashboard"
    )
    max_event_streams: PositiveInt = Field(
        default=256, description="maximum number of clients that listen to events, per process"
    )
    enrolments_per_minute: PositiveInt = Field(
        default=10, description="enrolment requests per address and minute, per process"
    )
    pending_enrolments: PositiveInt = Field(
        default=100, description="maximum number of pending enrolments; a tenth of it per address"
    )
    rotation_grace_seconds: NonNegativeFloat = Field(
        default=600.0, le=86_400, description="time for which the previous secret of a rotated token stays valid"
    )
    max_workers_per_site: PositiveInt = Field(
        default=1_000, description="maximum number of worker names that a site uses within 30 days"
    )
    site_bytes_per_day: Bytes | None = Field(
        default=None,
        description="bytes that a site may announce within 24 hours; if unset, half of the disk if the blobs are "
        "in a folder",
    )
    disk_reserve_bytes: BytesOrZero = Field(
        default=1 << 30, description="disk space to keep free; an upload or merge that would use it does not start"
    )
    memory_limit_bytes: Bytes | None = Field(
        default=None,
        description="memory of this process; if unset, the limit of its control group. Above 85 % no upload starts",
    )
    audit_sink: str | None = Field(default=None, description=f"receiver of each entry of the audit: {FORMS}")
    audit_sink_ca: Path | None = Field(default=None, description="CAs (PEM) of the audit's sink")
    audit_sink_authorization_file: Path | None = Field(
        default=None, description="file with the header Authorization for the audit's sink, such as Bearer ..."
    )
    signing_key: Path = Field(
        default_factory=lambda: data_dir() / "signing-key.pem",
        description="private key (PEM) that signs dossiers; `tessera coordinator signing-key` creates it, and its "
        "public key beside it",
    )
    keep_updates_seconds: PositiveFloat = Field(
        default=3_600.0, ge=60, description="time to keep an update after the end of its round"
    )
    keep_versions: PositiveInt | None = Field(
        default=None, description="number of latest versions to keep for each run, besides its first; if unset, all"
    )
    keep_unused_seconds: PositiveFloat = Field(
        default=86_400.0, ge=3_600, description="time to keep unreferenced blobs and abandoned uploads"
    )
    gc_interval_seconds: PositiveFloat = Field(
        default=600.0, description="interval at which the conductor removes old data"
    )

    @property
    def notice_channels(self) -> list[Channel]:
        return channels(self.webhook_url, self.webhook_secret_file, self.notice_command)

    @property
    def audit_receiver(self) -> AuditSink | None:
        """Raise ValueError."""
        if self.audit_sink is None:
            return None
        return audit_sink(self.audit_sink, self.audit_sink_ca, self.audit_sink_authorization_file)

    @property
    def public_path(self) -> str:
        """The path of `public_url`, such as /tessera; empty without one."""
        return urlsplit(self.public_url or "").path.rstrip("/")

    @property
    def heartbeat(self) -> Path:
        return self.heartbeat_file or self.staging_dir / "conductor"

    @property
    def most_per_address(self) -> int | None:
        """Maximum number of connections from one address; None if unlimited."""
        if self.max_connections_per_address is None and not self.behind_proxy:
            return max(1, self.max_connections // 4)
        return self.max_connections_per_address

    @field_validator(*JSON_EXAMPLES, mode="before")
    @classmethod
    def _read_json(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, str):
            return given
        try:
            return json.loads(given)
        except ValueError:
            raise ValueError(f"must be JSON, such as {JSON_EXAMPLES[str(info.field_name)]}") from None

    @model_validator(mode="before")
    @classmethod
    def _has_known_names(cls, given: Any) -> Any:
        refuse_misspelt(os.environ, cls.model_fields)
        return {**given, **dict(_secrets_in_files(given))}

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.tls_key or self.tls_client_ca) and not self.tls_cert:
            raise ValueError("TESSERA_TLS_KEY and TESSERA_TLS_CLIENT_CA require TESSERA_TLS_CERT")
        if self.notice_channels and not self.public_url:
            raise ValueError("webhook_url and notice_command require public_url, to which notices link")
        if self.signing_key.suffix == ".pub":
            raise ValueError("signing_key must not end in .pub, the ending of the public key beside it")
        if (self.webhook_url is None) != (self.webhook_secret_file is None):
            raise ValueError("webhook_url and webhook_secret_file require each other")
        try:
            _ = self.audit_receiver
        except ValueError as fault:
            raise ValueError(f"audit_sink: {fault}") from None
        self._has_provider()
        return self

    def _has_provider(self) -> None:
        if self.oidc_issuer is None:
            return
        if not (self.oidc_audience and self.oidc_roles):
            raise ValueError("oidc_issuer requires oidc_audience, the audience of its tokens, and oidc_roles")
        if self.oidc_audience == self.oidc_client_id:
            raise ValueError(
                "oidc_audience and oidc_client_id are the same: the ID tokens of every sign-in would be valid as "
                "tokens of the API; register an API of its own at the provider, and name that as the audience"
            )
        if self.oidc_client_id and not self.public_url:
            raise ValueError("oidc_client_id requires public_url, to which the provider redirects people")
        for url in filter(None, (self.oidc_issuer, self.oidc_keys_url, self.oidc_token_url, self.public_url)):
            parts = urlsplit(url)
            if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
                raise ValueError(f"{url} is not an https:// URL: forged responses would let an attacker sign in")

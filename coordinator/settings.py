"""Every setting of the coordinator, read once from the environment (`TESSERA_...`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tessera.shared.urls import is_loopback

PersonRole = Literal["admin", "orchestrator", "viewer"]
"""What a person may be, the strongest first. Sites are admitted by tokens of their own."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TESSERA_", frozen=True, extra="forbid")

    database_url: str = Field(
        default="sqlite:///tessera-data/tessera.db", description="where runs, rounds and tasks are kept"
    )
    database_connections: PositiveInt = Field(
        default=20, description="connections that one process has to PostgreSQL at most, a few for signals aside"
    )
    blob_url: str = Field(
        default="tessera-data/blobs", description="where blobs are kept: a folder, or s3://bucket/prefix"
    )
    staging_dir: Path = Field(
        default=Path("tessera-data/staging"),
        description="unfinished uploads; on the blobs' file system, so that finishing one is a rename",
    )
    host: str = Field(default="127.0.0.1", description="the address to listen on")
    port: int = Field(default=8470, ge=1, le=65535, description="the port to listen on")
    tls_cert: Path | None = Field(default=None, description="the certificate to serve TLS with, and its chain (PEM)")
    tls_key: Path | None = Field(default=None, description="its key, if that is in a file of its own")
    tls_client_ca: Path | None = Field(
        default=None, description="CAs (PEM) of which every client must show a certificate"
    )
    behind_proxy: bool = Field(
        default=False, description="whether a proxy does TLS, so that other machines may be served without"
    )
    admin_token_file: Path | None = Field(
        default=None, description="where the first admin token is written, instead of being printed"
    )
    oidc_issuer: str | None = Field(
        default=None, description="the OpenID provider whose tokens people may show, as it calls itself"
    )
    oidc_audience: str | None = Field(default=None, description="what those tokens must be for")
    oidc_keys_url: str | None = Field(
        default=None, description="where its keys are, if that is on another host than it says of itself"
    )
    oidc_client_id: str | None = Field(
        default=None, description="what the provider calls this page, if people are to sign in to it there"
    )
    oidc_client_secret_file: Path | None = Field(
        default=None, description="a file with that client's secret, if the provider has given it one"
    )
    oidc_scope: str = Field(default="openid", description="what the page asks the provider to tell of them")
    oidc_token_url: str | None = Field(
        default=None, description="where it gives tokens for codes, if that is on another host than it is itself"
    )
    public_url: str | None = Field(
        default=None, description="where browsers reach this coordinator, such as https://tessera.example"
    )
    oidc_role_claim: str = Field(default="roles", description="the claim that tells of roles; dots lead into it")
    oidc_roles: dict[str, PersonRole] = Field(
        default={}, description="what its values are here, as JSON; without one a person may do nothing"
    )
    lease_seconds: PositiveFloat = Field(
        default=60.0, le=86_400, description="how long a task is held without a heartbeat"
    )
    longest_wait_seconds: PositiveFloat = Field(default=60.0, description="the longest a claim may wait for a task")
    live_seconds: PositiveFloat = Field(default=90.0, description="how long a silent worker counts as live")
    gather_seconds: NonNegativeFloat = Field(
        default=10.0, description="how long a run waits for its full cohort, or for all, once there is a quorum"
    )
    tick_seconds: PositiveFloat = Field(default=0.5, description="how often the conductor looks without being called")
    alive_file: Path | None = Field(
        default=None, description="touched by the process that conducts at every look, for what watches it"
    )
    evaluation_seconds: PositiveFloat = Field(
        default=600.0, description="how long a finished run waits for the evaluation of its last version"
    )
    inline_bytes: PositiveInt = Field(default=65_536, description="blobs up to this size live in the database")
    max_upload_bytes: PositiveInt = Field(default=64 << 30, description="the largest blob that is taken")
    max_body_bytes: PositiveInt = Field(default=1 << 20, description="the largest JSON body that is read")
    submission_bytes: NonNegativeInt = Field(
        default=65_536,
        le=1 << 19,
        description="an update up to this size may come with its submission, and a version's news with its tasks",
    )
    idle_seconds: PositiveFloat = Field(
        default=120.0, description="how long an upload or an answer may stand still before its connection is cut"
    )
    max_header_bytes: PositiveInt = Field(default=65_536, description="the longest head of a request that is read")
    head_seconds: PositiveFloat = Field(
        default=10.0, description="how long the head of a request may take, and how long a JSON body may stand still"
    )
    body_seconds: PositiveFloat = Field(default=60.0, description="how long a JSON body may take")
    max_connections: PositiveInt = Field(default=16_384, description="the most connections at a time")
    max_connections_per_address: PositiveInt | None = Field(
        default=None,
        description="the same from one address; a quarter if left out, and no bound behind a proxy, whose all are",
    )
    requests_per_second: PositiveFloat = Field(
        default=1_000.0, description="how often one token may ask, in the long run, of one process"
    )
    request_burst: PositiveInt = Field(default=10_000, description="how often at once")
    failures_per_minute: PositiveInt = Field(
        default=60, description="how often one address may ask without a valid token, of one process"
    )
    answer_bytes_per_token: PositiveInt = Field(
        default=1 << 30,
        ge=2 << 20,
        description="the memory that answers with blobs may take for one token at a time, 2 MiB for each or its "
        "length if that is less, of one process",
    )
    session_seconds: PositiveFloat = Field(
        default=28_800.0, le=7 * 86_400, description="how long somebody stays signed in to the page"
    )
    max_listeners: PositiveInt = Field(default=256, description="the most that listen to events, of one process")
    enrolments_per_minute: PositiveInt = Field(
        default=10, description="how often workers from one address may ask to be admitted, of one process"
    )
    pending_enrolments: PositiveInt = Field(
        default=100, description="the most workers that wait to be admitted; from one address a tenth of them"
    )
    rotation_grace_seconds: NonNegativeFloat = Field(
        default=600.0, le=86_400, description="how long the secret before is admitted after a token was given another"
    )
    max_workers_per_site: PositiveInt = Field(
        default=1_000, description="the most names of workers of a site that were heard of within 30 days"
    )
    declarations_per_hour: PositiveInt = Field(
        default=10_000,
        description="how often the workers of a site may change what they declare, within an hour and of one process",
    )
    site_bytes_per_day: PositiveInt | None = Field(
        default=None,
        description="the most bytes that a site may announce within 24 hours; half of the disk if none is given and "
        "blobs are in a folder",
    )
    site_unfinished_uploads: PositiveInt = Field(
        default=1_000, description="the most uploads of a site that are unfinished at a time"
    )
    disk_reserve_bytes: NonNegativeInt = Field(
        default=1 << 30, description="what stays free of the disk: no upload and no merge is begun that would need it"
    )
    memory_limit_bytes: PositiveInt | None = Field(
        default=None,
        description="the memory that is there for this process, if not what its control group may use; above 85 % of "
        "it no upload is begun",
    )
    merge_readahead_bytes: PositiveInt = Field(
        default=1 << 18, description="what is read of each update at a time, from a store that is no folder"
    )
    merge_engine: Literal["threads", "ray"] = Field(
        default="threads", description="what merges: threads of the conductor, or tasks on a Ray cluster"
    )
    ray_address: str | None = Field(
        default=None, description="the Ray cluster to merge on; one on this machine is started if none is named"
    )
    keep_updates_seconds: PositiveFloat = Field(
        default=3_600.0, ge=60, description="how long an update is kept after its round has ended"
    )
    keep_versions: PositiveInt | None = Field(
        default=None,
        description="how many of a run's latest versions are kept, beside its first; all if none is given",
    )
    keep_unused_seconds: PositiveFloat = Field(
        default=86_400.0,
        ge=3_600,
        description="how long bytes are kept that nothing refers to, and uploads that nobody goes on with",
    )
    housekeeping_seconds: PositiveFloat = Field(
        default=600.0, description="how often what is no longer kept is removed"
    )

    @property
    def most_per_address(self) -> int | None:
        """The most connections from one address; None for any number."""
        if self.max_connections_per_address is None and not self.behind_proxy:
            return max(1, self.max_connections // 4)
        return self.max_connections_per_address

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_key or self.tls_client_ca) and not self.tls_cert:
            raise ValueError("tls_key and tls_client_ca are of no use without tls_cert")
        return self

    @model_validator(mode="after")
    def _provider_is_whole(self) -> Self:
        if self.oidc_issuer is None:
            return self
        if not (self.oidc_audience and self.oidc_roles):
            raise ValueError("oidc_issuer needs oidc_audience, whom its tokens are for, and oidc_roles")
        if self.oidc_client_id and not self.public_url:
            raise ValueError("oidc_client_id needs public_url, to which the provider sends people back")
        for url in filter(None, (self.oidc_issuer, self.oidc_keys_url, self.oidc_token_url, self.public_url)):
            parts = urlsplit(url)
            if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
                raise ValueError(
                    f"{url} is no https:// URL: who changed its answers on the way could be anybody here"
                )
        return self

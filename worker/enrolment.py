"""Enrolment of a worker, and rotation of its secret. The secret is generated here, and only its hash is sent."""

import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.shared.api.admin import Enrolment, EnrolmentSpec, RotationResult
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.client.client import Client
from tessera.shared.client.transport import may_pass
from tessera.shared.diagnostics import reason_of, toml_of
from tessera.shared.near_names import unread
from tessera.shared.problems import Problem, Unauthenticated
from tessera.worker.settings import SettingsError
from tessera.worker.state.atomic_files import replace, write_secret

NEXT = ".next"
"""Suffix of the file of a new secret, until the coordinator has confirmed it."""

TLS = ("ca_bundle", "client_cert", "client_key")

SKELETON = """\
# Made by `tessera worker join`. `tessera docs worker-settings` has every setting.
url = {url}
token_file = {token_file}
name = {name}
state_dir = {state_dir}
{more}
# The data that runs may train on, under the name that runs use for it. `tessera data init PATH` writes such a table.
# [datasets.ward-images]
# kind = "images"
# folder = "/data/ward-images"  # with a folder of images for each class
# labels = ["benign", "malignant"]
# size = 224
# held_out = 0.2
#
# [datasets.reports]
# kind = "text"
# file = "/data/reports.csv"  # with the columns text and label
# labels = ["benign", "malignant"]
# tokenizer = "/models/bert"
# held_out = 0.2

# You decide what leaves this site, regardless of a coordinator's requests.
# Without a rule, any block may leave in any run. Remove the `#` from these lines for a stricter site.
[policy]
# approve_runs = true                   # a person at this site approves each run first
# never_send = ["*embeddings*"]         # blocks' names, as patterns: `doctor --model FOLDER` tries them
# max_upload_bytes = 50_000_000         # of an update
# max_run_upload_bytes = 1_000_000_000  # of all updates of a run
# airlock = true                        # a person releases each update
"""


@dataclass(frozen=True)
class Registration:
    """A worker's settings file and secret.

    `tls` holds the settings for TLS. `missing` holds the lines that an existing settings file lacks or contradicts.
    `is_region` says whether the file has a `[region]`.
    """

    config: Path
    token_file: Path
    name: str
    secret: str
    tls: dict[str, Path]
    missing: tuple[str, ...]
    is_region: bool


def prepare(config: Path, url: str, name: str | None, tls: dict[str, Path]) -> Registration:
    """Write a settings file and a new secret. Existing files are kept.

    `tls` holds settings (`ca_bundle`, `client_cert`, `client_key`) that override those of an existing file. Raises
    SettingsError if the files belong to another coordinator, which alone may see their secret.
    """
    config, url = config.absolute(), url.rstrip("/")
    given = _read(config) if config.exists() else {}
    if given.get("url", url).rstrip("/") != url:
        raise SettingsError(f"{config} is for {given['url']}; choose another file with --config")
    if "token" in given:
        raise SettingsError(f"{config} has a token already; choose another file with --config")
    token_file = Path(given.get("token_file", config.with_suffix(".token"))).absolute()
    called = name or given.get("name") or _host_name()
    if token_file.exists():
        if "url" not in given:
            raise SettingsError(
                f"{token_file} holds a secret, and no settings name its coordinator; choose another name for the "
                "settings with --config"
            )
        secret = _secret_in(token_file)
    else:
        secret = new_secret("site")
    wanted = {"url": url, "token_file": str(token_file), "name": called, "state_dir": str(config.parent / "state")}
    more = {key: str(file.absolute()) for key, file in tls.items()}
    if not config.exists():
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
        quoted = {key: json.dumps(value) for key, value in wanted.items()}
        config.parent.mkdir(parents=True, exist_ok=True)
        with config.open("x", encoding="utf-8") as file:
            file.write(SKELETON.format(**quoted, more=lines))
        given = wanted | more
    if not token_file.exists():
        write_secret(token_file, secret)
    # A worker runs with its settings alone: an option that they contradict would end with this command.
    needed = {key: value for key, value in (wanted | more).items() if key not in given or _differs(key, given, more)}
    if name is not None and given.get("name") != called:
        needed["name"] = called
    missing = tuple(f"{key} = {json.dumps(value)}" for key, value in needed.items())
    trusted = {key: Path(given[key]) for key in TLS if key in given} | tls
    return Registration(config, token_file, called, secret, trusted, missing, "region" in given)


def _differs(key: str, given: dict[str, Any], more: dict[str, str]) -> bool:
    return key in more and str(Path(given[key]).absolute()) != more[key]


def request(client: Client, registration: Registration, site: str | None, device: str, version: str) -> Enrolment:
    """Request the worker's admission. Repeated with the same secret, it is the same request."""
    spec = EnrolmentSpec(
        site=site, worker=registration.name, device=device, version=version, secret_hash=hash_of(registration.secret)
    )
    return client.ask_to_join(spec)


def wait_for(client: Client, enrolment: Enrolment, sleep: Callable[[float], None] = time.sleep) -> Enrolment:
    """Return the enrolment once it is decided. `client` authenticates with the secret.

    Answers that no coordinator wrote end the wait no earlier than the enrolment expires. Raises Problem.
    """
    expires_at = time.monotonic() + enrolment.expires_in_seconds
    while enrolment.state == "pending":
        sleep(enrolment.poll_seconds)
        try:
            enrolment = client.enrolment(enrolment.id)
        except Problem as problem:
            if not may_pass(problem) or time.monotonic() > expires_at:
                raise
    return enrolment


def rotate(connect: Callable[[str], Client], file: Path) -> RotationResult:
    """Replace the secret in `file` by a new one. After an interruption at any point, call it again.

    Raises Problem, and SettingsError for a file without a secret.
    """
    present = _secret_in(file)
    following = file.with_name(file.name + NEXT)
    if not following.exists():
        write_secret(following, new_secret("site"))
    fresh = _secret_in(following)
    try:
        with connect(present) as client:
            rotated = client.rotate(hash_of(fresh))
    except Unauthenticated as refusal:
        # An earlier attempt may have succeeded, and the grace period of the old secret have ended.
        with connect(fresh) as client, suppress(Unauthenticated):
            rotated = client.rotate(hash_of(fresh))
            replace(following, file)
            return rotated
        raise refusal from None
    replace(following, file)
    return rotated


def _secret_in(file: Path) -> str:
    try:
        secret = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingsError(f"{file} cannot be read as a token: {unread(file, fault)}") from fault
    if not secret.isprintable() or not secret:
        raise SettingsError(f"{file} holds no token")
    return secret


def _read(config: Path) -> dict[str, Any]:
    try:
        return toml_of(config.read_bytes())
    except (OSError, ValueError) as fault:
        raise SettingsError(f"{config} cannot be read: {reason_of(fault)}") from fault


def _host_name() -> str:
    """Return this machine's name, reduced to the characters of a label."""
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname().partition(".")[0]).strip("-")[:64] or "worker"

"""A worker's settings: a TOML file, overridden by environment variables TESSERA_WORKER_*.

The worker reads the file at its start, and the policy and budgets whenever the file changes
(`worker.settings_reload`).

url = "https://tessera.example"
token_file = "/run/secrets/tessera"
name = "north-1"
state_dir = "/var/lib/tessera"

[datasets.ward-images]
kind = "images"
folder = "/data/ward-images"
labels = ["benign", "malignant"]
size = 224

[policy]
never_send = ["*embeddings*"]
"""

import os
import shutil
import ssl
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from tessera.shared.api.secure_sums import HELPER_KINDS
from tessera.shared.api.token_format import TOKEN_TEXT
from tessera.shared.client.transport import Credential, tls_context
from tessera.shared.diagnostics import Setting, effective, toml_of
from tessera.shared.environment import PREFIX, refuse_misspelt
from tessera.shared.near_names import absent, did_you_mean, unread
from tessera.shared.problems import Invalid
from tessera.shared.schema import Bytes, Label, Resources, TaskKind, Value
from tessera.shared.secure_sums.messages import LEAST_QUORUM, MAX_SITE_WEIGHT, Fingerprint
from tessera.shared.urls import require_private
from tessera.shared.validation_errors import messages_of
from tessera.worker.compute import Compute
from tessera.worker.data.partition.schemes import SitePartition
from tessera.worker.governance.notices import NoticeSettings
from tessera.worker.governance.policy import GIB, Allowance, Policy

# Not TESSERA_ alone: TESSERA_TOKEN belongs to the command line, and may be an administrator's.
ENVIRONMENT_PREFIX = "TESSERA_WORKER_"
MADE = (
    "state_dir",
    "ledger_dir",
    "runs_dir",
    "inbox_dir",
    "audit_dir",
    "audit_key_file",
    "held_out_key_file",
)
"""Settings of folders and files that a worker creates, each in a folder that is there."""


HELD_OUT_KEY_FILE = "held-out.key"
"""The name, in a worker's state folder, of the file of the key that decides which examples are held out."""
PREPARED_FOLDER = "prepared"
"""The name of the folder in a worker's state folder with the files made from its data sets, a folder for each."""

S = TypeVar("S", bound="DataSettings")


class SettingsError(ValueError):
    """The settings cannot be used. The message names the wrong key and the reason."""


class DataSource(BaseModel):
    """The source of a data set: its kind, the part of it to use, and the options of that kind."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str = Field(description="arrays, digits, text, chat, images, imagetext, or a kind that is installed")
    part: SitePartition | None = Field(default=None, description="the part of it to use; all of it if unset")
    held_out: float | None = Field(default=None, gt=0, lt=1, description="share of it to hold out from training")
    opt_out: Path | None = Field(
        default=None, description="file of the values of `group`, one a line, whose examples no task may use"
    )
    use: Literal["train", "evaluate"] = Field(
        default="train", description="whether runs train on it, or evaluate versions on all of it"
    )
    privacy: Allowance | None = Field(default=None, description="its privacy budget; that of all data sets if unset")
    ledger: Label | None = Field(
        default=None, description="the ledger that it shares with data sets of the same examples; its own if unset"
    )

    @model_validator(mode="after")
    def _trains_on_the_rest(self) -> Self:
        if self.use == "evaluate" and self.held_out is not None:
            raise ValueError("held_out: nothing trains on the rest of a data set for evaluation; leave held_out out")
        return self

    @property
    def options(self) -> dict[str, object]:
        return dict(self.model_extra or {})

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, beginning with class 0; empty if the settings have none."""
        names = self.options.get("labels")
        return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


class DataSources(BaseModel):
    """The settings by which an executor loads data sets. They hold no token."""

    model_config = ConfigDict(frozen=True)

    datasets: dict[str, DataSource]
    loaders: int | None
    held_out_key_file: Path
    prepared: Path
    """The folder of the files made from data sets, a folder for each."""


DeviceName = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?)$")]


class DataSettings(BaseSettings):
    """The settings about data. Other keys of a worker's settings are ignored."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", frozen=True, extra="ignore"
    )

    datasets: dict[Label, DataSource] = Field(
        min_length=1, description="the data of each data set that runs may name, as `[datasets.NAME]`"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  (the signature is theirs)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment override the file."""
        return env_settings, init_settings


class SecureSumsSettings(Value):
    """This site in secure sums, which hide its updates from the coordinator."""

    site: Label = Field(description="this site's name at the coordinator")
    roster: dict[Label, Fingerprint] = Field(
        default={},
        description="the fingerprints of the other sites' keys, as people there report them; `tessera worker roster` "
        "prints this site's",
    )
    quorum: int = Field(
        default=5,
        ge=LEAST_QUORUM,
        description="the least sites in a sum that this site sends to or opens",
    )
    helper: bool = Field(default=False, description="whether it opens sums of runs that name it as a helper")
    embeddings: bool = Field(
        default=False,
        description="whether embeddings of tokens and positions, and heads over a vocabulary, may go into sums "
        "without noise: a row that this site alone moves, such as that of a rare word, can be read from the sum",
    )
    weight: int = Field(
        default=1,
        ge=1,
        le=MAX_SITE_WEIGHT,
        description="its weight in exact sums: 1 at all sites, or by classes of size on which they agree. Keep it: "
        "a change between two sums shows the site's update in their difference",
    )


class SlurmSettings(Value):
    """The jobs of Slurm that execute tasks."""

    partition: str | None = Field(default=None, description="partition of the jobs; Slurm's default if unset")
    account: str | None = Field(default=None, description="account that the jobs are charged to")
    gpus: int = Field(default=0, ge=0, le=8, description="GPUs of each job, all on one node; 0: it trains on the CPU")
    time: str | None = Field(
        default=None,
        pattern=r"^[0-9:-]+$",
        description="time limit of each job, as Slurm writes it (D-HH:MM:SS); the partition's if unset",
    )
    lines: tuple[Annotated[str, Field(pattern=r"^--[ -~]+$")], ...] = Field(
        default=(), description="further options of sbatch, each a line `#SBATCH` of the job's script"
    )
    warning_seconds: PositiveInt = Field(
        default=120, le=65535, description="seconds before the time limit at which a job writes a checkpoint"
    )
    look_seconds: PositiveFloat = Field(
        default=15.0, description="seconds between two questions to Slurm about a job"
    )


class ExecutorSettings(BaseModel):
    """The way to execute tasks, if not in processes of the worker on its machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="a training script of the site's own: the program and its arguments, run without a shell",
    )
    launcher: Literal["local", "slurm"] = Field(
        default="local", description="slurm: each task that trains or evaluates is a job of Slurm"
    )
    slurm: SlurmSettings | None = Field(default=None, description='the jobs, with launcher = "slurm"')
    timeout_seconds: PositiveFloat | None = Field(
        default=None,
        description="longest time of the script, without its time in a queue; policy.max_task_seconds alone if unset",
    )

    @field_validator("command")
    @classmethod
    def _is_there(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command and shutil.which(command[0]) is None:
            raise ValueError(f"there is no program {command[0]!r} that can be run: give its whole path")
        return command

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.command is None and (self.launcher == "local" or self.timeout_seconds):
            lacks = 'command or launcher = "slurm"' if self.launcher == "local" else "command, beside timeout_seconds"
            raise ValueError(f"it lacks {lacks}")
        if self.slurm and self.launcher != "slurm":
            raise ValueError('slurm: set launcher = "slurm", or leave it out')
        return self


class RegionSettings(Value):
    """A region whose sites train in place of this worker (`tessera regional`)."""

    url: str = Field(pattern=r"^https?://", description="URL of the region's own coordinator")
    token_file: Path = Field(description="file with a token of role orchestrator of that coordinator")
    ca_bundle: Path | None = Field(default=None, description="the CAs to trust for it (PEM) in place of the system's")
    min_sites: int = Field(
        default=3,
        ge=2,
        description="the fewest sites behind anything that leaves the region: its rounds need as many, and a block "
        "that fewer of them sent stays here",
    )
    rounds: PositiveInt = Field(default=1, le=1000, description="rounds in the region for each round of the parent")
    deadline_seconds: PositiveFloat | None = Field(
        default=None, description="deadline of a round in the region; if unset, .8 of the parent's for all of them"
    )


REGION = "region"
"""The kind of a data set that the sites of a region have."""


class WorkerSettings(DataSettings):
    """A worker's settings. Unknown keys are refused."""

    model_config = SettingsConfigDict(extra="forbid")

    url: Annotated[str, Field(pattern=r"^https?://", description="URL of the coordinator")]
    token: SecretStr | None = Field(default=None, description="overrides token_file")
    token_file: Path | None = Field(default=None, description="file with the site's token")
    ca_bundle: Path | None = Field(default=None, description="the CAs to trust (PEM) in place of the system's")
    client_cert: Path | None = Field(default=None, description="a client certificate for the coordinator (PEM)")
    client_key: Path | None = Field(default=None, description="the key of client_cert, if it is in a separate file")
    name: Label = Field(description="this worker's name, unique within the site")
    state_dir: Path = Field(description="folder of cache and vault; not shared with other workers")
    device: DeviceName = Field(default="auto", description="the device; auto uses a GPU if there is one")
    devices: Literal["all"] | PositiveInt | tuple[DeviceName, ...] = Field(
        default=1,
        description="several devices that train each task together: all GPUs, a number of `device`'s kind, or a list",
    )
    held_out_key_file: Path | None = Field(
        default=None,
        description="file of the secret key that decides which examples are held out, created if missing; in "
        "state_dir if unset. Workers with the same examples need the same key",
    )
    kinds: tuple[Literal["train", "evaluate", "describe", "rehearse", "attack"], ...] = Field(
        default=("train", "evaluate", "describe", "rehearse", "attack"),
        min_length=1,
        description="kinds of tasks to claim",
    )
    threads: PositiveInt | None = Field(default=None, description="threads of one operation; torch's choice if unset")
    micro_batch: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="examples in one forward and backward pass; a larger batch is trained in pieces, whose gradients "
        "add up to the batch's. Unset, a batch is one piece; auto halves the pieces when memory runs out",
    )
    loaders: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="processes that read images from disk, ahead of training; 0: a thread of the worker. Unset, 2 "
        "with a GPU and else 0",
    )
    checkpoint_minutes: NonNegativeFloat = Field(
        default=10.0,
        description="minutes between two checkpoints of a task's training, from which it resumes after the worker "
        "was stopped or killed; 0 for none",
    )
    duration_quantum_seconds: PositiveFloat = Field(
        default=16.0,
        description="a task under differential privacy or in a secure sum ends at a multiple of this since it began, "
        "so that its duration reveals little of an example",
    )
    compute: Compute = Compute()
    executor: ExecutorSettings | None = Field(
        default=None, description="a script of the site's own, or jobs of Slurm, that train in place of the worker"
    )
    region: RegionSettings | None = Field(
        default=None, description="a region that trains in place of this worker (`tessera regional`); none if unset"
    )
    cache_bytes: Bytes = Field(default=20 * GIB, description="size of the cache of blobs between rounds")
    base_sources: tuple[str, ...] = Field(
        default=(),
        description="folders of snapshots, names on the hub at a commit (NAME@COMMIT), or addresses of mirrors, for "
        "the blocks of external bases that `tessera worker cache add` has not added. Each block is verified by its "
        "digest",
    )
    keep_vaults_days: PositiveFloat | Literal["forever"] = Field(
        default=30.0,
        description="days to keep a run's vault after its end, since the vault's last use",
    )
    poll_seconds: int = Field(
        default=25, ge=0, le=50, description="seconds that the coordinator may hold a claim open"
    )
    mappings: tuple[Path, ...] = Field(
        default=(), description="files that describe attention layouts unknown to Tessera"
    )
    resources: Resources = Field(
        default={}, description="limits of this worker, for methods that give some workers less work"
    )
    secure_sums: SecureSumsSettings | None = Field(
        default=None, description="this site in runs with secure sums; it takes no part in them if unset"
    )
    notices: NoticeSettings = NoticeSettings()
    policy: Policy = Policy()
    privacy: Allowance | None = Field(default=None, description="privacy budget of each data set")
    ledger_dir: Path | None = Field(default=None, description="folder of the privacy ledgers; in state_dir if unset")
    runs_dir: Path | None = Field(default=None, description="folder of the run history; in state_dir if unset")
    inbox_dir: Path | None = Field(
        default=None,
        description="folder of runs that wait for approval; in state_dir if unset. A site's workers may share it",
    )
    audit_dir: Path | None = Field(default=None, description="folder of the audit; in state_dir if unset")
    audit_key: SecretStr | None = Field(
        default=None, description="key that protects audit and ledgers; overrides audit_key_file"
    )
    audit_key_file: Path | None = Field(
        default=None, description="file of that key, created if missing; beside state_dir if unset"
    )
    metrics_file: Path | None = Field(
        default=None, description="file of metrics for Prometheus' node_exporter; *.prom"
    )
    log: Literal["auto", "console", "json"] = Field(
        default="auto", description="form of the log; auto: console on a terminal, else json"
    )
    share_log: bool = Field(
        default=False,
        description="whether heartbeats carry the last 20 events of this worker: the steps of rounds that began or "
        "ended, and when, without figures or texts",
    )

    @property
    def all_kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of tasks that it does, as a helper too. A region only trains."""
        if self.region:
            return ("train",)
        helps = self.secure_sums is not None and self.secure_sums.helper
        return (*self.kinds, *(HELPER_KINDS if helps else ()))

    @property
    def own_script(self) -> ExecutorSettings | None:
        """The settings of the site's own script; None without one."""
        return self.executor if self.executor and self.executor.command else None

    @property
    def slurm(self) -> SlurmSettings | None:
        """The settings of jobs of Slurm; None if tasks are executed on this machine."""
        if self.executor is None or self.executor.launcher != "slurm":
            return None
        return self.executor.slurm or SlurmSettings()

    @property
    def logs_to_console(self) -> bool:
        """True if a person reads the log."""
        return sys.stdout.isatty() if self.log == "auto" else self.log == "console"

    @property
    def allowances(self) -> dict[str, Allowance]:
        """The privacy budgets of the data sets that have one, by name."""
        given = {name: source.privacy or self.privacy for name, source in self.datasets.items()}
        return {name: allowance for name, allowance in given.items() if allowance}

    @property
    def sources(self) -> DataSources:
        """The sources of the data sets that the policy lets runs use."""
        return DataSources(
            datasets={
                name: source.model_copy(update={"privacy": None})
                for name, source in self.datasets.items()
                if self.policy.allows_dataset(name)
            },
            loaders=self.loaders,
            held_out_key_file=self.held_out_key_file or self.state_dir / HELD_OUT_KEY_FILE,
            prepared=self.state_dir / PREPARED_FOLDER,
        )

    @model_validator(mode="after")
    def _shards_over_devices(self) -> Self:
        if self.compute.shard and self.devices == 1:
            raise ValueError("compute.shard divides a model among several devices: set devices, or remove shard")
        if self.compute.shard and self.micro_batch is not None:
            raise ValueError("micro_batch: with compute.shard all devices train whole batches: remove micro_batch")
        return self

    @model_validator(mode="after")
    def _names_devices_once(self) -> Self:
        if self.slurm and (self.device != "auto" or self.devices != 1):
            raise ValueError("device, devices: executor.slurm.gpus says what the jobs train on: leave them out")
        if self.slurm and self.region:
            raise ValueError("executor: the workers of a region's sites train in place of this one: leave it out")
        return self

    @model_validator(mode="after")
    def _may_train(self) -> Self:
        rules = ("require_privacy", "max_weekly_privacy", "max_total_privacy", "require_secure_sums")
        named = [f"policy.{name}" for name in (*rules, "require_client_privacy") if getattr(self.policy, name)]
        # A data set that only evaluates may have a budget, for its figures.
        of_data = (name for name, source in self.datasets.items() if source.privacy and source.use == "train")
        named += ["privacy"] * (self.privacy is not None) + [f"datasets.{name}.privacy" for name in of_data]
        if self.own_script and named:
            raise ValueError(
                f"executor: a script counts as not private, so that {', '.join(named)} would refuse its training: "
                "remove executor or these settings"
            )
        return self

    @model_validator(mode="after")
    def _is_a_region(self) -> Self:
        others = [name for name, source in self.datasets.items() if (source.kind == REGION) != bool(self.region)]
        if others:
            which = f"datasets.{others[0]}.kind"
            raise ValueError(f'{which}: it is "{REGION}" in the settings of a region ([region]), and in no others')
        rules = ("require_privacy", "max_weekly_privacy", "max_total_privacy", "require_client_privacy")
        unfit = [name for name in ("executor", "secure_sums", "privacy") if getattr(self, name)]
        unfit += [f"policy.{name}" for name in (*rules, "require_secure_sums") if getattr(self.policy, name)]
        if self.region and (
            unfit := unfit + [f"datasets.{n}.privacy" for n, d in self.datasets.items() if d.privacy]
        ):
            raise ValueError(f"region: {', '.join(unfit)} are for a site with data; the region's sites set them")
        return self

    @model_validator(mode="after")
    def _lasts_a_quantum(self) -> Self:
        if self.policy.max_task_seconds < self.duration_quantum_seconds:
            raise ValueError(
                f"policy.max_task_seconds is {self.policy.max_task_seconds:g}: tasks that wait for "
                f"duration_quantum_seconds would all fail; set it to {self.duration_quantum_seconds:g} or more"
            )
        return self

    @model_validator(mode="after")
    def _has_token(self) -> Self:
        if self.token is None and self.token_file is None:
            raise ValueError("give token_file (or token), with the token that an administrator issued")
        return self


def read_settings(path: Path) -> WorkerSettings:
    """Return the settings of a TOML file and the environment. Raises SettingsError."""
    return parsed_settings(path, raw_settings(path))


def parsed_settings(path: Path, raw: bytes) -> WorkerSettings:
    """Return the settings in `raw`, the content of `path`, and the environment. Raises SettingsError."""
    settings = _parsed(path, raw, WorkerSettings)
    try:
        require_private(settings.url)
    except Invalid as refusal:
        raise SettingsError(f"{path}: url: {refusal.detail}. {refusal.advice}") from refusal
    for name in MADE:
        _require_place(path, name, getattr(settings, name), settings.state_dir)
    return settings


def _require_place(path: Path, name: str, place: Path | None, state_dir: Path) -> None:
    """Raise SettingsError if a folder or file would be created in a folder that is not there: its name is probably
    misspelt."""
    # Another user's folders may be closed to who only reads the settings, and a file server may be away.
    with suppress(OSError):
        if place and not place.parent.is_dir() and not place.parent.is_relative_to(state_dir):
            raise SettingsError(f"{path}: {name}: there is no folder {place.parent}; create it, or correct {name}")
        if place and name.endswith("_dir") and place.exists() and not place.is_dir():
            raise SettingsError(f"{path}: {name}: {place} is a file; name a folder")


def read_data_settings(path: Path) -> DataSettings:
    """Return the data settings of a settings file, or of a file with nothing else. Raises SettingsError."""
    return _parsed(path, raw_settings(path), DataSettings)


def raw_settings(path: Path) -> bytes:
    """Return the bytes of a settings file. Raises SettingsError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SettingsError(
            absent(path, "`tessera worker join` writes one, and `tessera docs site` describes it")
        ) from None
    except OSError as fault:
        raise SettingsError(f"{path} cannot be read: {fault.strerror}; name another with --config") from fault


NO_DATASET = ". Add a table [datasets.NAME] with the kind of the data: see `tessera docs data`"


def _parsed(path: Path, raw: bytes, kind: type[S]) -> S:
    _require_known_variables()
    try:
        given = toml_of(raw)
        if unknown := sorted(given.keys() - WorkerSettings.model_fields):
            faults = "; ".join(
                f"{key}: unknown key{did_you_mean(key, WorkerSettings.model_fields)}" for key in unknown
            )
            raise SettingsError(f"{path}: {faults}")
        return kind(**given)
    except tomllib.TOMLDecodeError as fault:
        raise SettingsError(f"{path} is not TOML: {fault}") from fault
    except SourceError as fault:
        raise SettingsError(f"environment: {fault}") from fault
    except ValidationError as fault:
        hint = NO_DATASET if any(error["loc"] == ("datasets",) for error in fault.errors()) else ""
        raise SettingsError(f"{path}: {_faults(fault, kind)}{hint}") from None


def _require_known_variables() -> None:
    """Raise SettingsError for a variable that is no setting: pydantic passes over it."""
    names = {f"{ENVIRONMENT_PREFIX}{field}".upper(): field for field in WorkerSettings.model_fields}
    for variable in sorted(os.environ):
        table = variable.upper().partition("__")[0]
        if table.startswith(ENVIRONMENT_PREFIX) and table not in names:
            raise SettingsError(f"environment: {variable}: no such setting{did_you_mean(variable, names)}")
    try:
        refuse_misspelt(os.environ, {name.removeprefix(PREFIX) for name in names})
    except Invalid as refusal:
        raise SettingsError(f"environment: {refusal.detail} {refusal.advice}") from None


def effective_settings(path: Path) -> list[Setting]:
    """Return every setting of a worker that starts now, and its origin. Raises SettingsError."""
    settings = read_settings(path)
    file = toml_of(path.read_bytes())
    return effective(settings.model_dump(), file, os.environ, ENVIRONMENT_PREFIX)


def _faults(fault: ValidationError, kind: type[BaseModel]) -> str:
    """Return each wrong key and the reason, without the values: a token may be among them."""
    said, variables = [], {variable.upper(): variable for variable in os.environ}
    for place, message in messages_of(fault.errors(include_url=False), kind):
        steps = [str(step) for step in place]
        key = variables.get(f"{ENVIRONMENT_PREFIX}{'__'.join(steps)}".upper(), ".".join(steps)) or "settings"
        said.append(f"{key}: {message}")
    return "; ".join(said)


def token_of(settings: WorkerSettings) -> str:
    """Return the token. Raises SettingsError if it is empty, or cannot be read or sent."""
    if settings.token is not None:
        where, token = "token: the value", settings.token.get_secret_value().strip()
    else:
        where = f"token_file: {settings.token_file}"
        try:
            token = settings.token_file.read_text(encoding="utf-8-sig").strip() if settings.token_file else ""
        except (OSError, UnicodeDecodeError) as fault:
            raise SettingsError(f"{where} cannot be read as a token: {unread(settings.token_file, fault)}") from fault
    if not token:
        raise SettingsError(f"{where} is empty")
    if not TOKEN_TEXT.fullmatch(token):
        remedy = "write it as it was issued, without quotation marks"
        raise SettingsError(f"{where} has characters that no token has: {remedy}")
    return token


def credential_of(settings: WorkerSettings) -> Credential:
    """Return the token, which is read again after a refusal: `tessera worker rotate` may have replaced it.

    Raises SettingsError.
    """

    def reread() -> str | None:
        # A file that became unreadable says less than the refusal.
        with suppress(SettingsError):
            return token_of(settings)
        return None

    return Credential(token_of(settings), reread)


def tls_of(settings: WorkerSettings) -> ssl.SSLContext:
    """Return the TLS context: trusted CAs and the client certificate. Raises SettingsError."""
    try:
        return tls_context(settings.ca_bundle, settings.client_cert, settings.client_key)
    except Invalid as refusal:
        raise SettingsError(f"{refusal.detail}. {refusal.advice}") from refusal

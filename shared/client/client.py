"""The REST API as typed methods, for workers, the command line and notebooks.

    with Client("https://tessera.example", token) as client:
        for run in client.runs():
            print(run.name, run.state)

Every method raises a `shared.problems.Problem` for a refusal, after retrying temporary failures.
"""

import io
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar
from urllib.parse import quote

import httpcore
import httpx
from pydantic import BaseModel, RootModel, ValidationError

from tessera.shared.api.admin import (
    About,
    Approval,
    AuditEntry,
    Enrolment,
    EnrolmentSpec,
    IssuedToken,
    Rotation,
    RotationResult,
    Site,
    SiteSpec,
    Status,
    Study,
    StudyMember,
    StudySpec,
    Token,
    TokenSpec,
    Withdrawal,
    WorkerView,
)
from tessera.shared.api.framing import MEDIA_TYPE, pack_submission, unpack, unpack_task
from tessera.shared.api.runs import (
    Measurement,
    ParentVersion,
    Preview,
    Round,
    Run,
    RunPatch,
    RunSpec,
    SiteCoverage,
    SiteReport,
)
from tessera.shared.api.secure_sums import HelperReport
from tessera.shared.api.tasks import (
    LEFT_OUT,
    Claim,
    EvaluationResult,
    Failure,
    Heartbeat,
    Lease,
    LiveValues,
    NamedTask,
    Release,
    ReportResult,
    Submission,
    Task,
    TaskView,
)
from tessera.shared.api.tasks import Progress as TaskProgress
from tessera.shared.api.token_format import TOKEN_TEXT
from tessera.shared.api.versions import Manifest, Version
from tessera.shared.client.bulk import FilePart
from tessera.shared.client.transfers import Progress, Transfers
from tessera.shared.client.transport import (
    Credential,
    HttpTransport,
    NotUnderstood,
    may_pass,
    tls_context,
)
from tessera.shared.environment import refuse_misspelt
from tessera.shared.json_limits import bounded
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.near_names import unread
from tessera.shared.problems import (
    Forbidden,
    Invalid,
    NotFound,
    OffsetMismatch,
    PreconditionFailed,
    Problem,
    Unauthenticated,
    faults_of,
)
from tessera.shared.schema import DEFAULT_STUDY, Page, RunState
from tessera.shared.tensors.hashing import Hashing, Sink, digest_at
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.urls import require_private

# Long enough for a passing fault, short enough for a person who waits at a terminal.
PATIENCE_SECONDS = 10.0

# Long enough to keep watching a run while its coordinator restarts.
WATCHING_PATIENCE_SECONDS = 300.0

DEFAULT_URL = "http://127.0.0.1:8470"

DOSSIER_SECONDS = 600.0
"""The time limit for a dossier to begin: the coordinator hashes all weights before that."""

_FILES = ("token_file", "ca_bundle", "client_cert", "client_key")

MAX_PAGES = 20_000
"""Pages of a collection. The audit of years has fewer; a malicious coordinator could go on for ever."""

MAX_CHANGES = 10
"""Attempts at a change of a resource that something else changes in between each time."""

T = TypeVar("T", bound=BaseModel)
C = TypeVar("C")


class Client:
    """A client of a coordinator, with one token."""

    def __init__(self, url: str, token: str | Credential | None = None, **transport: Any) -> None:
        self._transport = HttpTransport(url, token, **transport)
        self._transfers = Transfers(self._transport)
        self.left_out: str | None = None
        """The run that left the worker out at its last claim since its version is too old, and why."""

    @classmethod
    def from_environment(cls, given: Mapping[str, str | Path | None] | None = None, **transport: Any) -> Self:
        """Return a client from these options of `from_options`, and for those that are absent or None from the
        commands' variables: TESSERA_URL, TESSERA_TOKEN or TESSERA_TOKEN_FILE, TESSERA_CA_BUNDLE, TESSERA_CLIENT_CERT
        and TESSERA_CLIENT_KEY. Raises Invalid as `from_options` does, and for a misspelt variable."""
        refuse_misspelt(os.environ)
        names = ("url", "token", *_FILES)
        chosen = {name: value for name, value in (given or {}).items() if value is not None}
        values = {name: os.environ.get(f"TESSERA_{name.upper()}") or None for name in names} | chosen
        if "token_file" in chosen and "token" not in chosen:
            # The variable TESSERA_TOKEN must not override a file that the caller names.
            values["token"] = None
        url, token, *files = (values[name] for name in names)
        paths = {name: Path(file) if file else None for name, file in zip(_FILES, files, strict=True)}
        return cls.from_options(str(url or DEFAULT_URL), str(token) if token else None, **paths, **transport)

    @classmethod
    def from_options(
        cls,
        url: str,
        token: str | None = None,
        token_file: Path | None = None,
        ca_bundle: Path | None = None,
        client_cert: Path | None = None,
        client_key: Path | None = None,
        **transport: Any,
    ) -> Self:
        """Return a client from a user's options; `token` overrides `token_file`.

        Raises Invalid for a file that cannot be read, and for a URL that would expose the token.
        """
        require_private(url)
        verify = tls_context(ca_bundle, client_cert, client_key)
        return cls(url, read_token(token, token_file), verify=verify, **transport)

    def close(self) -> None:
        self._transport.close()

    def trace(self, traceparent: str | None) -> None:
        """Assign later requests to the trace of this traceparent, or to none."""
        self._transport.trace(traceparent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    # ------------------------------------------------------------ runs

    def create_run(self, spec: RunSpec, *, key: str | None = None) -> Run:
        """Start a run. `key` is an idempotency key: repeating the call with it returns the same run."""
        return self._create("/v1/runs", spec, Run, key)

    def preview_run(self, spec: RunSpec) -> Preview:
        """Return the workers that would take part in a run, and the reasons why others would not. Its model must be
        uploaded."""
        return self._post("/v1/runs/preview", spec, Preview)

    def runs(self) -> Iterator[Run]:
        return self._pages("/v1/runs", Run)

    def run(self, run_id: str) -> Run:
        return self._get(_run_path(run_id), Run)

    def set_run_state(self, run_id: str, state: RunState) -> Run:
        """Pause, resume ('running') or cancel a run, also one that changes at the same time, as at each commit."""
        patch = RunPatch.model_validate({"state": state})
        return despite_changes(lambda: self.patch_run(run_id, patch))

    def patch_run(self, run_id: str, patch: RunPatch, revision: int | None = None) -> Run:
        """Change the state, tags, note or settings of a run at this revision: the present one, unless it is given.

        Raises PreconditionFailed if the run has changed since then.
        """
        if revision is None:
            etag = self._transport.request("GET", _run_path(run_id)).header("ETag")
        else:
            etag = f'"{revision}"'
        return self._send(Run, "PATCH", _run_path(run_id), patch, {"If-Match": etag})

    def set_base(self, run_id: str, base: ParentVersion) -> Run:
        """Set the parent's version on which a region's run goes on; its blobs must be uploaded."""
        return self._send(Run, "PUT", f"{_run_path(run_id)}/base", base, {})

    def rounds(self, run_id: str) -> Iterator[Round]:
        """Yield every attempt at every round, with its tasks, oldest first."""
        return self._pages(f"{_run_path(run_id)}/rounds", Round)

    def round(self, run_id: str, number: int) -> Round:
        """Return the latest attempt at a round."""
        return self._get(f"{_run_path(run_id)}/rounds/{number}", Round)

    def versions(self, run_id: str, since: int = 0) -> Iterator[Version]:
        """Yield every version from the number `since` on, with its method's metrics."""
        return self._pages(f"{_run_path(run_id)}/versions", Version, since=since)

    def changes(self, run_id: str) -> Iterator[None]:
        """Yield whenever a run may have changed, from now on and without end: for a caller that then reads the run.

        Changes that happen while the caller reads make it yield once more. It also yields at every keep-alive of the
        stream of events, and when the stream cannot be read; the caller's own requests then show whether the
        coordinator is there.
        """
        events = f"{_run_path(run_id)}/events"
        while True:
            with suppress(Problem):
                for _ in self._transport.listen(events):
                    yield
            yield

    def measurements(self, run_id: str, since: int = 0, *, counts: bool = False) -> Iterator[Measurement]:
        """Yield the central and sites' metrics of every version from the number `since` on, with `counts` also the
        counts by subgroup."""
        asked: dict[str, int | str] = {"since": since, **({"counts": "true"} if counts else {})}
        return self._pages(f"{_run_path(run_id)}/metrics", Measurement, **asked)

    def reports(self, run_id: str) -> list[SiteReport]:
        """Return the report of each site to a run without rounds, with the state of its task."""
        return list(self._pages(f"{_run_path(run_id)}/reports", SiteReport))

    def coverage(self, run_id: str) -> Iterator[SiteCoverage]:
        """Yield each site that may take part and has the data set, with the rounds that were merged without it."""
        return self._pages(f"{_run_path(run_id)}/coverage", SiteCoverage)

    def export(
        self, run_id: str, file: BinaryIO, number: int | None = None, progress: Progress | None = None
    ) -> None:
        """Write a version (the latest if no number is given) as one safetensors file.

        `file` must be seekable: an interrupted export starts again from the beginning, and `progress` then receives
        minus the number of bytes written before. It is given up once it gets no further than before.
        """
        at = "latest" if number is None else str(number)
        start = furthest = file.tell()

        def attempt() -> None:
            nonlocal furthest
            if progress and file.tell() > start:
                progress(start - file.tell())
            file.seek(start)
            file.truncate()
            with self._transport.stream(f"{_run_path(run_id)}/versions/{at}/export", {}) as response:
                for piece in response.iter_raw():
                    file.write(piece)
                    furthest = max(furthest, file.tell())
                    if progress:
                        progress(len(piece))

        self._transport.patiently(attempt, lambda: furthest)

    def dossier(self, run_id: str, number: int) -> bytes:
        """Return the documents and the signature of a version's dossier as a zip, unverified."""
        path = f"{_run_path(run_id)}/versions/{number}/dossier"
        headers, timeout = {"Accept": "application/zip"}, httpx.Timeout(DOSSIER_SECONDS, connect=10.0)
        return self._transport.request("GET", path, headers=headers, timeout=timeout).content

    # ------------------------------------------------------------ blobs

    def has_blob(self, digest: str) -> bool:
        try:
            self._transport.request("HEAD", f"/v1/blobs/{digest}")
        except (NotFound, Forbidden, Unauthenticated):
            # A refusal of HEAD has no body. That of the upload says which role it needs.
            return False
        return True

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return a blob of at most `max_bytes`. Raises Invalid for a larger one, and DigestMismatch."""
        file = io.BytesIO()

        def bounded(_: int) -> None:
            if file.tell() > max_bytes:
                raise Invalid(f"{digest} has more than {max_bytes} bytes", remedy="Use fetch_blob for large blobs.")

        self.fetch_blob(digest, file, bounded)
        return file.getvalue()

    def fetch_blob(self, digest: str, file: BinaryIO, progress: Progress | None = None) -> int:
        """Write a blob to an empty file, resuming after interruptions, and return its size in bytes.

        Raises DigestMismatch if the bytes do not match the digest; the file's content is then invalid.
        """
        hashing = Hashing(file)
        self.copy_blob(digest, hashing, progress)
        hashing.require(digest)
        return file.tell()

    def copy_blob(self, digest: str, file: Sink, progress: Progress | None = None) -> None:
        """Fetch a blob as `fetch_blob` does, without verifying its digest."""
        self._transfers.receive(f"/v1/blobs/{digest}", file, progress)

    def copy_difference(
        self, run_id: str, number: int, since: int, file: Sink, below: int, progress: Progress | None = None
    ) -> bool:
        """Write the difference of version `number` from an earlier one to an empty file, without verifying a digest.
        Return False if there is none of fewer bytes than `below`."""

        def is_smaller(headers: httpx.Headers) -> bool:
            return int(headers.get("Content-Length", below)) < below

        path = f"{_run_path(run_id)}/versions/{number}/difference?since={since}"
        try:
            return self._transfers.receive(path, file, progress, is_smaller)
        except NotFound as problem:
            if not problem.from_document:
                raise
            return False

    def copy_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None:
        """Write several blobs one after the other, usually in one request, without verifying their digests."""
        self._transfers.receive_blobs(digests, file, progress)

    def model(self, digest: str) -> Model:
        return _read(Model, self.read_blob(digest), Model.read)

    def manifest(self, digest: str) -> Manifest:
        try:
            return Manifest.read(self.read_blob(digest), self.read_blob)
        except ValueError as fault:
            raise NotUnderstood(f"blob {digest} is not a manifest: {str(fault)[:300]}") from None

    def put_bytes(self, data: bytes) -> str:
        """Upload bytes and return their digest."""
        digest = digest_of(data)
        self.put_stream(digest, io.BytesIO(data), len(data))
        return digest

    def put_file(self, path: Path, progress: Progress | None = None, digest: str | None = None) -> str:
        """Upload a file, resuming after interruptions, and return its digest, computed unless given."""
        digest = digest or digest_at(path)
        with path.open("rb") as file:
            self.put_stream(digest, file, path.stat().st_size, progress)
        return digest

    def put_stream(self, digest: str, file: BinaryIO, length: int, progress: Progress | None = None) -> None:
        """Upload `length` bytes with this digest from a seekable file, resuming after interruptions."""
        self._transfers.upload(digest, file, length, progress)

    # ------------------------------------------------------------ tasks

    def claim(self, claim: Claim, wait_seconds: int = 25) -> Task | None:
        """Lease a task, waiting for one for up to `wait_seconds`."""
        headers = {"Content-Type": "application/json", "Prefer": f"wait={wait_seconds}", "Accept": MEDIA_TYPE}
        answer = self._transport.request("POST", "/v1/tasks/claim", content=claim.document(), headers=headers)
        self.left_out = answer.headers.get(LEFT_OUT)
        if answer.status_code != httpx.codes.OK:
            return None
        is_packed = answer.headers.get("Content-Type") == MEDIA_TYPE
        try:
            return _read(Task, answer.content, unpack_task if is_packed else None)
        except NotUnderstood as fault:
            # The round would wait for it as long as this worker calls. A proxy's answer names no task.
            with suppress(Problem):
                named = _read(NamedTask, answer.content, _packed_name if is_packed else None)
                said = "; ".join(map(str, fault.errors)) or fault.detail
                self.fail(named.id, Failure(token=named.token, code="invalid-task", detail=said[:2000]))
            raise

    def wait_as_claim(self, wait_seconds: int) -> None:
        """Wait for an answer as long as a claim without a task does, and lease none."""
        self._transport.request("GET", "/v1/tasks/claim", headers={"Prefer": f"wait={wait_seconds}"})

    def announce_claim(self, count: int, seconds: float) -> None:
        """Send the head of a claim of `count` bytes, and 8 KiB of it. Raises Problem: of the coordinator, which
        refuses a claim that is too long by its head, or of a proxy; Unreachable after `seconds` without an answer."""

        def begun() -> Iterator[bytes]:
            # Programs in Go hold a head back until 4 KiB follow it.
            yield b" " * 8192
            # As if the line had broken, after which httpcore reads the answer.
            raise httpcore.WriteError

        headers = {"Content-Length": str(count)}
        self._transport.once("POST", "/v1/tasks/claim", headers=headers, content=begun(), timeout=seconds)

    def tasks(self) -> Iterator[TaskView]:
        """Yield the site's own tasks, oldest first."""
        return self._pages("/v1/tasks", TaskView)

    def task(self, task_id: str) -> TaskView:
        return self._get(f"/v1/tasks/{task_id}", TaskView)

    def heartbeat(
        self, task_id: str, token: int, progress: TaskProgress | None = None, live: LiveValues | None = None
    ) -> Lease:
        """Renew a lease and report progress. Raises LeaseLost, TaskCancelled or RoundClosed if it has ended."""
        beat = Heartbeat(token=token, progress=progress, live=live)
        return self._post(f"/v1/tasks/{task_id}/heartbeat", beat, Lease)

    def submit(self, task_id: str, submission: Submission) -> TaskView:
        """Submit a finished `train` task with its update, or after that. It is accepted when this returns."""
        path = f"/v1/tasks/{task_id}/update"
        body, headers = pack_submission(submission), {"Content-Type": MEDIA_TYPE}
        return self._asked(TaskView, "POST", path, content=body, headers=headers)

    def submit_file(
        self, task_id: str, submission: Submission, file: BinaryIO, length: int, progress: Progress | None = None
    ) -> TaskView:
        """Submit a finished `train` task with its update of `length` bytes behind it, from a seekable file. After an
        interruption, upload the rest and submit."""
        headers, head = {"Content-Type": MEDIA_TYPE}, pack_submission(submission, length)
        part = FilePart(file, 0, length, progress or (lambda _: None), head)
        try:
            answer = self._transport.send_file("POST", f"/v1/tasks/{task_id}/update", headers, part)
            return _read(TaskView, answer.content)
        except Problem as problem:
            # A refused token may have been replaced, a part of the update may have been uploaded before, and a proxy
            # may take smaller requests alone.
            if not (may_pass(problem) or isinstance(problem, Unauthenticated | OffsetMismatch)):
                raise
        self.put_stream(submission.update, file, length, progress)
        return self.submit(task_id, submission)

    def submit_helper_report(self, task_id: str, report: HelperReport) -> TaskView:
        """Submit a helper's part of a secure sum."""
        return self._post(f"/v1/tasks/{task_id}/helper-report", report, TaskView)

    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView:
        return self._post(f"/v1/tasks/{task_id}/evaluation", evaluated, TaskView)

    def submit_report(self, task_id: str, report: ReportResult) -> TaskView:
        return self._post(f"/v1/tasks/{task_id}/report", report, TaskView)

    def fail(self, task_id: str, failure: Failure) -> TaskView:
        """Report that a task failed at this worker."""
        return self._post(f"/v1/tasks/{task_id}/failure", failure, TaskView)

    def release(self, task_id: str, token: int, code: str | None = None, detail: str = "") -> TaskView:
        """Release a task undone, so that it is offered again at once. A code and its detail say why."""
        why = Release(token=token, code=code, detail=detail[:2000])
        return self._post(f"/v1/tasks/{task_id}/release", why, TaskView)

    # ------------------------------------------------------------ sites, tokens, status

    def create_study(self, name: str, purpose: str = "") -> Study:
        return self._create("/v1/studies", StudySpec(name=name, purpose=purpose), Study)

    def studies(self) -> Iterator[Study]:
        """Yield the caller's studies without their members."""
        return self._pages("/v1/studies", Study)

    def study(self, name: str) -> Study:
        """Return a study with its members."""
        return self._get(f"/v1/studies/{quote(name, safe='')}", Study)

    def add_to_study(self, name: str, member: StudyMember) -> Study:
        return self._post(f"/v1/studies/{quote(name, safe='')}/add", member, Study)

    def remove_from_study(self, name: str, member: StudyMember) -> Study:
        """Remove a member from a study: a site's open tasks in its runs are cancelled."""
        return self._post(f"/v1/studies/{quote(name, safe='')}/remove", member, Study)

    def create_site(self, name: str, studies: Sequence[str] = (DEFAULT_STUDY,)) -> Site:
        return self._create("/v1/sites", SiteSpec(name=name, studies=tuple(studies)), Site)

    def sites(self) -> Iterator[Site]:
        return self._pages("/v1/sites", Site)

    def suspend_site(self, site_id: str) -> Site:
        """Suspend a site: its tokens are rejected from now on."""
        return self._post(f"/v1/sites/{site_id}/suspend", None, Site)

    def resume_site(self, site_id: str) -> Site:
        return self._post(f"/v1/sites/{site_id}/resume", None, Site)

    def withdraw_site(self, site_id: str, study: str | None = None) -> Withdrawal:
        """Withdraw a site for good, or from a study alone: end its tasks, and erase its updates and figures."""
        query = f"?study={quote(study)}" if study else ""
        return self._post(f"/v1/sites/{site_id}/withdraw{query}", None, Withdrawal)

    def workers(self) -> Iterator[WorkerView]:
        return self._pages("/v1/workers", WorkerView)

    def issue_token(self, spec: TokenSpec) -> IssuedToken:
        return self._create("/v1/admin/tokens", spec, IssuedToken)

    def tokens(self) -> Iterator[Token]:
        return self._pages("/v1/admin/tokens", Token)

    def revoke_token(self, token_id: str) -> None:
        self._transport.request("DELETE", f"/v1/admin/tokens/{token_id}")

    def rotate_token(self, token_id: str, secret_hash: str) -> RotationResult:
        """Replace the secret of any token by a secret with this hash, as an administrator."""
        return self._post(f"/v1/admin/tokens/{token_id}/rotate", Rotation(secret_hash=secret_hash), RotationResult)

    def ask_to_join(self, spec: EnrolmentSpec) -> Enrolment:
        """Request admission of a worker. Repeating the request with the same secret returns the same enrolment."""
        return self._post("/v1/enrolments", spec, Enrolment)

    def enrolment(self, enrolment_id: str) -> Enrolment:
        """Return an enrolment's state. The client's token is the secret that it was requested with."""
        return self._get(f"/v1/enrolments/{enrolment_id}", Enrolment)

    def enrolments(self, code: str | None = None) -> Iterator[Enrolment]:
        """Yield the pending enrolments, or those with this code in any state."""
        return self._pages("/v1/enrolments", Enrolment, **({} if code is None else {"code": code}))

    def approve(self, enrolment_id: str, approval: Approval) -> Enrolment:
        return self._post(f"/v1/enrolments/{enrolment_id}/approve", approval, Enrolment)

    def decline(self, enrolment_id: str) -> Enrolment:
        return self._post(f"/v1/enrolments/{enrolment_id}/decline", None, Enrolment)

    def rotate(self, secret_hash: str) -> RotationResult:
        """Replace the secret of this client's token by a secret with this hash."""
        return self._post("/v1/tokens/rotate", Rotation(secret_hash=secret_hash), RotationResult)

    def audit(self) -> Iterator[AuditEntry]:
        """Yield the audit log, oldest entry first; each entry holds the digest of the previous one."""
        return self._pages("/v1/admin/audit", AuditEntry)

    def audit_names(self) -> dict[str, str]:
        """Return the name behind each pseudonym of a site in the audit log."""
        return self._get("/v1/admin/audit/names", RootModel[dict[str, str]]).root

    def status(self) -> Status:
        return self._get("/v1/admin/status", Status)

    def about(self) -> About:
        return self._get("/version", About)

    # ------------------------------------------------------------ plumbing

    def _get(self, path: str, kind: type[T]) -> T:
        return self._asked(kind, "GET", path)

    def _post(self, path: str, body: BaseModel | None, kind: type[T], headers: dict[str, str] | None = None) -> T:
        return self._send(kind, "POST", path, body, headers or {})

    def _send(self, kind: type[T], method: str, path: str, body: BaseModel | None, headers: dict[str, str]) -> T:
        if body is None:
            return self._asked(kind, method, path, headers=headers)
        headers = {"Content-Type": "application/json", **headers}
        return self._asked(kind, method, path, content=body.model_dump_json(), headers=headers)

    def _asked(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        """Send a request, with retries, also of answers that are not of this kind, and return its answer."""
        return self._transport.patiently(lambda: _read(kind, self._transport.once(method, path, **options).content))

    def _create(self, path: str, body: BaseModel, kind: type[T], key: str | None = None) -> T:
        return self._post(path, body, kind, {"Idempotency-Key": key or uuid.uuid4().hex})

    def _pages(self, path: str, kind: type[T], **query: int | str) -> Iterator[T]:
        page_of: type[Page[T]] = Page[kind]  # type: ignore[valid-type]
        params = {name: str(value) for name, value in query.items()}
        for _ in range(MAX_PAGES):
            page = self._asked(page_of, "GET", path, params=params)
            yield from page.items
            if page.next_cursor is None:
                return
            if not page.items:
                break
            params["cursor"] = page.next_cursor
        raise NotUnderstood(f"the pages of {path} do not end")


def despite_changes(change: Callable[[], C]) -> C:
    """Read and change a resource by `change`, again if something else changed it in between. Raises Problem."""
    for _ in range(MAX_CHANGES - 1):
        with suppress(PreconditionFailed):
            return change()
    return change()


def read_token(text: str | None, file: Path | None) -> str | None:
    """Return the token given as text or else in a file, if any. Raises Invalid."""
    if not text and file:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as fault:
            detail = f"the token in {file} cannot be read: {unread(file, fault)}"
            raise Invalid(
                detail, remedy="Give --token, or another file (--token-file, TESSERA_TOKEN_FILE)."
            ) from fault
    token = (text or "").strip()
    if token and not TOKEN_TEXT.fullmatch(token):
        remedy = "Give it as it was issued, without quotation marks: --token, TESSERA_TOKEN, or in the token file."
        raise Invalid("the token has characters that no token has", remedy=remedy)
    return token or None


def _run_path(run_id: str) -> str:
    """Return the path of a run, whose id a person may have given. Raises NotFound if it is not an id."""
    if not re.fullmatch(r"[\w-]+", run_id, re.ASCII):
        raise NotFound(f"there is no run {run_id!r}", remedy="Give the id of a run.")
    return f"/v1/runs/{run_id}"


def _packed_name(body: bytes) -> NamedTask:
    return NamedTask.model_validate_json(bounded(unpack(body)[0]))


def _read(kind: type[T], content: bytes, read: Callable[[bytes], T] | None = None) -> T:
    try:
        return read(content) if read else kind.model_validate_json(bounded(content))
    except ValidationError as refusal:
        raise NotUnderstood(f"the answer is not a valid {kind.__name__}", errors=faults_of(refusal)) from None
    except ValueError as fault:
        raise NotUnderstood(f"the answer is not a valid {kind.__name__}: {fault}") from None

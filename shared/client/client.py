"""The REST API as typed methods. Workers, the command line and notebooks all use this.

    with Client("https://tessera.example", token) as client:
        for run in client.runs():
            print(run.name, run.state)

Every method raises a `shared.problems.Problem` for a refusal, after repeating what may be repeated.
"""

from __future__ import annotations

import base64
import io
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from tessera.shared.api.admin import (
    About,
    Approval,
    AuditEntry,
    Enrolment,
    EnrolmentSpec,
    IssuedToken,
    Rotated,
    Rotation,
    Site,
    SiteSpec,
    Status,
    Token,
    TokenSpec,
    WorkerView,
)
from tessera.shared.api.runs import Measurement, Preview, Round, Run, RunPatch, RunSpec
from tessera.shared.api.tasks import Claim, EvaluationResult, Failure, Heartbeat, Lease, Submission, Task, TaskView
from tessera.shared.api.tasks import Progress as TaskProgress
from tessera.shared.api.versions import BlobRequest, Difference, Manifest, Version
from tessera.shared.client.transport import Answer, Credential, NotUnderstood, Transport, Unreachable, tls_context
from tessera.shared.hashing import Hashing, Sink, digest_at
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.problems import Invalid, NotFound, OffsetMismatch, faults_of
from tessera.shared.schema import MAX_BLOBS_PER_REQUEST, Page, RunState
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.urls import require_private

ONE_REQUEST_BYTES = 1 << 20
"""A blob up to this size is uploaded in the request that announces it."""

DEFAULT_URL = "http://127.0.0.1:8470"

PIECE_BYTES = 1 << 18

FAST_LINE = 100e6
"""Bytes per second. To encode a block without loss, and to undo that as it is checked and as it is merged, takes some
4 ns of a core for each of its bytes, and saves the sending of a third of them."""

RATES_KEPT = 8

_FILES = ("token_file", "ca_bundle", "client_cert", "client_key")

_UPLOAD = re.compile(r"/v1/uploads/[A-Za-z0-9-]{1,64}")

T = TypeVar("T", bound=BaseModel)
Progress = Callable[[int], None]
"""Told the number of bytes each time some were moved."""


class Client:
    """A coordinator, as seen by one token."""

    def __init__(self, url: str, token: str | Credential | None = None, **transport: Any) -> None:
        self._transport = Transport(url, token, **transport)
        self._rates: deque[float] = deque(maxlen=RATES_KEPT)

    @classmethod
    def from_environment(cls) -> Self:
        """By the same variables as the commands: TESSERA_URL, TESSERA_TOKEN or TESSERA_TOKEN_FILE, TESSERA_CA_BUNDLE,
        TESSERA_CLIENT_CERT and TESSERA_CLIENT_KEY. Raises Invalid, as `as_told` does."""
        told = {name: os.environ.get(f"TESSERA_{name.upper()}") or None for name in ("url", "token", *_FILES)}
        files = {name: Path(file) if (file := told[name]) else None for name in _FILES}
        return cls.as_told(told["url"] or DEFAULT_URL, told["token"], **files)

    @classmethod
    def as_told(
        cls,
        url: str,
        token: str | None = None,
        token_file: Path | None = None,
        ca_bundle: Path | None = None,
        client_cert: Path | None = None,
        client_key: Path | None = None,
        **transport: Any,
    ) -> Self:
        """By what a person says; `token` is stronger than `token_file`.

        Raises Invalid for a file that cannot be read, and for a URL to which no token is to be sent.
        """
        require_private(url)
        verify = tls_context(ca_bundle, client_cert, client_key)
        return cls(url, read_token(token, token_file), verify=verify, **transport)

    def close(self) -> None:
        self._transport.close()

    def trace(self, traceparent: str | None) -> None:
        """All requests from now on belong to the trace that this names, or to none."""
        self._transport.trace(traceparent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ runs

    def create_run(self, spec: RunSpec, *, key: str | None = None) -> Run:
        """Start a run. `key` names this wish: the same key again gives the same run."""
        return self._create("/v1/runs", spec, Run, key)

    def preview_run(self, spec: RunSpec) -> Preview:
        """Return who would take part in such a run and who not and why; its model and version were uploaded
        before."""
        return self._post("/v1/runs/preview", spec, Preview)

    def runs(self) -> Iterator[Run]:
        return self._pages("/v1/runs", Run)

    def run(self, run_id: str) -> Run:
        return self._get(f"/v1/runs/{run_id}", Run)

    def set_run_state(self, run_id: str, state: RunState) -> Run:
        """Pause, resume ('running') or cancel a run, unless it changed in between."""
        etag = self._transport.request("GET", f"/v1/runs/{run_id}").headers["ETag"]
        patch = RunPatch.model_validate({"state": state})
        answer = self._send("PATCH", f"/v1/runs/{run_id}", patch, {"If-Match": etag})
        return _read(Run, answer.content)

    def rounds(self, run_id: str) -> Iterator[Round]:
        """Yield every attempt at every round, with its tasks, oldest first."""
        return self._pages(f"/v1/runs/{run_id}/rounds", Round)

    def round(self, run_id: str, number: int) -> Round:
        """Return the latest attempt at a round."""
        return self._get(f"/v1/runs/{run_id}/rounds/{number}", Round)

    def versions(self, run_id: str, since: int = 0) -> Iterator[Version]:
        """Yield every version from that number on, with what its method tells of it."""
        return self._pages(f"/v1/runs/{run_id}/versions", Version, since=since)

    def difference(self, run_id: str, number: int, since: int) -> Difference | None:
        """Return the blob that makes a version of an earlier one; None if they are too far apart for one, or if the
        line is so fast that to fetch the blocks takes no longer than to undo a difference."""
        if self.fast_line:
            return None
        params = {"since": str(since)}
        try:
            answer = self._transport.request("GET", f"/v1/runs/{run_id}/versions/{number}/difference", params=params)
        except NotFound as problem:
            if not problem.from_document:
                raise
            return None
        return _read(Difference, answer.content)

    def measurements(self, run_id: str, since: int = 0) -> Iterator[Measurement]:
        """Yield what was measured of each version from that number on, centrally and at sites."""
        return self._pages(f"/v1/runs/{run_id}/metrics", Measurement, since=since)

    def export(
        self, run_id: str, file: BinaryIO, number: int | None = None, progress: Progress | None = None
    ) -> None:
        """Write a version (the latest if no number is given) as one safetensors file.

        `file` must be seekable: an export that breaks off is begun again. `progress` is then told of its bytes anew,
        less those that it was told of before.
        """
        at = "latest" if number is None else str(number)
        start = file.tell()

        def attempt() -> None:
            if progress and file.tell() > start:
                progress(start - file.tell())
            file.seek(start)
            file.truncate()
            with self._transport.stream(f"/v1/runs/{run_id}/versions/{at}/export", {}) as response:
                for piece in response.iter_bytes(PIECE_BYTES):
                    file.write(piece)
                    if progress:
                        progress(len(piece))

        self._transport.patiently(attempt)

    # ------------------------------------------------------------ blobs

    def has_blob(self, digest: str) -> bool:
        try:
            self._transport.request("HEAD", f"/v1/blobs/{digest}")
        except NotFound:
            return False
        return True

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return a blob of at most `max_bytes`, whole. Raises Invalid for a larger one, and DigestMismatch."""
        file = io.BytesIO()

        def bounded(_: int) -> None:
            if file.tell() > max_bytes:
                raise Invalid(f"{digest} has more than {max_bytes} bytes", remedy="Use fetch_blob for large blobs.")

        self.fetch_blob(digest, file, bounded)
        return file.getvalue()

    def fetch_blob(self, digest: str, file: BinaryIO, progress: Progress | None = None) -> int:
        """Write a blob to an empty file, going on where it broke off, and returns its size in bytes.

        Raises DigestMismatch if the bytes are not those of its name; what was written is then worthless.
        """
        hashing = Hashing(file)
        self.copy_blob(digest, hashing, progress)
        hashing.require(digest)
        return file.tell()

    def copy_blob(self, digest: str, file: Sink, progress: Progress | None = None) -> None:
        """As `fetch_blob`, for who checks the bytes."""

        def attempt() -> None:
            start = file.tell()
            headers = {"Range": f"bytes={start}-"} if start else {}
            with self._transport.stream(f"/v1/blobs/{digest}", headers) as response:
                if start and response.status_code != httpx.codes.PARTIAL_CONTENT:
                    raise Unreachable("the rest of a blob was asked for, and all of it came")
                _pour(response, file, progress)

        with self._timing(file.tell):
            self._transport.patiently(attempt, moved=file.tell)

    def copy_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None:
        """Write several blobs one behind the other, in one request if all goes well, for who checks the bytes."""
        for first in range(0, len(digests), MAX_BLOBS_PER_REQUEST):
            some, before = tuple(digests[first : first + MAX_BLOBS_PER_REQUEST]), file.tell()

            def attempt(some: tuple[str, ...] = some, before: int = before) -> None:
                wanted = BlobRequest(digests=some, start=file.tell() - before).model_dump_json()
                headers = {"Content-Type": "application/json"}
                with self._transport.stream("/v1/blobs/read", headers, method="POST", content=wanted) as response:
                    _pour(response, file, progress)

            with self._timing(file.tell):
                self._transport.patiently(attempt, moved=file.tell)

    @contextmanager
    def _timing(self, position: Callable[[], int]) -> Iterator[None]:
        """Note how fast the line is, from a transfer. Of a small one the time is that of the request."""
        start, began_at = position(), time.monotonic()
        yield
        if (moved := position() - start) >= ONE_REQUEST_BYTES:
            self._rates.append(moved / (time.monotonic() - began_at))

    @property
    def fast_line(self) -> bool:
        """Whether bytes move so fast that to save some takes longer than to send them."""
        # What a line can do is what it did at best: at other times one end or the other was busy.
        return max(self._rates, default=0.0) > FAST_LINE

    def model(self, digest: str) -> Model:
        return _read(Model, self.read_blob(digest))

    def manifest(self, digest: str) -> Manifest:
        try:
            return Manifest.read(self.read_blob(digest), self.read_blob)
        except ValueError as fault:
            raise NotUnderstood(f"blob {digest} is no manifest: {str(fault)[:300]}") from None

    def put_bytes(self, data: bytes) -> str:
        """Upload bytes and return their digest."""
        digest = digest_of(data)
        self._upload(digest, io.BytesIO(data), len(data), None)
        return digest

    def put_file(self, path: Path, progress: Progress | None = None, digest: str | None = None) -> str:
        """Upload a file, going on where it broke off, and returns its digest, which need not be given."""
        digest = digest or digest_at(path)
        with path.open("rb") as file:
            self._upload(digest, file, path.stat().st_size, progress)
        return digest

    def _upload(self, digest: str, file: BinaryIO, length: int, progress: Progress | None) -> None:
        whole = length <= ONE_REQUEST_BYTES
        file.seek(0)
        headers = {
            "Upload-Length": str(length),
            "Upload-Complete": "?1" if whole else "?0",
            "Repr-Digest": f"sha-256=:{base64.b64encode(bytes.fromhex(digest[7:])).decode()}:",
            "Idempotency-Key": uuid.uuid4().hex,
        }
        body = file.read() if whole else b""
        answer = self._transport.request("POST", "/v1/uploads", headers=headers, content=body)
        if progress:
            progress(len(body))
        # What the coordinator holds already is complete at once, whatever its size.
        if answer.headers.get("Upload-Complete") != "?1":
            self._append(_upload_path(answer.headers.get("Location", "")), file, length, progress)

    def _append(self, location: str, file: BinaryIO, length: int, progress: Progress | None) -> None:
        offset = 0

        def attempt() -> None:
            nonlocal offset
            offset = int(self._transport.once("HEAD", location).headers["Upload-Offset"])
            file.seek(offset)
            headers = {
                "Upload-Offset": str(offset),
                "Upload-Complete": "?1",
                "Content-Type": "application/partial-upload",
                "Content-Length": str(length - offset),
            }
            pieces = _pieces(file, length - offset, progress)
            try:
                with self._timing(file.tell):
                    self._transport.once("PATCH", location, headers=headers, content=pieces)
            except OffsetMismatch as problem:
                # Another request of ours was still being written when this one asked for the offset.
                problem.retryable = True
                raise

        self._transport.patiently(attempt, moved=lambda: offset)

    # ------------------------------------------------------------ tasks

    def claim(self, claim: Claim, wait_seconds: int = 25) -> Task | None:
        """Ask for a task, waiting until there is one for up to `wait_seconds`."""
        headers = {"Prefer": f"wait={wait_seconds}"}
        answer = self._send("POST", "/v1/tasks/claim", claim, headers)
        return _read(Task, answer.content) if answer.status_code == httpx.codes.OK else None

    def tasks(self) -> Iterator[TaskView]:
        """Yield the site's own tasks, oldest first."""
        return self._pages("/v1/tasks", TaskView)

    def task(self, task_id: str) -> TaskView:
        return self._get(f"/v1/tasks/{task_id}", TaskView)

    def heartbeat(self, task_id: str, token: int, progress: TaskProgress | None = None) -> Lease:
        """Renew a lease, and say how far the task is. Raises LeaseLost, TaskCancelled or RoundClosed when there is
        nothing left to renew."""
        return self._post(f"/v1/tasks/{task_id}/heartbeat", Heartbeat(token=token, progress=progress), Lease)

    def submit(self, task_id: str, submission: Submission) -> TaskView:
        """Hand in a finished `train` task whose update was uploaded before. Accepted when it returns."""
        return self._post(f"/v1/tasks/{task_id}/update", submission, TaskView)

    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView:
        return self._post(f"/v1/tasks/{task_id}/evaluation", evaluated, TaskView)

    def fail(self, task_id: str, failure: Failure) -> TaskView:
        """Report that a task cannot be done here."""
        return self._post(f"/v1/tasks/{task_id}/failure", failure, TaskView)

    def release(self, task_id: str, token: int) -> TaskView:
        """Give a task back undone, to be offered again at once."""
        return self._post(f"/v1/tasks/{task_id}/release", Heartbeat(token=token), TaskView)

    # ------------------------------------------------------------ sites, tokens, status

    def create_site(self, name: str) -> Site:
        return self._create("/v1/sites", SiteSpec(name=name), Site)

    def sites(self) -> Iterator[Site]:
        return self._pages("/v1/sites", Site)

    def suspend_site(self, site_id: str) -> Site:
        """From now on the site's tokens are refused."""
        return self._post(f"/v1/sites/{site_id}/suspend", None, Site)

    def resume_site(self, site_id: str) -> Site:
        return self._post(f"/v1/sites/{site_id}/resume", None, Site)

    def workers(self) -> Iterator[WorkerView]:
        return self._pages("/v1/workers", WorkerView)

    def issue_token(self, spec: TokenSpec) -> IssuedToken:
        return self._create("/v1/admin/tokens", spec, IssuedToken)

    def tokens(self) -> Iterator[Token]:
        return self._pages("/v1/admin/tokens", Token)

    def revoke_token(self, token_id: str) -> None:
        self._transport.request("DELETE", f"/v1/admin/tokens/{token_id}")

    def ask_to_join(self, spec: EnrolmentSpec) -> Enrolment:
        """Ask for a worker to be admitted. The same secret again is the same wish."""
        return self._post("/v1/enrolments", spec, Enrolment)

    def enrolment(self, enrolment_id: str) -> Enrolment:
        """Return what became of it; for a client whose token is the secret that it was made for."""
        return self._get(f"/v1/enrolments/{enrolment_id}", Enrolment)

    def enrolments(self, code: str | None = None) -> Iterator[Enrolment]:
        """Yield workers that wait to be admitted, or those that showed a code, also if they no longer wait."""
        wanted = {} if code is None else {"code": code}
        return self._pages("/v1/enrolments", Enrolment, **wanted)

    def approve(self, enrolment_id: str, approval: Approval) -> Enrolment:
        return self._post(f"/v1/enrolments/{enrolment_id}/approve", approval, Enrolment)

    def decline(self, enrolment_id: str) -> Enrolment:
        return self._post(f"/v1/enrolments/{enrolment_id}/decline", None, Enrolment)

    def rotate(self, secret_hash: str) -> Rotated:
        """Give this client's token another secret, of which this is the hash."""
        return self._post("/v1/tokens/rotate", Rotation(secret_hash=secret_hash), Rotated)

    def audit(self) -> Iterator[AuditEntry]:
        """Yield every change of state, oldest first; each entry carries the digest of the one before."""
        return self._pages("/v1/admin/audit", AuditEntry)

    def status(self) -> Status:
        return self._get("/v1/admin/status", Status)

    def about(self) -> About:
        return self._get("/version", About)

    # ------------------------------------------------------------ plumbing

    def _get(self, path: str, kind: type[T]) -> T:
        return _read(kind, self._transport.request("GET", path).content)

    def _post(self, path: str, body: BaseModel | None, kind: type[T], headers: dict[str, str] | None = None) -> T:
        return _read(kind, self._send("POST", path, body, headers or {}).content)

    def _send(self, method: str, path: str, body: BaseModel | None, headers: dict[str, str]) -> Answer:
        if body is None:
            return self._transport.request(method, path, headers=headers)
        headers = {"Content-Type": "application/json", **headers}
        return self._transport.request(method, path, content=body.model_dump_json(), headers=headers)

    def _create(self, path: str, body: BaseModel, kind: type[T], key: str | None = None) -> T:
        return self._post(path, body, kind, {"Idempotency-Key": key or uuid.uuid4().hex})

    def _pages(self, path: str, kind: type[T], **wanted: int | str) -> Iterator[T]:
        page_of: type[Page[T]] = Page[kind]  # type: ignore[valid-type]
        given = {name: str(value) for name, value in wanted.items()}
        params = dict(given)
        while True:
            page = _read(page_of, self._transport.request("GET", path, params=params).content)
            yield from page.items
            if page.next_cursor is None:
                return
            params = {**given, "cursor": page.next_cursor}


def read_token(text: str | None, file: Path | None) -> str | None:
    """Return the token that a text is or else a file holds, if there is one. Raises Invalid."""
    if not text and file:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            detail = f"the token in {file} cannot be read: {fault}"
            raise Invalid(detail, remedy="Give --token, or another --token-file.") from fault
    token = (text or "").strip()
    if not (token.isascii() and token.isprintable()):
        raise Invalid("the token has characters that no token has", remedy="Give it as it was issued.")
    return token or None


def _upload_path(location: str) -> str:
    """Return where the coordinator put the upload: a path of its own. To another place neither token nor bytes may
    go."""
    if not _UPLOAD.fullmatch(location):
        raise NotUnderstood(f"the coordinator names {location[:200]!r} as the place of an upload")
    return location


def _read(kind: type[T], content: bytes) -> T:
    try:
        return kind.model_validate_json(content)
    except ValidationError as refusal:
        raise NotUnderstood(f"the answer is no {kind.__name__}", errors=faults_of(refusal)) from None


def _pour(response: httpx.Response, file: Sink, progress: Progress | None) -> None:
    # As the bytes come: what would be gathered into larger pieces first could keep `progress` waiting for hours.
    for piece in response.iter_raw():
        file.write(piece)
        if progress:
            progress(len(piece))


def _pieces(file: BinaryIO, count: int, progress: Progress | None) -> Iterator[bytes]:
    while count and (piece := file.read(min(PIECE_BYTES, count))):
        count -= len(piece)
        yield piece
        if progress:
            progress(len(piece))

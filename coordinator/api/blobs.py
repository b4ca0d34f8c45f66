"""Endpoints for all callers but viewers: upload and download of blobs by digest.

Uploads follow the IETF draft 'Resumable Uploads for HTTP' (draft-ietf-httpbis-resumable-upload) without its interim
responses, which the server cannot send.
"""

import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BeforeValidator
from starlette.types import Receive, Scope, Send

from tessera.coordinator.api.dependencies import Callers, Serving
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.auth.permissions import readable_blobs
from tessera.coordinator.blobs.portions import Portion
from tessera.coordinator.blobs.uploads import Upload, Uploads
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.coordinator.telemetry.metrics import RECEIVED_BYTES, SENT_BYTES
from tessera.shared.api.versions import BlobRequest
from tessera.shared.problems import BadRequest, NotFound, RangeUnsatisfiable, TooLarge
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.schema import TokenRole

router = APIRouter(prefix="/v1", tags=["blobs"], route_class=BoundedRoute)

DigestPath = Annotated[str, Path(pattern=r"^sha256:[0-9a-f]{64}$")]
HOLDERS: tuple[TokenRole, ...] = ("site", "orchestrator", "admin")
Holder = Annotated[Principal, Depends(Callers(*HOLDERS))]
"""Callers that may read and write blobs: viewers may not."""
Complete = Annotated[str, Header(alias="Upload-Complete", pattern=r"^\?[01]$")]


def _in_digits(written: object) -> object:
    """Refuse numbers that Python accepts and RFC 9110 does not: with signs, underscores or spaces."""
    if isinstance(written, str) and not re.fullmatch(r"[0-9]{1,19}", written):
        raise ValueError("a number of bytes must be 1 to 19 digits")
    return written


DIGITS = BeforeValidator(_in_digits)
MAX_BYTES = 10**19 - 1
"""The largest number of 19 digits."""

OCTETS = "application/octet-stream"
PARTIAL_UPLOAD = "application/partial-upload"

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_REPR_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")

ReprDigest = Annotated[
    str, Header(alias="Repr-Digest", max_length=256, json_schema_extra={"pattern": f"^{_REPR_DIGEST.pattern}$"})
]
"""Described by its pattern and validated by `_digest`, which has a clearer error."""


def _bytes_of(media_type: str, *, required: bool) -> dict[str, Any]:
    """Describe a body that a handler reads piece by piece, which FastAPI cannot do."""
    # Bytes have no schema in OpenAPI 3.1.
    return {"requestBody": {"content": {media_type: {}}, "required": required}}


# ---------------------------------------------------------------- down


_PARTS: dict[int | str, dict[str, Any]] = {
    206: {"description": "the bytes that `Range` requests"},
    304: {"description": "`If-None-Match` names the blob: the caller has it"},
}


# Before the other routes of blobs, which would match its path as a digest.
@router.post("/blobs/read", operation_id="readBlobs", response_class=StreamingResponse)
async def read_blobs(wanted: BlobRequest, serving: Serving, caller: Holder) -> Response:
    """Return several blobs that the caller may read, concatenated in one response."""

    def find() -> tuple[list[Portion], list[Portion]]:
        serving.memory.require()
        with serving.reading(caller) as session:
            readable = readable_blobs(session, caller, wanted.digests)
            if missing := [digest for digest in wanted.digests if digest not in readable]:
                raise NotFound(f"there is no blob {missing[0]} that this token may read")
            portions = serving.blobs.portions(session, wanted.digests)
        return portions, serving.blobs.unverified(portions)

    portions, unverified = await to_thread.run_sync(find)
    await verified(serving, caller, unverified)
    left = sum(portion.size for portion in portions) - wanted.start
    if left < 0:
        raise RangeUnsatisfiable(
            f"the blobs have {left + wanted.start} bytes in total; offset {wanted.start} is beyond"
        )
    return BlobAnswer(serving, caller, portions, wanted.start, wanted.start + left)


@router.get("/blobs/{digest}", operation_id="getBlob", response_class=StreamingResponse, responses=_PARTS)
@router.head("/blobs/{digest}", operation_id="headBlob", response_class=StreamingResponse, responses=_PARTS)
async def get_blob(
    digest: DigestPath,
    request: Request,
    serving: Serving,
    caller: Holder,
    range_: Annotated[str | None, Header(alias="Range", max_length=64)] = None,
    if_range: Annotated[str | None, Header(alias="If-Range", max_length=128)] = None,
    if_none_match: Annotated[str | None, Header(alias="If-None-Match", max_length=2048)] = None,
) -> Response:
    """Return a blob that the caller may read. A blob never changes."""

    def find() -> tuple[StoredBlob, list[Portion]]:
        with serving.reading(caller) as session:
            if not readable_blobs(session, caller, [digest]):
                raise NotFound(f"there is no blob {digest} that this token may read")
            blob = serving.blobs.find(session, digest)
        return blob, serving.blobs.unverified([Portion((blob,), inline=blob.inline is not None)])

    blob, unverified = await to_thread.run_sync(find)
    await verified(serving, caller, unverified)
    etag = f'"{digest}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, max-age=31536000, immutable"}
    if if_none_match and (if_none_match.strip() == "*" or etag in if_none_match):
        return Response(status_code=304, headers=headers)
    span = _span(range_, blob.size) if range_ and if_range in (None, etag) else None
    start, stop = span or (0, blob.size)
    if span:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.size}"
    status = 206 if span else 200
    if request.method == "HEAD":
        headers["Content-Length"] = str(stop - start)
        return Response(status_code=status, headers=headers, media_type=OCTETS)
    portion = Portion((blob,), inline=blob.inline is not None)
    return BlobAnswer(serving, caller, [portion], start, stop, status, headers)


async def verified(serving: Services, caller: Principal, portions: Sequence[Portion]) -> None:
    """Hash blobs in the caller's share of threads; concurrent requests for one wait here, without a thread. Raises
    StoreSpoilt and StoreAway."""
    for portion in portions:
        async with serving.hashing.hold(portion.blobs[0].digest):
            await serving.uploads.threads.run(caller.owner, serving.blobs.verify_portion, portion)


class BlobAnswer(StreamingResponse):
    """A response with blobs' bytes; a token with too many of them in progress gets TooManyRequests."""

    media_type = OCTETS

    def __init__(
        self,
        serving: Services,
        caller: Principal,
        portions: Sequence[Portion],
        start: int,
        stop: int,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._serving, self._caller, self._length = serving, caller, stop - start
        body = _counted(serving.blobs.stream_all(portions, start, stop))
        super().__init__(body, status, {**(headers or {}), "Content-Length": str(self._length)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._serving.answers.reserve(self._caller.token_id, self._length):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        # Before the head: a store that does not answer is a problem of its own, and no broken answer.
        pieces = aiter(self.body_iterator)
        self.body_iterator = _after(await anext(pieces, b""), pieces)
        await super().stream_response(send)


async def _after(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for piece in rest:
        yield piece


async def _counted(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        SENT_BYTES.inc(len(piece))
        yield piece


def _span(header: str, size: int) -> tuple[int, int] | None:
    """Return the start and stop of a Range header; None if it has several ranges, or none.

    Raises RangeUnsatisfiable if they lie outside.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    elif last and int(last) < int(first):
        return None
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    if start >= stop:
        raise RangeUnsatisfiable(
            f"the blob has {size} bytes; {header} requests none of them", headers={"Content-Range": f"bytes */{size}"}
        )
    return start, stop


# ---------------------------------------------------------------- up


@router.post(
    "/uploads",
    status_code=201,
    operation_id="createUpload",
    response_class=Response,
    openapi_extra=_bytes_of(OCTETS, required=False),
)
async def create_upload(
    request: Request,
    serving: Serving,
    caller: Holder,
    length: Annotated[int, DIGITS, Header(alias="Upload-Length", ge=0, le=MAX_BYTES)],
    complete: Complete,
    repr_digest: ReprDigest,
) -> Response:
    """Announce a blob by its digest and length. With `Upload-Complete: ?1` its bytes are the body."""
    upload = await announced(serving, caller, _digest(repr_digest), length)
    if complete == "?1" and not upload.complete and serving.uploads.offset(upload) == 0:
        await serving.uploads.whole(upload, received(request.stream()))
        upload = await serving.uploads.threads.run(upload.owner, serving.uploads.find, upload.id, upload.owner)
    return Response(
        status_code=201, headers={"Location": f"/v1/uploads/{upload.id}", **_progress(serving.uploads, upload)}
    )


async def announced(serving: Services, caller: Principal, digest: str, length: int) -> Upload:
    """Return a new upload, or the caller's earlier one of this digest. Raises TooLarge, and as `Uploads.announce`."""
    if length > serving.settings.max_upload_bytes:
        limit = serving.settings.max_upload_bytes
        raise TooLarge(f"{length} bytes were announced; the limit is {limit} (setting max_upload_bytes)")

    def announce() -> Upload:
        serving.memory.require()
        return serving.uploads.announce(caller.owner, digest, length, site_id=caller.site_id)

    return await serving.uploads.threads.run(caller.owner, announce)


@router.head("/uploads/{upload_id}", status_code=204, operation_id="headUpload")
def head_upload(upload_id: str, serving: Serving, caller: Holder) -> Response:
    """Return the offset of an upload: the number of bytes received."""
    headers = _progress(serving.uploads, serving.uploads.find(upload_id, caller.owner))
    return Response(status_code=204, headers={**headers, "Cache-Control": "no-store"})


@router.patch(
    "/uploads/{upload_id}",
    status_code=204,
    operation_id="appendUpload",
    openapi_extra=_bytes_of(PARTIAL_UPLOAD, required=True),
)
async def append_upload(
    upload_id: str,
    request: Request,
    serving: Serving,
    caller: Holder,
    offset: Annotated[int, DIGITS, Header(alias="Upload-Offset", ge=0, le=MAX_BYTES)],
) -> Response:
    """Append bytes to an upload at its offset."""
    if request.headers.get("Content-Type") != PARTIAL_UPLOAD:
        raise BadRequest(f"a PATCH to an upload must have Content-Type {PARTIAL_UPLOAD}")
    owner = caller.owner
    await serving.uploads.threads.run(owner, serving.memory.require)
    upload = await serving.uploads.threads.run(owner, serving.uploads.find, upload_id, owner)
    await serving.uploads.append(upload, offset, received(request.stream()))
    upload = await serving.uploads.threads.run(owner, serving.uploads.find, upload_id, owner)
    return Response(status_code=204, headers=_progress(serving.uploads, upload))


async def received(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a body, and count their bytes."""
    async for piece in body:
        RECEIVED_BYTES.inc(len(piece))
        yield piece


def _progress(uploads: Uploads, upload: Upload) -> dict[str, str]:
    return {
        "Upload-Offset": str(uploads.offset(upload)),
        "Upload-Length": str(upload.length),
        "Upload-Complete": "?1" if upload.complete else "?0",
    }


def _digest(header: str) -> str:
    match = _REPR_DIGEST.fullmatch(header)
    try:
        digest = base64.b64decode(match.group(1), validate=True) if match else b""
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise BadRequest("Repr-Digest must be 'sha-256=:<44 characters of base64>:'")
    return f"sha256:{digest.hex()}"

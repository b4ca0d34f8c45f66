"""Transfers of blobs, which resume after interruptions."""

import base64
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import BinaryIO

import httpx

from tessera.shared.api.versions import BlobRequest
from tessera.shared.client.bulk import FilePart
from tessera.shared.client.transport import HttpTransport, IntermediaryFault, NotUnderstood, Unreachable
from tessera.shared.problems import OffsetMismatch, Problem
from tessera.shared.schema import MAX_BLOBS_PER_REQUEST
from tessera.shared.tensors.hashing import Sink

ONE_REQUEST_BYTES = 1 << 20
"""A blob up to this size is uploaded in the request that announces it."""

LEAST_PIECE_BYTES = 1 << 14
"""A proxy that takes no body of this size is not one that uploads can go through."""

OCTETS = "application/octet-stream"

# A proxy that serves the coordinator under a path may put that, and its own host, before it.
_UPLOAD = re.compile(r"(?:https?://[^/]+)?(?:/[^/?#]+)*?(/v1/uploads/[A-Za-z0-9-]{1,64})")

Progress = Callable[[int], None]
"""A callback that receives the number of bytes of each piece transferred."""


class Transfers:
    """Downloads and uploads by one transport, without verifying digests."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._piece_bytes = sys.maxsize

    def receive(
        self,
        path: str,
        file: Sink,
        progress: Progress | None,
        is_wanted: Callable[[httpx.Headers], bool] = lambda _: True,
    ) -> bool:
        """Write the body at a path to a file, resuming after interruptions. Return False, without reading it, for one
        that is not wanted by its headers."""

        def attempt() -> bool:
            start = file.tell()
            headers = {"Accept": OCTETS} | ({"Range": f"bytes={start}-"} if start else {})
            with self._transport.stream(path, headers) as response:
                if start and response.status_code != httpx.codes.PARTIAL_CONTENT:
                    raise Unreachable("the rest of a blob was requested, but the coordinator sent all of it")
                if not is_wanted(response.headers):
                    return False
                _require_octets(response)
                _pour(response, file, progress)
            return True

        return self._transport.patiently(attempt, moved=file.tell)

    def receive_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None:
        """Write several blobs one after the other, usually in one request."""
        for first in range(0, len(digests), MAX_BLOBS_PER_REQUEST):
            some, before = tuple(digests[first : first + MAX_BLOBS_PER_REQUEST]), file.tell()

            def attempt(some: tuple[str, ...] = some, before: int = before) -> None:
                wanted = BlobRequest(digests=some, start=file.tell() - before).model_dump_json()
                headers = {"Content-Type": "application/json"}
                with self._transport.stream("/v1/blobs/read", headers, method="POST", content=wanted) as response:
                    _require_octets(response)
                    _pour(response, file, progress)

            self._transport.patiently(attempt, moved=file.tell)

    def upload(self, digest: str, file: BinaryIO, length: int, progress: Progress | None = None) -> None:
        """Upload `length` bytes with this digest from a seekable file, resuming after interruptions."""
        whole = length <= min(ONE_REQUEST_BYTES, self._piece_bytes)
        file.seek(0)
        headers = {
            "Upload-Length": str(length),
            "Upload-Complete": "?1" if whole else "?0",
            "Repr-Digest": f"sha-256=:{base64.b64encode(bytes.fromhex(digest[7:])).decode()}:",
            "Idempotency-Key": uuid.uuid4().hex,
        }
        body = file.read() if whole else b""
        try:
            answer = self._transport.request("POST", "/v1/uploads", headers=headers, content=body)
        except IntermediaryFault as page:
            if not self._sends_smaller(page, len(body)):
                raise
            self.upload(digest, file, length, progress)
            return
        if progress:
            progress(len(body))
        # An upload of a blob that the coordinator holds is complete at once.
        if answer.headers.get("Upload-Complete") != "?1":
            self._append(_upload_path(answer.headers.get("Location", "")), file, length, progress)

    def _append(self, location: str, file: BinaryIO, length: int, progress: Progress | None) -> None:
        offset = 0

        def attempt() -> bool:
            """Send the next piece. Return True if it was the last."""
            nonlocal offset
            try:
                offset = int(self._transport.once("HEAD", location).header("Upload-Offset"))
            except Problem as problem:
                if problem.retryable or isinstance(problem, (IntermediaryFault, NotUnderstood)):
                    raise
                # Without a body, a gateway's answer looks like the coordinator's. The answer to the next piece tells.
            count = min(length - offset, self._piece_bytes)
            is_last = offset + count == length
            headers = {
                "Upload-Offset": str(offset),
                "Upload-Complete": "?1" if is_last else "?0",
                "Content-Type": "application/partial-upload",
            }
            part = FilePart(file, offset, count, progress or (lambda _: None))
            try:
                self._transport.send_file("PATCH", location, headers, part)
            except OffsetMismatch as problem:
                # An earlier request of this client was still being stored when this one read the offset.
                problem.retryable = True
                raise
            except IntermediaryFault as page:
                if not self._sends_smaller(page, count):
                    raise
                return False
            return is_last

        while not self._transport.patiently(attempt, moved=lambda: offset):
            pass

    def _sends_smaller(self, page: IntermediaryFault, count: int) -> bool:
        """Halve the size of later pieces for a proxy that limits the bodies of requests. Return True if that may
        help, after a refused piece of `count` bytes."""
        if not page.is_body_limit or count <= LEAST_PIECE_BYTES:
            return False
        self._piece_bytes = count // 2
        return True


def _upload_path(location: str) -> str:
    # Without its host: neither token nor bytes may go to another.
    if not (found := _UPLOAD.fullmatch(location)):
        raise NotUnderstood(f"the coordinator gave {location[:200]!r} as the path of an upload")
    return found[1]


def _require_octets(response: httpx.Response) -> None:
    # A sign-in service's JSON, or an answer without a body, would be stored in place of a blob.
    kind = response.headers.get("Content-Type", OCTETS)
    if kind != OCTETS or response.status_code == httpx.codes.NO_CONTENT:
        raise NotUnderstood(f"HTTP {response.status_code} with content of type {kind[:60]!r} came in place of a blob")


def _pour(response: httpx.Response, file: Sink, progress: Progress | None) -> None:
    # In pieces as received: collecting larger ones first may delay `progress` by hours on a slow line.
    for piece in response.iter_raw():
        file.write(piece)
        if progress:
            progress(len(piece))

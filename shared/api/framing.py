"""A JSON document with blobs behind it, in one body: base64 would make them a third longer.

The first line is the document, the second a list of the blobs' sizes, and the rest are their bytes.
"""

import json
from collections.abc import Sequence

from tessera.shared.api.tasks import Submission, Task
from tessera.shared.json_limits import bounded, check_document
from tessera.shared.schema import MAX_INLINE_BLOBS

MEDIA_TYPE = "application/vnd.tessera.blobs"


def pack_task(task: Task) -> bytes:
    """Return the body of a task with its inline blobs. Defaults are omitted so that a worker of the previous version
    can parse it."""
    return pack(task.model_dump_json(exclude_defaults=True, exclude={"inline_blobs"}), task.inline_blobs)


def unpack_task(body: bytes) -> Task:
    """Return the task of a body. Raise ValueError for a malformed body."""
    document, blobs = unpack(body)
    if len(blobs) > MAX_INLINE_BLOBS:
        raise ValueError(f"the body has {len(blobs)} blobs; a task has at most {MAX_INLINE_BLOBS}")
    return Task.model_validate_json(bounded(document)).model_copy(update={"inline_blobs": blobs})


def pack_submission(submission: Submission, length: int | None = None) -> bytes:
    """Return the body of a submission with its update, if it contains one. With a `length`, return the beginning of a
    body that goes on with an update of that many bytes."""
    blobs = () if submission.data is None else (submission.data,)
    document = submission.model_dump_json(exclude_defaults=True, exclude={"data"})
    return pack(document, blobs) if length is None else _head(document, [length])


def pack(document: str, blobs: Sequence[bytes]) -> bytes:
    """Return a body."""
    return b"".join((_head(document, [len(blob) for blob in blobs]), *blobs))


def _head(document: str, sizes: Sequence[int]) -> bytes:
    return f"{document}\n{json.dumps(sizes, separators=(',', ':'))}\n".encode()


def unpack(body: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the document, unread, and the blobs. Raise ValueError for a malformed body."""
    document, sizes, data = unpack_head(body)
    if sum(sizes) != len(data):
        raise ValueError(f"{len(data)} bytes follow the document; {sum(sizes)} are announced")
    blobs, start = [], 0
    for size in sizes:
        blobs.append(data[start : start + size])
        start += size
    return document, tuple(blobs)


def unpack_head(body: bytes) -> tuple[bytes, list[int], bytes]:
    """Return the document, unread, the blobs' sizes, and what is there of their bytes. Raise ValueError for the
    malformed beginning of a body."""
    document, _, rest = body.partition(b"\n")
    line, _, data = rest.partition(b"\n")
    sizes = check_document(line, MAX_INLINE_BLOBS)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("the second line is no list of sizes")
    return document, sizes, data

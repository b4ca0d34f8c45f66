"""A JSON document with blobs behind it, in one body: base64 would make them a third longer.

The first line is the document, the second a list of the blobs' sizes, and the rest are their bytes.
"""

import json
from collections.abc import Sequence

from tessera.shared.api.tasks import Submission, Task
from tessera.shared.schema import MAX_INLINE_BLOBS

MEDIA_TYPE = "application/vnd.tessera.blobs"


def pack_task(task: Task) -> bytes:
    """Return the body of a task with its inline blobs. Defaults are omitted so that older workers can parse it."""
    return _pack(task.model_dump_json(exclude_defaults=True, exclude={"inline_blobs"}), task.inline_blobs)


def unpack_task(body: bytes) -> Task:
    """Return the task of a body. Raise ValueError for a body that is none."""
    document, blobs = unpack(body)
    if len(blobs) > MAX_INLINE_BLOBS:
        raise ValueError(f"the body has {len(blobs)} blobs; a task has at most {MAX_INLINE_BLOBS}")
    return Task.model_validate_json(document).model_copy(update={"inline_blobs": blobs})


def pack_submission(submission: Submission) -> bytes:
    """Return the body of a submission with its update, if it contains one."""
    blobs = () if submission.data is None else (submission.data,)
    return _pack(submission.model_dump_json(exclude_defaults=True, exclude={"data"}), blobs)


def _pack(document: str, blobs: Sequence[bytes]) -> bytes:
    sizes = json.dumps([len(blob) for blob in blobs], separators=(",", ":"))
    return b"".join((document.encode(), b"\n", sizes.encode(), b"\n", *blobs))


def unpack(body: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the document, unread, and the blobs. Raise ValueError for a body that is none."""
    document, _, rest = body.partition(b"\n")
    line, _, data = rest.partition(b"\n")
    sizes = json.loads(line)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("the second line is no list of sizes")
    if sum(sizes) != len(data):
        raise ValueError(f"{len(data)} bytes follow the document; {sum(sizes)} are announced")
    blobs, start = [], 0
    for size in sizes:
        blobs.append(data[start : start + size])
        start += size
    return document, tuple(blobs)

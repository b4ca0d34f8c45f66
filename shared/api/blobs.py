"""Uploads of blobs."""

from __future__ import annotations

from tessera.shared.schema import Digest, Message


class UploadView(Message):
    id: str
    digest: Digest
    offset: int
    length: int
    complete: bool

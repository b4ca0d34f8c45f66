"""Object stores that speak S3, as real servers: moto, which keeps everything in memory, and rclone, over a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import obstore
from obstore.store import S3Store

from tessera.coordinator.blobs.object_store import key_of
from tests.chaos.network import Line
from tests.support.coordinator import until
from tests.support.processes import free_port

BUCKET = "tiles"
KEY, SECRET = "a-key-of-tests", "a-secret-of-tests"


class Mending(Line):
    """rclone gives the range that it was asked for under status 200, which clients take for the whole."""

    def _heard(self, piece: bytes) -> bytes:
        head, end, _ = piece.partition(b"\r\n\r\n")
        if end and piece.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\nContent-Range: " in head:
            return piece.replace(b"200 OK", b"206 Partial Content", 1)
        return piece


class Bucket:
    """A bucket behind a line that may be cut; and a way to it behind the coordinator's back."""

    def __init__(self, line: Line, endpoint: str) -> None:
        self.line = line
        self.endpoint = endpoint
        self.url = f"s3://{BUCKET}/some/prefix"
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "eu-central-1",
            "AWS_ENDPOINT_URL": line.url,
            "AWS_ALLOW_HTTP": "true",
        }
        self.behind = S3Store(
            BUCKET,
            prefix="some/prefix",
            client_options={"allow_http": True},
            access_key_id=KEY,
            secret_access_key=SECRET,
            endpoint=endpoint,
            region="eu-central-1",
        )

    def names(self) -> list[str]:
        return sorted(found["path"] for page in obstore.list(self.behind) for found in page)

    def replace(self, digest: str, data: bytes) -> None:
        obstore.put(self.behind, key_of(digest), data)

    def lose(self, digest: str) -> None:
        obstore.delete(self.behind, key_of(digest))

    def holds(self, digest: str) -> bool:
        return key_of(digest) in self.names()

    def empty(self) -> None:
        if names := self.names():
            obstore.delete(self.behind, names)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within it, nobody who calls is answered."""
        self.line.dead = True
        self.line.cut()
        try:
            yield
        finally:
            self.line.dead = False


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[Bucket]:
    """A server of this kind with an empty bucket."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "buckets" / BUCKET).mkdir(parents=True)
    command = {
        "moto": [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)],
        "rclone": [
            str(shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")),
            *("serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"),
            str(folder / "buckets"),
        ],
    }[kind]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        until(lambda: _answers(endpoint), 60)
        if kind == "moto":
            httpx.put(f"{endpoint}/{BUCKET}").raise_for_status()
        line = (Mending if kind == "rclone" else Line)(port, Random(0))
        yield Bucket(line, endpoint)
        line.close()
    finally:
        server.kill()
        server.wait()


def _answers(endpoint: str) -> bool:
    try:
        return bool(httpx.get(endpoint, verify=False).status_code)  # noqa: S501 (no TLS)
    except httpx.TransportError:
        return False

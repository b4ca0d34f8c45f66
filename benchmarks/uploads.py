"""What is sent again of an upload whose connection is cut: `python -m benchmarks.uploads [--megabytes 100]`.

Between client and coordinator stands a proxy that cuts the connection at twenty random bytes of the upload, and
counts what left the client, with what was on its way when the connection was cut and never arrived. What that is
beyond an upload without cuts has been sent again. The line holds 64 KiB, as one to another city does.
"""

from __future__ import annotations

import argparse
import fcntl
import random
import socket
import struct
import tempfile
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.federation import Federation
from benchmarks.measuring import OUT, Results
from tessera.examples.processes import end_by_interrupt
from tessera.shared.client.client import Client

CUTS = 20
MOST = 0.02
PIECE_BYTES = 1 << 16


class CuttingProxy:
    """Passes TCP on to one port. Each time that so many bytes in all went up, it cuts the connection they went by."""

    def __init__(self, port: int, cuts: Sequence[int]) -> None:
        self.passed = 0
        """Bytes that went up and arrived, of bodies and headers."""
        self.lost = 0
        """Bytes that left the client and did not arrive."""
        self.made = 0
        """Cuts."""
        self._target = port
        self._cuts = sorted(cuts)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Connections inherit it; the system's own buffers would hold megabytes.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink, up in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=(source, sink, up), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                whole = len(piece)
                if up:
                    piece = self._counted(piece)
                sink.sendall(piece)
                if len(piece) < whole:
                    self._lose(source, whole - len(piece))
                    break
        # Both ways at once, as when a line is lost.
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _lose(self, source: socket.socket, nbytes: int) -> None:
        # Asked for rather than read, since reading would make room for more.
        (waiting,) = struct.unpack("i", fcntl.ioctl(source, termios.FIONREAD, struct.pack("i", 0)))
        with self._lock:
            self.lost += nbytes + waiting

    def _counted(self, piece: bytes) -> bytes:
        """As much of the piece as comes before the next cut."""
        with self._lock:
            if self._cuts and self.passed + len(piece) > self._cuts[0]:
                piece = piece[: max(0, self._cuts[0] - self.passed)]
                self._cuts.pop(0)
                self.made += 1
            self.passed += len(piece)
            return piece


def measure(results: Results, folder: Path, nbytes: int, cuts: int) -> float:
    """The share that was sent again."""
    dice = random.Random(0)  # noqa: S311  (to be the same each time)
    file = folder / "upload"
    with Federation(folder / "federation") as federation:
        token = federation.site_token("site")
        sent = {}
        for number in (0, cuts):
            # Other bytes each time: what the coordinator has already is not sent at all.
            file.write_bytes(np.random.default_rng(number).bytes(nbytes))
            proxy = CuttingProxy(federation.port, [dice.randrange(1, nbytes) for _ in range(number)])
            try:
                with Client(f"http://127.0.0.1:{proxy.port}", token, patience_seconds=30) as client:
                    # When this returns the coordinator has all of it, under its digest.
                    client.put_file(file)
            finally:
                proxy.close()
            sent[number] = proxy.passed + proxy.lost
    again = (sent[cuts] - sent[0]) / nbytes
    figures = {"sent_MB": sent[cuts], "without_MB": sent[0], "lost_on_the_way_MB": proxy.lost}
    shown = {name: figure / 1e6 for name, figure in figures.items()}
    results.add(MB=nbytes / 1e6, cuts=proxy.made, **shown, again=again)
    return again


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uploads", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--cuts", type=int, default=CUTS)
    parser.add_argument("--quick", action="store_true", help="a small upload, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    end_by_interrupt()
    results = Results("uploads", f"an upload whose connection is cut at {given.cuts} random bytes")
    with tempfile.TemporaryDirectory(prefix="tessera-uploads-") as name:
        megabytes, cuts = (4.0, 3) if given.quick else (given.megabytes, given.cuts)
        again = measure(results, Path(name), int(megabytes * 1e6), cuts)
        if not given.quick:
            results.aim(f"sent again of {megabytes:.0f} MB with {cuts} cuts", again, MOST)
    results.finish(given.out)


if __name__ == "__main__":
    main()

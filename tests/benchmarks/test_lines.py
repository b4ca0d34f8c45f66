"""Network lines in userspace, and what is said of rounds over them. Times have lower bounds alone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Self

import pytest

from benchmarks.lines.__main__ import LINES, Report, cases, rounds_of
from benchmarks.lines.shaper import Line, Shaper
from benchmarks.measuring import Results
from benchmarks.network import HOST, Certificates, Moved
from benchmarks.rounds.cases import Case, compare
from benchmarks.rounds.sides import Comparison, Summary, Turn
from tests.benchmarks.test_costs import quickly

FAST = Line(8000, 0.0)


@contextmanager
def server() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(60)
        yield listener


@contextmanager
def joined(line: Line) -> Iterator[tuple[Shaper, socket.socket, socket.socket]]:
    """The two ends of a connection over a line."""
    with Shaper(line) as shaper, server() as listener:
        port = shaper.open(listener.getsockname()[1])
        with socket.create_connection((HOST, port), timeout=60) as client, listener.accept()[0] as served:
            served.settimeout(60)
            yield shaper, client, served


def received(end: socket.socket, nbytes: int | None = None) -> bytes:
    """That many bytes, or all up to the end."""
    found = bytearray()
    while len(found) != nbytes and (piece := end.recv(1 << 16)):
        found += piece
    return bytes(found)


def test_bytes_leave_a_line_at_its_rate() -> None:
    data = bytes(range(256)) * 4000
    with joined(Line(40, 0.0)) as (_, client, served):
        began = monotonic()
        sending = threading.Thread(target=client.sendall, args=(data,))
        sending.start()
        assert received(served, len(data)) == data
        # 1,024,000 bytes at 5,000,000 bytes a second.
        assert monotonic() - began >= 0.2048
        sending.join()


def test_connections_of_a_line_share_its_rate() -> None:
    with Shaper(Line(40, 0.0)) as shaper, server() as listener:
        port = shaper.open(listener.getsockname()[1])
        began = monotonic()
        with (
            socket.create_connection((HOST, port)) as one,
            listener.accept()[0] as served_one,
            socket.create_connection((HOST, port)) as other,
            listener.accept()[0] as served_other,
        ):
            for end in (one, other):
                end.sendall(bytes(250_000))
            assert len(received(served_one, 250_000) + received(served_other, 250_000)) == 500_000
        assert monotonic() - began >= 0.1


def test_an_echo_takes_a_round_trip_and_the_first_one_two() -> None:
    began = monotonic()
    with joined(Line(1000, 0.05)) as (_, client, served):
        for round_trips in (2, 3):
            client.sendall(b"?")
            served.sendall(served.recv(1))
            assert client.recv(1) == b"?"
            assert monotonic() - began >= round_trips * 0.05


def test_a_sender_sees_the_line_and_not_a_buffer() -> None:
    with joined(Line(0.8, 0.0)) as (_, client, served):
        client.setblocking(False)
        began, sent = monotonic(), 0
        with suppress(BlockingIOError):
            while True:
                sent += client.send(bytes(1 << 14))
        # Without the line, the kernel's buffers hold four megabytes. It passes 100,000 bytes a second on.
        assert sent - 100_000 * (monotonic() - began) < 3 << 20
        assert served.fileno() >= 0


def test_an_answer_arrives_after_the_client_has_ended_its_side() -> None:
    with joined(FAST) as (_, client, served):
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        assert received(served) == b"question"
        served.sendall(b"answer")
        served.close()
        assert received(client) == b"answer"


def test_a_connection_to_a_port_without_a_server_ends() -> None:
    with server() as listener:
        port = listener.getsockname()[1]
    with Shaper(FAST) as shaper, socket.create_connection((HOST, shaper.open(port)), timeout=60) as client:
        assert client.recv(1) == b""


def test_all_bytes_are_counted() -> None:
    with joined(FAST) as (shaper, client, served):
        client.sendall(bytes(1000))
        received(served, 1000)
        served.sendall(bytes(30))
        received(client, 30)
        assert shaper.moved() == Moved(received=1000, sent=30)


def test_prompts_are_measured_once_and_the_rest_for_each_size() -> None:
    found = list(cases(["1", "10"], ["lossless", "safl", "prompts"], 2))
    assert [(kind, case.size, case.exchange) for kind, case in found] == [
        ("lossless", "1", "full"),
        ("safl", "1", "safl"),
        ("lossless", "10", "full"),
        ("safl", "10", "safl"),
        ("prompts", "prompts", "prompts"),
    ]


def test_a_slow_line_has_one_round_after_the_first() -> None:
    assert (rounds_of(LINES["20"], "440"), rounds_of(LINES["1000"], "100")) == (1, 4)


def test_safl_sends_a_third_of_the_layers() -> None:
    assert Case("440", 2, "safl").sent == {"include": [{"layers": [0, 1, 2, 3]}, {"roles": ["head"]}]}


def summary(seconds: float, received: float, sent: float) -> Summary:
    return Summary(seconds, seconds, seconds, seconds, 1.0, 1.0, 1, 1, received, sent, None, None)


def test_a_round_is_compared_with_line_bare_loop_and_faster_rival() -> None:
    results = Results("some", "about")
    report = Report(results, "100", Line(100, 0.03), workers=2)
    # Each of two workers moves 25 MB, which are two seconds at 12.5 MB a second.
    found = {"tessera": summary(3.0, 30e6, 20e6), "bare loop": summary(2.5, 30e6, 20e6)}
    rivals = {"flower": summary(6.0, 1.0, 1.0), "flare": summary(5.0, 1.0, 1.0)}
    report.add("lossless", Case("100", 2), Comparison(found | rivals, {}))
    row = results.rows[0]
    assert (row["of_line"], row["of_bare"], row["of_rival"]) == pytest.approx((1.5, 1.2, 0.6))
    assert (row["up_MB"], row["down_MB"]) == (15.0, 10.0)
    assert [(target.value, target.met) for target in results.targets] == [(pytest.approx(0.6), True)]


def test_a_later_exchange_is_compared_with_the_rivals_of_its_size() -> None:
    results = Results("some", "about")
    report = Report(results, "100", Line(100, 0.03), workers=2)
    alone = {"tessera": summary(3.0, 30e6, 20e6), "bare loop": summary(2.5, 30e6, 20e6)}
    report.add("lossless", Case("100", 2), Comparison(alone | {"flare": summary(5.0, 1.0, 1.0)}, {}))
    report.add("int8", Case("100", 2, codec="delta+int8"), Comparison(alone, {}))
    report.add("int8", Case("440", 2, codec="delta+int8"), Comparison(alone, {}))
    assert [row["of_rival"] for row in results.rows if row["exchange"] == "int8"][::2] == [0.6, None]


TURN = Turn(1.0, (2.0, 3.0), 1.0, 1.0, 1, 1, 10.0, 10.0)


@dataclass
class Timed:
    """A side whose turns are given."""

    name: str
    fault: Exception | None = None
    turns: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def turn(self, rounds: int) -> Turn:
        self.turns += 1
        if self.fault:
            raise self.fault
        return TURN


@pytest.mark.parametrize("turns", [1, 2])
def test_a_rival_that_times_out_is_left_out_with_the_reason(turns: int) -> None:
    stuck = Timed("flower", TimeoutError("timed out after 9 s: the first round ends"))
    others = [Timed("bare loop"), stuck, Timed("flare")]
    comparison = compare(Timed("tessera"), TURN, others, turns, 2)
    assert set(comparison.found) == {"tessera", "bare loop", "flare"}
    assert (comparison.failures, stuck.turns) == ({"flower": "timed out after 9 s: the first round ends"}, 1)
    results = Results("some", "about")
    Report(results, "20", LINES["20"], workers=2).add("lossless", Case("100", 2), comparison)
    assert results.rows[-1]["failed"] == "timed out after 9 s: the first round ends"


def test_a_failure_of_our_own_side_ends_the_comparison() -> None:
    with pytest.raises(TimeoutError, match="timed out"):
        compare(Timed("tessera"), TURN, [Timed("bare loop", TimeoutError("timed out"))], 1, 2)


@pytest.mark.long
@pytest.mark.timeout(300)  # processes that import much
@pytest.mark.parametrize("options", [(), ("--tls",)])
def test_rounds_over_lines_are_measured_beside_the_bare_loop(tmp_path: Path, options: tuple[str, ...]) -> None:
    name = "lines-tls" if options else "lines"
    found = quickly("lines", tmp_path, "--quick", *options, file=f"{name}.json")
    sides = [(row["side"], row["exchange"]) for row in found["rows"]]
    assert sides == [(side, kind) for kind in ("lossless", "lora") for side in ("tessera", "bare loop")]
    for row in found["rows"]:
        # Nothing is faster than its line.
        assert row["of_line"] >= 1
    assert found["machine"]["sha256_GB_s"] > 0


def test_certificates_are_those_of_this_host(tmp_path: Path) -> None:
    made = Certificates.made(tmp_path / "certificates")
    assert made.client_context().cert_store_stats()["x509_ca"] == 1
    assert "BEGIN CERTIFICATE" in made.server.read_text()

"""The header that says which trace a request belongs to."""

from __future__ import annotations

import pytest

from tessera.shared.telemetry.trace_ids import trace_in, trace_of, traceparent_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_trace_is_read_as_it_was_written() -> None:
    assert trace_in(traceparent_of("run", 1)) == trace_of("run", 1) != trace_of("run", 2)


@pytest.mark.parametrize(
    "header",
    [
        "",
        TRACE,
        f"00-{TRACE}-00f067aa0ba902b7",
        f"00-{TRACE.upper()}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"ff-{TRACE}-00f067aa0ba902b7-01",
        f"00-{TRACE}-00f067aa0ba902b7-01-more",
        f'00-{TRACE}-00f067aa0ba902b7-01\n{{"event": "forged"}}',
    ],
)
def test_what_is_no_trace_is_passed_over(header: str) -> None:
    assert trace_in(header) is None


def test_a_later_version_may_say_more() -> None:
    assert trace_in(f"01-{TRACE}-00f067aa0ba902b7-01-more") == TRACE

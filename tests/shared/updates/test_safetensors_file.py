"""The strict safetensors reader: what it takes, and each thing that it refuses."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from tessera.shared.updates.safetensors_file import ContainerError, header_bytes, read_header, write, write_streams
from tests.support.updates import container

ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def read(data: bytes, **options: Any) -> Any:
    return read_header(io.BytesIO(data), len(data), **options)


def test_what_the_common_writer_writes_is_read() -> None:
    tensors = {"b": np.ones((2, 3), np.float16), "a": np.arange(5, dtype=np.float32), "none": np.zeros((0, 2))}
    header = read(save(tensors, {"format": "pt"}))
    assert header.metadata == {"format": "pt"}
    assert {name: (e.dtype, e.shape, e.nbytes) for name, e in header.entries.items()} == {
        "a": ("F32", (5,), 20),
        "b": ("F16", (2, 3), 12),
        "none": ("F64", (0, 2), 0),
    }


def test_what_is_written_the_common_reader_reads() -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, dtype=np.float16)
    file = io.BytesIO()
    write(file, [("a", "F32", (2, 3)), ("b", "F16", (3,))], [a.tobytes(), b.tobytes()], {"k": "v"})
    back = load(file.getvalue())
    np.testing.assert_array_equal(back["a"], a)
    np.testing.assert_array_equal(back["b"], b)


def test_streams_of_unknown_length_become_a_file_that_the_common_reader_reads() -> None:
    file = io.BytesIO()
    streams = [("x", iter([b"ab", b"", b"c"])), ("empty", iter([])), ("y", iter([b"defg"]))]
    write_streams(file, streams, {"format": "test"}, ["x", "empty", "y"])
    back = load(file.getvalue())
    assert {name: bytes(array) for name, array in back.items()} == {"x": b"abc", "empty": b"", "y": b"defg"}
    assert read(file.getvalue()).metadata == {"format": "test"}


def test_streams_of_known_lengths_become_the_same_file_from_start_to_end() -> None:
    files = [io.BytesIO(), io.BytesIO()]
    for file, sizes in zip(files, (None, {"x": 3, "y": 4}), strict=True):
        write_streams(file, [("x", iter([b"ab", b"c"])), ("y", iter([b"defg"]))], {"k": "v"}, ["x", "y"], sizes)
    assert files[0].getvalue() == files[1].getvalue()


@pytest.mark.parametrize("sizes", [{"x": 4, "y": 4}, {"x": 3, "y": 4, "z": 0}])
def test_streams_of_other_lengths_than_stated_are_refused(sizes: dict[str, int]) -> None:
    streams = [("x", iter([b"abc"])), ("y", iter([b"defg"]))]
    with pytest.raises(ContainerError, match="bytes were given in place of"):
        write_streams(io.BytesIO(), streams, {}, list(sizes), sizes)


def test_data_begins_on_a_boundary_of_eight_bytes() -> None:
    for name in ("a", "ab", "abc", "abcdefgh"):
        assert len(header_bytes([(name, "F32", (1,))])) % 8 == 0


def test_a_writer_that_is_given_too_few_bytes_says_so() -> None:
    with pytest.raises(ContainerError, match="3 bytes were given for tensors of 4"):
        write(io.BytesIO(), [("a", "U8", (4,))], [b"abc"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "shorter than the 8 bytes"),
        (bytes(7), "shorter than the 8 bytes"),
        (struct.pack("<Q", 1 << 60), "at most 16777216 are read"),
        (struct.pack("<Q", 100) + b"{}", "claims 100 bytes of a file of 10"),
        (container(b"{not json"), "not JSON"),
        (container(b"\xff\xfe{}"), "not JSON"),
        (container(b"[" * 100_000), "not JSON"),
        (container(b"[]", bytes(4)), "not a JSON object"),
        (container(b'{"a": NaN}'), "holds NaN"),
        (container(b'{"a": Infinity}'), "holds Infinity"),
        (container(b'{"a": ' + json.dumps(ONE).encode() + b', "a": ' + json.dumps(ONE).encode() + b"}"), "twice"),
        (container(b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'), "twice"),
        (container({"\ud800": ONE}), "is not a valid tensor name"),
        (container({"a\0b": ONE}), "is not a valid tensor name"),
        (container({"a": ONE, "__metadata__": {"k": 1}}), "__metadata__"),
        (container({"a": ONE, "__metadata__": ["k"]}), "__metadata__"),
        (container({"a": 7}), "'a'"),
        (container({"a": {**ONE, "extra": 1}}), "'a': extra"),
        (container({"a": {"dtype": "U8", "shape": [4]}}), "'a': data_offsets"),
        (container({"a": {**ONE, "shape": [-4]}}), "'a': shape"),
        (container({"a": {**ONE, "shape": [1] * 9}}), "'a': shape"),
        (container({"a": {**ONE, "shape": [4.5]}}), "'a': shape"),
        (container({"a": {**ONE, "dtype": "U7"}}), "unknown dtype 'U7'"),
        (container({"a": {**ONE, "dtype": "F32"}}), r"its shape \[\d+\] needs \d+ bytes"),
        (container({"a": {**ONE, "shape": [3]}}), r"its shape \[3\] needs \d+ bytes"),
        (container({"a": {**ONE, "data_offsets": [4, 0]}}), "ends before it begins"),
        (container({"a": {**ONE, "data_offsets": [-4, 0]}}), "'a': data_offsets"),
        (container({"a": {**ONE, "data_offsets": [1, 5]}}, bytes(5)), "belong to no tensor"),
        (container({"a": ONE, "b": {**ONE, "data_offsets": [5, 9]}}, bytes(9)), "'b' spans"),
        (container({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}}, bytes(6)), "'b' spans"),
        (container({"a": ONE, "b": ONE}), "'b' spans"),
        (container({"a": ONE}, bytes(3)), "the file ends before that"),
        (container({"a": ONE}, bytes(5)), "describes 4 bytes of data; the file has 5"),
        (container({"a": {**ONE, "shape": [1 << 47, 1 << 47], "data_offsets": [0, 1 << 94]}}), "'a': data_offsets"),
    ],
)
def test_each_malformation_is_refused_with_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(ContainerError, match=message):
        read(data)


def test_the_bound_on_the_header_is_the_caller_s() -> None:
    data = container({"a": ONE})
    header_length = len(data) - 8 - 4
    assert read(data, max_header_bytes=header_length).data_start == 8 + header_length
    with pytest.raises(ContainerError, match=f"at most {header_length - 1} are read"):
        read(data, max_header_bytes=header_length - 1)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for attempt in (data, container(data, b"")):
        try:
            read(attempt)
        except ContainerError:
            continue


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "a"]), inner),
    max_leaves=8,
)


@given(header=st.dictionaries(st.sampled_from(["a", "__metadata__"]), JSONS))
def test_any_json_is_read_or_refused(header: object) -> None:
    try:
        read(container(header, b""))
    except ContainerError:
        return

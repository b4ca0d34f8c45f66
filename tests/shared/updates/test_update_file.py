"""Update files: what a worker writes, the coordinator reads; what it should not have written is named."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load

from tessera.shared.model.blocks import Block
from tessera.shared.problems import InvalidUpdate
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import Array, ArrayTensor, digest_of, mean_step, squares, to_array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, read_update, write_update
from tests.support.federation import small_model, values
from tests.support.updates import update_file

MODEL = small_model()
BASE = values(MODEL)
BASES = {name: ArrayTensor(array) for name, array in BASE.items()}
ASKED = {name: MODEL.by_name[name] for name in ("head.weight", "layer.0.qkv.weight#value")}
HEAD = BASE["head.weight"].tobytes()


def written(changed: dict[str, np.ndarray], codec: str = pipeline.LOSSLESS) -> bytes:
    file = io.BytesIO()
    changes = [TrainedBlock(MODEL.by_name[name], ArrayTensor(array), BASES[name]) for name, array in changed.items()]
    write_update(file, codec, changes)
    return file.getvalue()


def read(data: bytes) -> dict[str, EncodedTensor]:
    return read_update(lambda: io.BytesIO(data), len(data), ASKED, BASES)


@pytest.mark.parametrize("codec", ["raw", "zstd", pipeline.LOSSLESS])
def test_what_is_written_is_read_bit_for_bit_and_as_often_as_wanted(codec: str) -> None:
    changed = {name: BASE[name] + np.float32(0.001) for name in ASKED}
    tensors = read(written(changed, codec))
    for _ in range(2):
        assert {name: to_array(t).tobytes() for name, t in tensors.items()} == {
            name: array.tobytes() for name, array in changed.items()
        }


@pytest.mark.parametrize(
    "codec", ["raw", "zstd", pipeline.LOSSLESS, "delta+int8+zstd", "delta+bf16", "delta+lowrank=2+int8"]
)
def test_the_norms_of_what_is_sent_are_found_while_it_is_written(codec: str) -> None:
    """The difference is 0.5 everywhere; half of it is left from before: the norm is half of the root of the size."""
    rests = {name: np.full(BASE[name].size, np.float32(0.25)) for name in ASKED}
    changes = [
        TrainedBlock(block, ArrayTensor(BASE[name] + np.float32(0.25)), BASES[name], rests[name])
        for name, block in ASKED.items()
    ]
    files = [io.BytesIO(), io.BytesIO()]
    plain, measured = (write_update(file, codec, changes, norms=file is files[1]) for file in files)
    assert files[0].getvalue() == files[1].getvalue()
    assert plain.norms == {}
    expected = {name: 0.5 * math.sqrt(BASE[name].size) for name in ASKED}
    assert measured.norms == pytest.approx(expected, rel=1e-6)
    assert measured.nbytes == {name: tensor.nbytes for name, tensor in read(files[1].getvalue()).items()}


class ReadTensor(ArrayTensor):
    """A tensor that counts how often it is read."""

    reads = 0

    def chunks(self) -> Iterator[Array]:
        type(self).reads += 1
        return super().chunks()


def trained(
    shape: tuple[int, ...], seed: int, dtype: DType = "F32", kind: type[ArrayTensor] = ArrayTensor
) -> TrainedBlock:
    """Return a block that moved little, so that lossless codecs are worthwhile, with a rest from before."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=shape).astype(NUMPY_DTYPES[dtype])
    moved = base + (1e-3 * rng.normal(size=shape)).astype(base.dtype)
    rest = 1e-4 * rng.normal(size=base.size).astype(np.float32) if seed % 2 else None
    block = Block(tensor=f"w{seed}", role="mlp", shape=shape, dtype=dtype)
    return TrainedBlock(block, kind(moved, dtype), ArrayTensor(base, dtype), rest)


@pytest.mark.parametrize(
    "codec",
    ["raw", pipeline.LOSSLESS, "delta+int8+zstd", "delta+lowrank=4+int8+zstd", "delta+topk=0.05+shuffle+zstd"],
)
def test_norms_equal_those_of_a_separate_pass_and_leave_the_bytes_as_they_are(codec: str) -> None:
    """Bundled small blocks, a block of one probe, and blocks of several chunks, each with and without a rest."""
    shapes = [(50, 60), (70, 60), (256, 256), (256, 255), (600, 500), (500, 600)]
    changes = [trained(shape, seed) for seed, shape in enumerate(shapes)] + [trained((80, 80), 6, "F16")]
    files = [io.BytesIO(), io.BytesIO()]
    _, measured = (write_update(file, codec, changes, 7, norms=file is files[1]) for file in files)
    assert files[0].getvalue() == files[1].getvalue()
    assert measured.norms == {c.block.name: math.sqrt(sum(map(squares, c.steps()))) for c in changes}


def test_a_block_that_was_encoded_to_choose_its_codec_is_not_read_again_for_its_norm() -> None:
    changes = [trained((50, 60), seed, kind=ReadTensor) for seed in range(3)]
    write_update(io.BytesIO(), pipeline.LOSSLESS, changes, norms=True)
    assert ReadTensor.reads == 3


def test_a_file_of_raw_blocks_is_hashed_while_it_is_written() -> None:
    file = io.BytesIO()
    changes = [TrainedBlock(block, BASES[name], BASES[name]) for name, block in ASKED.items()]
    assert write_update(file, "raw", changes).digest == digest_of(file.getvalue())
    # The header of another is written last.
    assert write_update(io.BytesIO(), dict.fromkeys(ASKED, "zstd"), changes).digest is None


def test_a_part_of_what_was_asked_for_is_an_update_too() -> None:
    assert list(read(written({"head.weight": BASE["head.weight"]}))) == ["head.weight"]


def test_an_update_is_a_safetensors_file_that_names_each_block_s_codec() -> None:
    data = written({name: BASE[name] for name in ASKED})
    assert sorted(load(data)) == sorted(ASKED)


def test_blocks_that_were_not_asked_for_are_all_named() -> None:
    frozen = {n: BASE[n] for n in ("layer.0.qkv.weight#query", "layer.0.qkv.weight#key", "head.weight")}
    with pytest.raises(InvalidUpdate) as caught:
        read(written(frozen))
    assert [(f.pointer, f.detail) for f in caught.value.errors] == [
        ("layer.0.qkv.weight#key", "this slice was not asked for; another of its tensor was"),
        ("layer.0.qkv.weight#query", "this slice was not asked for; another of its tensor was"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a well-formed safetensors file"),
        (update_file({"head.weight": HEAD}, format_=None), "format is 'none'"),
        (update_file({"head.weight": HEAD}, format_="tessera-update/9"), "format is 'tessera-update/9'"),
        (update_file({"head.weight": HEAD}, padding=10_000), "at most 6144 are read"),
    ],
)
def test_a_file_of_another_form_is_refused_as_a_whole(data: bytes, message: str) -> None:
    with pytest.raises(InvalidUpdate, match=message):
        read(data)


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (update_file({"head.weight": HEAD}, codec="gzip"), "unknown stages"),
        (update_file({"head.weight": HEAD}, codec="zstd+zstd"), "names a stage twice"),
        (update_file({"head.weight": HEAD}, codec=None), "name no codec"),
        (update_file({"head.weight": HEAD[:-4]}), r"28 bytes were sent for a block of 32 bytes \(F32 \[2, 4\]\)"),
        (update_file({"head.weight": HEAD + bytes(4)}), "36 bytes were sent"),
        (update_file({"head.weight": HEAD}, dtype="F32"), r"a U8 vector, not F32 \[8\]"),
        (update_file({"head.weight": HEAD}, shape=(2, 16)), r"a U8 vector, not U8 \[2, 16\]"),
        # 32 + 32 // 64 + 1024 = 1056 is the most that 32 bytes may take.
        (update_file({"head.weight": bytes(1061)}, codec="zstd"), "1061 encoded bytes are more than"),
    ],
)
def test_a_block_of_another_form_is_named(data: bytes, detail: str) -> None:
    with pytest.raises(InvalidUpdate) as caught:
        read(data)
    (fault,) = caught.value.errors
    assert fault.pointer == "head.weight"
    assert re.search(detail, fault.detail)


@pytest.mark.parametrize("codec", ["delta", "delta+bf16", "delta+int8+zstd", "delta+int4", "delta+topk=0.25", "bits"])
def test_what_was_sent_as_differences_adds_to_a_sum_as_such(codec: str) -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(300, 301)).astype(np.float32)
    value = base + np.float32(1e-3) * rng.normal(size=base.shape).astype(np.float32)
    block = Block(tensor="w", role="mlp", shape=base.shape, dtype="F32")
    file = io.BytesIO()
    write_update(file, codec, [TrainedBlock(block, ArrayTensor(value), ArrayTensor(base))])
    data = file.getvalue()
    sent = read_update(lambda: io.BytesIO(data), len(data), {"w": block}, {"w": ArrayTensor(base)})["w"]
    assert sent.sent_as_steps == codec.startswith("delta")
    merged = to_array(mean_step(ArrayTensor(base), [(3.0, sent), (1.0, ArrayTensor(base))]))
    wanted = base + 0.75 * (to_array(sent) - base)
    np.testing.assert_allclose(merged, wanted, rtol=0, atol=1e-6)
    assert not np.array_equal(merged, base)

"""The gate: each kind of malformed update has its own code, and none makes the process grow."""

from __future__ import annotations

import copy
import json
import re
import tracemalloc
from typing import get_args

import numpy as np
import pytest

from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import Plan
from tessera.shared.model.selectors import Selector
from tessera.shared.problems import InvalidUpdate
from tessera.shared.rounds.validation import HeldUpdates, Inspector, NotFinite
from tessera.shared.rounds.versions import States
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import as_bytes
from tessera.shared.updates.codecs.stage import CodecError
from tessera.shared.updates.errors import KINDS, ContentKind, FormKind, HeaderKind
from tessera.shared.updates.safetensors_file import ContainerError
from tessera.simulation.blob_folder import Folder
from tests.support.cli import forked
from tests.support.federation import small_model, values
from tests.support.malformed import ASKED, CORPUS, MAX_NORM
from tests.support.paths import ROOT
from tests.support.updates import update_file

MIB = 1 << 20
BOUND = 64 * MIB
MODEL = small_model()
PLAN = Plan(upload=Selector.model_validate({"include": [{"names": list(ASKED)}]}))

# They need what no file alone has: a file that shrinks, a chunk of several, float64, a method that judges.
ELSEWHERE = {"file-changed", "chunk-too-long", "bytes-missing", "stage-size", "norm-overflow"}
ELSEWHERE |= {"metrics-unusable", "envelope-unusable", "extra-missing"}


@pytest.fixture(scope="module", params=["streamed", "held"])
def gate(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Folder, Inspector, Manifest]:
    """A gate that decodes updates block by block, and one that decodes small blocks together and holds them."""
    folder = Folder(tmp_path_factory.mktemp("gate"))
    held = HeldUpdates(MIB) if request.param == "held" else None
    blocks = {name: folder.put([as_bytes(array)]).digest for name, array in values(MODEL).items()}
    folder.put([canonical(MODEL)])
    return folder, Inspector(folder, States(folder), held), Manifest(blocks=blocks)


def refused(gate: tuple[Folder, Inspector, Manifest], data: bytes) -> InvalidUpdate:
    folder, inspector, manifest = gate
    digest = folder.put([data]).digest
    with pytest.raises(InvalidUpdate) as caught:
        inspector.checked(digest, MODEL, manifest, PLAN, MAX_NORM)
    folder.remove({digest})
    return caught.value


@pytest.mark.parametrize("what", CORPUS)
def test_each_kind_of_malformed_update_has_its_code(gate: tuple[Folder, Inspector, Manifest], what: str) -> None:
    data, kind = CORPUS[what]
    tracemalloc.start()
    try:
        problem = refused(gate, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {fault.code for fault in problem.errors} == {kind}, problem
    assert all(len(fault.detail) <= 300 and len(fault.pointer) <= 300 for fault in problem.errors)
    assert len(json.dumps(problem.json())) < 8_000
    assert peak < BOUND


def test_the_corpus_has_every_kind_that_a_file_alone_can_have() -> None:
    found = {kind for _, kind in CORPUS.values()}
    assert set(KINDS) - found == ELSEWHERE
    assert len(found) >= 40


def test_a_refusal_comes_from_another_process_as_it_was() -> None:
    for kind in (CodecError, ContainerError, NotFinite):
        back = copy.copy(kind("zstd-window", "too wide"))
        assert (type(back), back.code, str(back)) == (kind, "zstd-window", "too wide")


def test_every_code_is_described() -> None:
    document = (ROOT / "docs" / "update-format.md").read_text()
    section = document.partition("## Error codes of a malformed update")[2].partition("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("| "))
    assert re.findall(r"`([a-z0-9-]+)`", table) == list(KINDS)
    assert len(get_args(HeaderKind)) + len(get_args(FormKind)) + len(get_args(ContentKind)) == len(KINDS)


def test_the_same_gate_takes_what_is_well_formed(gate: tuple[Folder, Inspector, Manifest]) -> None:
    folder, inspector, manifest = gate
    start = values(MODEL)
    digest = folder.put([update_file({name: (start[name] + 1).tobytes() for name in ASKED})]).digest
    # 8 + 16 elements moved by 1.
    found, _ = inspector.checked(digest, MODEL, manifest, PLAN, MAX_NORM)
    assert found == {"update_norm": pytest.approx(np.sqrt(24), rel=1e-6)}


def test_no_hostile_update_makes_a_process_grow_by_more_than_64_mib() -> None:
    """In a process of its own, by the kernel's count, for a model of a thousand blocks and a large one."""
    done = forked(module="tests.support.hostile", seconds=300)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    print({what: f"{mib:.0f} MiB" for what, mib in grown.items()})
    assert len(grown) >= 10
    assert {what: mib for what, mib in grown.items() if mib > 64} == {}

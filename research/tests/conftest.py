"""The plan of the tables of evidence, a tiny one, and what holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, which reads them then. Processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TESSERA_WORKER_DURATION_QUANTUM_SECONDS", "0.01")
# Bits are compared, which are the CPU's.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import structlog
import torch

from evidence.plan import Plan, read
from evidence.pool import METHODS
from evidence.sources.prepare import MODEL, PHRASES
from tessera.shared.methods.registry import methods
from tests.test_evidence import made_up, tiny_bert

TINY_PLAN = """
[protocol]
tuning_seed = 0
seeds = [1, 2]
headline_seeds = [1, 2]
tuning_share = 0.5
tuning_versions = 1
factors = [1.0]
outward = 0
final_versions = 2
rising_versions = 3
rising_points = 0.1
standard_errors = 5.0
significance = 0.05
check_rounds = 2
check_versions = 1
check_seeds = [1, 2]

[grids.adamw]
base = 1e-3
training = { optimizer = "adamw", rates = { head = 10.0 } }

[tables.T]
title = "Two arms"
paper = "None"
question = "Does it run?"
federation = "phrases"
score = "macro_f1"
part = "unseen"
reference = "full"
equal_bytes = "one"
rounds = 3
sites_a_round = 3
training = { steps = 1, batch_size = 8 }
curve_examples = 30
check = ["full", "one"]
settings = [
  { name = "K-1", scope = "core" },
  { name = "away", away = { share = 0.3, first = 1, last = 1 }, arms = ["local"] },
  { name = "dropout", dropout = 0.3, sites_a_round = 5, arms = ["one"] },
]
arms = [
  { name = "full", method = "safl", settings = { score = "first", layers = 3, always = ["head"] } },
  { name = "one", method = "safl", settings = { score = "attention", layers = 1, always = ["head"] } },
  { name = "lora", method = "lora", model = "lora-2" },
  { name = "wide", method = "lora", model = "lora-2-all" },
  { name = "local", method = "local", personal = true },
  { name = "central", method = "fedavg", central = true },
]
claims = [{ name = "T.1", text = "One layer gains", arm = "one", against = "full", margin = 1.0, headline = true }]

[tables.T.options]
sites_per_wording = 2
examples_per_wording = 60
alpha = 0.5
validation_share = 0.2
test_share = 0.2
unseen_tests = 60
seen_tests = 40
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("TESSERA_TEST_LONG"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="TESSERA_TEST_LONG=1 runs it"))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Draw the same numbers each time, and undo what a test's commands change in what is logged."""
    before = structlog.get_config()
    torch.default_generator.manual_seed(0)
    yield
    structlog.configure(**before)


@pytest.fixture
def full() -> Plan:
    return read()


@pytest.fixture
def tiny(tmp_path: Path) -> Plan:
    (tmp_path / "tiny.toml").write_text(TINY_PLAN, encoding="utf-8")
    return read(tmp_path / "tiny.toml")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A tiny model and made-up phrases, as `evidence.sources.prepare` writes them."""
    folder = tmp_path / "prepared"
    tiny_bert(40).save_pretrained(folder / MODEL)
    made_up(pieces=40).save(folder / PHRASES)
    return folder


@pytest.fixture
def benchmark_methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks' own methods beside the product's."""
    with monkeypatch.context() as patch:
        patch.setenv("TESSERA_METHODS", str(METHODS))
        methods.cache_clear()
        yield
    methods.cache_clear()

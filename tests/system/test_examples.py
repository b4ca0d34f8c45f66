"""The other demos, shortened: they end by themselves, say what was learnt and what travelled, and leave nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from tessera.examples.pairs import __main__ as pairs
from tessera.examples.reports import __main__ as reports
from tessera.examples.reports.notes import DEPARTMENTS, WORDINGS, notes
from tessera.shared.client.run_file import read_spec
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.inventory import load_source
from tests.support.cli import environment
from tests.system.test_demo import left_of


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "told_of", "shortened"),
    [
        ("reports", r"no hospital has: accuracy 0\.\d+ after round 1", ()),
        ("pairs", r"own model's accuracy", ()),
        ("llm", r"count +cedar-office +0% ", ("--pretraining-steps", "20")),
        ("llm", r"rounding to 4 bits", ("--pretraining-steps", "20", "--base-bits", "4")),
    ],
)
def test_a_demo_ends_with_a_model_and_what_travelled(
    tmp_path: Path, name: str, told_of: str, shortened: tuple[str, ...]
) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", f"tessera.examples.{name}", "--out", str(out), "--set", "rounds=2", *shortened]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(told_of, done.stdout), done.stdout
    shares = re.search(r"Round 1 moved ([\d.]+) % .*; the 1 after it ([\d.]+) %", done.stdout)
    assert shares, done.stdout
    first, second = map(float, shares.groups())
    # Half the layers travel, or prompts alone; to train reports, round 1 fetches the model.
    assert second < (2 if name == "pairs" else 60)
    assert first > second or name == "pairs"
    exported = ModelFolder.open(out / "global-model").model
    # The upload added the model's tokenizer, if it has one.
    assert exported.model_copy(update={"preprocessing": {}}) == ModelFolder.open(out / "model").model
    assert left_of(out) == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_of_secure_sums_survives_a_site_and_a_helper_that_are_killed(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "tessera.examples.secure", "--out", str(out), "--set", "rounds=5"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 noisy sums, each over 5 to 6 sites" in done.stdout
    assert "Each site as a whole: epsilon 1000 at delta 1e-05" in done.stdout
    assert left_of(out) == []


def test_the_notes_are_the_same_each_time_and_of_every_department() -> None:
    first, again = (notes(200, WORDINGS[0], Random(1)) for _ in range(2))
    assert first == again
    assert {note.department for note in first} == set(DEPARTMENTS)


@pytest.mark.parametrize(("demo", "sites"), [(reports, 4), (pairs, 4)])
def test_what_a_demo_asks_for_is_there_at_every_site(tmp_path: Path, demo: ModuleType, sites: int) -> None:
    demo.write_tokenizer(tmp_path / "tokenizer")
    wanted = read_spec(demo.HERE / "run.toml", [])
    holdings = demo.holdings(tmp_path)
    loaded = {holding.site: load_source(holding.source, key_of_seed(0)) for holding in holdings}
    assert len(loaded) == sites
    assert all(dataset.examples > 100 for dataset in loaded.values())
    assert {wanted["dataset"], wanted["evaluation"].get("dataset", wanted["dataset"])} == {
        holding.dataset for holding in holdings
    }

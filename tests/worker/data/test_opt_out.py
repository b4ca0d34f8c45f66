"""A site's opt-out list: no task sees an example of a group in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tessera.shared.api.cohort import Cohort
from tessera.worker.cli.data import app
from tessera.worker.data.content import digests_of
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.settings import read_settings
from tests.support.coordinator import LiveCoordinator, until
from tests.worker.governance.test_site_decides import Desk, begin, tasks

KEY = b"k" * 32


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Forty texts of twenty patients, and a list of the patients 3 and 5 and of one who is in no text."""
    tensors = {"input_ids": torch.arange(40)[:, None], "labels": torch.arange(40) % 2, "group": torch.arange(40) // 2}
    save_file(tensors, tmp_path / "notes.safetensors")
    (tmp_path / "out.txt").write_text("3\n\n 5 \n99\n")
    return tmp_path


def loaded(folder: Path, *, listed: bool = True, **more: Any) -> Dataset:
    file = folder / "notes.safetensors"
    return load("arrays", {"file": str(file)}, opt_out=folder / "out.txt" if listed else None, **more)


def places(dataset: Dataset | None) -> set[int]:
    assert dataset
    return set(dataset.tensors["input_ids"].flatten().tolist())


def test_no_example_of_a_listed_group_is_loaded(notes: Path) -> None:
    dataset = loaded(notes)
    assert places(dataset) == set(range(40)) - {6, 7, 10, 11}
    found = dataset.report.opted_out
    assert found
    assert (found.listed, found.found, found.examples) == (3, 2, 4)
    assert (dataset.info.examples, dataset.info.groups, dataset.info.opted_out) == (36, 18, 4)


def test_a_list_moves_no_other_example_to_the_held_out_share(notes: Path) -> None:
    whole, rest = (loaded(notes, listed=listed, held_out=0.4, key=KEY) for listed in (False, True))
    out = {6, 7, 10, 11}
    assert places(rest) == places(whole) - out
    assert places(rest.held_out) == places(whole.held_out) - out


def test_a_changed_list_changes_the_digests_of_a_data_set(notes: Path) -> None:
    before = digests_of(loaded(notes))
    (notes / "out.txt").write_text("3\n")
    after = digests_of(loaded(notes))
    assert (len(before.readable), len(after.readable)) == (36, 38)
    assert before.content != after.content


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe3", "not text"),
        ("\n".join(map(str, range(20))).encode(), "every example"),
    ],
)
def test_an_unusable_list_is_refused(notes: Path, text: bytes | None, reason: str) -> None:
    (notes / "out.txt").unlink() if text is None else (notes / "out.txt").write_bytes(text)
    with pytest.raises(DataError, match=reason):
        loaded(notes)


def test_a_list_without_groups_is_refused(notes: Path) -> None:
    with pytest.raises(DataError, match="name the column in group"):
        load("digits", {}, opt_out=notes / "out.txt")


def test_an_example_without_group_is_refused_beside_a_list(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("text,label,patient\na b,x,1\nb c,y,\n")
    (tmp_path / "out.txt").write_text("7\n")
    options = {"file": str(tmp_path / "notes.csv"), "labels": ["x", "y"], "tokenizer": "run", "group": "patient"}
    with pytest.raises(DataError, match="1 examples have no group"):
        load("text", options, opt_out=tmp_path / "out.txt")


def test_data_show_counts_what_a_list_leaves_out(notes: Path) -> None:
    settings = notes / "data.toml"
    source = f'kind = "arrays"\nfile = "{notes}/notes.safetensors"\nopt_out = "{notes}/out.txt"\n'
    settings.write_text(f"[datasets.notes]\n{source}")

    def shown() -> Any:
        result = CliRunner().invoke(app, ["show", str(settings), "--json"])
        return json.loads(result.stdout)["datasets"][0]

    assert (shown()["examples"], shown()["opted out"], shown()["warnings"]) == (36, 4, [])
    (notes / "out.txt").write_text("patient-3\n")
    assert shown()["opted out"] == 0
    assert "none of the 1 lines of opt_out" in shown()["warnings"][0]


def test_a_running_worker_trains_without_who_opted_out_since_and_not_without_the_list(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    whole = load("digits", {})
    group = torch.arange(whole.examples) // 2
    save_file({**whole.tensors, "group": group}, tmp_path / "digits.safetensors")
    listed = tmp_path / "out.txt"
    listed.write_text("0\n")
    desk = Desk(coordinator, tmp_path, "")
    source = f'kind = "arrays"\nfile = "{tmp_path}/digits.safetensors"\nopt_out = "{listed}"\n'
    desk.text = desk.text.partition("[datasets")[0] + f"[datasets.digits]\n{source}\n[policy]\n"
    desk.write("")
    desk.settings = read_settings(desk.file)
    client = coordinator.client("orchestrator")
    with desk.working():
        first = begin(client)
        until(lambda: client.run(first.id).state == "completed")
        listed.unlink()
        second = begin(client, cohort=Cohort(max_attempts=1))
        # Nothing is claimed, so that the run waits.
        why = "it takes no tasks at present; its own log says why"
        until(lambda: why in client.preview_run(second.spec).model_dump_json())
        assert client.run(second.id).state == "running"
        listed.write_text("0\n1\n2\n")
        until(lambda: client.run(second.id).state == "completed")
    counts = [task.examples for run in (first, second) for task in tasks(client, run) if task.examples]
    assert counts == [whole.examples - 2, whole.examples - 6]

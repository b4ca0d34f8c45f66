"""The demo of a clinic: its notes and settings, its refusals, and the whole of it shortened, also with tables and a
model of the user's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

from tessera.examples.clinic import __main__ as demo
from tessera.examples.clinic import base
from tessera.examples.clinic.notes import (
    CLASSES,
    EXTERNAL,
    HOSPITALS,
    NEW_SITE,
    PUBLIC,
    Style,
    entity_rows,
    notes,
    question,
    question_rows,
    write_rows,
)
from tessera.examples.clinic.sites import Site, entity_classes, read_sites, worker_settings, write_tables
from tessera.examples.staging import DemoFailed
from tessera.shared.client.run_file import read_spec
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.inventory import load_source
from tessera.worker.settings import WorkerSettings, read_settings
from tests.support.cli import environment
from tests.system.test_demo import left_of

RULE = {"epsilon": 8.0, "delta": 1e-4, "unit": "group"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of all sites, and both small models, hardly trained."""
    made = tmp_path_factory.mktemp("clinic")
    write_tables(made / "tables", 40)
    for task in demo.TASKS:
        base.write(task, made / task, 2)
    return made


def settings_of(folder: Path, site: Site) -> WorkerSettings:
    home = folder / site.name
    home.mkdir(exist_ok=True)
    (home / "token").write_text("secret")
    tokenizers = {task: folder / task for task in demo.TASKS}
    lengths = {name: task.max_length for name, task in demo.TASKS.items()}
    text = worker_settings(site, "http://127.0.0.1:1", home / "token", tokenizers, CLASSES, lengths, RULE)
    (home / "worker.toml").write_text(text)
    return read_settings(home / "worker.toml")


def loaded(folder: Path, site: Site) -> dict[str, Dataset]:
    return {name: load_source(source, key_of_seed(0)) for name, source in settings_of(folder, site).datasets.items()}


@pytest.mark.parametrize("style", [PUBLIC, *HOSPITALS.values(), *EXTERNAL.values(), *NEW_SITE.values()])
def test_entities_and_answers_stand_in_a_note_which_is_the_same_each_time(style: Style) -> None:
    some = list(notes(style, 50, Random(3)))
    assert some == list(notes(style, 50, Random(3)))
    assert len({note.patient for note in some}) == 50 < len(some)
    rng, encode = Random(0), base.tokenizer()
    for note in some:
        spans = {span["label"]: note.text[span["start"] : span["end"]] for span in note.spans}
        assert spans == note.treatment._asdict()
        asked, answer = question(note, rng)
        assert f" {answer} " in f" {note.text} "
        ids = encode(f"{asked} {note.text}")["input_ids"]
        assert encode.unk_token_id not in ids
        assert "".join(encode.convert_ids_to_tokens(ids)) == f"{asked} {note.text}".replace(" ", "")


def test_hospitals_share_no_medicine_and_the_fourth_has_others() -> None:
    shares = [set(style.medicines) for style in (*HOSPITALS.values(), *NEW_SITE.values())]
    assert sum(map(len, shares)) == len(set.union(*shares))


def test_the_models_learn_beforehand_from_the_tensors_that_workers_read(folder: Path, tmp_path: Path) -> None:
    some, encode = list(notes(NEW_SITE["dune-hospital"], 10, Random(0))), base.tokenizer()
    tables = {task: tmp_path / f"{task}.jsonl" for task in demo.TASKS}
    write_rows(tables["entities"], entity_rows(some))
    write_rows(tables["questions"], question_rows(some, Random(1)))
    data = loaded(folder, Site("dune-hospital", "new-site", tables, None))
    made = {"entities": base.entities(encode, some), "questions": base.answers(encode, some, Random(1))}
    for task, expected in made.items():
        read = data[f"{task}-new-site"].tensors
        for name, tensor in expected.items():
            width = tensor.shape[1]
            assert torch.equal(read[name][:, :width], tensor), (task, name)


def test_each_hospital_trains_another_rank_and_refuses_a_run_with_less_privacy(folder: Path) -> None:
    sites = read_sites(folder / "tables", tuple(demo.TASKS))
    assert [site.rank for site in sites] == [4, 8, 16, None, None]
    for site in sites:
        settings, data = settings_of(folder, site), loaded(folder, site)
        assert set(data) == {site.dataset(task) for task in demo.TASKS}
        assert all(one.groups is not None for one in data.values())
        assert settings.resources.get("lora_rank") == site.rank
        required = settings.policy.require_privacy
        assert (required is not None) == ("train" in settings.kinds) == (site.setting == "in-domain")
        if required:
            assert (required.epsilon, required.unit) == (8.0, "group")
            assert {source.privacy.epsilon for source in settings.datasets.values() if source.privacy} == {16.0}
    for task in demo.TASKS:
        wanted = read_spec(demo.HERE / f"{task}.toml", [])
        assert {name: wanted["privacy"][name] for name in RULE} == RULE
        assert wanted["dataset"] == task


def test_tables_that_cannot_be_used_are_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match=r"no table to train on: write .*in-domain/HOSPITAL/entities\.jsonl"):
        read_sites(tmp_path, ["entities"])
    write_tables(tmp_path, 2)
    (tmp_path / "external/letters-archive").rename(tmp_path / "new-site/archive")
    with pytest.raises(DemoFailed, match=r"new-site has entities\.jsonl of archive, dune-hospital: leave one"):
        read_sites(tmp_path, ["entities"])
    table = tmp_path / "in-domain/birch-clinic/entities.jsonl"
    table.write_text('{"text": "no gout", "label": []}\n{"text": "gout", "label": [{"start": 0}]}\n')
    sites = [Site("birch-clinic", "in-domain", {"entities": table}, 4)]
    with pytest.raises(DemoFailed, match=r"entities\.jsonl, row 1, has no spans of entities: write it as"):
        entity_classes(sites)


@pytest.mark.parametrize("option", ["--tables", "--entities-model", "--questions-model"])
def test_a_folder_within_the_one_that_the_demo_replaces_is_refused(
    option: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(folder), option, str(folder / "tables")])
    with pytest.raises(SystemExit, match="2"):
        demo.arguments()
    assert "which this demo replaces: give another --out" in " ".join(capsys.readouterr().err.split())


def play(out: Path, *options: str) -> str:
    """Return what the demo prints with few short rounds."""
    short = ("--set", "rounds=1", "--set", "training.epochs=1", "--pretraining-steps", "5", "--patients", "150")
    command = [sys.executable, "-m", "tessera.examples.clinic", "--out", str(out), *short, *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_of(out) == []
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_compares_hospitals_together_and_alone_in_three_settings(tmp_path: Path) -> None:
    said = play(tmp_path / "demo")
    for task in demo.TASKS:
        table = said.partition(f"{task}: {demo.TASKS[task].score}")[2].partition("\n\n")[0]
        assert len(re.findall(r"^.*  \d\.\d{3} +\d\.\d{3} +\d\.\d{3} ", table, re.MULTILINE)) == 3, said
        epsilons = re.findall(r"federated .* 4, 8, 16 +(\d+\.\d+) ", table)
        assert [0 < float(epsilon) <= 8 for epsilon in epsilons] == [True], said
    assert said.count("synthetic") >= 6
    for task in demo.TASKS:
        assert ModelFolder.open(tmp_path / "demo" / f"trained-{task}").model.blocks


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_takes_tables_and_a_model_of_the_users_whose_weights_stay_at_the_sites(
    folder: Path, tmp_path: Path
) -> None:
    out, mine = tmp_path / "demo", tmp_path / "tables"
    write_tables(mine, 150)
    options = ("--tables", str(mine), "--questions-model", str(folder / "questions"), "--max-length", "64")
    said = play(out, *options, "--no-privacy")
    assert "entities: " not in said
    assert re.search(r"^federated .* 4, 8, 16 +- ", said, re.MULTILINE), said
    external = set(ModelFolder.open(out / "model-questions").model.external.values())
    blobs = {path.name for path in (out / "coordinator" / "blobs").rglob("*") if path.is_file()}
    assert len(external) > 10
    assert not any(digest.removeprefix("sha256:") in name for digest in external for name in blobs)

"""`tessera data`: what a site's data sets hold, and how one divides, as a table, a picture and a document."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tessera.shared.version import install_line
from tessera.worker.cli.data import app
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.cli import tessera
from tests.support.pretrained import bert_tokenizer

DIGITS = """
[datasets.digits]
kind = "digits"
held_out = 0.2
part = { scheme = "dirichlet", count = 4, index = 3, alpha = 0.1 }
"""

HELD = '[datasets.test]\nkind = "digits"\nsplit = "test"\n'


def config(folder: Path, text: str) -> str:
    path = folder / "data.toml"
    path.write_text(text)
    return str(path)


def told(*arguments: str, code: int = 0) -> str:
    answer = CliRunner().invoke(app, [*arguments])
    assert answer.exit_code == code, answer.output
    return " ".join(answer.output.split())


def document(*arguments: str) -> dict[str, object]:
    answer = CliRunner().invoke(app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    found: dict[str, object] = json.loads(answer.stdout)
    return found


def test_show_names_the_task_of_labels_that_are_no_classes(tmp_path: Path) -> None:
    table = tmp_path / "notes.csv"
    table.write_text("text,a,b,score\n" + "the cat,1,0,0.5\n" * 3 + "the dog,0,0,1.5\n" + "the hen,0,1,2\n")
    base = {"kind": "text", "file": str(table), "tokenizer": "run"}
    several = base | {"problem_type": "multi_label", "label_columns": True, "labels": ["a", "b"]}
    numbers = base | {"problem_type": "regression", "label": "score"}
    lines = [
        f"[datasets.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
        for name, options in (("several", several), ("numbers", numbers))
    ]
    shown = document("show", config(tmp_path, "".join(lines)))["datasets"]
    assert isinstance(shown, list)
    assert [(row["problem type"], row["labels"], row["classes"]) for row in shown] == [
        ("multi_label", 2, None),
        ("regression", None, None),
    ]
    assert "1 example has no label" in shown[0]["warnings"][0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [("# caf\xe9\n".encode("latin-1"), "cannot be read"), (b"datasets = 5\n", "datasets must be tables")],
)
def test_settings_that_cannot_get_a_data_set_are_refused_and_stay(
    tmp_path: Path, settings: bytes, reason: str
) -> None:
    file, lines = tmp_path / "worker.toml", tmp_path / "lines.csv"
    file.write_bytes(settings)
    lines.write_text("text,label\ngood,1\nbad,0\n")
    assert reason in told("init", str(lines), "--out", str(file), code=2)
    assert file.read_bytes() == settings


def test_show_tells_what_a_worker_would_have(tmp_path: Path) -> None:
    file = config(tmp_path, 'url = "https://not.needed.example"\n' + DIGITS + HELD)
    shown = document("show", file)["datasets"]
    assert isinstance(shown, list)
    digits, test = shown
    assert (digits["part"], digits["classes"]) == ("3 of 4, dirichlet", 10)
    # Of 371 a fifth, with a standard deviation of 7.7.
    assert digits["examples"] + digits["held out"] == 371
    assert 50 < digits["held out"] < 100
    assert (test["part"], test["examples"], test["held out"], test["domains"]) == (None, 360, None, None)
    assert test["tensors of each"] == ["labels int64", "pixel_values float32[1, 8, 8]"]
    shown_so = f"3 of 4, dirichlet {digits['examples']} {digits['held out']} 10"
    assert shown_so in told("show", file, "--dataset", "digits")


def test_split_counts_each_class_at_each_site_as_the_settings_divide_it(tmp_path: Path) -> None:
    file = config(tmp_path, DIGITS)
    sites = document("split", file)["sites"]
    assert isinstance(sites, list)
    assert [site["examples"] for site in sites] == [384, 445, 237, 371]
    assert sum(sites[0]["class"].values()) == 384
    assert "0 2 - 126 91 - - - 4 131 30 384" in told("split", file)


def test_options_change_the_division(tmp_path: Path) -> None:
    file = config(tmp_path, DIGITS)
    other = document("split", file, "--seed", "1", "--alpha", "100")["partition"]
    assert other == {"scheme": "dirichlet", "count": 4, "alpha": 100.0, "seed": 1}
    sites = document("split", file, "--scheme", "iid", "--sites", "3")["sites"]
    assert isinstance(sites, list)
    assert [site["examples"] for site in sites] == [479, 479, 479]
    assert "2 " in told("split", file, "--scheme", "shift")
    assert "noise 0.5" in told("split", file, "--scheme", "shift")


def test_the_names_of_classes_and_the_domains_are_shown(tmp_path: Path) -> None:
    for place, (domain, label) in enumerate((d, c) for d in ("photo", "sketch") for c in ("cat", "dog")):
        folder = tmp_path / "pets" / domain / label
        folder.mkdir(parents=True)
        (folder / "a.bmp").write_bytes(_bitmap(place))
    pets = f'kind = "images"\nfolder = "{tmp_path / "pets"}"\ndomain_folders = true\nsize = 2\n'
    file = config(tmp_path, f'[datasets.pets]\n{pets}labels = ["cat", "dog"]\n')
    shown = told("split", file, "--scheme", "domain", "--sites", "2")
    assert "site class cat dog in all 0 1 1 2 1 1 1 2" in shown
    assert "site domain 0 1 in all 0 2 - 2 1 - 2 2" in shown


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "pets" / "[bold]cat"
    folder.mkdir(parents=True)
    (folder / "a.bmp").write_bytes(_bitmap(0))
    file = config(
        tmp_path,
        f'[datasets.pets]\nkind = "images"\nfolder = "{tmp_path / "pets"}"\nsize = 2\nlabels = ["[bold]cat"]\n',
    )
    assert "site class [bold]cat in all 0 1 1" in told("split", file, "--scheme", "iid", "--sites", "1")


def _bitmap(value: int) -> bytes:
    """A one-pixel BMP."""
    return (
        b"BM:\0\0\0\0\0\0\0"
        + bytes([54, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 24, 0])
        + bytes(24)
        + bytes([value, 0, 0, 0])
    )


def test_show_warns_of_ignored_files_and_unknown_words(tmp_path: Path) -> None:
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "cat" / "a.bmp").write_bytes(_bitmap(0))
    (tmp_path / "pets" / "cat" / "b.dcm").write_bytes(b"")
    tokenizer = bert_tokenizer(tmp_path / "bert", ["a", "photo", "of"])
    pets = f'kind = "imagetext"\nfolder = "{tmp_path / "pets"}"\nsize = 2\nlabels = ["cat"]\n'
    file = config(tmp_path, f'[datasets.pets]\n{pets}tokenizer = "{tokenizer}"\n')
    shown = told("show", file)
    assert "33.3%" in shown  # a photo of a [UNK] [UNK]
    assert "warning: pets: the tokenizer does not know 33% of the tokens" in shown
    assert "warning: pets: 1 file ignored: 1 .dcm. Convert" in shown


def test_show_says_what_it_cannot_show_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "lines.csv").write_text("text\nthe cat\n")
    lines = f'kind = "text"\nfile = "{tmp_path / "lines.csv"}"\nhead = "causal-lm"\ntokenizer = "run"\n'
    shown = told("show", config(tmp_path, f"[datasets.lines]\n{lines}"))
    assert "of each run" in shown
    assert "int64" not in shown
    assert "lines: tokens and unknown words depend on each run's tokenizer, and cannot be shown here" in shown


def test_many_classes_and_none_are_told_in_short(tmp_path: Path) -> None:
    save_file({"labels": torch.arange(100) % 50}, tmp_path / "many.safetensors")
    save_file({"labels": torch.zeros(10, 3)}, tmp_path / "none.safetensors")
    kinds = "".join(
        f'[datasets.{name}]\nkind = "arrays"\nfile = "{tmp_path / name}.safetensors"\n' for name in ("many", "none")
    )
    file = config(tmp_path, kinds)
    shards = ("--scheme", "shards", "--sites", "5", "--each", "1")
    assert "site class kinds the largest in all 0 10 10% 20" in told("split", file, "--dataset", "many", *shards)
    iid = ("--scheme", "iid", "--sites", "2")
    assert "site class none in all 0 5 5 1 5 5" in told("split", file, "--dataset", "none", *iid)


@pytest.mark.parametrize(
    ("name", "begins"), [pytest.param("split.png", b"\x89PNG", marks=pytest.mark.long), ("split.svg", b"<?xml")]
)
def test_the_split_is_drawn_in_the_format_of_its_name(tmp_path: Path, name: str, begins: bytes) -> None:
    out = tmp_path / name
    assert f"drawn in {out}" in told("split", config(tmp_path, DIGITS), "--out", str(out))
    assert out.read_bytes().startswith(begins)


def test_without_matplotlib_the_table_is_there_and_a_picture_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib" or "split_plot" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = config(tmp_path, DIGITS)
    assert "371" in tessera("data", "split", file).stdout
    refused = tessera("data", "split", file, "--out", str(tmp_path / "a.png"))
    assert refused.returncode == 2
    assert "error: --out: matplotlib is not installed" in refused.stderr
    assert install_line("demo") in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("show", "--dataset", "none"), "there is no data set 'none'; it can be digits, test"),
        (("split",), "there are several data sets: give --dataset digits or test"),
        (("split", "--dataset", "test"), "give --scheme and --sites"),
        (("split", "--dataset", "test", "--scheme", "iid"), "--sites: required, but missing"),
        (("split", "--dataset", "test", "--scheme", "odd", "--sites", "2"), "--scheme: must be `iid`, "),
        (("split", "--dataset", "digits", "--each", "2"), "--each: scheme dirichlet has no such setting"),
        (("split", "--dataset", "digits", "--sites", "1500"), "--sites: "),
        (("split", "--dataset", "test", "--scheme", "iid", "--sites", "361"), "datasets.test.part: 360 rows cannot"),
        (("split", "--dataset", "test", "--scheme", "domain", "--sites", "2"), "needs the domain of each example"),
        (("split", "--dataset", "digits", "--out", "split.odd"), "Format 'odd' is not supported"),
        (("split", "--dataset", "digits", "--out", "/dev/null/all.png"), "/dev/null/all.png"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *options = arguments
    assert complaint in told(command, config(tmp_path, DIGITS + HELD), *options, code=2)


def test_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    assert "nowhere.toml; `tessera worker join` writes one" in told("show", str(tmp_path / "nowhere.toml"), code=2)
    assert "datasets: " in told("show", config(tmp_path, "name = 'x'"), code=2)
    odd = config(tmp_path, DIGITS + "splitt = 1\n")
    assert "error: datasets.digits.splitt: " in told("show", odd, code=2)


def test_the_environment_wins_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_WORKER_DATASETS__DIGITS__PART__INDEX", "0")
    assert "0 of 4, dirichlet" in told("show", config(tmp_path, DIGITS))


def test_init_writes_a_table_that_show_reads(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "my pets" / label).mkdir(parents=True)
        for place in range(20):
            (tmp_path / "my pets" / label / f"{place}.bmp").write_bytes(_bitmap(place))
    pets, file = str(tmp_path / "my pets"), str(tmp_path / "worker.toml")
    assert '[datasets.my-pets] # 40 images in folders kind = "images"' in told("init", pets)
    assert f"then check it: tessera data show {file}" in told("init", pets, "--out", file)
    told("init", pets, "--out", file, "--name", "more")
    shown = document("show", file)["datasets"]
    assert isinstance(shown, list)
    assert [(of["name"], of["examples"] + of["held out"]) for of in shown] == [("my-pets", 40), ("more", 40)]
    assert "has a data set 'more' already: give another --name" in told(
        "init", pets, "--out", file, "--name", "more", code=2
    )
    assert "there is no file or folder" in told("init", pets + "s", code=2)


@pytest.mark.parametrize("room", [0, 40])
def test_a_full_disk_leaves_the_settings_as_they_were(tmp_path: Path, room: int) -> None:
    (tmp_path / "lines.csv").write_text("text,label\nthe cat,good\nthe dog,bad\n")
    # More than the command writes to temporary files.
    before = f"{HELD}# {'-' * 1_000_000}\n".encode()
    (file := tmp_path / "worker.toml").write_bytes(before)
    # As on a full disk, no file grows beyond so many bytes.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
    try:
        answer = CliRunner().invoke(app, ["init", str(tmp_path / "lines.csv"), "--out", str(file)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (answer.exit_code, "worker.toml is unchanged: " in answer.stderr) == (2, True), answer.output
    assert file.read_bytes() == before


def test_init_and_show_warn_of_the_same_empty_texts(tmp_path: Path) -> None:
    (tmp_path / "lines.csv").write_text("text,label\nthe cat,good\n,Good\n")
    file = str(tmp_path / "data.toml")
    empty = "1 empty text among the examples. Remove these rows"
    written = told("init", str(tmp_path / "lines.csv"), "--out", file)
    assert f"warning: {empty}" in written
    assert "warning: 'Good' and 'good' differ only by case or spaces" in written
    Path(file).write_text(Path(file).read_text().replace("held_out", "# held_out"))
    assert f"warning: lines: {empty}" in told("show", file)


def test_init_proposes_chats_and_show_marks_what_is_learnt_of_one(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "own", CHATML)
    rows = [{"instruction": f"[ask] {number}", "output": answer} for number, answer in enumerate(("[yes]", "", "no"))]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "worker.toml"
    told("init", str(tmp_path / "asked.jsonl"), "--tokenizer", str(tokenizer), "--out", str(file))
    written = file.read_text()
    assert '# it has the columns instruction and output\nkind = "chat"' in written
    file.write_text(written.replace("held_out = 0.2", ""))
    shown = told("show", str(file))
    assert (
        "asked: one example, with its scored parts in [[ ]]: <|im_start|>user [ask] 0<|im_end|> "
        "<|im_start|>assistant [[[yes]<|im_end|>]]"
    ) in shown
    assert "warning: asked: 1 example without an answer left out: row 1" in shown
    file.write_text(file.read_text().replace(json.dumps(str(tokenizer)), '"run"'))
    assert "[[ ]]: user: [ask] 0 assistant: [[[yes]]]" in told("show", str(file))
    (row,) = document("show", str(file))["datasets"]  # type: ignore[misc]
    assert row["example"] == "user: [ask] 0\nassistant: [[[yes]]]"  # type: ignore[has-type]

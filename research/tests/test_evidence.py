"""The loaders of models and data in packages, on small made-up ones, and the frontier's study on a tiny model."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, BertConfig, BertModel

from common.document import block, tidied
from controls.head_only import HeadOnlyCoordinator
from evidence.frontier.__main__ import (
    ABOUT,
    COMMAND,
    MODELS,
    OtherStudy,
    begin_with_saved,
    claim,
    finished,
    main,
    save,
    work,
)
from evidence.frontier.report import lines, paired, void
from evidence.frontier.runs import inputs, run
from evidence.frontier.study import (
    ARMS,
    FIRST_RATES,
    QUICK,
    STANDARD,
    TUNING_SEED,
    Job,
    choices,
    nearest,
    startable,
    wanted_rates,
)
from evidence.results_folder import RUNS
from evidence.sources import minilm
from evidence.sources.packages import PackageUnusable, Wheel, digest_of, unpacked
from evidence.sources.phrases import (
    CHAPTERS,
    MOST,
    WORDINGS,
    Encoded,
    Phrase,
    cleaned,
    of_mapping,
    of_tabular,
    split,
)
from evidence.sources.prepare import PHRASES
from tessera.shared.methods.base import MethodSettings, MethodSpec, Participant, RunInfo, State
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block
from tessera.simulation.comparison.statistics import interval
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate

# ---------------------------------------------------------------- packages

MEMBER = "made_up/data/list.txt"


def write_wheel(folder: Path, version: str = "1.0", text: str = "Cholera") -> Wheel:
    """Write a wheel of two files, and return it with the one that is read."""
    folder.mkdir(exist_ok=True)
    file = folder / f"made_up-{version}-py3-none-any.whl"
    info = f"made_up-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MEMBER, text)
        archive.writestr("made_up/__init__.py", "raise SystemExit")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: made-up\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel("made-up", version, digest_of(file), (MEMBER,))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which alone pip takes packages."""
    folder = tmp_path / "registry"
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def test_named_members_of_a_wheel_are_unpacked_and_cached(registry: Path, tmp_path: Path) -> None:
    wheel = write_wheel(registry)
    folder = unpacked(wheel, tmp_path / "cache")
    assert [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()] == [Path(MEMBER)]
    assert (folder / MEMBER).read_text() == "Cholera"
    (registry / "made_up-1.0-py3-none-any.whl").unlink()
    assert unpacked(wheel, tmp_path / "cache") == folder


def test_changed_wheel_is_refused_by_name(registry: Path, tmp_path: Path) -> None:
    wheel = write_wheel(registry)
    write_wheel(registry, text="Typhoid fever")
    with pytest.raises(PackageUnusable, match=r"made-up==1\.0 has changed: its SHA-256 is"):
        unpacked(wheel, tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*.txt")) == []


def test_missing_wheel_is_named(registry: Path, tmp_path: Path) -> None:
    wheel = write_wheel(registry)
    with pytest.raises(PackageUnusable, match=r"made-up==2\.0 cannot be downloaded: .*copy the folder"):
        unpacked(replace(wheel, version="2.0"), tmp_path / "cache")


def test_missing_member_is_named(registry: Path, tmp_path: Path) -> None:
    wheel = replace(write_wheel(registry), members=("made_up/data/other.txt",))
    with pytest.raises(PackageUnusable, match=r"made-up==1\.0 has no made_up/data/other\.txt"):
        unpacked(wheel, tmp_path / "cache")


# ---------------------------------------------------------------- phrases

TABULAR = """<ICD10CM.tabular>
<chapter><name>1</name><desc>Infections</desc><section id="A00-A09">
  <diag><name>A00</name><desc>Cholera</desc>
    <diag><name>A00.0</name><desc>Cholera due to  Vibrio</desc><inclusionTerm><note>Classical cholera</note>
      </inclusionTerm></diag></diag>
  <diag><name>A01</name><desc>Typhoid fever</desc></diag></section></chapter>
<chapter><name>2</name><desc>Neoplasms</desc><section id="C00-D49">
  <diag><name>C00</name><desc>Neoplasm of lip</desc></diag></section></chapter>
</ICD10CM.tabular>"""


def test_titles_and_inclusion_terms_have_their_category_and_chapter(tmp_path: Path) -> None:
    (tmp_path / "list.xml").write_text(TABULAR)
    assert list(of_tabular(tmp_path / "list.xml")) == [
        Phrase("Cholera", "title", "A00", 1),
        Phrase("Cholera due to Vibrio", "title", "A00", 1),
        Phrase("Classical cholera", "term", "A00", 1),
        Phrase("Typhoid fever", "title", "A01", 1),
        Phrase("Neoplasm of lip", "title", "C00", 2),
    ]


def test_old_titles_with_codes_of_one_chapter_are_kept(tmp_path: Path) -> None:
    rows = [
        ("Cholera", "A01.0"),
        ("Cholera", "A00.1"),
        ("Cholera", "A00.9"),
        # In two chapters, and in none.
        ("Fever with lump", "A01"),
        ("Fever with lump", "C00"),
        ("Strange code", "Z99"),
        ("", "A00"),
    ]
    with closing(sqlite3.connect(tmp_path / "map.db")) as database, database:
        database.execute('CREATE TABLE icd_mapping ("ICD-9 English" TEXT, "ICD-10" TEXT)')
        database.executemany("INSERT INTO icd_mapping VALUES (?, ?)", rows)
    found = list(of_mapping(tmp_path / "map.db", {"A00": 1, "A01": 1, "C00": 2}))
    assert found == [Phrase("Cholera", "icd-9", "A00", 1)]


def test_equal_phrases_count_once_and_a_category_has_at_most_twelve() -> None:
    many = [Phrase(f"Cholera of finger {number}", "title", "A00", 1) for number in range(MOST + 5)]
    found = cleaned(
        [
            *many,
            Phrase("CHOLERA", "title", "A00", 1),
            Phrase("cholera", "icd-9", "A00", 1),
            Phrase("COVID", "title", "U07", 22),
        ]
    )
    assert len(found) == MOST + 1
    assert found[0] == Phrase("cholera", "icd-9", "A00", 1)
    assert {phrase.wording for phrase in found[1:]} == {"title"}
    assert found == cleaned([*reversed(many), Phrase("cholera", "icd-9", "A00", 1)])


def made_up(categories: int = 4, width: int = 8, pieces: int = 40) -> Encoded:
    """Phrases of all chapters and wordings, three of each category and wording, as tokens from 5 on."""
    count = CHAPTERS * categories * len(WORDINGS) * 3
    places = np.arange(count)
    tokens = np.random.default_rng(0).integers(5, pieces, (count, width))
    tokens[:, 0], tokens[::2, -2:] = 2, 0
    of_category = places // (len(WORDINGS) * 3)
    return Encoded(tokens, places % len(WORDINGS), of_category, of_category // categories)


def test_sites_have_one_wording_and_no_category_is_on_two_sides() -> None:
    phrases = made_up()
    found = split(phrases, seed=3, sites_per_wording=2, examples=60)
    assert sorted(found.sites) == [f"{wording}-{site}" for wording in sorted(WORDINGS) for site in (1, 2)]
    rows = [*found.sites.values(), found.validation, found.test]
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))
    for site, of_site in found.sites.items():
        assert len(of_site) == 60
        assert {WORDINGS[number] for number in phrases.wordings[of_site]} == {site.rpartition("-")[0]}
    training = phrases.categories[np.concatenate([*found.sites.values()])]
    sides = [set(training), set(phrases.categories[found.validation]), set(phrases.categories[found.test])]
    assert sum(map(len, sides)) == len(set.union(*sides))
    # Each chapter is tested.
    assert set(phrases.labels[found.test]) == set(range(CHAPTERS))


def test_wording_with_too_few_phrases_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wording icd-9 has .* too few for 2 sites of 1000: lower one of the two"):
        split(made_up(), seed=3, sites_per_wording=2, examples=1000)


def test_saved_phrases_are_the_same(tmp_path: Path) -> None:
    phrases = made_up()
    phrases.save(tmp_path / PHRASES)
    loaded = Encoded.load(tmp_path / PHRASES)
    for name in ("tokens", "wordings", "categories", "labels"):
        assert np.array_equal(getattr(loaded, name), getattr(phrases, name))
    dataset = loaded.dataset(np.array([0, 1]))
    assert dataset.tensors["attention_mask"].tolist() == [[1] * 6 + [0] * 2, [1] * 8]
    assert dataset.tensors["labels"].tolist() == [0, 0]


# ---------------------------------------------------------------- the model

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("unused", "chol", "##era", "fever", "lip", "of", "##s")
TINY = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.1,
}  # fmt: skip


def tiny_bert(pieces: int) -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig.from_dict({**TINY, "vocab_size": pieces}))


def write_bert(folder: Path) -> None:
    """Write a tiny BERT as transformers saves it, with a tokenizer of a few pieces."""
    vocabulary = {piece: number for number, piece in enumerate((SPECIAL[0], *WORDS[:1], *SPECIAL[1:], *WORDS[1:]))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    marks = [(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tiny_bert(len(vocabulary)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_cut_model_computes_as_the_whole_one(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "cut"
    write_bert(whole)
    texts = ["Cholera", "fever of Cholera of chol", "lips?"]
    tokens = minilm.cut(whole, texts, width=7, out=out)
    assert tokens.shape == (3, 7)
    old, new = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (whole, out))
    assert new.get_vocab_size() == old.get_vocab_size() - 1
    for text, row in zip(texts, tokens, strict=True):
        pieces = old.encode(text).tokens
        assert new.encode(text).tokens == [*pieces[:6], "[SEP]"][: len(pieces)]
        assert new.encode(text).ids == row[row != 0].tolist()
    before = AutoModel.from_pretrained(whole).eval()
    after = AutoModel.from_pretrained(out, dtype=torch.float32).eval()
    assert after.config.hidden_dropout_prob == 0
    ids = torch.tensor([old.encode(texts[0]).ids]), torch.tensor(tokens[:1, : len(old.encode(texts[0]).ids)])
    with torch.inference_mode():
        expected, found = (model(each) for model, each in zip((before, after), ids, strict=True))
    # The weights are rounded to float16.
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, atol=5e-3, rtol=0)
    torch.testing.assert_close(found.pooler_output, found.last_hidden_state[:, 0].tanh())


# ---------------------------------------------------------------- the arms


def test_every_arm_trains_the_head_and_what_its_name_says() -> None:
    blocks = block_table(instantiate({**TINY, "model_type": "bert", "vocab_size": 9}, "text-classification"))
    factors = [f"bert.encoder.layer.0.attention.self.query.lora_{factor}.default.weight" for factor in "AB"]
    adapters = [Block(tensor=name, role="adapter", layer=0, shape=(2, 2), dtype="F32") for name in factors]
    trained = {}
    for arm in ARMS:
        run = RunInfo((*blocks, *adapters) if arm.method == "lora" else blocks, rounds=2)
        spec = MethodSpec(name=arm.method, settings=dict(arm.settings))
        half = HeadOnlyCoordinator(MethodSettings(), run) if arm.name == "head" else coordinator_half(spec, run)
        cohort = [Participant("a", 8), Participant("b", 8)]
        plans = half.plan(half.start(State(0, {})), cohort, Random(0)).values()
        found = [plan.train.resolve(run.blocks) for plan in plans]
        trained[arm.name] = {frozenset(block.layer for block in each if block.layer is not None) for each in found}
        if arm.name == "attention":
            # The worker chooses the layers.
            assert [plan.scalars["layers"] for plan in plans] == [1, 1]
        else:
            assert {block.role for each in found for block in each if block.layer is None} == {"head"}
    assert trained["full"] == {frozenset({0, 1, 2})}
    assert trained["last"] == {frozenset({2})}
    assert trained["lora"] == {frozenset({0})}
    assert trained["head"] == {frozenset()}
    # The same for both sites.
    assert len(trained["random"]) == 1


# ---------------------------------------------------------------- the rule for rates, and the order

LOW, MIDDLE, HIGH = FIRST_RATES


def test_first_rates_are_tried_then_the_next_one_outward() -> None:
    assert wanted_rates(STANDARD, {}) == FIRST_RATES
    assert wanted_rates(STANDARD, {LOW: 0.1, HIGH: 0.3}) == (MIDDLE,)
    assert wanted_rates(STANDARD, {LOW: 0.1, MIDDLE: 0.4, HIGH: 0.3}) == ()
    assert wanted_rates(STANDARD, {LOW: 0.1, MIDDLE: 0.2, HIGH: 0.3}) == (3e-3,)
    assert wanted_rates(STANDARD, {LOW: 0.1, MIDDLE: 0.2, HIGH: 0.3, 3e-3: 0.2}) == ()
    # Two further ones at most.
    assert wanted_rates(STANDARD, {LOW: 0.1, MIDDLE: 0.2, HIGH: 0.3, 3e-3: 0.4, 1e-2: 0.5}) == ()
    assert wanted_rates(STANDARD, {LOW: 0.3, MIDDLE: 0.3, HIGH: 0.3}) == (3e-5,)


def test_other_epsilons_take_the_rate_of_the_nearest_tuned_one() -> None:
    assert [nearest((1.0, 4.0, inf), epsilon) for epsilon in (0.5, 2.0, 8.0)] == [1.0, 1.0, 4.0]


def scores_of(study_cells: list[tuple[str, float]]) -> dict[Job, float]:
    """The finished tuning runs of some cells, whose best rate is the middle one."""
    values = zip(FIRST_RATES, (0.1, 0.5, 0.2), strict=True)
    return {Job(arm, epsilon, TUNING_SEED, rate): score for rate, score in values for arm, epsilon in study_cells}


def test_runs_start_seed_by_seed_once_their_rate_is_settled() -> None:
    assert {job.seed for job in startable(STANDARD, {}, ())} == {TUNING_SEED}
    assert len(list(startable(STANDARD, {}, ()))) == len(ARMS) * 3 * len(FIRST_RATES)
    one = scores_of([("lora", 4.0)])
    ready = [job for job in startable(STANDARD, one, ()) if not job.tunes]
    assert [job.seed for job in ready] == [1, 2, 3, 1, 4, 5]
    assert {(job.arm, job.rate) for job in ready} == {("lora", MIDDLE)}
    assert [job.epsilon for job in ready] == [4.0, 4.0, 4.0, 8.0, 4.0, 4.0]
    everything = scores_of([(arm.name, epsilon) for arm in ARMS for epsilon in STANDARD.tuned])
    order = list(startable(STANDARD, everything, ()))
    assert len(order) == len(ARMS) * (3 * 5 + 3)
    assert order[0] == Job("full", 1.0, 1, MIDDLE)
    assert order[0] not in list(startable(STANDARD, everything, {order[0]}))
    assert choices(STANDARD, everything)["head", 0.5] == MIDDLE


# ---------------------------------------------------------------- the report


def table_of(scores: dict[tuple[str, float, int], float], accuracy: float = 0.6) -> dict[Job, dict[str, float]]:
    of_all = {
        "accuracy": accuracy,
        "majority_accuracy": 0.13,
        "majority_f1": 0.01,
        "examples": 400,
        "upload_bytes": 8,
    }
    return {Job(*key, MIDDLE): {"macro_f1": score, **of_all} for key, score in scores.items()}


def test_differences_are_paired_by_seed() -> None:
    table = table_of(
        {("full", 1.0, 1): 0.2, ("full", 1.0, 2): 0.4, ("attention", 1.0, 2): 0.5, ("head", 1.0, 3): 0.1}
    )
    assert paired(table, "attention", "full") == pytest.approx([10.0])
    assert paired(table, "head", "full") == []


def test_interval_of_three_values() -> None:
    # The quantile of 2 degrees of freedom at 97.5 % is 4.303; the standard deviation is 1.
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)


def test_table_is_void_if_full_training_does_not_learn() -> None:
    # Five standard errors at 400 examples: 0.13 + 5 sqrt(0.13 * 0.87 / 400) = 0.214.
    assert void(table_of({("full", inf, 1): 0.5}, accuracy=0.22)) is None
    assert "seed 1" in str(void(table_of({("full", inf, 1): 0.5}, accuracy=0.21)))
    assert "no run" in str(void(table_of({("full", 1.0, 1): 0.5})))


# ---------------------------------------------------------------- the study


@pytest.mark.long
def test_a_run_spends_its_epsilon_and_is_scored_on_the_part_of_its_seed(prepared: Path, tmp_path: Path) -> None:
    figures = run(QUICK, Job("lora", 1.0, 1, 1e-3), prepared, tmp_path, "cpu")
    assert 0.95 < figures["spent"] <= 1
    parts = split(Encoded.load(prepared / PHRASES), 1, QUICK.sites_per_wording, QUICK.examples)
    assert figures["examples"] == len(parts.test)
    assert 0 <= figures["macro_f1"] <= 1


@pytest.mark.long
def test_quick_study_runs_resumes_and_reports(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--quick", "--prepared", str(prepared), "--out", str(out)]
    assert main([*arguments, "--deadline", "0"]) == 0
    assert finished(out) == {}
    some = replace(QUICK, arms=tuple(QUICK.arm(name) for name in ("full", "attention", "lora")))
    assert work(some, prepared, out, "cpu", processes=2) == {}
    assert len(finished(out)) == 3 * len(QUICK.tuned) * (1 + len(QUICK.seeds))
    assert main([*arguments, "--report"]) == 0
    report = capsys.readouterr().out
    assert "### Epsilon 1, delta 0.001" in report
    assert "| lora | inf | 0.001 |" in report
    assert (out / "frontier.png").stat().st_size > 0
    spent = {job.epsilon: figures["spent"] for job, figures in finished(out).items() if not job.tunes}
    assert 0.95 < spent[1.0] <= 1
    assert spent[inf] == 0
    # A run that is missing is done again, with the same bits.
    lost = next((out / RUNS).glob("attention-epsilon-1-seed-1-*"))
    before = json.loads(lost.read_bytes())
    lost.unlink()
    assert work(some, prepared, out, "cpu", processes=1) == {}
    assert json.loads(lost.read_bytes())["digest"] == before["digest"]
    # Their names end with a digest of what they depend on.
    made = sorted(folder.name.rpartition("-")[0] for folder in (out / MODELS).iterdir())
    assert made == ["lora-2-0", "lora-2-1", "plain-0", "plain-1"]


def test_results_of_other_settings_are_not_mixed(prepared: Path, tmp_path: Path) -> None:
    claim(tmp_path, QUICK, inputs(prepared))
    claim(tmp_path, QUICK, inputs(prepared))
    with pytest.raises(OtherStudy, match="has runs with other settings: name another folder with --out"):
        claim(tmp_path, STANDARD, inputs(prepared))


def test_report_of_no_runs_is_void() -> None:
    assert any("**Void**" in line for line in lines(STANDARD, {}))


def test_the_document_has_the_tables_of_the_saved_runs(tmp_path: Path) -> None:
    begin_with_saved(tmp_path, STANDARD)
    assert block(COMMAND) == tidied(lines(STANDARD, finished(tmp_path)))


def test_saved_runs_fill_folders_of_the_same_study_and_inputs_alone(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    begin_with_saved(one, STANDARD)
    save(one, tmp_path / "saved.json")
    begin_with_saved(two, STANDARD, tmp_path / "saved.json")
    assert finished(two) == finished(one) != {}
    # A folder that has some of them gets the others.
    next((two / RUNS).iterdir()).unlink()
    begin_with_saved(two, STANDARD, tmp_path / "saved.json")
    assert finished(two) == finished(one)
    begin_with_saved(other, QUICK)
    assert not (other / ABOUT).exists()
    claim(other, STANDARD, {"phrases.npz": "others"})
    begin_with_saved(other, STANDARD)
    assert finished(other) == {}


def test_only_the_whole_study_is_saved(tmp_path: Path, prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claim(tmp_path, QUICK, inputs(prepared))
    with pytest.raises(OtherStudy, match="name the folder of the whole study with --out"):
        save(tmp_path, tmp_path / "saved.json")
    with pytest.raises(SystemExit):
        main(["--quick", "--save"])
    assert "leave --quick out" in capsys.readouterr().err

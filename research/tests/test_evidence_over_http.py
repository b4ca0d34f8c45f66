"""Runs of the tables of evidence that are repeated over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evidence import store
from evidence.federations import SOURCES
from evidence.jobs import Job
from evidence.over_http import NotComparable, captioned, jobs, repeat
from evidence.plan import Plan
from evidence.report.lines import repeated_line
from evidence.report.section import section
from evidence.runs import described
from evidence.sources import lit
from evidence.sources.prepare import MODEL
from tessera.worker.data.registry import load
from tests.test_evidence import tiny_bert
from tests.test_evidence_report import found_of, raw
from tests.test_evidence_sources import SHAPE, drawings, tiny_dinov2, write_bert

JOB = Job("T", "K-1", "one", 1, 1e-3)


@pytest.mark.long
def test_a_run_over_http_has_the_digest_of_the_simulation(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    found = repeat(tiny, JOB, prepared, tmp_path)
    assert found["digest"] == found["simulated"]
    # Beside the start travel one layer and the head, in float32, of three sites in three rounds, and little else.
    (start,) = (tmp_path / "models").glob("*/model.safetensors")
    sizes = {name: values.nbytes for name, values in load_file(start).items()}
    sent = [size for name, size in sizes.items() if ".layer.2." in name or name.startswith("classifier.")]
    assert 1 < found["received_bytes"] / (sum(sizes.values()) + 3 * 3 * sum(sent)) < 2


def test_a_run_whose_sites_do_not_all_train_is_not_repeated(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match="is central or has absent sites: choose another arm"):
        repeat(tiny, Job("T", "K-1", "central", 1, 1e-3), prepared, tmp_path)


def test_a_run_that_a_simulation_cannot_finish_is_not_repeated(prepared: Path, tiny: Plan, tmp_path: Path) -> None:
    broken = tiny_bert(40)
    torch.nn.init.constant_(broken.embeddings.word_embeddings.weight, torch.nan)
    broken.save_pretrained(prepared / MODEL)
    with pytest.raises(NotComparable, match=r"has no last version, choose another arm: .* NaN"):
        repeat(tiny, JOB, prepared, tmp_path)


def test_workers_read_a_site_s_emoji_from_its_files_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_dinov2().save_pretrained(tmp_path / "whole")
    write_bert(tmp_path / "text")
    drawings(monkeypatch).save(tmp_path / "emoji.npz")
    recipe = lit.Recipe(steps=1, concepts=8, rate=0.01, projection=8)
    lit.prepare(SHAPE, tmp_path / "whole", tmp_path / "text", tmp_path / "emoji.npz", tmp_path / "lit", recipe)
    options = {"sites_per_vendor": 1, "shift": "both", "alpha": 0.3, "prompts": 2, "caption": "a", "tests": 4}
    for site, data in SOURCES["emoji"].federation(tmp_path, 1, options).sites.items():
        (tmp_path / site).mkdir()
        given = dict(captioned(data, tmp_path, tmp_path / site))
        read = load(given.pop("kind"), given)
        some = torch.tensor([3, 1])
        rows, others = read.read(some), data.read(some)
        for one, other in ((rows, others), (read.common, data.common)):
            assert one.keys() == other.keys()
            assert all(torch.equal(values, other[name]) for name, values in one.items())
        assert rows["pixel_values"].stride() == others["pixel_values"].stride()


def test_runs_whose_learning_rate_is_chosen_are_compared(tiny: Plan, tmp_path: Path) -> None:
    curve = [0.1, 0.5, 0.5, 0.5]
    arms = [("T", "one")]
    with pytest.raises(NotComparable, match=r"rate of T/one is not chosen: run .* --tables T --arms one` first"):
        jobs(tiny, {}, arms)
    assert jobs(tiny, found_of(tiny, raw("one", 0, curve), raw("one", 1, curve)), arms) == [JOB]
    made = {"simulated": "d", "digest": "d", "received_bytes": 2e6, "sent_bytes": 3e6, "seconds": 4.0, "machine": "m"}
    found = {**described(tiny, JOB), **made}
    assert repeated_line(found).startswith(
        "- T/K-1/one/seed-1-rate-0.001: the same digest, d; 2 MB received and 3 MB sent"
    )
    assert ": another digest than d, e;" in repeated_line({**found, "digest": "e"})
    assert repeated_line(found) in list(section(tiny, {}, "0123", [found]))
    # Results of an older plan are left out.
    store.save_repeated([found, {**found, "setup": "other"}], tmp_path)
    assert store.repeated(tiny, tmp_path) == [found]

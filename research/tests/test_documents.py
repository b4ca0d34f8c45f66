"""The studies' documents say what their tables and tests say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.document import EVIDENCE
from tests.paths import ROOT

PRODUCT = ROOT.parent / "docs"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def test_sentences_about_evidence_have_the_intervals_of_its_tables() -> None:
    lines = EVIDENCE.read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    sentences = [line for line in lines if line not in rows]
    pattern = r"[-+][0-9.]+ \[[^]]+\](?!\()"
    shown = set(re.findall(pattern, "\n".join(rows)))
    for prose in ("\n".join(sentences), (PRODUCT / "which-method.md").read_text()):
        quoted = re.findall(pattern, " ".join(prose.split()))
        assert len(quoted) > 5
        assert [each for each in quoted if each not in shown] == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_its_heading(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", page.read_text()):
        place = page.parent / target if target else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}#{anchor}"


def test_every_test_that_the_product_s_pages_promise_by_is_there() -> None:
    named = {
        found
        for page in PRODUCT.rglob("*.md")
        for found in re.findall(r"research/(tests/\w+\.py)(?:::(\w+))?", page.read_text())
    }
    assert len(named) > 3
    missing = [(file, test) for file, test in named if f"def {test}" not in (ROOT / file).read_text()]
    assert missing == []

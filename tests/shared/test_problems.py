"""The error tree, and its way over the wire and back."""

from __future__ import annotations

import json
import re
from typing import Literal

import httpx
import pytest
from pydantic import BaseModel, Field, PositiveInt, ValidationError, field_validator

from tessera.shared import problems
from tessera.shared.cli.reference.problems import KINDS, document
from tessera.shared.client.transport import HttpAnswer, problem_of
from tessera.shared.problems import MAX_FAULTS, MEDIA_TYPE, PROBLEMS, Fault, Problem, ProblemDocument, faults_of

ANY_PROBLEM = pytest.mark.parametrize("kind", PROBLEMS.values(), ids=PROBLEMS)
ANY_PAGE = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def test_the_tree_drawn_at_the_top_of_the_file_is_the_tree_there_is() -> None:
    drawn = set(re.findall(r"- (\w+)", problems.__doc__ or ""))
    assert drawn == {kind.__name__ for kind in PROBLEMS.values()}


@ANY_PAGE
def test_each_problem_has_a_page_with_its_own_meaning_causes_and_a_remedy(kind: type[Problem]) -> None:
    assert kind.title
    assert 400 <= kind.status < 600
    # A sentence and reasons of its own, except those of a server fault, which stand in the class above.
    assert {"meaning", "causes"} <= set(vars(kind)) or kind is problems.ServerFault
    assert kind.meaning.endswith(".")
    assert kind.remedy.endswith(".")
    assert all(kind.causes)
    section = document().partition(f"\n## {kind.code}\n")[2].partition("\n## ")[0]
    assert [part for part in (kind.title, kind.meaning, *kind.causes, kind.remedy) if part not in section] == []


def test_a_problem_links_to_no_page_of_another_host() -> None:
    """A coordinator, or what stands in for one, may send any type."""
    headers = httpx.Headers({"Content-Type": MEDIA_TYPE})
    for sent in ("https://elsewhere.example/x", "//elsewhere.example", "/problems/../x", "/problems/\x1b[31m", ""):
        document = problems.Conflict("d").document().model_copy(update={"type": sent})
        answer = HttpAnswer(409, headers, document.model_dump_json().encode(), "GET https://t.example/v1/runs")
        assert problem_of(answer).page == "", sent
    document = problems.Conflict("d").document()
    answer = HttpAnswer(409, headers, document.model_dump_json().encode(), "GET https://t.example/v1/runs")
    assert problem_of(answer).page == "https://t.example/problems/conflict"
    answer = HttpAnswer(409, headers, document.model_dump_json().encode(), "GET https://t.example/tessera/v1/runs")
    assert problem_of(answer).page == "https://t.example/tessera/problems/conflict"


def test_no_two_problems_share_a_code_or_a_title() -> None:
    assert len({kind.title for kind in PROBLEMS.values()}) == len(PROBLEMS)


@ANY_PROBLEM
def test_a_problem_that_is_sent_is_the_problem_that_is_raised(kind: type[Problem]) -> None:
    sent = kind("what is wrong", errors=[Fault(pointer="/a", detail="b")], remedy="Do this.")
    headers = httpx.Headers({"Content-Type": MEDIA_TYPE, "Retry-After": "7"})
    answer = HttpAnswer(sent.status, headers, json.dumps(sent.json()).encode())
    raised = problem_of(answer)
    assert type(raised) is kind
    assert (raised.detail, raised.errors, raised.advice) == (sent.detail, sent.errors, sent.advice)
    assert raised.retry_after_seconds == 7


def test_a_problem_of_a_newer_coordinator_is_known_by_its_status() -> None:
    document = PROBLEMS["conflict"]("new").document().model_copy(update={"code": "brand-new"})
    headers = httpx.Headers({"Content-Type": MEDIA_TYPE})
    raised = problem_of(HttpAnswer(409, headers, document.model_dump_json().encode()))
    assert isinstance(raised, problems.Conflict)


def test_the_number_of_faults_shown_is_bounded() -> None:
    problem = problems.Invalid("many", errors=[Fault(pointer=f"/{i}", detail="x") for i in range(1000)])
    assert len(problem.document().errors) == MAX_FAULTS
    assert len(str(problem).splitlines()) == MAX_FAULTS + 1


def test_a_document_has_the_members_of_rfc_9457_and_its_type_is_a_page() -> None:
    document = ProblemDocument.model_validate(problems.LeaseLost("it expired").json())
    assert (document.type, document.status, document.title) == ("/problems/lease-lost", 409, problems.LeaseLost.title)


def test_validation_faults_say_where_and_never_what_was_sent() -> None:
    class Inner(BaseModel):
        number: int

    class Outer(BaseModel):
        items: list[Inner]

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"items": [{"number": 1}, {"number": "secret"}]})
    (fault,) = faults_of(caught.value, "/body")
    assert fault.pointer == "/body/items/1/number"
    assert "secret" not in fault.detail


def test_a_fault_is_told_once_and_in_our_words() -> None:
    class Settings(BaseModel):
        codec: str
        rounds: PositiveInt | Literal["auto"]
        scope: str = Field(default_factory=lambda given: str(given["rounds"]))

        @field_validator("codec")
        @classmethod
        def _known(cls, codec: str) -> str:
            raise ValueError(f"there is no {codec}")

    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"codec": "gzip", "rounds": []})
    assert {fault.pointer: fault.detail for fault in faults_of(caught.value)} == {
        "/codec": "there is no gzip",
        "/rounds": "must be a whole number or `auto`",
    }


@pytest.mark.parametrize("code", ["lease-lost", "task-cancelled", "round-closed", "stale-version"])
def test_what_tells_a_worker_to_drop_its_work_is_not_to_be_repeated(code: str) -> None:
    assert issubclass(PROBLEMS[code], problems.Conflict)
    assert not PROBLEMS[code].retryable

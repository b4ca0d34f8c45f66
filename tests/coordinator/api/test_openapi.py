"""The description of the API says what each operation takes and gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tessera.coordinator.openapi import document
from tessera.shared.problems import MEDIA_TYPE

DESCRIBED = json.loads(document())


def test_every_operation_has_a_stable_name_of_its_own() -> None:
    paths = DESCRIBED["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() and name[0].islower() and "_" not in name for name in names)


def test_every_operation_says_what_it_is_for() -> None:
    paths = DESCRIBED["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["tags"], (method, path)
            assert operation["summary"], (method, path)


def test_no_refusal_is_described_in_the_media_type_of_another_answer() -> None:
    for path, method, operation in operations():
        for status in ("422", "default"):
            assert list(operation["responses"][status]["content"]) == [MEDIA_TYPE], (method, path)


def test_no_parameter_is_described_as_null_which_no_header_or_query_can_be() -> None:
    for path, method, operation in operations():
        for parameter in operation.get("parameters", ()):
            assert "anyOf" not in parameter["schema"], (method, path, parameter["name"])


def test_no_name_that_breaks_its_pattern_is_described_as_taken() -> None:
    described = DESCRIBED["components"]["schemas"]
    assert described["EvaluationResult"]["properties"]["metrics"]["additionalProperties"] is False
    assert described["Claim"]["properties"]["datasets"]["additionalProperties"] is False


def test_a_worker_that_asks_to_join_is_not_described_as_needing_a_token() -> None:
    assert {} in DESCRIBED["paths"]["/v1/enrolments"]["post"]["security"]


def test_the_bodies_of_uploads_and_parts_of_blobs_are_described() -> None:
    paths = DESCRIBED["paths"]
    assert list(paths["/v1/uploads"]["post"]["requestBody"]["content"]) == ["application/octet-stream"]
    assert "content" not in paths["/v1/uploads"]["post"]["responses"]["201"]
    assert list(paths["/v1/uploads/{upload_id}"]["patch"]["requestBody"]["content"]) == ["application/partial-upload"]
    assert {"200", "206", "304"} <= set(paths["/v1/blobs/{digest}"]["get"]["responses"])


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DESCRIBED["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation

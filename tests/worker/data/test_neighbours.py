"""One example more or less, or with another label, changes no other example: the premise of differential privacy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Groups
from tessera.worker.data.registry import load
from tests.support.pretrained import plain_tokenizer
from tests.worker.task.test_packed_runs import WORDS

KEY = b"a site's secret"
Row = dict[str, Any]

ROWS: list[Row] = [
    {"text": " ".join((WORDS * 3)[number % 5 : number % 5 + 2 + number % 4]) + f" {WORDS[0]}" * (number // 20),
     "label": "ab"[number % 2], "patient": f"p{number // 2}"}
    for number in range(40)
]  # fmt: skip


def shorter(rows: list[Row]) -> list[Row]:
    """Without the longest text."""
    longest = max(rows, key=lambda row: len(row["text"].split()))
    return [row for row in rows if row is not longest]


def longer(rows: list[Row]) -> list[Row]:
    """With a text that is longer than all others, of a patient whose name is before all others."""
    return [{"text": " ".join(WORDS * 9), "label": "a", "patient": "a0"}, *rows]


def relabelled(rows: list[Row]) -> list[Row]:
    """With the only example of a class."""
    return [{**rows[0], "label": "c"}, *rows[1:]]


def regrouped(rows: list[Row]) -> list[Row]:
    """With an example in a group of its own."""
    return [{**rows[0], "patient": "alone"}, *rows[1:]]


def opened(folder: Path, rows: list[Row], group: str | None) -> Dataset:
    folder.mkdir()
    (folder / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "file": str(folder / "notes.jsonl"), "max_length": 12, "labels": ["a", "b", "c"], "absent": "any",
        "tokenizer": str(plain_tokenizer(folder / "plain", WORDS)), **({"group": group} if group else {}),
    }  # fmt: skip
    return load("text", options, held_out=0.4, key=KEY)


def examples_of(data: Dataset) -> dict[tuple[bytes, bytes], tuple[str, Any]]:
    """The side of each example and its padded inputs with its class number, by its texts and its group."""
    found = {}
    for side, part in (("trained", data), ("held out", data.held_out)):
        assert part is not None
        padded, groups = part.padded(), part.groups or [b""] * part.examples
        for place, identity in enumerate(part.identities()):
            inputs = {name: tensor[place].tolist() for name, tensor in sorted(padded.tensors.items())}
            found[identity, bytes(groups[place])] = side, inputs
    return found


def groups_of(data: Dataset) -> dict[int, tuple[int, ...]]:
    """The examples of each group, as hashes, by the hash of its name."""
    groups, identities = Groups.of(data.groups), list(data.identities())
    members = groups.members.split(groups.sizes.tolist())
    return {
        int(key): tuple(sorted(hash(identities[place]) for place in places.tolist()))
        for key, places in zip(groups.keys, members, strict=True)
    }


@pytest.mark.parametrize("change", [shorter, longer, relabelled, regrouped], ids=lambda change: change.__name__)
@pytest.mark.parametrize("group", [None, "patient"], ids=["example", "group"])
def test_a_changed_example_changes_no_other(
    tmp_path: Path, change: Callable[[list[Row]], list[Row]], group: str | None
) -> None:
    before, after = opened(tmp_path / "a", ROWS, group), opened(tmp_path / "b", change(ROWS), group)
    one, other = examples_of(before), examples_of(after)
    same = one.keys() & other.keys()
    changed = [identity for identity in same if one[identity] != other[identity]]
    # At most the example itself, if it has its texts and its group still.
    assert len(changed) <= 1
    assert len(same) >= len(one) - 1
    assert all(one[identity][0] == other[identity][0] for identity in same)
    assert before.schema == after.schema
    if group:
        differing = set(groups_of(before).items()) ^ set(groups_of(after).items())
        # A group that has one more, and one that has one less.
        assert len({key for key, _ in differing}) <= 2

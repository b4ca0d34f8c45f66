"""Groups of examples: which there are, and which members of each are drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessera.worker.data.content import content_digest
from tessera.worker.data.groups import Groups, UngroupedExamples
from tessera.worker.data.partition.division import hold_out
from tests.support.tasks import images

NAMES = [b"ann", b"bob", b"ann", b"cid", b"bob", b"ann", b"bob", b"ann"]


def drawn_of(names: list[bytes], most: int, seed: int) -> dict[bytes, list[int]]:
    """The drawn members of each group, as their places among the examples of the others of that group."""
    groups = Groups.of(names)
    found = groups.drawn(torch.arange(groups.count), most, seed)
    places = {name: [place for place, each in enumerate(names) if each == name] for name in sorted(set(names))}
    return {
        name: [places[name].index(row) for row in rows.tolist()] for name, rows in zip(places, found, strict=True)
    }


def test_groups_are_numbered_by_their_names() -> None:
    groups = Groups.of(NAMES)
    assert groups.count == 3
    assert groups.sizes.tolist() == [4, 3, 1]
    assert groups.members.tolist() == [0, 2, 5, 7, 1, 4, 6, 3]
    assert groups.numbers.tolist() == [0, 1, 0, 2, 1, 0, 1, 0]


def test_all_members_are_drawn_of_a_group_that_is_small_enough() -> None:
    rows = Groups.of(NAMES).drawn(torch.tensor([1, 2]), most=3, seed=1)
    assert [each.tolist() for each in rows] == [[1, 4, 6], [3]]


def test_each_member_of_a_large_group_is_drawn_equally_often() -> None:
    groups = Groups.of([b"ann"] * 5)
    drawn = torch.zeros(5)
    for seed in range(1000):
        (rows,) = groups.drawn(torch.tensor([0]), most=2, seed=seed)
        assert len(set(rows.tolist())) == 2
        drawn[rows] += 1
    # Of 1,000 draws of 2 of 5; the seeds are fixed.
    assert drawn.tolist() == pytest.approx([400] * 5, abs=60)


@pytest.mark.parametrize(
    "changed",
    [[*NAMES, b"bob"], [b"bob", *NAMES], [name for name in NAMES if name != b"bob"] + [b"bob"]],
    ids=["added at the end", "added at the start", "dropped"],
)
def test_an_example_more_or_less_changes_no_other_group(changed: list[bytes]) -> None:
    before, after = Groups.of(NAMES), Groups.of(changed)
    assert (after.count, after.keys.tolist()) == (before.count, before.keys.tolist())
    for seed in range(20):
        one, two = drawn_of(NAMES, 2, seed), drawn_of(changed, 2, seed)
        assert (one[b"ann"], one[b"cid"]) == (two[b"ann"], two[b"cid"])


@pytest.mark.parametrize(
    "missing",
    [b"", b"  ", b"nan", b"NaN", b"None", b"null", b"NULL", b"NA", b"N/A", b"<NA>", b"NaT", rb"\N"],
)
def test_a_missing_name_is_refused(missing: bytes) -> None:
    with pytest.raises(UngroupedExamples, match="not every example has a group"):
        Groups.of([b"ann", missing])


def test_examples_without_names_are_refused() -> None:
    with pytest.raises(UngroupedExamples, match="no example has a group"):
        Groups.of(None)


def test_an_example_changes_the_side_of_no_other_group() -> None:
    names = [f"p{number % 8}".encode() for number in range(24)]
    data = replace(images(24), groups=names)
    moved = replace(data, groups=[*names[:-1], b"p0"], tensors={**data.tensors, "labels": 2 - data.tensors["labels"]})
    sides = []
    for each in (data, moved):
        split = hold_out(each, 0.4, b"secret")
        assert split.held_out
        sides.append((set(split.groups or ()), set(split.held_out.groups or ())))
    assert sides[0] == sides[1]
    assert not sides[0][0] & sides[0][1]


def test_other_groups_are_other_contents() -> None:
    data, hashes = replace(images(4), groups=[b"a", b"a", b"b", b"b"]), torch.zeros(4).numpy()
    other = replace(data, groups=[b"a", b"b", b"b", b"b"])
    assert content_digest(data, hashes) != content_digest(other, hashes)
    assert content_digest(data, hashes) == content_digest(replace(data), hashes)

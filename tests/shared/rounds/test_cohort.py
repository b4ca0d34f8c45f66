"""Who takes part follows from the seed and the names, and from nothing else."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tessera.shared.api.cohort import Cohort
from tessera.shared.rounds.planning import choose
from tessera.shared.tensors.hashing import derive_seed

NAMES = st.lists(st.text("abcdef/", min_size=1, max_size=6), unique=True, max_size=12)


def rng(seed: int) -> Random:
    return Random(seed)


def test_the_dice_are_the_first_53_bits_of_the_digest_of_their_names() -> None:
    # sha256("7/cohort/3") begins with these eight bytes; dropping 11 bits leaves 53, which JSON carries exactly.
    assert derive_seed(7, "cohort", 3) == 0x9B74FB8D1147CB4B >> 11
    assert derive_seed(7, "cohort", 3) < 1 << 53


def test_each_argument_of_the_dice_matters() -> None:
    thrown = {
        derive_seed(0, "train", 1, "a/w"),
        derive_seed(1, "train", 1, "a/w"),
        derive_seed(0, "train", 2, "a/w"),
        derive_seed(0, "train", 1),
    }
    assert len(thrown) == 4


@given(
    names=NAMES,
    seed=st.integers(0, 2**53 - 1),
    size=st.none() | st.integers(1, 14),
    shuffle=st.randoms(),
    data=st.data(),
)
def test_the_choice_has_the_required_sites_and_does_not_depend_on_the_order_of_the_names(
    names: list[str], seed: int, size: int | None, shuffle: Random, data: st.DataObject
) -> None:
    shuffled = list(names)
    shuffle.shuffle(shuffled)
    required = tuple(data.draw(st.lists(st.sampled_from([*names, "away"]), unique=True, max_size=size)))
    cohort = Cohort.model_construct(size=size, require=required)
    chosen = choose(names, cohort, rng(seed))
    assert choose(shuffled, cohort, rng(seed)) == chosen
    assert chosen == sorted(set(chosen))
    assert {*required} & {*names} <= set(chosen) <= set(names)
    assert len(chosen) == (len(names) if size is None else min(size, len(names)))


def test_every_worker_is_chosen_about_as_often_as_any_other() -> None:
    counts = dict.fromkeys("abcd", 0)
    for number in range(4000):
        for name in choose("abcd", Cohort(size=2), rng(derive_seed(0, "cohort", number))):
            counts[name] += 1
    # Each of four is in a cohort of two half of the time: 2000, with a standard deviation of about 32.
    assert all(abs(count - 2000) < 5 * 32 for count in counts.values())

"""The last description of each data set, and the subjects that it is of.

While fewer subjects than the minimum have changed, it is repeated: the difference of two descriptions would be
counts of these subjects alone. A site's workers may share the database.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tessera.shared.api.descriptions import Description
from tessera.shared.tensors.lazy import Array
from tessera.worker.governance.disclosure import DisclosureRule
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.state.database import StateDatabase


class DescribedData:
    """The descriptions in the database of a `folder`."""

    def __init__(self, folder: Path) -> None:
        self._database = StateDatabase.of(folder)

    def describe(
        self, dataset: str, digests: Array, rule: DisclosureRule, most: int, make: Callable[[], Description]
    ) -> Description:
        """Return the last description again, or else keep durably what `make` returns. Count it as one of at most
        `most`. `digests` has the subjects' digests, uint64 [subjects, 2].

        Raises PolicyViolation and the exceptions of `make`.
        """
        with self._database.writing():
            query = "SELECT times, digests, description FROM descriptions WHERE dataset = ?"
            times, known, last = self._database.row(query, dataset) or (0, b"", None)
            if times >= most:
                raise PolicyViolation(
                    "max_descriptions",
                    f"the data set {dataset!r} was described {most} times, the most that the policy allows",
                )
            description = Description.model_validate_json(last) if last else None
            if description is None or not self._repeats(dataset, description, known, digests, rule):
                known, description = digests.astype("<u8").tobytes(), make()
            row = dataset, times + 1, known, description.model_dump_json()
            self._database.write("INSERT OR REPLACE INTO descriptions VALUES (?, ?, ?, ?)", *row)
        return description

    def _repeats(self, dataset: str, last: Description, known: bytes, digests: Array, rule: DisclosureRule) -> bool:
        changed = changed_subjects(np.frombuffer(known, "<u8").reshape(-1, 2), digests)
        same_rule = (last.minimum, last.step) == (rule.minimum, rule.step)
        if not changed:
            return same_rule
        if changed >= max(rule.minimum, last.minimum):
            return False
        if rule.minimum > last.minimum or rule.step > last.step:
            raise PolicyViolation(
                "min_subjects",
                f"the last description of {dataset!r} had a lower minimum or finer counts than the policy has now, "
                "and too few of its subjects have changed for another",
            )
        return True


def changed_subjects(earlier: Array, now: Array) -> int:
    """Return the number of subjects that were added, removed or changed. Each argument has the digests of a subject
    and of its examples, uint64 [subjects, 2]."""
    known, found = (np.unique(np.ascontiguousarray(each), axis=0) for each in (earlier, now))
    both = np.concatenate([known, found])
    _, first, times = np.unique(both, axis=0, return_index=True, return_counts=True)
    return len(np.unique(both[first[times == 1], 0]))

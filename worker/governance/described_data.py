"""The last answers of a kind about each data set, and the subjects that they are of.

While fewer subjects than the minimum have changed, they are repeated: the difference of two answers would be counts
of these subjects alone. A site's workers may share the database.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from tessera.shared.api.descriptions import DisclosedCounts
from tessera.shared.tensors.lazy import Array
from tessera.worker.governance.disclosure import DisclosureRule
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.state.database import StateDatabase

A = TypeVar("A", bound=DisclosedCounts)


@dataclass(frozen=True)
class Answers(Generic[A]):
    """The answers of one kind about data sets, and the policy's limit on their number."""

    kind: type[A]
    limit: str
    """The policy's setting."""
    most: int
    done: str
    """The task on a data set, for a sentence."""


class DescribedData:
    """The answers in the database of a `folder`."""

    def __init__(self, folder: Path) -> None:
        self._database = StateDatabase.of(folder)

    def answer(
        self,
        answers: Answers[A],
        dataset: str,
        question: str,
        digests: Array,
        rule: DisclosureRule,
        make: Callable[[], A],
    ) -> A:
        """Return the last answer to a question again, or else keep durably what `make` returns. `digests` has the
        subjects' digests, uint64 [subjects, 2].

        It is counted durably before `make` is called: a failure reveals something of the data too. Raises
        PolicyViolation and the exceptions of `make`.
        """
        about, name = (answers, dataset, question, digests, rule), f"{dataset} {answers.limit}"
        with self._database.writing():
            self._count(answers, dataset)
            kept = self._kept(*about)[1].get(question)
        if kept:
            return kept
        # Other workers would wait for the database.
        made = make()
        with self._database.writing():
            known, found = self._kept(*about)
            answer = found.setdefault(question, made)
            stored = json.dumps({each: one.model_dump(mode="json") for each, one in found.items()})
            update = "UPDATE descriptions SET digests = ?, description = ? WHERE dataset = ?"
            self._database.write(update, known, stored, name)
        return answer

    def _count(self, answers: Answers[A], dataset: str) -> None:
        """Count an answer. Raises PolicyViolation."""
        name = f"{dataset} {answers.limit}"
        (times,) = self._database.row("SELECT times FROM descriptions WHERE dataset = ?", name) or (0,)
        if times >= answers.most:
            raise PolicyViolation(
                answers.limit,
                f"the data set {dataset!r} was {answers.done} {times} times, the most that the policy allows",
            )
        count = "INSERT INTO descriptions VALUES (?, 1, ?, '{}') ON CONFLICT DO UPDATE SET times = times + 1"
        self._database.write(count, name, b"")

    def _kept(
        self, answers: Answers[A], dataset: str, question: str, digests: Array, rule: DisclosureRule
    ) -> tuple[bytes, dict[str, A]]:
        """Return the digests of the subjects that the kept answers are of, and these by question; none once enough
        subjects have changed. Raises PolicyViolation."""
        query = "SELECT digests, description FROM descriptions WHERE dataset = ?"
        known, stored = self._database.row(query, f"{dataset} {answers.limit}") or (b"", "{}")
        found = {each: answers.kind.model_validate(one) for each, one in json.loads(stored).items()}
        last = next(iter(found.values()), None)
        changed = changed_subjects(np.frombuffer(known, "<u8").reshape(-1, 2), digests)
        alike = last is not None and (last.minimum, last.step) == (rule.minimum, rule.step)
        if last is None or changed >= max(rule.minimum, last.minimum) or not (changed or alike):
            return digests.astype("<u8").tobytes(), {}
        if changed and (rule.minimum > last.minimum or rule.step > last.step):
            raise PolicyViolation(
                "min_subjects",
                f"the last description of {dataset!r} had a lower minimum or finer counts than the policy has now, "
                "and too few of its subjects have changed for another",
            )
        if changed and question not in found:
            raise PolicyViolation(
                "min_subjects",
                f"too few subjects of {dataset!r} have changed since it was last {answers.done}, for another version",
            )
        return known, found


def changed_subjects(earlier: Array, now: Array) -> int:
    """Return the number of subjects that were added, removed or changed. Each argument has the digests of a subject
    and of its examples, uint64 [subjects, 2]."""
    known, found = (np.unique(np.ascontiguousarray(each), axis=0) for each in (earlier, now))
    both = np.concatenate([known, found])
    _, first, times = np.unique(both, axis=0, return_index=True, return_counts=True)
    return len(np.unique(both[first[times == 1], 0]))

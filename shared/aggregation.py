"""Blobs in, blobs out: a round's accepted updates become the next version, block by block, chunk by chunk.

The updates are merged in the order of their workers' names, so the same set of updates gives the same bytes whatever
the order in which they came (invariant I6), and memory is bounded by a few chunks per update (invariant I11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.anomaly import LEFT_OUT, NORM, relative_norms, scores
from shared.blobs import Stored
from shared.inspection import UPDATE_NORM, Inspector
from shared.methods import coordinator_half
from shared.methods.contract import CoordinatorHalf, Plan, State, Update
from shared.planning import run_facts
from shared.server_optimizer import merge
from shared.states import States
from shared.wire import Manifest, RunSpec, VersionRef


@dataclass(frozen=True)
class Accepted:
    """An accepted update: by whom, made under which plan, and where its bytes are."""

    site: str
    """The admitted site whose token the worker showed."""
    worker: str
    digest: str
    examples: int
    numbers: Mapping[str, float]
    plan: Plan


Merged = Mapping[str, tuple[str, ...]]
"""The workers whose updates were merged, each with the blocks of its update that stayed as they were: a robust rule
leaves a block alone that too few workers sent."""


@dataclass(frozen=True)
class Aggregation:
    states: States
    inspector: Inspector

    def merge(
        self, spec: RunSpec, base: VersionRef, accepted: Sequence[Accepted]
    ) -> tuple[Manifest, list[Stored], Merged]:
        """The next version, its new blobs made safe (the last is the manifest's own), and what was merged."""
        state, merged = self._merged(spec, base, accepted)
        return *self.states.store(state, base.digest), merged

    def next_state(self, spec: RunSpec, base: VersionRef, accepted: Sequence[Accepted]) -> State:
        """The next version, nothing of it computed yet."""
        return self._merged(spec, base, accepted)[0]

    def _merged(self, spec: RunSpec, base: VersionRef, accepted: Sequence[Accepted]) -> tuple[State, Merged]:
        half, state, updates = self._round(spec, base, accepted)
        after = merge(half, spec.server_optimizer, state, updates)
        same = {name for name, tensor in after.model.items() if tensor is state.model[name]}
        # An update of which no block was merged came to nothing. One that has none is a method's that sends none.
        sent = {update.worker: update.blocks.keys() for update in updates}
        merged = {worker: tuple(sorted(b & same)) for worker, b in sent.items() if not b or b - same}
        return after, merged

    def scores(self, spec: RunSpec, base: VersionRef, accepted: Sequence[Accepted]) -> dict[str, dict[str, float]]:
        """How far each worker's update is from what the run's robust rule makes of them, by its name. Reads the
        updates once more; nothing for a run without such a rule."""
        if spec.robust.neutral:
            return {}
        half, state, updates = self._round(spec, base, accepted)
        return scores(state.model, half.merge(state, updates).model, updates)

    def _round(
        self, spec: RunSpec, base: VersionRef, accepted: Sequence[Accepted]
    ) -> tuple[CoordinatorHalf[Any], State, list[Update]]:
        model = self.states.model(spec.model)
        manifest = self.states.manifest(base.digest)
        aside = outlying(spec, accepted)
        updates = [
            Update(
                worker=entry.worker,
                examples=min(entry.examples, spec.max_examples or entry.examples),
                blocks=self.inspector.open(entry.digest, model, manifest, entry.plan),
                numbers=entry.numbers,
                site=entry.site,
                plan=entry.plan,
            )
            for entry in sorted(accepted, key=lambda entry: entry.worker)
            if entry.worker not in aside
        ]
        half = coordinator_half(spec.method, run_facts(spec, model))
        return half, self.states.load(model, manifest, base.number), updates


def norm_scores(spec: RunSpec, accepted: Sequence[Accepted]) -> dict[str, dict[str, float]]:
    """Each worker's norm beside the others', and whether its update is left out for that."""
    aside = outlying(spec, accepted)
    return {
        worker: {NORM: ratio, **({LEFT_OUT: 1.0} if worker in aside else {})}
        for worker, ratio in _ratios(accepted).items()
    }


def outlying(spec: RunSpec, accepted: Sequence[Accepted]) -> list[str]:
    """The workers whose updates are larger than the run takes, beside the median of all that were accepted.

    Judged when the round is over: on arrival it would depend on who came first (docs/decisions/0021).
    """
    most = spec.max_norm_of_median
    return sorted(worker for worker, ratio in _ratios(accepted).items() if most is not None and ratio > most)


def _ratios(accepted: Sequence[Accepted]) -> dict[str, float]:
    return relative_norms({one.worker: one.numbers[UPDATE_NORM] for one in accepted if UPDATE_NORM in one.numbers})

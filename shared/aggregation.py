"""Blobs in, blobs out: a round's accepted updates become the next version, block by block, chunk by chunk.

The updates are merged in the order of their workers' names, so the same set of updates gives the same bytes whatever
the order in which they came (invariant I6), and memory is bounded by a few chunks per update (invariant I11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.blobs import Stored
from shared.inspection import Inspector
from shared.methods import coordinator_half
from shared.methods.contract import Plan, State, Update
from shared.planning import run_facts
from shared.server_optimizer import merge
from shared.states import States
from shared.wire import Manifest, RunSpec, VersionRef


@dataclass(frozen=True)
class Accepted:
    """An accepted update: by whom, made under which plan, and where its bytes are."""

    worker: str
    digest: str
    examples: int
    numbers: Mapping[str, float]
    plan: Plan


@dataclass(frozen=True)
class Aggregation:
    states: States
    inspector: Inspector

    def merge(self, spec: RunSpec, base: VersionRef, accepted: Sequence[Accepted]) -> tuple[Manifest, list[Stored]]:
        """The next version and its new blobs, made safe; the last of them is the manifest's own."""
        return self.states.store(self.next_state(spec, base, accepted), base.digest)

    def next_state(self, spec: RunSpec, base: VersionRef, accepted: Sequence[Accepted]) -> State:
        """The next version, nothing of it computed yet."""
        model = self.states.model(spec.model)
        manifest = self.states.manifest(base.digest)
        updates = [
            Update(
                worker=entry.worker,
                examples=min(entry.examples, spec.max_examples or entry.examples),
                blocks=self.inspector.open(entry.digest, model, manifest, entry.plan),
                numbers=entry.numbers,
            )
            for entry in sorted(accepted, key=lambda entry: entry.worker)
        ]
        half = coordinator_half(spec.method, run_facts(spec, model))
        return merge(half, spec.server_optimizer, self.states.load(model, manifest, base.number), updates)

"""Blobs in, blobs out: a round's accepted updates become the next version, block by block, chunk by chunk.

The updates are merged in the order of their workers' names, so the same set of updates gives the same bytes in any
order of arrival (invariant I6). Memory is bounded by a few chunks (invariant I11), or by a few chunks per update for
a robust rule, the updates' scores and their drift, which compare updates with each other.

Sites count, not workers: a site's token admits any number of workers. So the updates of one site are pooled into one
before they are judged, weighed or averaged.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from tessera.shared.aggregation.drift import DRIFT, drift_by_role
from tessera.shared.aggregation.mean import Normalization, average
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.methods.base import UPDATE_NORM, CoordinatorHalf, Plan, State, Update
from tessera.shared.methods.registry import chooses_blocks, coordinator_half
from tessera.shared.metrics.selections import Choices, choices, selection_scalars
from tessera.shared.model.spec import Model
from tessera.shared.rounds import regions
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.rounds.client_privacy import NoisyMean, SummedRelease, anonymous
from tessera.shared.rounds.outliers import LEFT_OUT, NORM, median_norm, relative_norms, scores
from tessera.shared.rounds.planning import run_facts, warnings_of
from tessera.shared.rounds.secure_sums import Sums
from tessera.shared.rounds.server_step import merge
from tessera.shared.rounds.update_memory import LatestUpdate, calibrated
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.hashing import derive_seed
from tessera.shared.tensors.lazy import RebasedTensor, StretchedStep, Tensor, itself
from tessera.shared.tensors.statistics import is_statistic
from tessera.shared.updates.rounded_steps import rounded
from tessera.shared.updates.update_file import UpdateTensor


@dataclass(frozen=True)
class AcceptedUpdate:
    """An accepted update: by whom, made under which plan, and where its bytes are."""

    site: str
    """The admitted site whose token the worker showed."""
    worker: str
    digest: str
    examples: int
    metrics: Mapping[str, float]
    plan: Plan
    base: VersionRef
    """The version that it started from."""
    layers: Sequence[str] = ()
    """The names of the layers whose blocks the update holds."""
    since: Sequence[str] = ()
    """The digests of the versions after its base, up to that into which it is merged."""


Merged = Mapping[str, tuple[str, ...]]
"""The workers whose updates were merged, each with the blocks of its update that stayed as they were: a robust rule
leaves a block alone that too few workers sent."""


@dataclass(frozen=True)
class NextVersion:
    """The result of merging a round's updates."""

    ref: VersionRef
    manifest: Manifest
    blobs: Sequence[StoredBlob]
    """Its new blobs, made safe; the last is the manifest's own."""
    kept: AbstractSet[str]
    """The blobs of the version before it."""
    scalars: Mapping[str, float]
    """Of the manifest, and of its sites' selection of layers if its method chooses blocks. The latter follow from the
    rounds on record: the next merge does not read them."""
    warnings: Sequence[str]
    merged: Merged
    scores: Mapping[str, Mapping[str, float]]
    """By worker, from the norms of their updates."""
    bounds: Bounds
    """Of the rounds after it."""


@dataclass(frozen=True)
class Aggregation:
    states: States
    inspector: Inspector

    def merge(
        self,
        spec: RunSpec,
        bounds: Bounds,
        current: VersionRef,
        accepted: Sequence[AcceptedUpdate],
        sums: Sums | None = None,
        noise_key: bytes = b"",
        earlier: Sequence[Choices] = (),
        latest: Sequence[AcceptedUpdate] = (),
    ) -> NextVersion:
        """Compute and store the next version. `earlier` has the sites' selections for the versions before, and
        `latest`, for a run with `cohort.memory`, each site's latest merged update.

        Raises ValueError for a run with client-level privacy without the round's key.
        """
        with self.inspector.blobs.reading_ahead([entry.digest for entry in accepted]):
            state, merged = self.next_state(spec, bounds, current, accepted, sums, noise_key, latest)
            manifest, blobs = self.states.store(state, current.digest)
        model, ref = self.states.model(spec.model), VersionRef(number=current.number + 1, digest=blobs[-1].digest)
        half = coordinator_half(spec.method, run_facts(spec, model))
        shown, aside = self.states.load(model, manifest, ref.number), outlying(half, bounds, accepted)
        if chooses_blocks(spec.method):
            now = choices((one.site, one.layers) for one in accepted if one.worker in merged)
            shown = replace(shown, scalars={**shown.scalars, **selection_scalars(earlier, now)})
        return NextVersion(
            ref,
            manifest,
            blobs,
            self.states.manifest(current.digest).digests,
            shown.scalars,
            warnings_of(spec, model, shown, bounds, aside, examples_by_site(accepted, aside)),
            merged,
            norm_scores(half, bounds, accepted),
            observed(half, bounds, accepted),
        )

    def next_state(
        self,
        spec: RunSpec,
        bounds: Bounds,
        current: VersionRef,
        accepted: Sequence[AcceptedUpdate],
        sums: Sums | None = None,
        noise_key: bytes = b"",
        latest: Sequence[AcceptedUpdate] = (),
    ) -> tuple[State, Merged]:
        """Return the next version, nothing of it computed yet, and what was merged. Raises as `merge` does."""
        if sums:
            half, state, updates, sent = self._summed(spec, current, accepted, sums)
        else:
            half, state, updates, sent = self._round(spec, bounds, current, accepted)
        release: NoisyMean | SummedRelease | None = None
        if spec.client_privacy and sums:
            release = SummedRelease(spec)
            updates = anonymous(updates)
        elif spec.client_privacy and spec.sites_per_round:
            if not noise_key:
                raise ValueError("the round has no key for the noise of client_privacy")
            plans, blocks = [entry.plan for entry in accepted], self.states.model(spec.model).blocks
            release = NoisyMean(spec.client_privacy, spec.sites_per_round, blocks, plans, updates, noise_key)
            updates = anonymous(updates)
        after = merge(half, spec.server_optimizer, state, updates, release)
        if spec.cohort.memory:
            senders = {update.site: half.weight(update) for update in updates}
            after = calibrated(state, after, senders, self._latest(spec, half, bounds, latest))
        if spec.signals.drift:
            after = replace(after, scalars=_with_drift(spec, half, state, updates, after.scalars))
        if spec.parent:
            after = regions.with_steps(half, state, after, updates)
        if spec.download_codec == "int8":
            steps = rounded(state.model, after.model, derive_seed(spec.seed, current.number + 1))
            after = replace(after, model=steps)
        same = {name for name, tensor in after.model.items() if tensor is state.model[name]}
        # An update without a merged block came to nothing. An update without any block is of a method that sends
        # none.
        merged = {worker: tuple(sorted(b & same)) for worker, b in sent.items() if not b or b - same}
        return after, merged

    def scores(
        self, spec: RunSpec, bounds: Bounds, current: VersionRef, accepted: Sequence[AcceptedUpdate]
    ) -> dict[str, dict[str, float]]:
        """Return each site's distance from the result of the run's robust rule, by the names of its
        workers. Reads the updates once more; nothing for a run without such a rule."""
        if spec.robust.neutral:
            return {}
        with self.inspector.blobs.reading_ahead([entry.digest for entry in accepted]):
            half, state, updates, _ = self._round(spec, bounds, current, accepted)
            found = scores(state.model, half.merge(state, updates).model, half.scaled(state, updates))
        by_site = {update.site: found[update.worker] for update in updates}
        return {entry.worker: by_site[entry.site] for entry in accepted if entry.site in by_site}

    def _round(
        self, spec: RunSpec, bounds: Bounds, current: VersionRef, accepted: Sequence[AcceptedUpdate]
    ) -> tuple[CoordinatorHalf[Any], State, list[Update], dict[str, set[str]]]:
        """Return the method's half, the version, an update of each site, and the blocks that each worker sent."""
        model = self.states.model(spec.model)
        state = self.states.load(model, self.states.manifest(current.digest), current.number)
        half = coordinator_half(spec.method, run_facts(spec, model))
        aside = set(outlying(half, bounds, accepted))
        self.inspector.blobs.expect([entry.digest for entry in accepted])
        updates: list[Update] = []
        blocks: dict[str, set[str]] = {}
        open_ = half.open_blocks(state)
        frozen = {block.name for block in model.blocks if not open_.holds(block)}
        for entries in _by_site(entry for entry in accepted if entry.worker not in aside):
            sent = [self._update(entry, spec.cohort, model, state) for entry in entries]
            if any(update.staleness for update in sent):
                half.require("buffered", "set cohort.mode to barrier")
            blocks |= {update.worker: set(update.blocks) for update in sent}
            sent = [_without(one, frozen) if one.staleness else one for one in sent]
            update = pooled(state.model, sent, spec.normalization)
            updates.append(_bounded(update, bounds.max_examples or update.examples))
        return half, state, updates, blocks

    def _latest(
        self, spec: RunSpec, half: CoordinatorHalf[Any], bounds: Bounds, latest: Sequence[AcceptedUpdate]
    ) -> list[LatestUpdate]:
        """Return each site's latest update, with the weight with which it was merged."""
        model = self.states.model(spec.model)

        def opened(entry: AcceptedUpdate) -> Mapping[str, UpdateTensor]:
            base = self.states.manifest(entry.base.digest)
            return self.inspector.reopen(entry.digest, model, base, entry.plan)

        def weight(entry: AcceptedUpdate) -> float:
            examples = _limited(entry.examples, bounds)
            return half.weight(Update(entry.worker, examples, {}, entry.metrics, entry.site, entry.plan))

        in_order = sorted(latest, key=lambda entry: entry.worker)
        return [LatestUpdate(entry.site, weight(entry), partial(opened, entry)) for entry in in_order]

    def _summed(
        self, spec: RunSpec, current: VersionRef, accepted: Sequence[AcceptedUpdate], sums: Sums
    ) -> tuple[CoordinatorHalf[Any], State, list[Update], dict[str, set[str]]]:
        """Return the same as `_round`, with the sites' mean as the only update."""
        model = self.states.model(spec.model)
        state = self.states.load(model, self.states.manifest(current.digest), current.number)
        half = coordinator_half(spec.method, run_facts(spec, model))
        self.inspector.blobs.expect([*(entry.digest for entry in accepted), *sums.mask_sums])
        moved = sums.moved(state, self.inspector.blobs, spec.normalization, spec.sites_per_round)
        plan = accepted[0].plan if accepted else Plan()
        update = Update(worker="sum", examples=sum(entry.examples for entry in accepted), blocks=moved, plan=plan)
        sent = {worker: set(e.block_names(sums.terms)) for worker, e in sums.envelopes.items()}
        return half, state, [update], sent

    def _update(self, entry: AcceptedUpdate, cohort: Cohort, model: Model, state: State) -> Update:
        """Return an accepted update. A block that has changed since it started is moved by the update's steps, which
        weigh less the more often that was."""
        changes = self._changes(entry)

        def moved(name: str, sent: UpdateTensor) -> Tensor:
            present = state.model[name]
            if sent.base == present:
                return StretchedStep(present, sent, cohort.mixing) if cohort.mixing else sent
            # By steps from another base, a variance can become negative: the value is averaged.
            by_value = cohort.mixing is not None or is_statistic(name)
            own = itself(sent) if by_value else RebasedTensor(present, sent)
            return StretchedStep(present, own, cohort.staleness_weight(changes[name]) * (cohort.mixing or 1.0))

        sent = dict(self.inspector.reopen(entry.digest, model, self.states.manifest(entry.base.digest), entry.plan))
        extra: dict[str, Tensor] = {each.name: sent.pop(each.block.name) for each in entry.plan.extra}
        return Update(
            worker=entry.worker,
            examples=entry.examples,
            blocks={name: moved(name, tensor) for name, tensor in sent.items()},
            metrics=entry.metrics,
            site=entry.site,
            plan=entry.plan,
            extra=extra,
            staleness=state.round - entry.base.number,
            weights={name: tensor.weight for name, tensor in sent.items() if tensor.weight is not None},
        )

    def _changes(self, entry: AcceptedUpdate) -> Counter[str]:
        """Return the number of versions since an update's own in which each block changed."""
        blocks = [self.states.manifest(digest).blocks for digest in (entry.base.digest, *entry.since)]
        pairs = pairwise(blocks)
        return Counter(name for before, after in pairs for name in after if after[name] != before.get(name))


def _limited(examples: int, bounds: Bounds) -> int:
    return min(examples, bounds.max_examples or examples)


def _bounded(update: Update, most: int) -> Update:
    """Return the update with at most this number of examples, and the weights of its blocks in proportion."""
    if update.examples <= most:
        return update
    weights = {name: max(1, weight * most // update.examples) for name, weight in update.weights.items()}
    return replace(update, examples=most, weights=weights)


def _without(update: Update, frozen: AbstractSet[str]) -> Update:
    return replace(update, blocks={name: tensor for name, tensor in update.blocks.items() if name not in frozen})


def _with_drift(
    spec: RunSpec,
    half: CoordinatorHalf[Any],
    state: State,
    updates: Sequence[Update],
    scalars: Mapping[str, float],
) -> dict[str, float]:
    """Return a version's scalars with the drift of its round, if that is measured, and without that of others."""
    others = {name: value for name, value in scalars.items() if not name.startswith(DRIFT)}
    if (state.round + 1) % spec.signals.every:
        return others
    senders = [(half.weight(update), update.blocks) for update in half.scaled(state, updates)]
    return others | drift_by_role(state.model, {block.name: block.role for block in half.run.blocks}, senders)


def pooled(model: Mapping[str, Tensor], updates: Sequence[Update], normalization: Normalization) -> Update:
    """Return the updates of one site's workers as one: the mean weighted by examples, whose sum is its weight.

    With `participants`, a block that only some of them sent is averaged over those. Otherwise the others count as
    'no change', so that averaging the sites gives the same as averaging the workers.
    """
    if len(updates) == 1:
        return updates[0]
    senders, weights = [(float(update.examples), update.blocks) for update in updates], [u.weights for u in updates]
    divided: Normalization = "participants" if normalization == "participants" else "cohort"
    blocks = average(model, senders, divided, weights=weights)
    behind: dict[str, int] = {}
    if any(weights):
        behind = {name: sum(u.weights.get(name, u.examples) for u in updates if name in u.blocks) for name in blocks}
    metrics = _metrics_of_site([(update.examples, update.metrics) for update in updates])
    examples, staleness = sum(update.examples for update in updates), max(update.staleness for update in updates)
    return replace(updates[0], examples=examples, blocks=blocks, metrics=metrics, staleness=staleness, weights=behind)


def _by_site(accepted: Iterable[AcceptedUpdate]) -> list[list[AcceptedUpdate]]:
    """Return each site's updates, in the order of its workers' names; sites in that of the first of them."""
    found: dict[str, list[AcceptedUpdate]] = {}
    for entry in sorted(accepted, key=lambda entry: entry.worker):
        found.setdefault(entry.site, []).append(entry)
    return list(found.values())


def _metrics_of_site(reported: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return each metric's mean, weighted by examples, over a site's workers that reported it; of the norms the
    largest, since a site reports its own examples.

    The mean of updates of the same blocks is no longer than that. Of different blocks it may be as long as all of
    them together: at most that norm times the root of the number of workers.
    """
    having: dict[str, list[tuple[float, int]]] = {}
    for examples, metrics in reported:
        for name, value in metrics.items():
            having.setdefault(name, []).append((value, examples))
    means = {name: fmean(*zip(*those, strict=True)) for name, those in sorted(having.items())}
    return {**means, UPDATE_NORM: max(having[UPDATE_NORM])[0]} if UPDATE_NORM in having else means


def norm_scores(
    half: CoordinatorHalf[Any], bounds: Bounds, accepted: Sequence[AcceptedUpdate]
) -> dict[str, dict[str, float]]:
    """Return the norm of each worker's site beside the others', and whether its update is left out for that."""
    aside = outlying(half, bounds, accepted)
    return {
        worker: {NORM: ratio, **({LEFT_OUT: 1.0} if worker in aside else {})}
        for worker, ratio in _ratios(half, accepted).items()
    }


def outlying(half: CoordinatorHalf[Any], bounds: Bounds, accepted: Sequence[AcceptedUpdate]) -> list[str]:
    """Return the workers whose site's update is larger than the run takes, beside the largest median of any round so
    far.

    Judged when the round is over: on arrival it would depend on who came first (docs/decisions/0021).
    """
    most, norms = bounds.max_norm_of_median, _norms(half, accepted)
    middle = median_norm(norms)
    if most is None or middle == 0:
        return []
    limit = most * max(middle, bounds.median_norm)
    return sorted(entry.worker for entry in accepted if norms.get(entry.site, 0.0) > limit)


def examples_by_site(accepted: Iterable[AcceptedUpdate], aside: Collection[str]) -> dict[str, int]:
    """Return the examples of each site's updates, but for those of the workers that are left out."""
    merged = [entry for entry in accepted if entry.worker not in aside]
    return {entries[0].site: sum(entry.examples for entry in entries) for entries in _by_site(merged)}


def observed(half: CoordinatorHalf[Any], bounds: Bounds, accepted: Sequence[AcceptedUpdate]) -> Bounds:
    """Return the bounds of the rounds after the round of these updates."""
    return bounds.model_copy(update={"median_norm": max(bounds.median_norm, median_norm(_norms(half, accepted)))})


def _ratios(half: CoordinatorHalf[Any], accepted: Sequence[AcceptedUpdate]) -> dict[str, float]:
    """Return each worker's site's norm over the median of the sites'."""
    ratios = relative_norms(_norms(half, accepted))
    return {entry.worker: ratios[entry.site] for entry in accepted if entry.site in ratios}


def stretched_norm(half: CoordinatorHalf[Any], metrics: Mapping[str, float]) -> float | None:
    """Return the norm of an update's step as the method merges it, in a unit that is the same in every round.

    None for an update that was not measured.
    """
    return metrics[UPDATE_NORM] * half.step_scale(metrics) if UPDATE_NORM in metrics else None


def _norms(half: CoordinatorHalf[Any], accepted: Sequence[AcceptedUpdate]) -> dict[str, float]:
    """Return the norm of each site's update, from the norms of its workers': nothing is read again."""
    of_sites = {
        entries[0].site: _metrics_of_site([(entry.examples, entry.metrics) for entry in entries])
        for entries in _by_site(accepted)
    }
    return {site: norm for site, of in of_sites.items() if (norm := stretched_norm(half, of)) is not None}

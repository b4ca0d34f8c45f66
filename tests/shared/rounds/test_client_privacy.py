"""What one site can change in a version under client-level privacy, and the noise that hides it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import kstest

from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.methods.base import UPDATE_NORM, MethodSpec, Participant, Plan, State, UnsupportedRun, Update
from tessera.shared.methods.registry import coordinator_half, methods
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import Selector, roles
from tessera.shared.model.spec import Model
from tessera.shared.privacy.gaussian import epsilon_of, noise_multiplier_for
from tessera.shared.privacy.noise import grid_of
from tessera.shared.problems import Invalid
from tessera.shared.rounds.aggregate import AcceptedUpdate, Aggregation
from tessera.shared.rounds.client_privacy import (
    CLIP_NORM,
    EPSILON,
    NOISE,
    Noise,
    NoisyMean,
    SummedRelease,
    anonymous,
    next_clip,
    noise_share,
    rho_of_round,
    simulated_key,
    stated_sites,
)
from tessera.shared.rounds.planning import begun, bounds_of, run_facts, warnings_of
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.run_settings import ClientPrivacy
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import Array, ArrayTensor, SteppedTensor, as_bytes, to_array
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.simulation.blob_folder import Folder
from tests.support.federation import small_model
from tests.support.tasks import NORMALISED, subject_of

CLIP = 0.5
SITES = 4
KEY = bytes(range(32))
LITTLE_NOISE = {"epsilon": 1000.0, "delta": 1e-5, "clip_norm": CLIP, "expected_sites": SITES}
"""The noise is about 0.02 of the clip norm, and the grid a 1024th of that."""
ROUNDED = 1.001
"""The grid moves each of some hundred values, by less than this in all."""

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lora": [{"freeze_a": True, "train_head": False}],
    "fedfrozen": [
        {"warmup_rounds": 1},
        *({"warmup_rounds": 0, "scope": scope} for scope in ("all_but_qk", "attn_vo", "v_head", "v_only")),
        *(
            {"warmup_rounds": 0, "freeze": "value", "scope": scope}
            for scope in ("all_but_v", "attn_qko", "qk_head", "qk_only")
        ),
    ],
    "safl": [
        *({"score": score, "layers": 1} for score in ("random", "first", "last")),
        {"score": "fixed", "fixed": ["layer.0"], "prune": 0.5, "prune_by": "magnitude"},
    ],
}
"""Further settings of methods, beside their defaults."""


def adapted_model(width: int = 4) -> Model:
    """The small model with a normalisation layer, and low-rank adapters beside its value matrix."""
    norm = Block(tensor="norm.weight", role="norm", shape=(width,), dtype="F32")
    factors = [
        Block(tensor=f"layer.0.{name}.weight", role="adapter", adapts=("value",), layer=0, shape=shape, dtype="F32")
        for name, shape in (("lora_A", (2, width)), ("lora_B", (width, 2)))
    ]
    model = small_model(width)
    return model.model_copy(update={"blocks": (*model.blocks, norm, *factors)})


def spec(**settings: Any) -> RunSpec:
    digest = f"sha256:{'0' * 64}"
    plain = {"name": "r", "method": {"name": "fedavg"}, "model": digest, "version": digest, "dataset": "d"}
    private = {"normalization": "cohort", "client_privacy": LITTLE_NOISE}
    return RunSpec.model_validate({**plain, "rounds": 1, **private, **settings})


def is_admitted(method: str, settings: dict[str, Any]) -> bool:
    chosen = spec(method={"name": method, "settings": settings})
    try:
        coordinator_half(chosen.method, run_facts(chosen, adapted_model())).check_merge("client_privacy")
    except UnsupportedRun:
        return False
    return True


EACH = [
    (method, settings)
    for method in sorted(methods())
    for settings in ({}, *SETTINGS.get(method, []))
    if is_admitted(method, settings)
]
"""Each registered method that client-level privacy admits, with settings that it admits."""


@cache
def model_of(method: str) -> Model:
    """A model that the method can train: with prompts, if it needs them."""
    try:
        begun(spec(method={"name": method}, client_privacy=None), adapted_model(), State(0, {}))
    except Invalid:
        return subject_of(method).document()
    return adapted_model()


class Run:
    """The first round of a run with client-level privacy, whose model is zero."""

    def __init__(self, path: Path, model: Model | None = None, **settings: Any) -> None:
        self.model, self.folder = model or adapted_model(), Folder(path)
        self.states = States(self.folder)
        self.inspector = Inspector(self.folder, self.states)
        self.spec = spec(model=self.folder.put([canonical(self.model)]).digest, **settings)
        self.start = {block.name: np.zeros(block.shape, np.float32) for block in self.model.blocks}
        blocks = {name: self.folder.put([as_bytes(value)]).digest for name, value in self.start.items()}
        state = begun(self.spec, self.model, self.states.load(self.model, Manifest(blocks=blocks), 0))
        self.scalars = state.scalars
        self.base = VersionRef(number=0, digest=self.states.store(state)[1][-1].digest)
        half = coordinator_half(self.spec.method, run_facts(self.spec, self.model))
        self.plan = half.plan_for(state, Participant("any", 1))

    def update(
        self,
        site: str,
        values: float | Mapping[str, Array],
        worker: str = "w",
        codec: str = "raw",
        plan: Plan | None = None,
    ) -> AcceptedUpdate:
        """An update with these values, or with one for all that its plan uploads, as the coordinator accepts it."""
        plan = plan or self.plan
        if not isinstance(values, Mapping):
            planned = plan.upload.resolve(self.model.blocks)
            values = {block.name: np.full(block.shape, values, np.float32) for block in planned}
        changes = [
            TrainedBlock(self.model.by_name[name], ArrayTensor(value), ArrayTensor(self.start[name]))
            for name, value in values.items()
        ]
        file = BytesIO()
        write_update(file, codec, changes)
        digest = self.folder.put([file.getvalue()]).digest
        manifest = self.states.manifest(self.base.digest)
        measured, _ = self.inspector.checked(digest, self.model, manifest, plan, None)
        return AcceptedUpdate(site, f"{site}/{worker}", digest, 10, measured, plan, self.base)

    def state(self, accepted: Sequence[AcceptedUpdate], key: bytes = KEY) -> State:
        aggregation = Aggregation(self.states, self.inspector)
        return aggregation.next_state(self.spec, Bounds(), self.base, accepted, noise_key=key)[0]

    def moved(self, *accepted: AcceptedUpdate, key: bytes = KEY) -> Array:
        """The next version's difference from the first, float64 [values]."""
        model = self.state(accepted, key).model
        return np.concatenate([to_array(model[name]).reshape(-1).astype(np.float64) for name in self.start])


def length(difference: Array) -> float:
    """The l2 norm, in units of what one site may change: the clip norm over the divisor."""
    return float(np.linalg.norm(difference)) * SITES / CLIP


# ---------------------------------------------------------------- sensitivity


@pytest.mark.parametrize(
    "value", [4e6, *(pytest.param(value, marks=pytest.mark.long) for value in (-1e-30, 1e-3, 1.0))]
)
@pytest.mark.parametrize(("method", "settings"), EACH)
def test_one_site_changes_a_version_by_its_clip_norm_at_most(
    tmp_path: Path, method: str, settings: dict[str, Any], value: float
) -> None:
    run = Run(tmp_path, model_of(method), method={"name": method, "settings": settings}, rounds=2)
    others = [run.update("a", 0.001), run.update("b", -3.0)]
    without = run.moved(*others)
    # The same key gives the same noise, so that only the sums differ.
    change = length(run.moved(*others, run.update("x", value)) - without)
    assert change < ROUNDED
    # Large steps are clipped to the norm, unless the method sends nothing.
    assert (change > 1 / ROUNDED) == (value >= 1 and method != "local")
    # Nor does the sum have another divisor when one site more or less comes.
    assert length(run.moved(*others, run.update("x", 0.0)) - without) < 1e-3


def test_each_method_is_admitted_with_some_settings_above_or_refused_with_all() -> None:
    assert set(methods()) - {method for method, _ in EACH} == {"feddyn", "fednova", "fedproto", "scaffold"}


def test_an_update_within_the_clip_norm_is_summed_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    others, small = [run.update("a", 1.0)], run.update("x", 0.01)
    step = run.moved(*others, small) - run.moved(*others)
    np.testing.assert_allclose(step, 0.01 / SITES, atol=2e-5)


def test_a_larger_update_keeps_its_direction_and_comes_to_the_clip_norm(tmp_path: Path) -> None:
    run = Run(tmp_path)
    step = run.moved(run.update("a", 7.0), run.update("x", 2.0)) - run.moved(run.update("a", 7.0))
    assert 1 / ROUNDED < length(step) < ROUNDED
    np.testing.assert_allclose(step, step.mean(), atol=2e-5)


@pytest.mark.parametrize("codec", ["raw", LOSSLESS, "delta", "delta+int8", "delta+topk=0.1", "delta+bf16"])
def test_the_clip_is_of_the_steps_that_are_summed_under_every_codec(tmp_path: Path, codec: str) -> None:
    run = Run(tmp_path)
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=v.shape).astype(np.float32) for name, v in run.start.items()}
    step = run.moved(run.update("x", values, codec=codec)) - run.moved(run.update("x", 0.0))
    assert 1 / ROUNDED < length(step) < ROUNDED


def test_steps_that_vanish_beside_the_version_are_clipped_as_they_were_sent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    sent = run.update("x", 100.0, codec="delta+int8")
    # Beside a version of large values, the measured difference of such an update is less than its steps.
    understated = AcceptedUpdate(**{**vars(sent), "metrics": {UPDATE_NORM: 1e-3}})
    assert length(run.moved(understated) - run.moved(run.update("x", 0.0))) < ROUNDED


def test_two_workers_of_a_site_change_a_version_by_one_clip_norm(tmp_path: Path) -> None:
    run = Run(tmp_path, cohort={"workers_per_site": 2})
    head, rest = (Plan(upload=Selector(include=roles("head").include)), Plan())
    two = [run.update("x", 9.0, "1", plan=head), run.update("x", 5.0, "2", plan=rest)]
    opposed = [run.update("x", 9.0, "1"), run.update("x", -9.0, "2")]
    nothing = run.moved(run.update("x", 0.0))
    assert 1 / ROUNDED < length(run.moved(*two) - nothing) < ROUNDED
    assert length(run.moved(*opposed) - nothing) < 1e-3


def test_what_a_site_declares_and_reports_changes_no_version(tmp_path: Path) -> None:
    run = Run(tmp_path, method={"name": "safl", "settings": {"score": "random", "layers": 1}})
    plain = run.update("x", 3.0)
    boastful = AcceptedUpdate(**{**vars(plain), "examples": 10**9, "metrics": {**plain.metrics, "score.0": 1.0}})
    other = run.update("a", -1.0)
    np.testing.assert_array_equal(run.moved(plain, other), run.moved(boastful, other))
    assert run.state([plain]).scalars == run.state([boastful]).scalars


def test_the_sum_is_in_float64_where_one_step_does_not_change_how_others_are_rounded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    moved = run.state([run.update("x", 3.0), run.update("y", 1e-9)]).model["head.weight"]
    assert isinstance(moved, SteppedTensor)
    total, noise = moved.step.sources
    assert {next(iter(tensor.chunks())).dtype for tensor in (total, noise, moved.step)} == {np.dtype(np.float64)}


# ---------------------------------------------------------------- noise

NOISY = {"epsilon": 2.0, "delta": 1e-5, "clip_norm": CLIP, "expected_sites": SITES}


def test_noise_has_the_deviation_of_the_accounting_and_is_normal(tmp_path: Path) -> None:
    run = Run(tmp_path, adapted_model(64), client_privacy=NOISY, rounds=10)
    noise = run.moved(run.update("x", 0.0)) * SITES / (CLIP * run.scalars[NOISE])
    # 33,000 values: five standard errors are 0.02.
    assert noise.size > 30_000
    assert abs(noise.std() - 1) < 0.02
    assert kstest(noise, "norm").pvalue > 0.01


def test_noise_covers_what_plans_upload_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path, method={"name": "fedfrozen", "settings": {"warmup_rounds": 0, "scope": "v_head"}})
    head = {"head.weight": np.ones(run.start["head.weight"].shape, np.float32)}
    after = run.state([run.update("x", head)]).model
    changed = {name for name, tensor in after.items() if to_array(tensor).any()}
    planned = {block.name for block in run.plan.upload.resolve(run.model.blocks)}
    # A block that a site left out counts as zero, and gets noise too.
    assert changed == planned > {"head.weight"}


def test_released_sums_are_points_of_a_public_grid(tmp_path: Path) -> None:
    run = Run(tmp_path, client_privacy=NOISY)
    grid = grid_of(CLIP * run.scalars[NOISE])
    points = run.moved(run.update("x", 0.3), run.update("y", -0.7)) * SITES / grid
    np.testing.assert_array_equal(points, np.rint(points))


def test_a_key_gives_the_same_bits_and_another_key_other_noise(tmp_path: Path) -> None:
    run = Run(tmp_path)
    updates = [run.update("x", 0.3), run.update("y", -0.7)]
    np.testing.assert_array_equal(run.moved(*updates), run.moved(*reversed(updates)))
    assert np.all(run.moved(*updates) != run.moved(*updates, key=bytes(32)))
    assert simulated_key(1, 2) != simulated_key(1, 3) != simulated_key(2, 3)


def test_blocks_of_one_shape_get_different_noise_and_each_reading_the_same() -> None:
    noise = Noise((3, 5), KEY, 2.0)
    first, again = (np.concatenate(list(noise.chunks())) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert KEY.hex() not in repr(noise)
    assert str(KEY) not in repr(noise)


def test_a_merge_without_a_key_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ValueError, match="key"):
        run.moved(run.update("x", 1.0), key=b"")


def test_a_server_optimizer_and_rounded_downloads_see_the_noisy_mean_alone(tmp_path: Path) -> None:
    model = adapted_model(64)
    plain = Run(tmp_path / "1", model)
    doubled = Run(tmp_path / "2", model, server_optimizer={"kind": "sgd", "learning_rate": 2.0})
    rounded = Run(tmp_path / "3", model, download_codec="int8")
    step, twice, coarse = (run.moved(run.update("x", 1.0)) for run in (plain, doubled, rounded))
    np.testing.assert_allclose(twice, 2 * step, rtol=1e-6)
    assert 0 < np.abs(coarse - step).max() < np.abs(step).max() / 32


# ---------------------------------------------------------------- adaptive clipping

ADAPTIVE = {**LITTLE_NOISE, "clip_quantile": 0.5}


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_clip_norm_goes_to_the_quantile(quantile: float) -> None:
    norms, clip = np.linspace(1.0, 3.0, 201), 50.0
    for _ in range(400):
        clip = next_clip(clip, float((norms <= clip).mean()), quantile)
    assert clip == pytest.approx(np.quantile(norms, quantile), rel=0.02)


@pytest.mark.parametrize("came", [SITES // 2, SITES, 4 * SITES])
@pytest.mark.parametrize("quantile", [0.25, 0.75])
def test_it_goes_there_for_any_number_of_updates(quantile: float, came: int) -> None:
    terms = ClientPrivacy.model_validate({**ADAPTIVE, "clip_quantile": quantile})
    norms = np.linspace(1.0, 3.0, came)
    updates = [Update(str(norm), 1, {}, {UPDATE_NORM: float(norm)}) for norm in norms]
    state = State(0, {}, scalars={CLIP_NORM: CLIP, NOISE: 0.05})
    for number in range(200):
        release = NoisyMean(terms, SITES, (), (), updates, simulated_key(0, number))
        state = release(state, replace(state, round=number + 1))
    share = np.mean(norms <= state.scalars[CLIP_NORM])
    assert abs(share - quantile) <= 1 / came
    assert 0.95 < state.scalars[CLIP_NORM] < 3.15


def test_the_clip_norm_moves_by_a_bounded_factor_whatever_the_noise_says() -> None:
    assert next_clip(1.0, 1e9, 0.5) == next_clip(1.0, 1.0, 0.5) == pytest.approx(math.exp(-0.1))
    assert next_clip(1.0, -1e9, 0.5) == next_clip(1.0, 0.0, 0.5) == pytest.approx(math.exp(0.1))


def test_the_next_clip_norm_follows_the_noisy_count_and_is_in_the_version(tmp_path: Path) -> None:
    run = Run(tmp_path, client_privacy=ADAPTIVE)
    below = [run.update(site, 1e-4) for site in "abcd"]
    above = [run.update(site, 9.0) for site in "abcd"]
    # Noise of the count is 0.04 of a site, and its step size 0.2.
    assert run.state(below).scalars[CLIP_NORM] == pytest.approx(CLIP * math.exp(-0.1), rel=0.02)
    assert run.state(above).scalars[CLIP_NORM] == pytest.approx(CLIP * math.exp(0.1), rel=0.02)
    assert run.state(above[:2] + below[2:]).scalars[CLIP_NORM] == pytest.approx(CLIP, rel=0.02)


def test_the_count_has_the_noise_that_it_is_accounted_with(tmp_path: Path) -> None:
    # So many expected sites that no share is cut off at 0 or 1.
    run = Run(tmp_path, client_privacy={**NOISY, "clip_quantile": 0.5, "expected_sites": 10_000})
    update, keys = run.update("x", 1e-4), [simulated_key(0, number) for number in range(400)]
    clips = np.array([run.state([update], key).scalars[CLIP_NORM] for key in keys])
    counts = np.log(CLIP / clips) / 0.2 * 10_000
    deviation = run.scalars[NOISE] / (2 * math.sqrt(0.1))
    # Standard errors are 1/28 for the deviation and 1/20 for the mean, which is one site within the norm.
    assert counts.std() == pytest.approx(deviation, rel=0.15)
    assert abs(counts.mean() - 0.5) < 0.2 * deviation


def test_the_sum_is_noisier_for_the_count_and_both_together_cost_the_same(tmp_path: Path) -> None:
    model = adapted_model(64)
    fixed = Run(tmp_path / "1", model, client_privacy=NOISY)
    adaptive = Run(tmp_path / "2", model, client_privacy={**NOISY, "clip_quantile": 0.5})
    ratio = adaptive.moved(adaptive.update("x", 0.0)).std() / fixed.moved(fixed.update("x", 0.0)).std()
    z = fixed.scalars[NOISE]
    assert adaptive.scalars[NOISE] == z
    # The count of halves has sensitivity 1/2 and the noise z / (2 sqrt(0.1)): z^-2 = (ratio z)^-2 + 0.1 z^-2.
    count = z / (2 * math.sqrt(0.1))
    assert (ratio * z) ** -2 + (2 * count) ** -2 == pytest.approx(z**-2, rel=1e-3)


# ---------------------------------------------------------------- accounting and refusals


def test_each_version_says_what_all_so_far_have_cost(tmp_path: Path) -> None:
    run = Run(tmp_path, client_privacy=NOISY, rounds=10)
    assert run.scalars[EPSILON] == 0
    scalars = run.state([run.update("x", 1.0)]).scalars
    assert scalars[EPSILON] == epsilon_of(run.scalars[NOISE], 1, 1e-5) > 0
    assert epsilon_of(run.scalars[NOISE], 10, 1e-5) <= 2.0 * (1 + 1e-9)
    assert scalars[NOISE] == run.scalars[NOISE]


def test_a_first_version_cannot_bring_less_noise(tmp_path: Path) -> None:
    run = Run(tmp_path)
    brought = State(0, {}, scalars={NOISE: 0.0, CLIP_NORM: 1e9, EPSILON: -1.0})
    assert begun(run.spec, run.model, brought).scalars == run.scalars


SUMS = {"helpers": ["a", "b", "c", "d"], "quorum": 5}
IN_SUMS = {"secure_sums": SUMS, "cohort": {"quorum": 5, "size": 6}}


def test_with_secure_sums_the_epsilon_is_that_of_the_noise_of_the_sites(tmp_path: Path) -> None:
    run = Run(tmp_path, client_privacy=NOISY, rounds=10, **IN_SUMS)
    assert run.scalars[EPSILON] == 0
    # The discrete Gaussian is accounted for by its divergence, which takes slightly more noise.
    exact = noise_multiplier_for(ClientPrivacy(**NOISY), 10)
    assert exact < run.scalars[NOISE] < 1.15 * exact
    release = SummedRelease(run.spec)
    spent = [release(State(n - 1, {}, scalars=run.scalars), State(n, {})).scalars[EPSILON] for n in (1, 5, 10)]
    assert 0 < spent[0] < spent[1] < spent[2] <= 2.0
    assert spent[2] > 1.999


def test_the_noise_of_a_round_is_counted_in_the_shares_of_the_sites_that_are_certain() -> None:
    for given, shares in ((None, 4), (5, 5), (1, 1)):
        run = spec(client_privacy={**NOISY, "honest_sites": given}, **IN_SUMS)
        assert run.honest_sites == shares
        share = noise_share(run, 1000, senders=6)
        total = share.deviation * math.sqrt(shares) * 2.0**share.exponent
        least = NOISY["clip_norm"] / math.sqrt(2 * rho_of_round(run))
        assert least < total < 1.001 * least


def test_a_run_whose_sums_have_no_room_for_the_noise_is_refused_with_the_remedy() -> None:
    whole = {"training": {"full_fine_tuning": True}}
    run = spec(client_privacy=NOISY, rounds=400, secure_sums=SUMS, cohort={"quorum": 5}, **whole)
    begun(run, adapted_model(), State(0, {}))
    for width, why in ((30_000, "have no room for"), (2500, "the noise of the steps themselves")):
        with pytest.raises(Invalid) as refusal:
            begun(run, adapted_model(width), State(0, {}))
        (fault,) = refusal.value.errors
        assert fault.pointer == "/client_privacy"
        assert why in fault.detail
        assert "set cohort.size to fewer sites" in fault.detail
    few = spec(client_privacy=NOISY, rounds=400, **IN_SUMS, **whole)
    begun(few, adapted_model(30_000), State(0, {}))


def test_a_run_that_would_add_noise_to_running_statistics_is_refused_with_the_remedy() -> None:
    normalised = NORMALISED.document()
    run = spec(client_privacy=NOISY)
    begun(run, adapted_model(), State(0, {}))
    with pytest.raises(Invalid) as refusal:
        begun(run, normalised, State(0, {}))
    assert "running_mean negative: choose fedbn" in refusal.value.errors[0].detail
    begun(run.model_copy(update={"method": MethodSpec(name="fedbn")}), normalised, State(0, {}))


@pytest.mark.parametrize(
    ("stated", "settings", "sites"),
    [
        ({"expected_sites": 100}, {}, 100),
        # A smaller divisor makes no smaller federation.
        ({"expected_sites": 10}, {"cohort": {"size": 100}}, 100),
        ({"expected_sites": None}, {"cohort": {"size": 100}}, 100),
        ({"expected_sites": 10}, {"cohort": {"sites": [f"site-{n}" for n in range(100)]}}, 100),
        # Nor do the sites whose noise counts: all senders are protected.
        ({"expected_sites": None, "honest_sites": 1}, {**IN_SUMS, "cohort": {"quorum": 5, "size": 100}}, 100),
        ({"expected_sites": None}, IN_SUMS, 6),
    ],
)
def test_a_delta_that_gives_no_guarantee_for_the_sites_is_refused_with_the_limit(
    stated: dict[str, Any], settings: dict[str, Any], sites: int
) -> None:
    # 100^-1.1 is 0.0063. For six sites it is 0.14, above the largest delta that any run may have.
    for delta, is_refused in ((0.0064, sites == 100), (0.0062, False)):
        run = spec(client_privacy={**LITTLE_NOISE, **stated, "delta": delta}, **settings)
        assert stated_sites(run) == sites
        if not is_refused:
            begun(run, adapted_model(), State(0, {}))
            continue
        with pytest.raises(Invalid) as refusal:
            begun(run, adapted_model(), State(0, {}))
        (fault,) = refusal.value.errors
        assert fault.pointer == "/client_privacy/delta"
        assert "for 100 sites: set client_privacy.delta to 0.0063 or less, better to less than 0.001" in fault.detail


def test_a_delta_above_a_tenth_of_one_over_the_sites_is_warned_of_when_the_run_is_created() -> None:
    for delta, sites, warned in ((0.0011, 100, 1), (0.001, 100, 0), (0.017, 6, 1), (0.016, 6, 0)):
        run = spec(client_privacy={**LITTLE_NOISE, "delta": delta, "expected_sites": sites})
        said = warnings_of(run, adapted_model(), State(0, {}))
        assert len(said) == warned
        assert all(f"large for {sites} sites: set it to {0.1 / sites:.2g} or less" in sentence for sentence in said)
        assert warnings_of(run, adapted_model(), State(1, {})) == ()
    assert warnings_of(spec(client_privacy=None), adapted_model(), State(0, {})) == ()


def test_sites_have_no_other_bounds() -> None:
    assert bounds_of(spec(), [Participant("a/w", 10, site="a")]) == Bounds()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"normalization": "participants"}, "set normalization to cohort"),
        ({"normalization": "inverse-probability"}, "set normalization to cohort"),
        ({"robust": {"rule": "median"}, "cohort": {"quorum": 3}}, "leave out robust"),
        ({"max_examples": 100}, "leave out max_examples"),
        ({"max_update_norm": 1.0}, "leave out max_update_norm"),
        ({"max_norm_of_median": 3.0}, "leave out max_norm_of_median"),
        ({"client_privacy": {**LITTLE_NOISE, "expected_sites": None}}, "expected_sites, or cohort.size"),
        ({"client_privacy": {**LITTLE_NOISE, "honest_sites": 3}}, "here the coordinator does: leave it out"),
    ],
)
def test_a_setting_that_would_break_the_bound_is_refused_with_the_remedy(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        spec(**settings)


def test_the_cohort_s_size_is_the_divisor_if_no_other_is_set() -> None:
    settings = {**LITTLE_NOISE, "expected_sites": None}
    assert spec(client_privacy=settings, cohort={"size": 7}).sites_per_round == 7
    assert spec(cohort={"size": 7}).sites_per_round == SITES
    assert spec(client_privacy=None).sites_per_round is None


@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [
        ("scaffold", {}, "choose a method such as fedavg"),
        ("feddyn", {}, "choose a method such as fedavg"),
        ("fednova", {}, "choose a method such as fedavg"),
        ("fedfrozen", {"warmup_rounds": "auto"}, "set warmup_rounds to a number"),
        ("fedfrozen", {"signals": True}, "leave out signals"),
        ("safl", {"layers": 1}, "set score to random"),
        ("safl", {"layers": 1, "score": "fisher", "chooser": "consensus"}, "set score to random"),
    ],
)
def test_a_method_whose_versions_tell_more_than_the_noisy_mean_is_refused(
    method: str, settings: dict[str, Any], told: str
) -> None:
    run = spec(method={"name": method, "settings": settings}, training={"optimizer": "sgd"})
    with pytest.raises(Invalid) as refusal:
        begun(run, adapted_model(), State(0, {}))
    assert told in refusal.value.errors[0].detail


def test_sites_of_equal_weight_name_none_for_their_blocks() -> None:
    (one,) = anonymous([Update("w", 9, {}, weights={"head.weight": 8})])
    assert (one.examples, one.weights) == (1, {})

"""The attack on secure sums, as a property: whatever tasks a coordinator sends out from one version, and whichever
sums helpers then open, no linear combination of these explains more of a site's update than the best of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tessera.shared.api import tasks
from tessera.shared.api.tasks import ALIKE, Submission, Task, TaskView
from tessera.shared.api.versions import Manifest
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import Plan
from tessera.shared.problems import NotFound
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import SealingKey, SigningKey
from tessera.shared.secure_sums.messages import Agreement, Envelope, RingBlock, SiteKeys, Terms
from tessera.shared.secure_sums.roster import signed_keys
from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.simulation import Weights
from tessera.simulation.blob_folder import Folder
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.model.build import instantiate
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.site_keys import SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.task import environment, secure_sums
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.runner import task_runner
from tests.support.secure_sums import Disk, Federation, ring_of
from tests.support.tasks import VIT

MODEL = {**VIT, "num_hidden_layers": 1}
EXAMPLES = {"site-00": 8, "site-01": 18, "site-02": 40, "site-03": 24, "site-04": 30}
HELPERS = ("site-00", "site-01", "site-02", "site-03")
MARGIN = 0.05

Attempt = Mapping[str, Any]
"""A round that a coordinator begins: its changes of the task that all sites get, and what it chooses beside the task.
`sites` are invited, `max_weight` is that of the terms, `own` has changes of single sites' tasks."""


@cache
def data() -> dict[str, Dataset]:
    """Images of each site, of different numbers."""
    found = {}
    for place, (site, examples) in enumerate(EXAMPLES.items()):
        dice = torch.Generator().manual_seed(place)
        pixels = torch.randn(examples, 1, 8, 8, generator=dice)
        found[site] = Dataset({"pixel_values": pixels, "labels": torch.randint(0, 3, (examples,), generator=dice)})
    return found


@dataclass(frozen=True)
class Keys:
    """A site's keys in the federation."""

    federation: Federation
    site: str

    def identity(self) -> SigningKey:
        return self.federation.identities[self.site]

    def sealing_keys(self) -> Mapping[str, SealingKey]:
        return {}

    def public(self, site: str, weight: int = 1) -> SiteKeys:
        return signed_keys(site, self.identity(), self.federation.sealing[site].public, weight)


@dataclass
class HostileCoordinator:
    """A coordinator that sends any tasks, keeps what sites send, and has helpers open what they will.

    One of the four helpers is on its side: it forgets what it signed.
    """

    folder: Path
    federation: Federation = field(default_factory=lambda: Federation(len(EXAMPLES), len(HELPERS)))
    sent: list[Submission] = field(default_factory=list)
    rounds: list[tuple[Terms, dict[str, Envelope]]] = field(default_factory=list)
    updates: dict[tuple[str, int], Array] = field(default_factory=dict)
    """The integers of an accepted update, by site and attempt: what no one but the site may know."""
    opened: dict[tuple[int, frozenset[str]], Array] = field(default_factory=dict)
    """By attempt and senders."""
    abandoned: dict[str, tuple[Agreement, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.blobs = Folder(self.folder / "blobs")
        start = Weights.of(instantiate(MODEL, "image-classification", seed=1), MODEL, "image-classification")
        uploaded = upload_model(self.blobs, start)
        self.model, self.version = uploaded.model, uploaded.version
        self.values = Manifest.read(self.blobs.read(self.version), self.blobs.read).values
        self.ring = {b.name: RingBlock(elements=b.numel, exponent=-22) for b in start.model.blocks}
        self.numbers = count()
        self.sites = {site: self.site(site) for site in EXAMPLES}

    def site(self, site: str) -> TaskRunner:
        """Return a site's worker with an empty record of what it sent, as after a loss of its disk."""
        place = self.folder / f"{site}-{next(self.numbers)}"
        place.mkdir()
        keys, roster = Keys(self.federation, site), self.federation.roster
        return task_runner(
            cast("Any", self),
            {"data": data()[site]},
            TrainingSetup(torch.device("cpu")),
            Vault(place / "vault"),
            Cache(place / "cache", 1 << 24),
            place,
            history=RunHistory(place / "runs", "w"),
            seed_key=site.encode(),
            # Masks cancel to the bit, so that sums without them are the same.
            sums=SumParty(site, keys, roster, 3, helper=False, agreements=None, masks=False),
        )

    # ------------------------------------------------------------ what a worker asks of it

    def copy_blob(self, digest: str, file: Any, progress: Callable[[int], None] | None = None) -> None:
        file.write(self.blobs.read(digest))

    def copy_blobs(self, digests: Sequence[str], file: Any, progress: Any = None) -> None:
        for digest in digests:
            self.copy_blob(digest, file)

    def copy_difference(self, *_: Any) -> bool:
        return False

    def submit(self, task_id: str, submission: Submission) -> TaskView:
        self.sent.append(submission)
        about: dict[str, Any] = {"id": task_id, "run": "r", "round": 1, "worker": "w", "kind": "train"}
        return TaskView(**about, state="accepted", token=submission.token, attempts=1)

    def task(self, task_id: str) -> TaskView:
        problem = NotFound("it was never merged")
        problem.from_document = True
        raise problem

    # ------------------------------------------------------------ what it does

    def attempt(self, changes: Attempt) -> None:
        """Have the sites train for a round, and keep the updates that come."""
        changed = dict(changes)
        number, own = len(self.rounds), changed.pop("own", {})
        sites, max_weight = changed.pop("sites", EXAMPLES), changed.pop("max_weight", 1000)
        helpers, quorum = changed.pop("helpers", HELPERS), changed.pop("quorum", 3)
        base: dict[str, Any] = {
            "id": f"t-{number}", "token": 1, "kind": "train", "run": "run-1", "run_name": "demo", "round": 1,
            "rounds": 9, "seed": 7, "method": {"name": "fedavg"}, "plan": Plan(), "dataset": "data",
            "codec": LOSSLESS, "training": {"batch_size": None, "learning_rate": 0.05},
            "normalization": "participants", "model": self.model, "lease_seconds": 60.0, "inline_bytes": 1 << 20,
            "secure_sums": {"helpers": helpers, "quorum": quorum}, **changed,
        }  # fmt: skip
        base["version"] = {"number": base["round"] - 1, "digest": self.version}
        plain = Task.model_validate(base)
        terms = self.federation.terms(
            plain.round, run=plain.run, attempt=number + 1, version=self.version, values=self.values, quorum=quorum,
            settings=plain.alike_digest, max_weight=max_weight, blocks=self.ring, abandoned=self.abandoned,
            helpers=[Keys(self.federation, site).public(site) for site in helpers],
        )  # fmt: skip
        self.blobs.put([canonical(terms)])
        envelopes: dict[str, Envelope] = {}
        for site in sites:
            given = {**base, "sums": {"terms": terms.digest}, **(own.get(site, {}))}
            try:
                self.sites[site].run(Task.model_validate(given), lambda: None, Report())
            except (PolicyViolation, ValidationError):
                continue
            submission = self.sent.pop()
            envelopes[site] = Envelope.model_validate_json(submission.envelope or "")
            rings = ring_of(submission.data or b"", terms, envelopes[site].block_names(terms))
            values = {name: np.concatenate(list(ring.chunks())).view(np.int32) for name, ring in rings.items()}
            absent = {name: np.zeros(one.elements) for name, one in terms.blocks.items()}
            whole = np.concatenate([(absent | values)[name] for name in sorted(absent)])
            self.updates[site, number] = whole.astype(np.float64)
        self.rounds.append((terms, envelopes))

    def abandon(self, number: int) -> None:
        """Ask helpers to sign that nothing is opened under an attempt's terms."""
        terms, _ = self.rounds[number]
        about = (terms.run, terms.round, terms.digest)
        signed = (self.asked(keys.site, "abandon", *about, place) for place, keys in enumerate(terms.helpers))
        if found := tuple(filter(None, signed)):
            self.abandoned[terms.digest] = found

    def open(self, number: int, senders: frozenset[str]) -> None:
        """Have helpers sign and open the sum of these senders of an attempt, if they will."""
        terms, known = self.rounds[number]
        envelopes = [known[site] for site in sorted(senders & set(known))]
        helpers = [keys.site for keys in terms.helpers]
        agreed = [one for helper in helpers if (one := self.asked(helper, "agree", terms, envelopes))]
        helping = [
            helper
            for place, helper in enumerate(helpers)
            if self.asked(helper, "open", terms, envelopes, agreed, terms.seeds_of(place), BytesIO())
        ]
        if len(helping) > terms.tolerance:
            own = (self.updates[envelope.site, number] for envelope in envelopes)
            self.opened[number, senders & set(known)] = np.sum(list(own), axis=0)

    def asked(self, helper: str, what: str, *about: Any) -> Any:
        try:
            return getattr(self.helper(helper), what)(*about)
        except SumRefused:
            return None

    def helper(self, site: str) -> Any:
        if site == HELPERS[-1]:
            self.federation.disks[site] = Disk()
        return self.federation.member(site)

    def excess(self) -> float:
        """Return how much more of the variance of one site's update all opened sums explain than the best of them.

        Updates from one version resemble each other, so that a sum without a site's update explains some of it too.
        """
        sums = [total for total in self.opened.values() if total.any()]
        updates = [update for update in self.updates.values() if update.any()] if sums else []
        return max((explained(u, sums) - max(explained(u, [total]) for total in sums) for u in updates), default=0.0)


def explained(update: Array, sums: Sequence[Array]) -> float:
    """Return the share of an update's squared length that the nearest linear combination of sums has."""
    columns = np.stack([total / np.linalg.norm(total) for total in sums], axis=1)
    weights, *_ = np.linalg.lstsq(columns, update, rcond=1e-9)
    return 1 - float(np.sum((update - columns @ weights) ** 2) / np.sum(update**2))


def attacked(folder: Path, history: Sequence[Attempt]) -> float:
    """Send these attempts out, open each as far as helpers do, and return the attack's gain."""
    coordinator = HostileCoordinator(folder)
    for number, attempt in enumerate(history):
        coordinator.attempt(attempt)
        coordinator.open(number, frozenset(EXAMPLES))
    return coordinator.excess()


ATTACKS: dict[str, Sequence[Attempt]] = {
    # What an ordinary orchestrator starts: three runs that differ in max_examples alone, which the terms follow.
    "max_examples": [
        {"run": f"run-{most}", "max_weight": most, "max_examples": most, "sites": HELPERS[:3]} for most in (8, 18, 40)
    ],
    "the terms' largest weight": [
        {"round": number, "max_weight": most, "sites": HELPERS[:3]} for number, most in enumerate((8, 18, 40), 1)
    ],
    "one site's seed": [
        {"round": number, "own": {"site-02": {"seed": number}}, "training": {"batch_size": 8, "learning_rate": 0.05}}
        for number in (1, 2)
    ],
    "a site that is left out": [{"run": "run-1"}, {"run": "run-2", "sites": list(EXAMPLES)[1:]}],
}
"""Histories by which a coordinator recovered single updates, or could, from sums of all that were there."""


def by_examples(party: SumParty, terms: Terms) -> int:
    return min(EXAMPLES[party.site], terms.max_weight)


def switch_off(monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    """Take away the guards against an attack, here and at helpers."""
    monkeypatch.setattr(Terms, "is_exact", False)
    if "weight" in attack or "examples" in attack:
        monkeypatch.setattr(secure_sums, "_weight", by_examples)
    if "seed" in attack:
        monkeypatch.setattr(tasks, "ALIKE", ALIKE - {"seed"})
        monkeypatch.setattr(environment, "mixed_seed", lambda _, task: task.seed)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_sums_is_found_once_its_guard_is_gone_and_gains_nothing_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    assert attacked(tmp_path / "guarded", ATTACKS[attack]) < MARGIN
    switch_off(monkeypatch, attack)
    assert attacked(tmp_path / "open", ATTACKS[attack]) > MARGIN


TRAINING = ({"batch_size": None, "learning_rate": 0.05}, {"batch_size": 8, "learning_rate": 0.5})
CHOICES: dict[str, Sequence[Any]] = {
    "rounds": [9, 10],
    "seed": [7, 8],
    "max_weight": [8, 18, 40, 1000],
    "max_examples": [8, 18, 40],
    "normalization": ["participants", "cohort"],
    "training": TRAINING,
    "cohort": [{"size": 4}, {"size": 5}],
    "quorum": [3, 4],
    "helpers": [HELPERS, HELPERS[::-1], HELPERS[:3]],
    "server_optimizer": [{"kind": "adam"}],
    "plan": [{"upload": {"include": [{"roles": ["value", "head"]}]}}],
    "sites": [list(EXAMPLES)[1:], list(EXAMPLES)[:4], list(EXAMPLES)[:3], list(EXAMPLES)[2:]],
    "own": [{"site-02": {"seed": 9}}, {"site-04": {"training": TRAINING[1]}}, {"site-01": {"orchestrator": "x"}}],
}
"""Whatever a coordinator or an orchestrator chooses of a round, its run and its sites' tasks."""


def drawn(folder: Path, dice: Random) -> float:
    """Return what an attack gains that draws its attempts, some of them like the one before but for one choice.

    Sums are opened at any time, of any senders; sites lose their records, and helpers abandon attempts.
    """
    coordinator, attempt = HostileCoordinator(folder), dict[str, Any]()
    for number in range(4):
        for name in dice.sample(list(CHOICES), dice.choice([1, 1, 2, 4])):
            attempt[name] = dice.choice(CHOICES[name])
        # Sites let a run keep its settings, and helpers sign one set for a round.
        attempt |= dice.choice([*[{"run": f"run-{number}"}] * 4, {"round": number + 1}, {}])
        coordinator.attempt(attempt)
        for earlier in range(number + 1):
            if dice.random() < 0.1:
                coordinator.abandon(earlier)
            if dice.random() < 0.7:
                left_out = dice.sample(list(EXAMPLES), dice.choice([0, 0, 1]))
                coordinator.open(earlier, frozenset(EXAMPLES) - frozenset(left_out))
        if dice.random() < 0.3:
            lost = dice.choice(list(EXAMPLES))
            coordinator.sites[lost] = coordinator.site(lost)
    return coordinator.excess()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_no_combination_of_opened_sums_tells_a_site_s_update(tmp_path: Path, seed: int) -> None:
    assert drawn(tmp_path, Random(seed)) < MARGIN


def test_without_records_of_sums_drawn_histories_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the property would hold for what no drawn history tries."""
    monkeypatch.setattr(Terms, "is_exact", False)
    assert drawn(tmp_path, Random(3)) > MARGIN

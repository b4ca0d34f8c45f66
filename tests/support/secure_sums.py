"""Sites that sum in secret, in one process: what the coordinator of a round would pass between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from random import Random
from typing import Any

import numpy as np

from tessera.shared.api.secure_sums import HelperReport
from tessera.shared.api.tasks import Submission, Task, TaskView
from tessera.shared.client.client import Client
from tessera.shared.privacy.noise import secret_key
from tessera.shared.privacy.noise_shares import rho_for, share_for
from tessera.shared.run_settings import Budget
from tessera.shared.secure_sums.committee import Commitment, Member, SenderSet, forbidding, sender_set
from tessera.shared.secure_sums.envelope import make_envelope, new_seeds
from tessera.shared.secure_sums.keys import SealingKey, SigningKey
from tessera.shared.secure_sums.masked_update import RingTensor, read_ring, write_masked
from tessera.shared.secure_sums.messages import (
    Agreement,
    Envelope,
    NoiseTerms,
    RingBlock,
    SumDocument,
    Terms,
    fingerprint,
    levels_of,
    share_out,
)
from tessera.shared.secure_sums.opened import OpenedSum
from tessera.shared.secure_sums.roster import signed_keys
from tessera.shared.tensors.lazy import CHUNK, Array, digest_of
from tests.support.federation import ScriptedWorker

SIZES = {"head": 7, "layer.0.value": 33, "layer.1.value": 12}


@dataclass
class Disk:
    """What a helper remembers from one call to the next."""

    made: list[Commitment] = field(default_factory=list)

    def remember(self, made: Commitment, repeating: Collection[str] = ()) -> Commitment | None:
        if made in self.made:
            return None
        if (earlier := forbidding(self.made, made, repeating)) is None:
            self.made.append(made)
        return earlier


@dataclass(frozen=True)
class Steps:
    values: Array

    def steps(self) -> Iterator[Array]:
        for start in range(0, self.values.size, CHUNK):
            yield self.values[start : start + CHUNK]


@dataclass(frozen=True)
class Sent:
    envelope: Envelope
    file: bytes

    def ring(self, terms: Terms) -> dict[str, RingTensor]:
        return ring_of(self.file, terms, self.envelope.block_names(terms))


def ring_of(file: bytes, terms: Terms, blocks: Sequence[str]) -> dict[str, RingTensor]:
    return read_ring(partial(BytesIO, file), len(file), terms, blocks)


@dataclass
class Federation:
    """Sites with keys that all have compared, the first few of which are helpers."""

    sites: int
    helpers: int
    quorum: int = 3
    bits: int = 32
    sizes: Mapping[str, int] = field(default_factory=lambda: dict(SIZES))

    def __post_init__(self) -> None:
        self.names = [f"site-{n:02}" for n in range(self.sites)]
        self.identities = {name: SigningKey.new() for name in self.names}
        self.roster = {name: fingerprint(key.public) for name, key in self.identities.items()}
        self.sealing = {name: SealingKey.new() for name in self.names[: self.helpers]}
        self.disks = {name: Disk() for name in self.sealing}

    def terms(self, number: int = 1, **changed: Any) -> Terms:
        helpers = [signed_keys(name, self.identities[name], key.public) for name, key in self.sealing.items()]
        terms = {
            "run": "run-1",
            "round": number,
            "attempt": 1,
            "version": digest_of(b"version"),
            "values": digest_of(b"values of %d" % number),
            "settings": digest_of(b"settings"),
            "helpers": helpers,
            "quorum": self.quorum,
            "max_senders": max(self.sites, 3),
            "max_weight": 1000,
            "bits": self.bits,
            "blocks": {name: RingBlock(elements=size, exponent=-12) for name, size in self.sizes.items()},
        }
        return Terms(**(terms | changed))

    def noisy_terms(
        self,
        epsilon: float = 8.0,
        rounds: int = 4,
        clip_norm: float = 0.5,
        honest_sites: int | None = None,
        **changed: Any,
    ) -> Terms:
        """Return terms with client-level privacy, and the least noise for it."""
        honest_sites = honest_sites or self.quorum - 1
        rho = rho_for(Budget(epsilon=epsilon, delta=1e-5)) / rounds
        levels = levels_of(self.bits, max(self.sites, 3))
        share = share_for(rho, clip_norm, honest_sites, sum(self.sizes.values()), levels)
        noise = NoiseTerms(
            epsilon=epsilon,
            delta=1e-5,
            rounds=rounds,
            clip_norm=clip_norm,
            honest_sites=honest_sites,
            deviation=share.deviation,
        )
        blocks = {name: RingBlock(elements=size, exponent=share.exponent) for name, size in self.sizes.items()}
        return self.terms(**{"max_weight": 1, "noise": noise, "blocks": blocks, **changed})

    def member(self, site: str) -> Member:
        """Return a helper that has just started: what it knows of earlier is on its disk."""
        return Member(
            site,
            self.identities[site],
            {self.sealing[site].public: self.sealing[site]},
            self.roster,
            self.disks[site],
            self.quorum,
        )

    def send(
        self,
        terms: Terms,
        site: str,
        steps: Mapping[str, Array],
        weight: int = 10,
        seed: int = 0,
        noise_key: bytes | None = None,
    ) -> Sent:
        seeds, file = new_seeds(terms), BytesIO()
        changes = {name: Steps(values) for name, values in steps.items()}
        if terms.noise:
            weight, noise_key = 1, noise_key or secret_key()
        written = write_masked(file, terms, changes, weight, seeds, seed, noise_key=noise_key)
        identity = self.identities[site]
        envelope = make_envelope(terms, site, identity, weight, list(steps), written.digest, seeds)
        return Sent(envelope, file.getvalue())

    def agreements(self, terms: Terms, sent: Iterable[Sent], helpers: Iterable[str]) -> list[Agreement]:
        envelopes = [each.envelope for each in sent]
        return [self.member(helper).agree(terms, envelopes) for helper in helpers]

    def mask_sums(
        self, terms: Terms, sent: Sequence[Sent], agreed: Sequence[Agreement], helpers: Iterable[str]
    ) -> list[bytes]:
        """Return what the helpers write, each for its share of the seeds."""
        envelopes = [each.envelope for each in sent]
        numbers = {self.names.index(helper): helper for helper in helpers}
        files = []
        for number, seeds in share_out(len(terms.helpers), sorted(numbers)).items():
            file = BytesIO()
            self.member(numbers[number]).open(terms, envelopes, agreed, seeds, file)
            files.append(file.getvalue())
        return files

    def opened(self, terms: Terms, sent: Sequence[Sent], files: Sequence[bytes]) -> dict[str, Array]:
        """Return the sum of each block that enough sites sent."""
        found = self.sender_set(terms, sent)
        masks = [ring_of(file, terms, sorted(found.senders)) for file in files]
        rings = {each.envelope.site: each.ring(terms) for each in sent}
        return {
            block: _whole(
                OpenedSum(
                    [rings[site][block] for site in sites],
                    [own[block] for own in masks],
                    terms.bits,
                    terms.blocks[block].elements,
                )
            )
            for block, sites in found.senders.items()
        }

    def sender_set(self, terms: Terms, sent: Sequence[Sent]) -> SenderSet:
        return sender_set(terms, [each.envelope for each in sent], self.roster)


def _whole(total: OpenedSum) -> Array:
    return np.concatenate([np.empty(0, np.int64), *total.chunks()])


def steps_of(rng: Random, sizes: Mapping[str, int] = SIZES, blocks: Sequence[str] | None = None) -> dict[str, Array]:
    """Return random steps of some blocks, with all that a sum could trip over: zeros, signs, large and small."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    chosen = list(sizes) if blocks is None else blocks
    return {
        name: (numbers.normal(size=sizes[name]) * 10.0 ** rng.uniform(-5, 1)).astype(np.float32) for name in chosen
    }


def integers_of(
    terms: Terms, steps: Mapping[str, Array], weight: int, seed: int, noise_key: bytes | None = None
) -> dict[str, Array]:
    """Return what a sender has under its masks, from the file that it writes without any."""
    file = BytesIO()
    changes = {name: Steps(values) for name, values in steps.items()}
    write_masked(file, terms, changes, weight, [], seed, noise_key=noise_key)
    plain = ring_of(file.getvalue(), terms, sorted(steps))
    return {name: _whole(OpenedSum([tensor], [], terms.bits, tensor.numel)) for name, tensor in plain.items()}


@dataclass
class SecretSite:
    """A scripted site that takes part in secure sums over HTTP, and is a helper."""

    site: str
    client: Client
    federation: Federation
    weight: int = 1

    def __post_init__(self) -> None:
        self.sealing = self.federation.sealing[self.site]
        identity = self.federation.identities[self.site]
        self.worker = ScriptedWorker(
            self.client,
            kinds=("train", "agree", "open", "abandon"),
            site_keys=signed_keys(self.site, identity, self.sealing.public, self.weight),
        )

    def terms(self, task: Task) -> Terms:
        assert task.sums is not None
        return Terms.model_validate_json(self.client.read_blob(task.sums.terms))

    def document(self, task: Task) -> SumDocument:
        assert task.sums is not None
        return SumDocument.model_validate_json(self.client.read_blob(task.sums.document or ""))

    def submission(self, task: Task, step: float, examples: int = 10) -> Submission:
        """Train by adding a number to every block that the plan uploads; return the masked update, uploaded."""
        terms, base = self.terms(task), self.worker.fetch(task)
        steps = {name: np.full(base[name].size, step, np.float32) for name in terms.blocks}
        sent = self.federation.send(terms, self.site, steps, self.weight)
        return Submission(
            token=task.token,
            version=task.version.digest,
            update=self.client.put_bytes(sent.file),
            envelope=sent.envelope.model_dump_json(),
            examples=examples,
        )

    def train(self, step: float, examples: int = 10) -> TaskView:
        task = self.worker.take()
        assert task.kind == "train"
        return self.client.submit(task.id, self.submission(task, step, examples))

    def report(self, task: Task) -> HelperReport:
        """Do a helper's task, and return its result unsent."""
        member = self.federation.member(self.site)
        if task.kind == "abandon":
            assert task.sums is not None
            number = self.federation.names.index(self.site)
            signed = member.abandon(task.run, task.round, task.sums.terms, number)
            return HelperReport(token=task.token, agreement=signed)
        terms, document = self.terms(task), self.document(task)
        if task.kind == "agree":
            return HelperReport(token=task.token, agreement=member.agree(terms, document.envelopes))
        assert task.sums is not None
        file = BytesIO()
        member.open(terms, document.envelopes, document.agreements, task.sums.seeds, file)
        return HelperReport(token=task.token, mask_sums=self.client.put_bytes(file.getvalue()))

    def help(self, kind: str) -> TaskView:
        task = self.worker.take()
        assert task.kind == kind
        return self.client.submit_helper_report(task.id, self.report(task))

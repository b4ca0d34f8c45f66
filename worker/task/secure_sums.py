"""Secure sums at a worker: check a round's terms, mask an update, and do the tasks of a helper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO, TypeVar

import structlog
from pydantic import BaseModel

from tessera.shared.api.descriptions import TableName
from tessera.shared.api.refusals import check_settings
from tessera.shared.api.secure_sums import MAX_DOCUMENT_BYTES, HelperReport, SumTask
from tessera.shared.api.versions import Manifest
from tessera.shared.json_limits import read_document
from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.rounds.count_table import CountTable
from tessera.shared.rounds.planning import check_work
from tessera.shared.run_settings import InvalidDelta, check_delta
from tessera.shared.secure_sums.committee import Member, sender_set
from tessera.shared.secure_sums.envelope import make_envelope, new_seeds
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.masked_update import write_masked
from tessera.shared.secure_sums.messages import SumDocument, Terms
from tessera.shared.secure_sums.roster import check_terms
from tessera.shared.tensors.lazy import Array, squares
from tessera.shared.updates.update_file import TrainedBlock, WrittenUpdate
from tessera.worker.errors import TaskFailure
from tessera.worker.governance.policy import PolicyViolation, require
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.site_keys import SumParty
from tessera.worker.task.environment import TaskRun, facts_of
from tessera.worker.task.fetch import failing_as, read_model

M = TypeVar("M", bound=BaseModel)


def admitted_terms(run: TaskRun) -> Terms | None:
    """Return the terms of the task's secure sum, checked by this site's rules; None for a run without sums.

    Raises PolicyViolation, TaskFailure, and UnsupportedRun for a run without secure sums.
    """
    sums = run.task.sums
    if run.task.kind == "rehearse" and run.task.secure_sums:
        # It sends no update, so that there are no terms of a round.
        _party(run)
        with _refusing():
            _check_run(run)
        return None
    is_whole = (sums is None) == (run.task.secure_sums is None)
    require(is_whole, "secure_sums", "the task has the run's settings of secure sums without terms, or the reverse")
    if sums is None:
        run.env.policy.check_unmasked()
        given = run.task.client_privacy
        without = given is None or given.honest_sites is None
        require(without, "secure_sums", "the task's client_privacy is for a secure sum, which the run does not have")
        _check_run(run)
        return None
    with _refusing():
        terms = _terms(run, sums)
        if terms.settings != run.task.alike_digest:
            raise SumRefused("terms-differ", "the terms are of sites that train by other settings or another plan")
        party = _party(run)
        check_terms(terms, party.roster, party.quorum)
        _check_noise(run, terms)
        if terms.noise and run.env.history:
            run.env.history.check_site(run.env.policy, terms.rho)
        detail = f"this site weighs {party.weight}; the terms allow {terms.max_weight}"
        require(_weight(party, terms) <= terms.max_weight, "secure_sums.weight", detail)
        try:
            _check_run(run)
            if client := run.task.client_privacy:
                sites = client.expected_sites or terms.max_senders
                check_delta(client.delta, sites, "site", "client_privacy.delta")
        except (UnsupportedRun, InvalidDelta) as fault:
            raise SumRefused("noise" if terms.noise else "run", str(fault)) from None
    if terms.is_exact and run.env.history:
        run.env.history.check_sum(terms)
    return terms


def _weight(party: SumParty, terms: Terms) -> int:
    """Return this site's weight: its own, never limited by the terms, so that no two sums have it with different
    coefficients. With noise all weigh alike."""
    return 1 if terms.noise else party.weight


def _check_run(run: TaskRun) -> None:
    """Raise UnsupportedRun for a run that no coordinator of ours creates: its updates reveal more than its sums,
    or more than its privacy covers.

    Rules that compare single updates, limits of their norms, the number of workers of a site and a cohort's quorum
    are the coordinator's alone: masks and the terms keep it from acting on them.
    """
    task = run.task
    check_settings(task)
    model = read_model(run)
    check_work(coordinator_half(task.method, facts_of(run.task, model)), model, [task.plan])


def check_values(terms: Terms, manifest: Manifest) -> None:
    """Raise PolicyViolation unless the terms name the values of the version that the site trains from.

    Helpers, who see no version, go by them.
    """
    same = terms.values == manifest.values
    require(same, "secure_sums", "terms-differ: the terms name the values of another model than that of the version")


def _check_noise(run: TaskRun, terms: Terms) -> None:
    """Check that the round's noise is that of the task, and as much as this site requires.

    The task's settings are the same in the whole run (`worker.governance.run_history`). Raises SumRefused,
    PolicyViolation.
    """
    given, noise = run.task.client_privacy, terms.noise
    settings = ("epsilon", "delta", "clip_norm", "honest_sites")
    said = [getattr(given, name) for name in settings] + [run.task.rounds] if given else None
    found = [getattr(noise, name) for name in settings] + [noise.rounds] if noise else None
    if said != found:
        raise SumRefused("noise", f"the terms have the noise {found}; the task's client_privacy makes {said}")
    if floor := run.env.policy.require_client_privacy:
        floor.check(noise, terms.quorum)


def counted(run: TaskRun, terms: Terms, table: CountTable, counts: Mapping[TableName, tuple[int, ...]]) -> Array:
    """Return a table with this site's counts, to be sent as an update. Raises PolicyViolation."""
    with _refusing():
        return table.counted(counts, terms, _weight(_party(run), terms))


def masked(
    run: TaskRun, terms: Terms, changes: Sequence[TrainedBlock], file: BinaryIO, *, norms: bool
) -> tuple[WrittenUpdate, str, Mapping[str, Array]]:
    """Write a masked update into a file, from its start. Return the written update, its envelope as JSON, and each
    block's rounding error at few bits. An update with a step that is not finite has no steps at all.

    Raises PolicyViolation.
    """
    party, seeds = _party(run), new_seeds(terms)
    weight = _weight(party, terms)
    lengths = {change.block.name: math.sqrt(sum(map(squares, change.steps()))) for change in changes}
    if not all(map(math.isfinite, lengths.values())):
        # A refusal would be an exact answer about the examples, so such an update counts as none.
        structlog.get_logger("worker").error("update-without-step", cause="a step is infinite or not a number")
        changes = [replace(change, value=change.base, rest=None) for change in changes]
        lengths = dict.fromkeys(lengths, 0.0)
    by_name = {change.block.name: change for change in changes}
    with _refusing():
        key = party.noise_key(run.training_seed) if terms.noise else None
        used = seeds if party.masks else []
        about = (file, terms, by_name, weight, used, run.training_seed)
        written = write_masked(*about, noise_key=key, keep_rests=terms.bits < 32)
        identity = party.keys.identity()
        envelope = make_envelope(terms, party.site, identity, weight, list(by_name), written.digest, seeds)
    sizes = {name: change.block.numel * terms.bits // 8 for name, change in by_name.items()}
    return WrittenUpdate(sizes, lengths if norms else {}, written.digest), envelope.model_dump_json(), written.rests


def help_open(run: TaskRun) -> None:
    """Do a helper's task: sign the senders of a round, or send the sum of their masks.

    Raises PolicyViolation, TaskFailure, Problem.
    """
    task, sums, env = run.task, run.task.sums, run.env
    env.policy.check_request(task, env.kinds)
    if env.history:
        env.history.check(run.snapshot, env.policy)
    run.report.begin("fetching")
    with env.shelf.pinning(), _refusing():
        if task.kind == "abandon":
            _abandon(run)
            return
        if sums is None or sums.document is None:
            raise TaskFailure("invalid-task", "the task names neither terms nor envelopes")
        terms, party = _terms(run, sums), _party(run)
        _require_room(run, terms)
        _check_noise(run, terms)
        document, member = _read(run, sums.document, SumDocument), _member(party)
        if task.kind == "agree":
            agreement = member.agree(terms, document.envelopes)
            about = {"senders": agreement.senders, "key": party.fingerprint}
            head = run.journal.note("sums.agree", sites=len(document.envelopes), **about)
            report = HelperReport(token=task.token, agreement=agreement)
        else:
            with temporary_file(env.scratch) as (path, file):
                digest = member.open(terms, document.envelopes, document.agreements, sums.seeds, file)
                file.flush()
                nbytes = path.stat().st_size
                if env.history:
                    env.history.add(run.snapshot, env.policy, nbytes)
                senders = sender_set(terms, document.envelopes).digest
                about = {"senders": senders, "key": party.fingerprint, "masks": digest}
                head = run.journal.note("sums.open", bytes=nbytes, sites=len(document.envelopes), **about)
                run.report.begin("uploading", total_bytes=nbytes)
                with path.open("rb") as opened:
                    run.deliver(lambda: env.coordinator.put_stream(digest, opened, nbytes, run.sent))
            report = HelperReport(token=task.token, mask_sums=digest)
    _submit(run, report, head)


def _abandon(run: TaskRun) -> None:
    """Sign that this helper signs no set under the task's terms, which were of an attempt that was abandoned."""
    task, sums, settings, party = run.task, run.task.sums, run.task.secure_sums, _party(run)
    if sums is None or settings is None or party.site not in settings.helpers:
        raise TaskFailure("invalid-task", "the task names no terms, or this site is no helper of its run")
    signed = _member(party).abandon(task.run, task.round, sums.terms, settings.helpers.index(party.site))
    head = run.journal.note("sums.abandon", terms=sums.terms, key=party.fingerprint)
    _submit(run, HelperReport(token=task.token, agreement=signed), head)


def _member(party: SumParty) -> Member:
    if party.agreements is None:
        raise TaskFailure("no-helper", "this worker does not open sums: set secure_sums.helper in its settings")
    keys = party.keys
    return Member(party.site, keys.identity(), keys.sealing_keys(), party.roster, party.agreements, party.quorum)


def _submit(run: TaskRun, report: HelperReport, head: str | None) -> None:
    counted = {"download_bytes": run.report.download_bytes, "audit_head": head}
    sent = report.model_copy(update=counted)
    run.deliver(lambda: run.env.coordinator.submit_helper_report(run.task.id, sent))


def _require_room(run: TaskRun, terms: Terms) -> None:
    """Raise PolicyViolation if the sums of all blocks are more than the site sends."""
    most = run.env.policy.max_upload_bytes
    nbytes = sum(ring.elements for ring in terms.blocks.values()) * terms.bits // 8
    require(nbytes <= most, "max_upload_bytes", f"sums of {nbytes} bytes are larger than the {most} allowed")


def _party(run: TaskRun) -> SumParty:
    if (party := run.env.sums) is None:
        raise TaskFailure(
            "no-secure-sums", "this worker takes part in no secure sums: set [secure_sums] in its settings"
        )
    return party


def _terms(run: TaskRun, sums: SumTask) -> Terms:
    task, terms = run.task, _read(run, sums.terms, Terms)
    about = (terms.run, terms.round, terms.version)
    if about != (task.run, task.round, task.version.digest):
        raise SumRefused("terms-differ", f"the terms are of {about}, and not of the task")
    if task.version.number != task.round - 1:
        raise SumRefused("terms-differ", f"round {task.round} does not start from version {task.version.number}")
    settings, helpers = task.secure_sums, tuple(helper.site for helper in terms.helpers)
    found = (helpers, terms.quorum, terms.bits, terms.repeat_model)
    if settings is None or found != (settings.helpers, settings.quorum, settings.bits, settings.repeat_model):
        raise SumRefused(
            "terms-differ",
            f"the terms have the helpers {helpers}, the quorum {terms.quorum}, sums of {terms.bits} bits and "
            f"repeat_model = {str(terms.repeat_model).lower()}, unlike the run",
        )
    return terms


def _read(run: TaskRun, digest: str, kind: type[M]) -> M:
    with failing_as("invalid-terms"):
        return read_document(kind, run.read(digest, MAX_DOCUMENT_BYTES))


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn refusals in the block into violations of this site's rules."""
    try:
        yield
    except SumRefused as refusal:
        raise PolicyViolation("secure_sums", str(refusal)) from refusal

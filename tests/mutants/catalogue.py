"""What is changed, and what finds it: merging, leases, what leaves a site, and secure sums."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    """A line, or a part of one, that the file has exactly once."""
    new: str
    tests: tuple[str, ...]
    """Paths, as pytest takes them, that fail when `old` is `new`."""


MEAN = ("tests/shared/aggregation/test_mean.py",)
ROBUST = ("tests/shared/aggregation/test_robust.py",)
LAZY = ("tests/shared/tensors/test_lazy.py",)
SITES = ("tests/shared/rounds/test_sites.py",)
COUNTED = ("tests/coordinator/api/test_sites_count.py",)
UPDATES = ("tests/coordinator/api/test_updates.py",)
LEASES = ("tests/coordinator/api/test_leases.py",)
ACCEPTANCE = ("tests/coordinator/domain/test_acceptance.py",)
LIFECYCLE = ("tests/coordinator/domain/test_lifecycle.py", "tests/coordinator/db/test_transitions.py")
TRANSITIONS = ("tests/coordinator/db/test_transitions.py",)
DECIDE = ("tests/coordinator/domain/test_decide.py",)
ACCESS = ("tests/coordinator/api/test_access.py", "tests/coordinator/api/test_owasp.py")
POLICY = ("tests/worker/governance/test_policy.py",)
AIRLOCK = ("tests/worker/governance/test_airlock.py",)
BUDGET = ("tests/worker/task/test_upload_budget.py",)
AGENT = ("tests/worker/test_agent.py::test_what_may_not_be_done_fails_the_task_and_sends_nothing",)
DECIDES = ("tests/worker/governance/test_site_decides.py",)
HOSTILE = ("tests/shared/secure_sums/test_hostile.py",)
ROUNDS = ("tests/shared/secure_sums/test_rounds.py",)
ROUNDING = ("tests/shared/secure_sums/test_rounding.py",)
MASKED = ("tests/shared/rounds/test_masked_updates.py",)
SUM_TERMS = ("tests/worker/task/test_secure_terms.py",)
AGREEMENTS = ("tests/worker/state/test_agreements.py",)
ASKED_ONCE = (
    "tests/coordinator/api/test_secure_sums.py::test_two_conductors_that_ask_helpers_at_once_ask_each_once",
)

MERGING = (
    Mutant(
        "shared/aggregation/mean.py",
        "accepted = sum(weight for weight, _ in senders)",
        "accepted = float(len(senders))",
        MEAN,
    ),
    Mutant(
        "shared/aggregation/mean.py",
        "return accepted * _probability(name, inclusion(name))",
        "return accepted",
        MEAN,
    ),
    Mutant("shared/aggregation/mean.py", "if not 0 < chance <= 1:", "if not 0 < chance <= 2:", MEAN),
    Mutant("shared/aggregation/mean.py", "if name in blocks] for name", "] for name", MEAN),
    Mutant(
        "shared/tensors/lazy.py",
        "total = sum(weight for weight, _ in senders) if whole is None else whole",
        "total = sum(weight for weight, _ in senders)",
        (*LAZY, *MEAN),
    ),
    Mutant(
        "shared/tensors/lazy.py",
        "if any(weight <= 0 for weight, _ in senders):",
        "if any(weight < 0 for weight, _ in senders):",
        LAZY,
    ),
    Mutant(
        "shared/rounds/aggregate.py",
        "for entry in sorted(accepted, key=lambda entry: entry.worker):",
        "for entry in accepted:",
        SITES,
    ),
    Mutant(
        "shared/rounds/aggregate.py",
        "_by_site(entry for entry in accepted if entry.worker not in aside)",
        "_by_site(accepted)",
        COUNTED,
    ),
    Mutant(
        "shared/rounds/aggregate.py",
        "examples=min(update.examples, bounds.max_examples or update.examples)",
        "examples=update.examples",
        COUNTED,
    ),
    Mutant(
        "shared/rounds/aggregate.py",
        '"participants" if normalization == "participants" else "cohort"',
        '"participants"',
        SITES,
    ),
    Mutant(
        "shared/rounds/aggregate.py",
        "examples, staleness = sum(update.examples for update in updates),",
        "examples, staleness = updates[0].examples,",
        SITES,
    ),
    Mutant(
        "shared/rounds/aggregate.py",
        "limit = most * max(middle, bounds.median_norm)",
        "limit = most * middle",
        SITES,
    ),
    Mutant("shared/aggregation/robust.py", "return 2 * self.attackers + 1", "return 2 * self.attackers", ROBUST),
    Mutant("shared/aggregation/robust.py", "return (senders - 1) // 2", "return (senders - 1) // 3", ROBUST),
    Mutant(
        "shared/rounds/validation.py",
        "if max_norm is not None and norm > max_norm:",
        "if max_norm is not None and norm > 2 * max_norm:",
        UPDATES,
    ),
    Mutant("shared/rounds/validation.py", "if not isfinite(norm):", "if norm < 0:", (*UPDATES, *COUNTED)),
)

FENCING = (
    Mutant(
        "coordinator/domain/acceptance.py",
        'if state != "leased" or shown_token != token:',
        'if state != "leased":',
        ACCEPTANCE,
    ),
    Mutant(
        "coordinator/domain/acceptance.py",
        'if state != "leased" or shown_token != token:',
        'if state == "expired" or shown_token != token:',
        ACCEPTANCE,
    ),
    Mutant(
        "coordinator/domain/acceptance.py",
        'round_state in ("merging", "committed")',
        'round_state in ("merging",)',
        ACCEPTANCE,
    ),
    Mutant(
        "coordinator/domain/lifecycle.py",
        '"accept": Move(("leased",), "accepted")',
        '"accept": Move(("leased", "expired"), "accepted")',
        LIFECYCLE,
    ),
    Mutant(
        "coordinator/domain/lifecycle.py",
        '"abandon": Move(("open", "merging"), "abandoned")',
        '"abandon": Move(("open", "merging", "committed"), "abandoned")',
        LIFECYCLE,
    ),
    Mutant(
        "coordinator/db/transitions.py",
        '{"id": task.id, "token": task.token}',
        '{"id": task.id}',
        TRANSITIONS,
    ),
    Mutant(
        "coordinator/db/transitions.py",
        ".where(*same, columns.state.in_(move.sources))",
        ".where(*same)",
        TRANSITIONS,
    ),
    Mutant("coordinator/db/transitions.py", ".rowcount != 1:", ".rowcount > 1:", TRANSITIONS),
    Mutant("coordinator/db/tasks.py", '"token": task.token + 1,', '"token": task.token,', LEASES),
    Mutant("coordinator/db/tasks.py", '"attempts": task.attempts + 1,', '"attempts": task.attempts,', LEASES),
    Mutant(
        "coordinator/db/tasks.py",
        "return task.state in ACCEPTED and task.token == token and",
        "return task.state in ACCEPTED and",
        (*LEASES, "tests/coordinator/api/test_idempotency.py"),
    ),
    Mutant("coordinator/db/tasks.py", "    record.require_lease(token)", "    pass", LEASES),
    Mutant(
        "coordinator/db/tasks.py",
        "if report.examples > (declared := record.declared_examples):",
        "if report.examples > 1000 * (declared := record.declared_examples):",
        UPDATES,
    ),
    Mutant(
        "coordinator/db/tasks.py",
        "if report.version != record.version.digest:",
        "if not report.version:",
        UPDATES,
    ),
    Mutant(
        "coordinator/db/tasks.py",
        "if row is None or (site_id is not None and row[1].site_id != site_id):",
        "if row is None:",
        ACCESS,
    ),
    Mutant(
        "coordinator/domain/leases.py",
        'if task.state == "leased" and expires_at <= now:',
        'if task.state == "leased" and expires_at < now:',
        DECIDE,
    ),
    Mutant(
        "coordinator/domain/leases.py",
        'elif task.state == "expired" and task.attempts < max_attempts:',
        'elif task.state == "expired" and task.attempts <= max_attempts:',
        DECIDE,
    ),
    Mutant(
        "coordinator/domain/decide.py",
        "len(came) >= max(run.cohort.target_updates, quorum):",
        "len(came) >= run.cohort.target_updates:",
        DECIDE,
    ),
    Mutant(
        "coordinator/domain/decide.py",
        "elif waiting and len(came | waiting) >= quorum and now < round_.deadline_at:",
        "elif waiting and len(came | waiting) >= quorum:",
        DECIDE,
    ),
    Mutant(
        "coordinator/operations/tasks.py",
        '"attempts": record.task.attempts - 1',
        '"attempts": record.task.attempts',
        LEASES,
    ),
    Mutant(
        "coordinator/operations/tasks.py",
        "record.require_lease(request.token)",
        "pass",
        LEASES,
    ),
)

EGRESS = (
    Mutant(
        "worker/governance/policy.py",
        "if unasked := names - {block.name for block in asked}:",
        "if unasked := names & set():",
        POLICY,
    ),
    Mutant(
        "worker/governance/policy.py",
        "self.check_upload(block for block in asked if block.name in names)",
        "pass",
        POLICY,
    ),
    Mutant("worker/governance/policy.py", "if private := names & set(kept):", "if private := names & set():", POLICY),
    Mutant(
        "worker/governance/policy.py",
        "if nbytes > self.max_upload_bytes:",
        "if nbytes > 2 * self.max_upload_bytes:",
        POLICY,
    ),
    Mutant("worker/task/upload.py", "self.check_egress(update, asked, result.keep)", "pass", AGENT),
    Mutant("worker/agent.py", "held.wait(check)", "pass", DECIDES),
    Mutant(
        "worker/task/upload.py",
        "if digest_at(path) != summary.update:",
        "if not summary.update:",
        AIRLOCK,
    ),
    Mutant("worker/task/upload.py", 'if view.state == "accepted":', 'if view.state == "merged":', DECIDES),
    Mutant("worker/governance/airlock.py", 'if decision.verdict == "withhold":', "if not decision.verdict:", AIRLOCK),
    Mutant(
        "worker/governance/airlock.py",
        "return found if found and found.update == held.update else None",
        "return found",
        AIRLOCK,
    ),
    Mutant("worker/governance/airlock.py", "if self._decision(held):", "if not held.id:", AIRLOCK),
    Mutant("worker/task/upload_budget.py", "if over <= 0:", "if over <= 64:", BUDGET),
)

SECURE_SUMS = (
    Mutant(
        "shared/secure_sums/committee.py",
        "if len(by_site) < len(envelopes):",
        "if len(by_site) > len(envelopes):",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/committee.py",
        "if len(by_site) > terms.max_senders:",
        "if len(by_site) > 2 * terms.max_senders:",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/committee.py",
        "if len({envelope.identity for envelope in envelopes}) < len(envelopes):",
        "if not envelopes:",
        HOSTILE,
    ),
    Mutant("shared/secure_sums/committee.py", "require_known(roster, site, envelope.identity)", "pass", HOSTILE),
    Mutant("shared/secure_sums/committee.py", "if len(sites) >= terms.quorum}", "if len(sites) >= 1}", HOSTILE),
    Mutant(
        "shared/secure_sums/committee.py",
        "check_terms(terms, self.roster, self.least_quorum)",
        "check_terms(terms, self.roster)",
        HOSTILE,
    ),
    Mutant("shared/secure_sums/committee.py", "check_agreements(found, agreements)", "pass", HOSTILE),
    Mutant(
        "shared/secure_sums/committee.py",
        "if len(signed) < terms.signatures:",
        "if len(signed) <= terms.tolerance:",
        HOSTILE,
    ),
    Mutant("shared/secure_sums/committee.py", "signed.add(agreement.helper)", "signed.add(len(signed))", HOSTILE),
    Mutant(
        "shared/secure_sums/committee.py",
        "require_signature(helper.identity, purpose, subject.encode(), agreement.signature, helper.site)",
        "pass",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/committee.py",
        "if (self.run, self.round) == (other.run, other.round):",
        "if self.run == other.round:",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/committee.py",
        "return bool(shared) and not set(self.sites) == set(other.sites) <= set(repeating)",
        "return bool(shared) and not repeating",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/committee.py",
        "return len(signed & set(helpers)) >= signatures_of(len(helpers))",
        "return len(signed) >= signatures_of(len(helpers))",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/messages.py",
        "return (helpers + tolerance_of(helpers)) // 2 + 1",
        "return (helpers + tolerance_of(helpers)) // 2",
        ROUNDS,
    ),
    Mutant(
        "shared/secure_sums/messages.py",
        "return ((1 << (bits - 1)) - 1) // senders",
        "return (1 << (bits - 1)) - 1",
        ROUNDING,
    ),
    Mutant(
        "shared/secure_sums/messages.py",
        "if bits >> len(terms.blocks):",
        "if bits >> 2 * len(terms.blocks):",
        HOSTILE,
    ),
    Mutant("shared/secure_sums/envelope.py", "_require_signed(envelope)", "pass", HOSTILE),
    Mutant("shared/secure_sums/envelope.py", "if envelope.terms != terms.digest:", "if not envelope.terms:", HOSTILE),
    Mutant(
        "shared/secure_sums/envelope.py",
        "if envelope.weight > terms.max_weight:",
        "if envelope.weight > 2 * terms.max_weight:",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/envelope.py",
        "return [new_seed() for _ in terms.seeds]",
        "return [new_seed()] * len(terms.seeds)",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/envelope.py",
        'f"tessera seeds {terms.digest}/{site}/{helper}"',
        'f"tessera seeds {terms.digest}/{helper}"',
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/masks.py",
        'info = f"{terms_digest}/{block}".encode()',
        "info = terms_digest.encode()",
        HOSTILE,
    ),
    Mutant(
        "shared/secure_sums/masks.py", 'info = f"{terms_digest}/{block}".encode()', "info = block.encode()", HOSTILE
    ),
    Mutant("shared/secure_sums/masks.py", "np.add(total, masks, out=total)", "pass", ROUNDS),
    Mutant(
        "shared/secure_sums/masked_update.py",
        "if not (np.isfinite(lowest) and np.isfinite(highest)):",
        "if np.isnan(lowest):",
        ROUNDING,
    ),
    Mutant(
        "shared/secure_sums/masked_update.py",
        'if header.metadata.get("terms") != terms.digest:',
        'if not header.metadata.get("terms"):',
        MASKED,
    ),
    Mutant(
        "shared/secure_sums/keys.py",
        'return b"tessera " + purpose.encode() + b"\\0" + message',
        "return message",
        HOSTILE,
    ),
    Mutant("shared/secure_sums/roster.py", "require_known(roster, keys.site, keys.identity)", "pass", HOSTILE),
    Mutant(
        "shared/secure_sums/roster.py",
        "require_signature(keys.identity, SEALING_KEY, message, keys.signature, keys.site)",
        "pass",
        HOSTILE,
    ),
    Mutant(
        "shared/rounds/secure_sums.py",
        '_require(not unasked, f"the plan does not ask for {unasked[:4]}")',
        "pass",
        MASKED,
    ),
    Mutant(
        "worker/task/secure_sums.py",
        "if terms.settings != run.task.alike_digest:",
        "if not terms.settings:",
        SUM_TERMS,
    ),
    Mutant("worker/task/secure_sums.py", "check_terms(terms, party.roster, party.quorum)", "pass", SUM_TERMS),
    Mutant(
        "worker/task/secure_sums.py",
        "if about != (task.run, task.round, task.version.digest):",
        "if not about:",
        SUM_TERMS,
    ),
    Mutant(
        "worker/task/secure_sums.py",
        "seeds if party.masks else []",
        "[]",
        SUM_TERMS,
    ),
    Mutant("worker/state/site_keys.py", "if digest not in found):", "if not found):", AGREEMENTS),
    Mutant(
        "worker/state/site_keys.py",
        "if earlier := forbidding(known, made, repeating):",
        "if earlier := forbidding(known[1:], made, repeating):",
        AGREEMENTS,
    ),
    Mutant(
        "worker/state/site_keys.py", "if len(chain.entries) < self._known:", "if len(chain.entries) < 0:", AGREEMENTS
    ),
    Mutant(
        "coordinator/domain/sum_helpers.py",
        "if signed >= sums.signatures:",
        "if signed + 1 >= sums.signatures:",
        DECIDE,
    ),
    Mutant(
        "coordinator/domain/sum_helpers.py",
        "elif sums.helpers - failed < sums.signatures:",
        "elif failed and sums.helpers - failed <= sums.signatures:",
        DECIDE,
    ),
    Mutant(
        "coordinator/conductor/secure_sums.py",
        'require(_states(present) == _states(tasks), "the helpers\' tasks have changed meanwhile")',
        "pass",
        ASKED_ONCE,
    ),
)

MUTANTS = (*MERGING, *FENCING, *EGRESS, *SECURE_SUMS)

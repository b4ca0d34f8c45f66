"""Requests for approval of runs by a person at the site, and the decisions on them.

The site's workers may share the requests. An approval covers a run's terms, by their digest: changed terms need
another approval.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from tessera.shared.schema import MAX_WITHHELD, MAX_WITHHELD_TERMS, TaskKind, Value
from tessera.worker.governance.run_history import TaskStatement
from tessera.worker.state.database import StateDatabase, StateError

REASON_CHARACTERS = 200

MAX_UNDECIDED = 1000
"""Number of requests that may await a decision: runs cost their coordinator nothing, and each claim reads every
request."""

SHOWN_TERMS = 16
"""Length of the digest's beginning that stands for a run's terms: no two requests of a run have the same."""

Standing = Literal["approved", "awaiting-approval", "declined", "approval-ended"]


class InboxError(StateError):
    """An unknown request, or one that another was made to resemble."""


class Unapproved(Exception):
    """A task of a run that the site has not approved. `code` is reported to the coordinator."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class ApprovalDecision(Value):
    """A person's decision on a request."""

    approved: bool
    by: str
    at: datetime
    until: datetime | None = None
    reason: str = ""


class Request(Value):
    """A run's request for approval, in plain words."""

    run: str
    run_name: str
    terms: str
    """The digest of the run's terms."""
    orchestrator: str | None
    dataset: str
    examples: int
    worker: str
    asked_at: datetime
    summary: str
    live_terms: dict[str, float] = {}
    """By name the terms that a run may change."""
    repeats_model: bool = False
    """True if the site's updates from the run's model may be in sums of other runs."""
    decision: ApprovalDecision | None = None

    @property
    def shown_terms(self) -> str:
        return self.terms[:SHOWN_TERMS]

    def standing(self, now: datetime) -> Standing:
        if self.decision is None:
            return "awaiting-approval"
        if not self.decision.approved:
            return "declined"
        ended = self.decision.until is not None and now >= self.decision.until
        return "approval-ended" if ended else "approved"

    def reason(self, now: datetime) -> str:
        """Return the reason why the run's tasks are refused, as reported to the coordinator."""
        decision, standing = self.decision, self.standing(now)
        if standing == "declined" and decision:
            return f"declined: {decision.reason}"[:REASON_CHARACTERS]
        if standing == "approval-ended" and decision and decision.until:
            return f"approval-ended: the approval was until {decision.until:%Y-%m-%d %H:%M} UTC"
        return "awaiting-approval: a person at the site has to approve the run"


class Inbox:
    """The requests in the database of a `folder`, filed by workers and decided by people.

    Each run needs approval; unless `every_run`, only those that send updates from a model into a second sum do.
    """

    def __init__(
        self, folder: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC), *, every_run: bool = True
    ) -> None:
        self._database = StateDatabase.of(folder)
        self._now = now
        self._every_run = every_run

    def require(self, snapshot: TaskStatement, make: Callable[[str], Request], *, trains: bool = True) -> None:
        """Raise Unapproved unless the run is approved. `make` makes the request for a new digest of terms.

        A task on the held-out examples of a data set belongs to a run that trains on the rest: unless this worker
        does not train, the request is to train, which says that the run measures too.
        """
        if not (self._every_run or snapshot.repeats_model):
            return
        kinds: list[TaskKind] = ["train", snapshot.kind] if snapshot.held_out else [snapshot.kind]
        now = self._now()
        requests = [self._find(snapshot.run, snapshot.terms_digest(kind)) for kind in kinds]
        if any(request and request.standing(now) == "approved" for request in requests):
            return
        request = next(filter(None, requests), None)
        if request is None:
            self._require_room()
            request = self._ask(make(snapshot.terms_digest(kinds[0] if trains else snapshot.kind)))
        if (standing := request.standing(now)) != "approved":
            raise Unapproved(standing, request.reason(now))

    def changes_since(self, run: str, live_terms: Mapping[str, float]) -> str:
        """Return a sentence on the terms that a run has changed since it last asked, with a space; empty if none."""
        former = next((request for request in reversed(self.requests()) if request.run == run), None)
        before = former.live_terms if former else {}
        changed = [
            f"{n} from {before[n]:.9g} to {now:.9g}" for n, now in live_terms.items() if now != before.get(n, now)
        ]
        return f"The run has changed since it last asked: {', '.join(changed)}. " if changed else ""

    def require_still(self, snapshot: TaskStatement) -> None:
        """Raise Unapproved unless the run is still approved, as `require` does, without a new request."""

        def missing(_: str) -> Request:
            raise Unapproved("awaiting-approval", "awaiting-approval: its request is no longer in the inbox")

        self.require(snapshot, missing)

    def _require_room(self) -> None:
        """Raise Unapproved if too many requests await a decision."""
        if sum(request.decision is None for request in self.requests()) >= MAX_UNDECIDED:
            raise Unapproved(
                "awaiting-approval",
                f"awaiting-approval: {MAX_UNDECIDED} requests await a decision, and the site files no more: a person "
                "there has to approve or decline some",
            )

    def _ask(self, request: Request) -> Request:
        with self._database.writing():
            # Another worker of the site may have filed it meanwhile.
            if existing := self._find(request.run, request.terms):
                return existing
            self._write(request)
        return request

    def decide(self, requests: Iterable[Request], decision: ApprovalDecision) -> list[Request]:
        """Record a decision on these requests and no others: a run may file another at any time."""
        with self._database.writing():
            decided = [request.model_copy(update={"decision": decision}) for request in requests]
            for request in decided:
                self._write(request)
        return decided

    def find(self, named: str) -> list[Request]:
        """Return the requests of one run, by name, id or id prefix. Raises InboxError unless exactly one matches."""
        found = [r for r in self.requests() if named and (r.run_name == named or r.run.startswith(named))]
        if not found:
            raise InboxError(f"no run {named!r} has requested approval here; list the requests: tessera worker inbox")
        if len(runs := sorted({request.run for request in found})) > 1:
            raise InboxError(f"{named!r} matches the runs {', '.join(runs)}: give more of the id")
        return found

    def find_one(self, named: str, terms: str = "") -> Request:
        """Return the request of one run on the terms whose digest begins with `terms`; of several, the only one that
        is open, as neither approved nor declined.

        Raises InboxError if there is none, or more than one: then a person may not have read all of them.
        """
        found = self.find(named)
        now = self._now()
        matches = [request for request in found if request.terms.startswith(terms)]
        if len(matches) > 1:
            matches = [request for request in matches if request.standing(now) not in ("approved", "declined")]
        if len(matches) != 1:
            listed = ", ".join(f"{request.shown_terms} ({request.standing(now)})" for request in found)
            raise InboxError(
                f"{found[0].run_name} ({found[0].run}) has requested approval of the terms {listed}: read each with "
                "`tessera worker inbox`, and name one with --terms"
            )
        return matches[0]

    def requests(self) -> list[Request]:
        """Return all requests, oldest first. Raises StateError."""
        read = self._database.documents(Request, "SELECT request FROM requests")
        return sorted(read, key=lambda request: (request.asked_at, request.run))

    def withheld(self) -> dict[str, str]:
        """Return the reason by run of each run with an unapproved request, newest last, for use in claims."""
        now = self._now()
        asked = [request for request in self.requests() if self._every_run or request.repeats_model]
        unapproved = [request for request in asked if request.standing(now) != "approved"]
        withheld = {request.run: request.reason(now) for request in unapproved}
        return dict(list(withheld.items())[-MAX_WITHHELD:])

    def withheld_terms(self) -> dict[str, tuple[dict[str, float], ...]]:
        """Return the live terms of each run's unapproved requests, for runs that a person approved on other terms.

        Once a run has changed to approved terms, or to new ones, it may offer a task.
        """
        now, requests, found = self._now(), self.requests(), dict[str, list[dict[str, float]]]()
        accepted = {request.run for request in requests if request.decision and request.decision.approved}
        for request in requests:
            if request.run in accepted and request.standing(now) != "approved":
                found.setdefault(request.run, []).append(request.live_terms)
        return {run: tuple(terms[-MAX_WITHHELD_TERMS:]) for run, terms in found.items() if all(terms)}

    def _find(self, run: str, terms: str) -> Request | None:
        query = "SELECT request FROM requests WHERE run = ? AND terms = ?"
        found = self._database.document(Request, query, run, terms[:SHOWN_TERMS])
        # A coordinator can search for two sets of terms whose digests begin alike.
        if found and found.terms != terms:
            raise InboxError(
                f"run {run} has a request on other terms, whose digest begins like that of the present ones, "
                f"{found.shown_terms}: decline it, since its coordinator may have chosen both"
            )
        return found

    def _write(self, request: Request) -> None:
        self._database.write(
            "INSERT OR REPLACE INTO requests VALUES (?, ?, ?)",
            request.run, request.shown_terms, request.model_dump_json(),
        )  # fmt: skip

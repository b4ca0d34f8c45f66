"""All errors that the API reports, as one tree, and their form on the wire (RFC 9457, `application/problem+json`).

Problem
|- BadRequest 400        not readable as HTTP, JSON or a header: fix the caller
|- Unauthenticated 401   no token, or one that is unknown, expired or revoked
|- Forbidden 403         the token's role does not allow it
|  `- SiteSuspended      an administrator suspended the site
|- NotFound 404
|- Conflict 409          the request expects another state
|  |- LeaseLost          the lease expired or is another worker's: drop the work
|  |- TaskCancelled      the run or round no longer needs the task: drop the work
|  |- RoundClosed        the update arrived too late to be merged
|  |- StaleVersion       the update was trained from another version
|  |- NameInUse          another worker of the site has this name
|  |- OffsetMismatch     the upload continues at another byte
|  `- UploadBusy         another request is writing to this upload
|- TooSlow 408           the request stalled, or took too long to arrive
|- Gone 410              the version was removed to make room
|- PreconditionFailed 412
|- TooLarge 413
|- RangeUnsatisfiable 416
|- Invalid 422           readable and wrong: `errors` says where
|  |- InvalidUpdate      an update that cannot be merged
|  |- DigestMismatch     the bytes have another digest than announced
|  `- KeyReused          an idempotency key was sent with another body
|- PreconditionRequired 428
|- TooManyRequests 429   retry after a while
|  `- QuotaExceeded      the site has reached its quota of announced bytes
|- HeadersTooLarge 431
|- ServerFault 500
|  |- StoreSpoilt        a blob is missing or corrupt
|  |- WorkerFailed       stored with a task, never sent as a response
|  `- Withheld           the same, for a task whose site has not approved the run
`- Unavailable 503       retry after a while
   |- Busy               too many connections, or too little memory for another upload
   |- StoreFull          too little disk space for the announced bytes
   `- StoreAway          the object store does not answer
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from tessera.shared.schema import Value
from tessera.shared.validation_errors import messages_of
from tessera.shared.version import install_line

M = TypeVar("M", bound=BaseModel)

MEDIA_TYPE = "application/problem+json"
PAGES = "/problems"
"""The path of the coordinator's pages about problems: `type` is a URL reference to one (RFC 9457, section 3.1.1)."""
MAX_FAULTS = 50
MAX_DETAIL = 600


class Fault(Value):
    """One error: `pointer` is a JSON pointer into the request, or the name of a block or header.

    `code` is the kind of the error, if it has one: see `shared.updates.errors`.
    """

    pointer: str
    detail: str
    code: str = ""


class ProblemDocument(Value, extra="ignore"):
    """The body of every response with a status of 400 or more. Readers pass over members that they do not know."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    remedy: str
    retryable: bool
    errors: tuple[Fault, ...] = ()
    trace: str | None = None
    """Id under which the coordinator's log has the details."""


class Problem(Exception):
    """An error to report: what is wrong (`detail`), where (`errors`), and how to fix it (`remedy`)."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "server-fault"
    title: ClassVar[str] = "The coordinator failed"
    meaning: ClassVar[str] = "An error in the coordinator itself ended the request; its log has the details."
    """The first sentence of the code's page, which `causes` and `remedy` follow."""
    causes: ClassVar[tuple[str, ...]] = ("a fault of the program", "a damaged file or database")
    remedy: ClassVar[str] = "Try again; if it persists, look in the coordinator's log."
    retryable: bool = False

    def __init__(
        self,
        detail: str,
        *,
        errors: Sequence[Fault] = (),
        remedy: str | None = None,
        retry_after_seconds: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = tuple(errors)
        self.advice = remedy or self.remedy
        self.retry_after_seconds = retry_after_seconds
        self.headers = headers or {}
        # True if a coordinator reported it, rather than a proxy by a bare HTTP status.
        self.from_document = False
        # The URL of the code's page at that coordinator.
        self.page = ""

    def document(self) -> ProblemDocument:
        shown = self.errors[:MAX_FAULTS]
        return ProblemDocument(
            type=f"{PAGES}/{self.code}",
            title=self.title,
            status=self.status,
            detail=self.detail,
            code=self.code,
            remedy=self.advice,
            retryable=self.retryable,
            errors=shown,
        )

    def json(self) -> dict[str, JsonValue]:
        return self.document().model_dump(mode="json", exclude_none=True)

    def __str__(self) -> str:
        faults = "".join(f"\n  {fault.pointer}: {fault.detail}" for fault in self.errors[:MAX_FAULTS])
        page = f" See {self.page}" if self.page else ""
        return f"{self.detail} [{self.code}] {self.advice}{page}{faults}"


class BadRequest(Problem):
    status = 400
    code = "bad-request"
    title = "The request cannot be read"
    meaning = "The coordinator cannot read the request as HTTP, JSON or a header."
    causes = ("a body that is no JSON", "a malformed header, cursor or range", "a method that the path does not have")
    remedy = "Compare the request with the API's description at /openapi.json."


class Unauthenticated(Problem):
    status = 401
    code = "unauthenticated"
    title = "The token is missing or not valid"
    meaning = "The request has no token, or one that this coordinator does not accept."
    causes = (
        "a token that has expired, was revoked or was rotated",
        "a token of another coordinator",
        "a token file that is missing or holds more than the token",
    )
    remedy = (
        "Send 'Authorization: Bearer <token>' with a token that an administrator has issued; commands read it from "
        "--token-file or TESSERA_TOKEN_FILE."
    )


class Forbidden(Problem):
    status = 403
    code = "forbidden"
    title = "The token's role does not allow this"
    meaning = "The token is valid, but its role or its owner may not do this."
    causes: ClassVar[tuple[str, ...]] = (
        "a viewer's token where the action needs an orchestrator's or an administrator's",
        "a run that another orchestrator created",
        "a form that another page sent",
    )
    remedy = "Use a token with one of the roles named, or ask an administrator for one."


class SiteSuspended(Forbidden):
    code = "site-suspended"
    title = "The token's site is suspended"
    meaning = "An administrator has suspended the site, and all its tokens are refused."
    causes = ("updates of the site that did harm", "a lost token or machine of the site")
    remedy = "Ask an administrator why, and to resume it; workers ask again by themselves."


class NotFound(Problem):
    status = 404
    code = "not-found"
    title = "It does not exist here"
    meaning = "No object has this name or id, or the token may not read it: the answer is the same for both."
    causes = (
        "a misspelt name or id",
        "an object that was removed to make room",
        "an object that belongs to others",
        "a URL with a path such as /page",
    )
    remedy = "Check the name or id: a list shows those that exist here."


class Conflict(Problem):
    status = 409
    code = "conflict"
    title = "The request expects another state"
    meaning = "The object is in another state than the request needs."
    causes: ClassVar[tuple[str, ...]] = (
        "another person or process has changed it",
        "the request was already carried out",
    )
    remedy = "Read the resource again, then decide whether to repeat the request."


class LeaseLost(Conflict):
    code = "lease-lost"
    title = "The lease is no longer yours"
    meaning = "The lease of the task has ended, and the coordinator may have offered the task to another worker."
    causes = (
        "a worker that was stopped, suspended or offline for longer than the lease",
        "two processes with one worker's files",
    )
    remedy = "Drop the work and its private results, and claim again."


class TaskCancelled(Conflict):
    code = "task-cancelled"
    title = "The task was cancelled"
    meaning = "The run or the round no longer needs the task."
    causes = (
        "a run that was cancelled",
        "a round that was abandoned",
        "a policy or decision of the site that now excludes the run",
    )
    remedy = "Drop the work and its private results, and claim again."


class RoundClosed(Conflict):
    code = "round-closed"
    title = "The round closed before this update arrived"
    meaning = "The round ended before the update arrived, and the update is not merged."
    causes = (
        "a deadline that is too short for this worker or its line",
        "enough updates of other workers (cohort.target_updates)",
    )
    remedy = "Drop the update and claim again; a longer deadline or a smaller quorum waits for slow workers."


class StaleVersion(Conflict):
    code = "stale-version"
    title = "The update was made from another version"
    meaning = "The update consists of steps from another version than its task names."
    causes = ("a client that mixed two tasks", "a worker that continued with an older model")
    remedy = "Fetch the version that the task names, train from it, and submit again."


class NameInUse(Conflict):
    code = "name-in-use"
    title = "Another worker of the site has this name"
    meaning = "A worker with this name is live in another state folder, or in a process that started later."
    causes = (
        "worker settings that were copied to a second machine",
        "a container that started without its state folder",
        "an earlier process that still runs",
    )
    remedy = (
        "Give the newer one another name: `name` in its settings, or --name where it joins. If it replaces the "
        "other, stop the other: its name is free as soon as Retry-After says, or its token is revoked."
    )


class OffsetMismatch(Conflict):
    code = "offset-mismatch"
    title = "The upload continues at another byte"
    meaning = "The sent bytes do not begin where the stored part of the upload ends."
    causes = ("an interrupted request, of which the coordinator stored a part",)
    remedy = "Continue from the offset in the Upload-Offset header of this response."


class UploadBusy(Conflict):
    code = "upload-busy"
    title = "Another request is writing to this upload"
    meaning = "Two requests write to one upload at the same time."
    causes = ("an earlier request whose connection broke, and which has not ended yet",)
    remedy = "Wait for it to end, ask for the offset with HEAD, and continue from there."
    retryable = True


class TooSlow(Problem):
    status = 408
    code = "too-slow"
    title = "The request took too long to arrive"
    meaning = "The request stalled, or did not arrive completely within the time limit."
    causes = ("a slow or broken line", "a proxy that holds bodies back")
    remedy = "Send the request again, without pauses."
    retryable = True


class Gone(Problem):
    status = 410
    code = "version-retired"
    title = "This version is no longer kept"
    meaning = "The version existed, and its blobs were removed to make room."
    causes = ("a run that keeps few versions (keep_versions)",)
    remedy = "Use a later version; raise keep_versions to keep more of them."


class PreconditionFailed(Problem):
    status = 412
    code = "precondition-failed"
    title = "It has changed since you read it"
    meaning = "The object is no longer in the state that If-Match names, so nothing was changed."
    causes = ("another person or process has changed it since it was read",)
    remedy = "Read it again and repeat the request with its new ETag."


class TooLarge(Problem):
    status = 413
    code = "too-large"
    title = "The body is too large"
    meaning = "The body has more bytes or values than the coordinator accepts for this request."
    causes = ("a model, update or document above a limit of the coordinator", "a list of very many entries")
    remedy = "Send less, or ask the administrator to raise the limit named in the detail."


class RangeUnsatisfiable(Problem):
    status = 416
    code = "range-unsatisfiable"
    title = "The range lies outside the blob"
    meaning = "The requested bytes lie behind the end of the blob."
    causes = ("a download that is already complete", "a partial file of another blob")
    remedy = "Ask for a range that begins before the size in the Content-Range header."


class Invalid(Problem):
    status = 422
    code = "invalid"
    title = "The request is not valid"
    meaning = "The request can be read, but a value in it is wrong; `errors` names each place."
    causes: ClassVar[tuple[str, ...]] = (
        "a misspelt key, or a value out of its range",
        "settings that contradict each other",
        "a client of another version",
    )
    remedy = "Fix the listed errors and send the request again."


class InvalidUpdate(Invalid):
    code = "invalid-update"
    title = "The update cannot be merged"
    meaning = "The update does not fit its plan or contains values that cannot be merged."
    causes = (
        "training that diverged to infinite or missing values",
        "a worker of another version",
        "a faulty or malicious worker",
    )
    remedy = "No part of it was used, and the round goes on; fix the worker before it claims again."


class DigestMismatch(Invalid):
    code = "digest-mismatch"
    title = "The bytes have another digest than announced"
    meaning = "The SHA-256 of the received bytes is not the announced one."
    causes = ("a file that changed while it was sent", "a fault of a disk, of memory or on the line")
    remedy = "The upload was deleted; create a new one and send the bytes again."


class KeyReused(Invalid):
    code = "idempotency-key-reused"
    title = "The idempotency key belongs to another request"
    meaning = "An Idempotency-Key names one request, and this one has another body."
    causes = ("a script that sends one key with different requests",)
    remedy = "Use a new Idempotency-Key for each new request, and the same one only to repeat it unchanged."


class PreconditionRequired(Problem):
    status = 428
    code = "precondition-required"
    title = "The change needs an If-Match header"
    meaning = "The coordinator changes this object only if the request names the state that it changes."
    causes = ("a client that sends no If-Match",)
    remedy = "Read the resource and send its ETag as If-Match, so that no other change is overwritten."


class TooManyRequests(Problem):
    status = 429
    code = "too-many-requests"
    title = "Too many requests"
    meaning = "The caller, or its address, sends more requests than the coordinator serves to one caller."
    causes: ClassVar[tuple[str, ...]] = (
        "a script that asks in a loop",
        "several processes with one token",
        "repeated failures to sign in from one address",
    )
    remedy = "Wait as long as Retry-After says."
    retryable = True


class QuotaExceeded(TooManyRequests):
    code = "quota-exceeded"
    title = "The site has reached its quota of announced bytes"
    meaning = "The site has announced as many bytes as it may upload at a time."
    causes = ("uploads that were begun and not finished", "several workers of one site that upload large models")
    remedy = "Finish the uploads that are under way, wait as long as Retry-After says, or ask for a larger quota."


class HeadersTooLarge(Problem):
    status = 431
    code = "headers-too-large"
    title = "The head of the request is too large"
    meaning = "The request line and the headers have more bytes than the coordinator reads."
    causes = ("cookies of other services on the same host", "a proxy that adds many headers")
    remedy = "Send fewer or shorter headers, or ask the administrator to raise the limit named in the detail."


class ServerFault(Problem):
    retryable = True


class StoreSpoilt(ServerFault):
    code = "store-spoilt"
    title = "A blob in the coordinator's store is missing or corrupt"
    meaning = "The bytes under a digest are missing, or no longer have this digest."
    causes = (
        "a fault of the disk",
        "files that were deleted or replaced by hand",
        "a database and a blob store from different backups",
    )
    remedy = "Restore the blob store from a backup; nothing was computed from the corrupt blob."
    retryable = False


class WorkerFailed(ServerFault):
    """A worker's reason for failing a task; stored with the task, never sent as a response."""

    code = "worker-failed"
    title = "The worker could not do the task"
    meaning = "A worker gave the task up and reported the reason; the round continues without it."
    causes = ("the code at the beginning of the detail names the cause; the table below lists the codes",)
    remedy = "Ask the site's staff: the worker's log has the details."
    retryable = False

    @classmethod
    def of(cls, code: str, detail: str) -> Self:
        """Return the failure with a remedy for the run's orchestrator, who has no access to the site."""
        return cls(f"{code}: {detail}", remedy=OF_WORKERS.get(code))


_MISFIT = (
    "Create the model folder again with `tessera model init` of the version that the sites run, and begin a new run."
)
_PLAN = "Change the method or its settings, and begin a new run."

OF_WORKERS: Mapping[str, str] = {
    "policy-violation": "The site's policy forbids it: begin a run that asks for less, or leave the site out "
    "(cohort.sites).",
    "disk-full": "Ask the site to free some space, or to make its worker's folder writable: the worker goes on by "
    "itself. The run goes on without it while other sites reach cohort.quorum.",
    "state-rolled-back": "Ask the site: its worker's files are an older copy, and a person there decides how to "
    "go on. The run goes on without it while other sites reach cohort.quorum.",
    "no-secure-sums": "Ask the site to set [secure_sums], or leave it out (cohort.sites).",
    "no-helper": "Ask the site to set secure_sums.helper, or name another site in secure_sums.helpers.",
    "invalid-terms": "The coordinator and the worker differ in version: install the same at both.",
    "invalid-task": "The coordinator and the worker differ in version: install the same at both.",
    "withheld-by-site": "A person there kept this update: ask the site's people, or leave it out (cohort.sites).",
    "executor-ended": "If it recurs, ask the site: its worker's log says why a process ended, such as for lack of "
    "memory.",
    "slurm-refused": "Ask the site to correct [executor.slurm] in its worker's settings, or to wait for its quota of "
    "jobs: the text has Slurm's reason.",
    "slurm-cancelled": "Ask the site why its cluster's operator cancelled the job. The run goes on without it while "
    "other sites reach cohort.quorum.",
    "slurm-timeout": "Ask the site to raise executor.slurm.time, or to lower checkpoint_minutes: a job that has "
    "written a checkpoint is followed by another one.",
    "slurm-preempted": "Nothing: a later round asks the site again. If it recurs, ask the site for a partition "
    "without preemption.",
    "slurm-node-failed": "Nothing: a later round asks the site again. If it recurs, ask the site about the node.",
    "slurm-lost": "Ask the site: its Slurm does not know the job any more. The worker's log has the job's id.",
    "slurm-failed": "Ask the site: its worker's log has the last lines of the job's output.",
    "slurm-no-gpu": "Ask the site: the job's node has fewer working GPUs than executor.slurm.gpus. The site may "
    "exclude the node by a line of executor.slurm.lines.",
    "slurm-away": "Ask the site whether its Slurm runs: `scontrol ping`. The run goes on without it while other "
    "sites reach cohort.quorum.",
    "region-refuses": "Ask the people of the region: its own coordinator refuses the run. Or begin a run without the "
    "region (cohort.sites).",
    "region-stopped": "Ask the people of the region: they have stopped its part of the run. The run goes on without "
    "it while other sites reach cohort.quorum.",
    "region-too-small": "Ask the people of the region: fewer of its sites took part than its region.min_sites. The "
    "run goes on without it while other sites reach cohort.quorum.",
    "out-of-memory": "Begin a run with a smaller training.batch_size or model, or leave the worker's site out.",
    "no-base": "Ask the site to add the base, the snapshot that the model was made of: "
    "`tessera worker cache add FOLDER`.",
    "script-failed": "Ask the site: its worker's log has the last lines of its script's output. The run goes on "
    "without it while other sites reach cohort.quorum.",
    "script-timeout": "Ask the site to raise executor.timeout_seconds, or begin a run with fewer training.steps or "
    "epochs.",
    "script-result": "Ask the site: its script has to submit the model of `task.model()`, with all blocks of the "
    "plan in their own shapes and dtypes. Its worker's log has more.",
    "script-not-finite": "Ask the site to lower its script's learning rate, or to check its data for infinite or "
    "missing values.",
    "too-little-memory": "Begin a run with a smaller model or fewer trained blocks, such as adapters, or leave the "
    "worker's site out (cohort.sites).",
    "diverged": "Begin a run with a lower training.learning_rate.",
    "no-figures": "Ask the site to read its own log. Where it rounds figures, and in an attack, it sends no cause "
    "that may depend on an example.",
    "not-trained": "Leave the site out (cohort.sites): it has nothing that the attack could recognise.",
    "no-finite-loss": "Ask the site to check its data for infinite or missing values and labels; if several sites "
    "report this, begin a run from an earlier version, with a lower training.learning_rate.",
    "over-budget": "Begin a run with a larger upload_budget or upload_seconds, or with a method that sends less.",
    "too-large": "Its site can raise cache_bytes if the detail says so; else begin a run with a smaller model.",
    "unknown-architecture": "Begin a run with a model type of `tessera docs blockmap`, or have sites describe this "
    "one (mappings).",
    "model-refused": "Begin a run with a model that transformers builds by itself, without code of its own.",
    "model-mismatch": _MISFIT,
    "data-unreadable": "Ask the site: its worker's log names the file.",
    "loader-failed": "Ask the site to give the worker more memory or shared memory, or to lower its `loaders`.",
    "input-mismatch": "Begin a run with a model that takes these inputs, or ask the site to change the data "
    "set's options (size, channels, labels, tokenizer, max_length).",
    "invalid-model": _MISFIT,
    "invalid-version": _MISFIT,
    "tokenizer-mismatch": "Begin a run with the tokenizer that the model was trained with, or ask the site to name "
    "its own (tokenizer).",
    "no-tokenizer": "Begin a run with a model that has its tokenizer (`tessera model init` keeps it), "
    "or ask the site to name its own (tokenizer).",
    "no-chat-template": "Add chat_template.jinja to the folder that `tessera model init` reads, make the model "
    "folder again, and begin a new run; or ask the site for prompts and completions as texts.",
    "invalid-tokenizer": _MISFIT,
    "packed-texts": "Have the site set pack = false for the data set, or leave it out (cohort.sites).",
    "invalid-plan": _PLAN,
    "invalid-result": _PLAN,
    "invalid-method": _PLAN,
    "unsuited": _PLAN,
    "unknown-method": "Have the site install the method (TESSERA_METHODS), or leave it out (cohort.sites).",
    "unknown-codec": "Begin a run with another codec, or have the site install a version that has this one.",
    "unknown-dataset": "Begin a run with a data set that the site has: `tessera run preview` lists them.",
    "nothing-held-out": "Have the site hold out some of the data set, or begin a run that does not measure at sites.",
    "privacy-not-installed": f"Have the site run {install_line('privacy', elsewhere=True)}, or leave it out "
    "(cohort.sites).",
    "augmentation-not-installed": f"Have the site run {install_line('augmentation', elsewhere=True)}, or "
    "leave it out (cohort.sites).",
}
"""Remedies for failures of workers, by the worker's error code."""


class Withheld(ServerFault):
    """A task that a worker returned because its site has not approved the run; stored with the task, never sent."""

    code = "withheld"
    title = "The site has not approved the run"
    meaning = "The worker returned the task, because its site decides about each run itself."
    causes = (
        "a request that waits for a person at the site",
        "a request that the site declined",
        "an approval that has ended",
    )
    remedy = "A person at the site decides: `tessera worker inbox` there shows the request."
    retryable = False


class Unavailable(Problem):
    status = 503
    code = "unavailable"
    title = "The coordinator cannot serve this now"
    meaning = "The coordinator cannot serve this request at the moment, and may soon."
    causes: ClassVar[tuple[str, ...]] = (
        "a coordinator that is stopping, starting or not reachable",
        "a database that does not answer",
    )
    remedy = "Wait as long as Retry-After says and try again."
    retryable = True


class Busy(Unavailable):
    code = "busy"
    title = "The coordinator is too busy for this request"
    meaning = "The coordinator serves as many connections, streams or bodies as its limits allow."
    causes = ("many workers or dashboards at the same moment", "limits that are too low for the federation")


class StoreFull(Unavailable):
    code = "store-full"
    title = "The coordinator's disk has no room for this"
    meaning = "The coordinator refuses new bytes, because its disk would become too full."
    causes = ("versions and updates of many runs", "other files on the same disk")
    remedy = "Wait as long as Retry-After says and try again; an administrator must make room."


class StoreAway(Unavailable):
    code = "store-away"
    title = "The coordinator's blob store does not answer"
    meaning = "The object store that holds the coordinator's blobs does not answer."
    causes = ("an outage of the store or of the network to it", "credentials of the store that have expired")
    remedy = "Wait as long as Retry-After says and try again; an administrator should look at the store."


def pointer_to(*steps: object) -> str:
    """Return a JSON pointer (RFC 6901), bounded."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)[:300]


def faults_of(refusal: ValidationError, above: str = "", model: object = None) -> list[Fault]:
    """Return pydantic's errors without the input: a hostile request must not get a response larger than itself.

    `model` is the model that was validated, for its keys' names.
    """
    return faults_in(refusal.errors(include_url=False), above, model)


def faults_in(errors: Sequence[Mapping[str, Any]], above: str = "", model: object = None) -> list[Fault]:
    """Return pydantic's errors, joined into one for a value that matches no member of a union."""
    located = messages_of(errors[:MAX_FAULTS], model)
    return [Fault(pointer=above + pointer_to(*steps), detail=message[:MAX_DETAIL]) for steps, message in located]


def _tree(kind: type[Problem]) -> Iterator[type[Problem]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


PROBLEMS: dict[str, type[Problem]] = {kind.code: kind for kind in list(_tree(Problem))[1:]}
"""All kinds of problem by code."""


def problem_from(
    document: ProblemDocument | dict[str, Any],
    retry_after_seconds: float | None = None,
    headers: dict[str, str] | None = None,
) -> Problem:
    """Return the problem that a document describes; for an unknown code, the kind follows from the status."""
    read = ProblemDocument.model_validate(document)
    kind = PROBLEMS.get(read.code) or kind_of_status(read.status)
    problem = kind(
        read.detail,
        errors=read.errors,
        remedy=read.remedy,
        retry_after_seconds=retry_after_seconds,
        headers=headers,
    )
    problem.from_document = True
    return problem


def kind_of_status(status: int) -> type[Problem]:
    """Return the most general problem of a status."""
    if status in (502, 504):
        return Unavailable
    return next((kind for kind in PROBLEMS.values() if kind.status == status), ServerFault)


def validated(model: type[M], given: object, detail: str) -> M:
    """Return a given value as a `model`. Raise Invalid with `detail` and the place of each error."""
    try:
        return model.model_validate(given)
    except ValidationError as refusal:
        raise Invalid(detail, errors=faults_of(refusal, model=model)) from None

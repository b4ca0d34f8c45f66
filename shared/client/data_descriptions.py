"""Runs that ask the sites for descriptions of a data set, or for their totals in a secure sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tessera.shared.api.runs import Preview, Run, RunPatch, RunSpec
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.client.previews import ended
from tessera.shared.metrics.data_comparison import UNANSWERED, DataAnswers, SummedCounts
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName
from tessera.shared.model.spec import Model
from tessera.shared.problems import Invalid, faults_of
from tessera.shared.rounds.count_table import BLOCK, CountTable
from tessera.shared.schema import DEFAULT_STUDY

UNTIL_APPROVED = {"awaiting-approval"}
"""The rule of a site that answers once a person there has approved the run."""


class _NoModel:
    """The model of a run that has none: one number that no site fetches."""

    model = Model(
        config={"model_type": "none"},
        head="image-classification",
        blocks=(Block(tensor="none", role="other", shape=(1,), dtype="F32"),),
    )

    def blocks(self) -> Iterator[tuple[Block, memoryview]]:
        yield self.model.blocks[0], memoryview(bytes(4))

    def files(self) -> dict[FileName, bytes]:
        return {}


def compare_data(
    client: Client,
    dataset: str,
    study: str = DEFAULT_STUDY,
    wait_seconds: float = 600.0,
    helpers: Sequence[str] = (),
    quorum: int = 5,
    *,
    repeat: bool = False,
) -> tuple[Run, DataAnswers]:
    """Ask each site of a study with the data set for its description, and wait for the answers at most this long.

    With `helpers`, the sites that open secure sums, only totals over at least `quorum` sites are learned; `repeat`
    asks for a second sum of the data set. Return the answers with the run that asked. Raises Invalid if no site has
    the data set, or fewer than the quorum.
    """
    uploaded = upload_model(client, CountTable(dataset) if helpers else _NoModel())
    about = {"name": f"describe-{dataset}"[:64], "dataset": dataset, "study": study, "rounds": 0, "describe": True}
    cohort: dict[str, Any] = {"deadline_seconds": wait_seconds}
    if helpers:
        sums = {"helpers": list(helpers), "quorum": quorum, "repeat_model": repeat}
        about |= {"rounds": 1, "secure_sums": sums, "method": {"name": "fedavg"}}
        cohort["quorum"] = quorum
    given = {**about, "model": uploaded.model, "version": uploaded.version, "cohort": cohort}
    able, others = _sites(client.preview_run(_spec(given)))
    if not able:
        said = "; ".join(f"{site}: {reason}" for site, reason in others.items()) or "no worker has ever connected"
        remedy = "Correct the name of the data set, or repair the sites."
        raise Invalid(f"no site can describe a data set {dataset!r} ({said})", remedy=remedy)
    if helpers and len(able) < quorum:
        remedy = "Lower the quorum, to 3 at the least, or repair the other sites."
        raise Invalid(f"{len(able)} sites can count {dataset!r} together, and a sum takes {quorum}", remedy=remedy)
    # Named, it ends as soon as they have answered.
    given["cohort"] = {**cohort, "sites": sorted({*able, *helpers})}
    # The deadline of a round begins with the round, which waits for approvals.
    run, reports = ended(client, client.create_run(_spec(given)), wait_seconds if helpers else math.inf)
    if not helpers:
        return run, DataAnswers.of(run, reports, others)
    if run.state == "running":
        run = client.patch_run(run.id, RunPatch(state="cancelled"))
    return run, _totals(client, run, others)


def _spec(given: Mapping[str, Any]) -> RunSpec:
    try:
        return RunSpec.model_validate(given)
    except ValidationError as fault:
        faults = faults_of(fault, model=RunSpec)
        raise Invalid("the sites cannot be asked like this", errors=faults, remedy="Fix what is named.") from None


def _totals(client: Client, run: Run, others: Mapping[str, str]) -> DataAnswers:
    """Return the totals of the sites whose counts are in the sum, and the reasons of the others."""
    tasks = [task for round_ in client.rounds(run.id) for task in round_.tasks if task.kind == "train"]
    counted = {_site(task.worker) for task in tasks if task.state == "merged"}
    failed = {_site(task.worker): task.problem.detail for task in tasks if task.problem}
    waited = dict.fromkeys(run.spec.cohort.sites or (), run.reason or UNANSWERED)
    silent = {site: reason for site, reason in {**others, **waited, **failed}.items() if site not in counted}
    if not counted:
        return DataAnswers({}, silent)
    manifest = Manifest.read(client.read_blob(run.version.digest), client.read_blob)
    raw = client.read_blob(manifest.blocks[BLOCK.name], BLOCK.nbytes)
    return DataAnswers({}, silent, SummedCounts(len(counted), CountTable(run.spec.dataset).totals(raw, len(counted))))


def _site(worker: str) -> str:
    return worker.partition("/")[0]


def _sites(found: Preview) -> tuple[list[str], dict[str, str]]:
    """Return the sites that may answer, and the reason of each other one."""
    reasons: dict[str, str] = {}
    able = set()
    for worker in found.workers:
        site = _site(worker.worker)
        if {one.rule for one in worker.ineligibilities} <= UNTIL_APPROVED:
            able.add(site)
        else:
            reasons.setdefault(site, worker.ineligibilities[0].detail)
    return sorted(able), {site: reason for site, reason in sorted(reasons.items()) if site not in able}

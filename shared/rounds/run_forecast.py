"""The forecast of a whole run from the reports on its rehearsal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Self

from tessera.shared import units
from tessera.shared.api.rehearsals import Rehearsal
from tessera.shared.api.runs import RunSpec, SiteReport


@dataclass(frozen=True)
class WorkerForecast:
    """One worker's part in a run."""

    worker: str
    device: str
    report: Rehearsal = field(default_factory=Rehearsal)
    fault: str = ""
    """The reason that it did not train; empty if it did."""
    remedy: str = ""
    round_seconds: float = 0.0
    """The time of a round, with its transfers as far as the line's speed is known."""
    first_seconds: float = 0.0
    """The time that the first round takes beside."""

    @classmethod
    def of(cls, one: SiteReport) -> Self:
        """Return the forecast of a worker's task."""
        if problem := one.problem:
            return cls(one.worker, one.device, fault=problem.detail, remedy=problem.remedy)
        if (found := one.rehearsal) is None:
            fault = f"it has not answered (its task is {one.state})"
            return cls(one.worker, one.device, fault=fault, remedy="Ask its site whether the worker runs.")
        down = found.download_bytes_per_second or float("inf")
        moved = found.sent_bytes / down + found.update_bytes / (found.upload_bytes_per_second or down)
        of_round = found.load_seconds + found.train_seconds + moved
        once = found.check_seconds + found.tokenize_seconds + found.version_bytes / down
        return cls(one.worker, one.device, found, round_seconds=of_round, first_seconds=once)

    @property
    def site(self) -> str:
        return self.worker.partition("/")[0]

    @property
    def cells(self) -> tuple[str | None, ...]:
        """The row of the table with `RunForecast.columns`."""
        found, speed = self.report, self.report.download_bytes_per_second
        if self.fault:
            return (self.worker, self.device, "failed", *[None] * (len(RunForecast.columns) - 3))
        return (
            self.worker,
            self.device,
            "synthetic" if found.synthetic else "real",
            str(found.steps),
            units.duration(self.round_seconds),
            units.size(found.host_bytes),
            units.size(found.device_bytes),
            f"{units.size(int(speed))}/s" if speed else None,
            units.size(found.update_bytes),
            None if found.epsilon is None else f"{found.epsilon:.3g}",
        )


@dataclass(frozen=True)
class RunForecast:
    """A whole run, as its rehearsal promises it."""

    columns: ClassVar = (
        "worker", "device", "rows", "steps", "time a round", "memory", "GPU memory", "line", "update", "epsilon",
    )  # fmt: skip
    """Of the table with the `cells` of each worker."""

    spec: RunSpec
    """The run that was rehearsed."""
    workers: tuple[WorkerForecast, ...]
    slowest: str | None
    """The worker that decides how long a round takes; None if fewer sites than the quorum trained."""
    seconds: float | None
    download_bytes: int
    """Of all sites together, without those that failed; at most, since versions are sent as differences."""
    upload_bytes: int
    epsilon: float | None
    """The largest of any site; None without differential privacy of examples."""

    @classmethod
    def of(cls, rehearsal: RunSpec, reports: Sequence[SiteReport]) -> Self:
        """Return the forecast of the run that `rehearsal` rehearses.

        A round lasts until each site that it asked has answered, or as many as close it early. Of a site's workers
        the slowest counts.
        """
        spec, workers = rehearsal.trained, tuple(map(WorkerForecast.of, reports))
        trained = sorted((one for one in workers if not one.fault), key=lambda one: one.round_seconds)
        # The last of a site is its slowest worker.
        sites = sorted({one.site: one for one in trained}.values(), key=lambda one: one.round_seconds)
        cohort, slowest, seconds = spec.cohort, None, None
        if len(sites) >= cohort.quorum:
            last = sites[min(max(cohort.enough or len(sites), cohort.quorum), len(sites)) - 1]
            slowest = last.worker
            seconds = spec.rounds * min(last.round_seconds, cohort.deadline_seconds) + last.first_seconds
        share = min(1.0, cohort.asked / len(sites)) if cohort.asked and sites else 1.0
        updates = min(share * spec.rounds, cohort.max_updates_per_site or inf)
        down = sum(one.report.version_bytes + (updates - share) * one.report.sent_bytes for one in sites)
        up = sum(updates * one.report.update_bytes for one in sites)
        spent = [one.report.epsilon for one in sites if one.report.epsilon is not None]
        return cls(spec, workers, slowest, seconds, round(down), round(up), max(spent, default=None))

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the forecast in words."""
        time = f"unknown: fewer sites than the quorum of {self.spec.cohort.quorum} trained"
        if self.seconds is not None:
            time = f"{units.duration(self.seconds)} for {self.spec.rounds} rounds; {self.slowest} decides"
        yield "time", time
        yield (
            "bytes",
            f"{units.size(self.upload_bytes)} up, at most {units.size(self.download_bytes)} down, all sites",
        )
        if self.epsilon is not None and self.spec.privacy:
            yield (
                "epsilon",
                f"{self.epsilon:.3g} at delta {self.spec.privacy.delta:g} for each {self.spec.privacy.unit}",
            )
        if self.spec.client_privacy:
            yield "privacy of a site", self.spec.client_privacy.bound

    @property
    def faults(self) -> Iterator[str]:
        """Yield the faults that the run would have, each with its remedy."""
        most = self.spec.cohort.deadline_seconds
        for one in self.workers:
            if one.fault:
                yield f"{one.worker}: {one.fault.rstrip('.')}. {one.remedy}"
            elif (lasts := one.round_seconds + one.first_seconds) > most:
                yield (
                    f"{one.worker}: its first round takes {units.duration(lasts)}, and rounds end after "
                    f"{units.duration(most)}. Set cohort.deadline_seconds to {round(2 * lasts)} or more."
                )
            elif not one.report.download_bytes_per_second:
                yield f"{one.worker}: the version was there already, so that its time has no transfers"

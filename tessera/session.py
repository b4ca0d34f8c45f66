"""A session with a coordinator: start runs, watch them, read their scores, compare and export them."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tessera.shared.api.runs import Preview, RunSpec
from tessera.shared.api.runs import Run as RunRecord
from tessera.shared.client.client import WATCHING_PATIENCE_SECONDS, Client
from tessera.shared.client.data_descriptions import compare_data
from tessera.shared.client.lookup import find_run
from tessera.shared.client.previews import preview_notes, previewed
from tessera.shared.client.round_outcomes import follow, outcomes
from tessera.shared.client.run_comparison import compare_runs
from tessera.shared.client.run_file import check_spec, read_spec
from tessera.shared.client.run_versions import Wanted, described, export_version, new_run
from tessera.shared.metrics.classification import group_figures
from tessera.shared.metrics.comparison import BestVersion, ComparedRun, History, best_version, compare
from tessera.shared.metrics.comparison import RunComparison as ComparisonRecord
from tessera.shared.metrics.convergence import Convergence
from tessera.shared.metrics.data_comparison import DataAnswers
from tessera.shared.metrics.extras import extra
from tessera.shared.metrics.rows import rows_of
from tessera.shared.metrics.site_spread import headlines
from tessera.shared.problems import Invalid, Problem
from tessera.shared.schema import DEFAULT_STUDY
from tessera.shared.terminal.watch import watch_as_text

if TYPE_CHECKING:
    import pandas as pd

Settings = str | Path | Mapping[str, Any]
"""A run's settings: the path of its TOML file, or the same as a mapping."""


def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    token_file: str | Path | None = None,
    ca_bundle: str | Path | None = None,
    client_cert: str | Path | None = None,
    client_key: str | Path | None = None,
) -> Session:
    """Return a session with the coordinator at `url`.

    Options that are left out come from the environment, as those of the commands do: TESSERA_URL, TESSERA_TOKEN or
    TESSERA_TOKEN_FILE, TESSERA_CA_BUNDLE, TESSERA_CLIENT_CERT and TESSERA_CLIENT_KEY.

    Raises Problem if a file cannot be read, the coordinator cannot be reached, or it does not accept the token.
    """
    given = {
        "url": url,
        "token": token,
        "token_file": token_file,
        "ca_bundle": ca_bundle,
        "client_cert": client_cert,
        "client_key": client_key,
    }
    client = Client.from_environment(given, patience_seconds=WATCHING_PATIENCE_SECONDS, awaits_start=False)
    try:
        next(client.runs(), None)
    except Problem:
        client.close()
        raise
    return Session(client)


class Session:
    """A connection to a coordinator with one token, as `connect` returns it.

    It can be used as a context manager, which closes the connection at its end. `client` has the whole API.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()

    def preview(
        self,
        settings: Settings | None = None,
        model: str | Path | None = None,
        *,
        start_from: str | None = None,
    ) -> Preview:
        """Return the workers that would take part in a run, and the reasons of the others.

        Takes the arguments of `start`; uploads the model, and starts nothing.
        """
        return self.client.preview_run(self._spec(settings, model, start_from))

    def start(
        self,
        settings: Settings | None = None,
        model: str | Path | None = None,
        *,
        start_from: str | None = None,
    ) -> Run:
        """Start a run from a model folder, or from a version of another run: `start_from="first@best"`.

        `settings` are a run file or its content as a mapping; by default the settings of the other run. Raises
        Problem that lists every invalid setting. Warns if too few workers would take part.
        """
        spec = self._spec(settings, model, start_from)
        if found := previewed(self.client, spec):
            for sentence in preview_notes(found):
                warnings.warn(sentence.removeprefix("warning: "), stacklevel=2)
        return Run(self.client, self.client.create_run(spec, key=uuid.uuid4().hex))

    def _spec(self, settings: Settings | None, model: str | Path | None, start_from: str | None) -> RunSpec:
        given = None if settings is None else _read(settings)
        folder = None if model is None else Path(model)
        return new_run(self.client, given, folder, start_from)[0]

    def run(self, named: str) -> Run:
        """Return the run with this id, this beginning of an id, or this name. Raises Problem if there is not exactly
        one."""
        return Run(self.client, find_run(self.client, named))

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return [Run(self.client, record) for record in self.client.runs()]

    def compare(self, *runs: Run | str, metric: str | None = None, reach: Sequence[float] = ()) -> Comparison:
        """Compare two runs or more by `metric`, or by the main score of the first that has been evaluated.

        `reach` are scores: the comparison gives the rounds, time and bytes that each run took to reach them. By
        default they are shares of the best score.

        Runs are given by id or name too. Raises Problem for an unknown run or metric.
        """
        records = [run.record if isinstance(run, Run) else find_run(self.client, run) for run in runs]
        return Comparison(compare_runs(self.client, records, metric, reach))

    def compare_data(
        self,
        dataset: str,
        study: str = DEFAULT_STUDY,
        wait_seconds: float = 600.0,
        helpers: Sequence[str] = (),
        quorum: int = 5,
    ) -> DataAnswers:
        """Ask each site of a study to describe a data set. Return the tables of their counts, and the `faults` that
        training on them would have; with `helpers`, which open secure sums, only totals over at least `quorum` sites.
        Raises Problem if no site has it."""
        return compare_data(self.client, dataset, study, wait_seconds, helpers, quorum)[1]


class Run:
    """A run at a coordinator. `record` is its state as of the last request; `refresh` updates it."""

    def __init__(self, client: Client, record: RunRecord) -> None:
        self._client = client
        self.record = record

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.spec.name

    @property
    def state(self) -> str:
        """`running`, `paused`, `completed` or `cancelled`."""
        return self.record.state

    @property
    def settings(self) -> dict[str, Any]:
        """The content of its run file, with all defaults: what `start` takes."""
        return self.record.spec.settings

    def __repr__(self) -> str:
        made = f"version {self.record.version.number} of {self.record.spec.rounds}"
        return f"<Run {self.name} ({self.id[:8]}): {self.state}, {made}>"

    def refresh(self) -> Self:
        """Read the run's state again."""
        self.record = self._client.run(self.id)
        return self

    def watch(self) -> Self:
        """Wait until the run ends or pauses. Print each round as it ends, with a progress bar below."""
        self.record = watch_as_text(follow(self._client, self.id))
        return self

    def table(self) -> pd.DataFrame:
        """Return a pandas table with a row for each attempt at a round: its scores, bytes and seconds.

        Raises Problem if pandas is not installed.
        """
        frames = extra("data_frames")
        measurements = list(self._client.measurements(self.id))
        rows = [
            {
                "round": one.round.number,
                "attempt": one.round.attempt,
                "stage": one.round.stage,
                "state": one.round.state,
                "accepted": one.accepted,
                **one.scores,
                **{f"{name}_sites": one.spreads[name].sites for name in headlines(one.spreads)},
                "download_bytes": one.download_bytes,
                "upload_bytes": one.upload_bytes,
                "seconds": one.seconds(),
            }
            for one in outcomes(self._client.rounds(self.id), self.record.spec, measurements)
        ]
        return frames.rounds_table(rows)

    def metrics(self) -> pd.DataFrame:
        """Return a pandas table with every metric of every site, worker and version, one value a row."""
        frames = extra("data_frames")
        record = self.refresh().record
        measurements = list(self._client.measurements(self.id, counts=True))
        return frames.metrics_table(
            rows_of(record, self._client.rounds(self.id), self._client.versions(self.id), measurements)
        )

    def figures(self, version: int | None = None) -> pd.DataFrame:
        """Return a pandas table with the figures of a classifier and their 95 % intervals: of a version, by default
        the latest with counts; of all sites and each, all examples and each subgroup, and each class."""
        frames = extra("data_frames")
        evaluation, counted = self.record.spec.evaluation, self._client.measurements(self.id, counts=True)
        wanted = [one for one in counted if one.subgroup_counts and version in (None, one.version)]
        latest = [one for one in wanted if one.version == wanted[-1].version]
        return frames.figures_table(group_figures(latest, evaluation.specificity if evaluation else ()))

    def best(self) -> BestVersion | None:
        """Return the version with the best main score; None if no version has been evaluated."""
        return best_version(self._client.measurements(self.id))

    def convergence(self, *scores: float, metric: str | None = None) -> Convergence | None:
        """Return the rounds, time and bytes until each score, and the jitter of the last versions; None if none was
        evaluated. The scores are 90 % and 95 % of the best by default."""
        record = self.refresh().record
        measurements = self._client.measurements(self.id)
        return History.of(record, self._client.rounds(self.id), measurements).convergence(scores, metric)

    def compare(self, *others: Run | str, metric: str | None = None, reach: Sequence[float] = ()) -> Comparison:
        """Compare this run with others, as `Session.compare` does."""
        return Session(self._client).compare(self, *others, metric=metric, reach=reach)

    def plot(self, metric: str | None = None) -> Plot:
        """Return a chart of the main score, or of `metric`, by version; `Comparison.plot` has several runs."""
        record = self.refresh().record
        history = History.of(record, self._client.rounds(self.id), self._client.measurements(self.id))
        return Comparison(compare([history], metric)).plot()

    def export(
        self,
        out: str | Path,
        version: Wanted = "latest",
        *,
        like: str | Path | None = None,
        base: str | Path | None = None,
    ) -> Path:
        """Write a version to a new folder that transformers' `from_pretrained` loads, or to one `.safetensors` file.

        `version` is a number, "latest" or "best". Other files of the folder `like`, such as a tokenizer, are copied;
        `base` is the folder with the weights of an external base.
        Raises Problem for an unknown version, for "best" if none was evaluated, and for a folder that exists.
        """
        folder, weights = (Path(given) if given else None for given in (like, base))
        export_version(self._client, self.refresh().record, Path(out), version, like=folder, base=weights)
        return Path(out)


class Comparison:
    """Several runs side by side."""

    def __init__(self, record: ComparisonRecord) -> None:
        self.record = record

    @property
    def metric(self) -> str | None:
        """The score that is compared; None if no run has been evaluated."""
        return self.record.metric

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        return self.record.runs

    def table(self) -> pd.DataFrame:
        """Return a pandas table with each run's score by version, and its bytes and seconds up to that version."""
        return extra("data_frames").comparison_table(self.record)

    def settings(self) -> pd.DataFrame:
        """Return a pandas table of the settings that differ, with a column for each run."""
        return extra("data_frames").settings_table(self.record)

    def plot(self) -> Plot:
        """Return a chart of each run's score by version, with the best one marked.

        Raises Problem if markupsafe is not installed, and if no version has been evaluated.
        """
        charts, title = extra("svg_charts"), self.record.title or ""
        best = [one.best.number if one.best and one.best.metric == one.metric else None for one in self.runs]
        series = [
            charts.Series(one.name, one.scores, main=True, best=at) for one, at in zip(self.runs, best, strict=True)
        ]
        picture = charts.lines("scores", title, series, along="version")
        if not picture:
            raise Invalid(
                f"no version of {', '.join(one.name for one in self.runs)} has been evaluated",
                remedy="Wait for an evaluation, or start runs with `evaluation`.",
            )
        return Plot(charts.svg_file(charts.Panel("scores", title, picture, (), (), series)))

    def __repr__(self) -> str:
        best = [f"{run.name}: best {described(run.best) if run.best else 'not measured'}" for run in self.runs]
        said = [f"warning: {warning}" for warning in self.record.warnings]
        return f"<Comparison by {self.metric}: {'; '.join([*best, *said])}>"


class Plot:
    """A chart as SVG; a notebook shows it."""

    def __init__(self, svg: str) -> None:
        self._svg = str(svg)

    def _repr_svg_(self) -> str:
        return self._svg

    def save(self, file: str | Path) -> Path:
        """Write the chart to a file, or over it."""
        Path(file).write_text(self._svg, encoding="utf-8")
        return Path(file)


def _read(settings: Settings) -> dict[str, Any]:
    if isinstance(settings, Mapping):
        check_spec("this mapping", settings)
        return dict(settings)
    return read_spec(Path(settings))

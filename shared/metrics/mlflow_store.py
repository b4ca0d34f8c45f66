"""Rows as the metrics of a run in an MLflow tracking store.

A run of Tessera is one MLflow run, found again by its tag: exporting a run that went on adds what is new.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence

# Disable MLflow's usage telemetry.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from tessera.shared.api.runs import Run
from tessera.shared.metrics.rows import MetricRow
from tessera.shared.problems import Invalid

TAG, COVERAGE_TAG = "tessera.run", "tessera.coverage"
STATUS = {"completed": "FINISHED", "cancelled": "KILLED"}

# Limits of one request to a tracking server.
BATCH = 1000
MAX_NAME_LENGTH = 250
MAX_PARAM_LENGTH = 500

MAX_MESSAGE_LENGTH = 300

_FORBIDDEN = re.compile(r"[^\w.\- /]")
_OF_PATHS = re.compile(r"^\.+|/")
"""Parts of a worker's name for a metric that would make a path of it: MLflow refuses `loss/` and `..` within one."""


def write(rows: Sequence[MetricRow], run: Run, uri: str, experiment: str) -> str:
    """Return the id of the MLflow run. A metric's step is its version; what made none is left out.

    Raises Invalid for a store that MLflow cannot use.
    """
    try:
        return _write(rows, run, uri, experiment)
    except (MlflowException, SQLAlchemyError) as fault:
        told = " ".join(str(fault).split())[:MAX_MESSAGE_LENGTH]
        remedy = "Name one such as sqlite:///mlflow.db, or a tracking server's URL, and see that it is there."
        raise Invalid(f"MLflow cannot use this store: {told}", remedy=remedy) from fault


def _write(rows: Sequence[MetricRow], run: Run, uri: str, experiment: str) -> str:
    client = MlflowClient(tracking_uri=uri)
    made = _run(client, run, experiment)
    made_id: str = made.info.run_id
    known = {name: _history(client, made, name) for name in made.data.metrics}
    now = int(time.time() * 1000)
    found = [Metric(_name(row), row.value, now, row.version) for row in rows if row.version is not None]
    # A figure over sites may have been exported before the last of them had measured.
    news = [metric for metric in found if known.get(metric.key, {}).get(metric.step) != metric.value]
    for start in range(0, len(news), BATCH):
        client.log_batch(made_id, metrics=news[start : start + BATCH])
    # FINISHED is shown as a success.
    status = "FAILED" if run.state == "completed" and run.has_low_coverage else STATUS.get(run.state, "RUNNING")
    client.update_run(made_id, status=status)
    if run.coverage:
        client.set_tag(made_id, COVERAGE_TAG, ("low: " if run.coverage.low else "") + run.coverage.words)
    return made_id


def _run(client: MlflowClient, run: Run, experiment: str) -> MlflowRun:
    found = client.get_experiment_by_name(experiment)
    experiment_id = found.experiment_id if found else client.create_experiment(experiment)
    if before := client.search_runs([experiment_id], f"tags.`{TAG}` = '{run.id}'"):
        return before[0]
    made = client.create_run(experiment_id, run_name=run.spec.name, tags={TAG: run.id})
    client.log_batch(
        made.info.run_id,
        params=[Param(name, value[:MAX_PARAM_LENGTH]) for name, value in _facts(run)],
        tags=_tags(run),
    )
    return made


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the run's settings by their paths."""
    for name, value in run.spec.model_dump(mode="json", exclude={"name"}, exclude_none=True).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", str(inner)) for key, inner in value.items())
        else:
            yield name, str(value)


def _tags(run: Run) -> list[RunTag]:
    return [RunTag("tessera.method", run.spec.method.name), RunTag("tessera.model", run.spec.model)]


def _history(client: MlflowClient, made: MlflowRun, name: str) -> dict[int, float]:
    """Return the last value of each step."""
    history = sorted(client.get_metric_history(made.info.run_id, name), key=lambda metric: metric.timestamp)
    return {metric.step: metric.value for metric in history}


def _name(row: MetricRow) -> str:
    """`accuracy` of the central data set is `central/accuracy`, that of a site `sites/accuracy/north/w1`."""
    kind = row.stage if row.round is None else "round" if row.worker is None else "train"
    whose = [row.site or "", row.worker or ""] if kind in ("sites", "train") else []
    whose += [row.site] if kind == "figures" and row.site else []
    return _FORBIDDEN.sub("_", "/".join([kind, _OF_PATHS.sub("_", row.metric), *whose]))[:MAX_NAME_LENGTH]

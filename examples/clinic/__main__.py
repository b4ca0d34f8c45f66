"""Fine-tuning by three hospitals on entities in notes and on questions about notes, with privacy for each patient,
measured at a fourth. The demo makes small models and synthetic notes, or takes models and tables of yours."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from tessera.examples.clinic.sites import (
    HELD_OUT,
    SETTINGS,
    TRAINING,
    entity_classes,
    having,
    read_sites,
    worker_settings,
    write_tables,
)
from tessera.examples.federation import Federation
from tessera.examples.staging import DemoFailed, parser, play
from tessera.shared import units
from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.client.client import Client
from tessera.shared.client.export import export_folder
from tessera.shared.client.previews import ended, forecast_of, rehearsal_of
from tessera.shared.client.round_outcomes import RoundOutcome, follow
from tessera.shared.client.run_file import read_spec
from tessera.shared.client.run_versions import new_run
from tessera.shared.schema import EPSILON
from tessera.shared.terminal import output
from tessera.shared.terminal.rehearsal_table import show_rehearsal
from tessera.shared.terminal.watch import print_ended
from tessera.shared.updates.model_folder import ModelFolder

HERE = Path(__file__).parent
PATIENTS = 600
PRETRAINING_STEPS = {"entities": 100, "questions": 300}
RANKS = "4,8,16"


class Task(NamedTuple):
    head: str
    score: str
    """The figure that the last table shows."""
    max_length: int
    """Tokens of an example of the demo's own."""
    model: str
    """A model of the user's that fits."""


TASKS = {
    "entities": Task("token-classification", "entity_f1", 56, "a model, such as a BERT"),
    "questions": Task("causal-lm", "exact_match", 64, "a causal language model with a chat template"),
}
OWN_MAX_LENGTH = 512
RULE = ("epsilon", "delta", "unit")
"""The settings of a run's privacy that a hospital requires."""


class Result(NamedTuple):
    """A version's mean score in each setting, and the ranks and rounds of its training."""

    scores: Mapping[str, float]
    ranks: Sequence[int]
    outcomes: Sequence[RoundOutcome]

    @property
    def epsilon(self) -> str:
        """Return the largest epsilon that a hospital has spent."""
        tasks = [task for outcome in self.outcomes for task in outcome.round.tasks if EPSILON in task.metrics]
        return f"{max(task.metrics[EPSILON] for task in tasks):.2f}" if tasks else "-"

    @property
    def moved(self) -> str:
        nbytes = sum(outcome.upload_bytes + outcome.download_bytes for outcome in self.outcomes)
        return units.size(nbytes) if nbytes else "-"


class Clinic:
    """The federation, with the model, the classes and the run's settings of each task."""

    def __init__(self, console: Console, federation: Federation, given: argparse.Namespace) -> None:
        self.console = console
        self.federation = federation
        self.own = {task: folder.resolve() for task, folder in given.models.items() if folder}
        self.tasks = list(self.own or TASKS)
        tables = given.tables.resolve() if given.tables else federation.folder / "tables"
        if not given.tables:
            write_tables(tables, given.patients)
        self.sites = read_sites(tables, self.tasks)
        self.bases = {task: self.own.get(task, federation.folder / f"small-{task}") for task in self.tasks}
        self.classes = entity_classes(self.sites) if "entities" in self.tasks else []
        self.lengths = {
            task: given.max_length or (OWN_MAX_LENGTH if task in self.own else TASKS[task].max_length)
            for task in self.tasks
        }
        self.specs = {task: self._spec(task, given) for task in self.tasks}

    def _spec(self, task: str, given: argparse.Namespace) -> dict[str, Any]:
        count = len(having(self.sites, task, TRAINING))
        spec = read_spec(HERE / f"{task}.toml", [f"cohort.size={count}", f"cohort.quorum={count}", *given.settings])
        if given.no_privacy:
            spec.pop("privacy", None)
        return spec

    def start(self, client: Client, pretraining_steps: int | None) -> None:
        """Make the small models, and start each site's worker."""
        small = [task for task in self.tasks if task not in self.own]
        for task in small:
            steps = str(PRETRAINING_STEPS[task] if pretraining_steps is None else pretraining_steps)
            made = [sys.executable, "-m", "tessera.examples.clinic.base", task, str(self.bases[task]), steps]
            self.federation.processes.start(f"small-{task}", made, {})
        with self.console.status("pre-training small models on public texts" if small else ""):
            for task in small:
                self.federation.processes.finish(f"small-{task}")
        privacy = self.specs[self.tasks[0]].get("privacy")
        rule = {name: privacy[name] for name in RULE} if privacy else None
        for site in self.sites:
            token_file = self.federation.admit(client, site.name)
            settings = worker_settings(
                site, self.federation.url, token_file, self.bases, self.classes, self.lengths, rule
            )
            (token_file.parent / "worker.toml").write_text(settings, encoding="utf-8")
            self.federation.restart_worker(site.name)

    def model(self, task: str) -> ModelFolder:
        """Create a task's model with adapters of all ranks. The sites have the weights of a model of the user's."""
        base, head = self.bases[task], TASKS[task].head
        options = ["--config", str(base), "--head", head, "--lora-rank", RANKS]
        if task == "entities":
            options += ["--labels", ",".join(self.classes)]
        if task in self.own:
            options.append("--external-base")
        made = self.federation.make_model(*options, name=f"model-{task}")
        if task in self.own:
            self.federation.add_base([site.name for site in self.sites if task in site.tables], base, head)
        return made

    def compare(self, client: Client, task: str, folder: ModelFolder) -> dict[str, Result]:
        """Rehearse a task, run it at all hospitals and at one alone, and measure the base and both results."""
        trained = having(self.sites, task, TRAINING)
        # The hospital that can train the most is the strongest rival.
        alone = max(trained, key=lambda site: site.rank or 0)
        # Versions are measured afterwards, in all settings side by side.
        spec, _ = new_run(client, {**self.specs[task], "evaluation": None}, folder.path, None)
        self._require_measurable(client, task, spec)
        self._say(f"\n[bold]{task}: rehearsal[/], two steps at each hospital, as `tessera run rehearse` does")
        rehearsal, forecast = forecast_of(client, client.create_run(rehearsal_of(spec), key=uuid.uuid4().hex))
        show_rehearsal(rehearsal, forecast, as_json=False)
        if forecast.slowest is None:
            raise DemoFailed("too few hospitals can train; the reasons are above")
        self._say(f"\n[bold]{task}: {len(trained)} hospitals[/]")
        together, outcomes = self._trained(client, spec)
        self._say(f"\n[bold]{task}: {alone.name} alone[/], with the same settings")
        cohort = spec.cohort.model_copy(update={"size": 1, "quorum": 1, "sites": (alone.name,)})
        single, its_outcomes = self._trained(
            client, spec.model_copy(update={"name": f"{task}-{alone.name}"[:64], "cohort": cohort})
        )
        base = self.bases[task] if task in self.own else None
        export_folder(client, together, self.federation.folder / f"trained-{task}", None, _quiet, folder.path, base)
        starts = {"base": f"{together.id}@0", f"{alone.name} alone": f"{single.id}@latest", "federated": together.id}
        ranks = ((), (alone.rank or 0,), [site.rank or 0 for site in trained])
        with self.console.status("measuring"):
            measured = self._measured(client, task, starts)
        return {
            name: Result(measured[name], some, rounds)
            for name, some, rounds in zip(starts, ranks, ([], its_outcomes, outcomes), strict=True)
        }

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _trained(self, client: Client, spec: RunSpec) -> tuple[Run, list[RoundOutcome]]:
        """Print each round of a run as it ends. Return the run and its rounds."""
        run, outcomes = client.create_run(spec, key=uuid.uuid4().hex), []
        for glimpse in follow(client, run.id, poll_seconds=0.25):
            self.federation.processes.check()
            for outcome in glimpse.ended:
                print_ended(self.console, outcome)
                outcomes.append(outcome)
        if glimpse.run.state != "completed":
            raise DemoFailed(f"the run is {glimpse.run.state}: {glimpse.run.reason}")
        return run, outcomes

    def _measurements(self, task: str) -> dict[str, dict[str, Any]]:
        """Return the settings of a run without rounds for each setting that has sites."""
        found = {}
        for setting in SETTINGS:
            if not (sites := having(self.sites, task, setting)):
                continue
            where = {"sites": True} if setting == TRAINING else {"sites": False, "dataset": sites[0].dataset(task)}
            found[setting] = {
                "name": f"{task}-{setting}",
                "dataset": task,
                "rounds": 0,
                "method": {"name": "fedavg"},
                "evaluation": {**self.specs[task]["evaluation"], **where},
                "cohort": {"quorum": len(sites), "deadline_seconds": 600},
            }
        return found

    def _require_measurable(self, client: Client, task: str, spec: RunSpec) -> None:
        """Raise DemoFailed, before anything trains, if a site could not measure a version."""
        for setting, given in self._measurements(task).items():
            start = {"model": spec.model, "version": spec.version}
            known = client.preview_run(RunSpec.model_validate({**given, **start}))
            names = {site.name for site in having(self.sites, task, setting)}
            lacking = sorted({one.worker.partition("/")[0] for one in known.workers if one.ineligibilities} & names)
            if lacking:
                raise DemoFailed(
                    f"{', '.join(lacking)} cannot measure {task}: a site needs 20 rows or more, and a hospital that "
                    f"trains about {math.ceil(20 / HELD_OUT)}, of which it holds out {HELD_OUT:.0%}. Add rows, or "
                    "remove its table"
                )

    def _measured(self, client: Client, task: str, starts: Mapping[str, str]) -> dict[str, dict[str, float]]:
        """Return the mean score over sites of some versions, by setting. Runs without rounds measure them."""
        runs = {}
        for setting, given in self._measurements(task).items():
            for name, start in starts.items():
                spec, _ = new_run(client, given, None, start)
                runs[name, setting] = client.create_run(spec, key=uuid.uuid4().hex)
        found: dict[str, dict[str, float]] = {name: {} for name in starts}
        for (name, setting), begun in runs.items():
            run, _ = ended(client, begun)
            if run.state != "completed":
                raise DemoFailed(f"{run.spec.name} of the version {name!r} is {run.state}: {run.reason}")
            score, measured = TASKS[task].score, client.measurements(run.id)
            if figures := [one.metrics[score] for one in measured if score in one.metrics]:
                found[name][setting] = sum(figures) / len(figures)
        return found


def _quiet(_: int) -> None:
    """Report no progress."""


def demo(console: Console, federation: Federation, given: argparse.Namespace) -> None:
    clinic = Clinic(console, federation, given)
    trained = {site.name: site.rank for site in clinic.sites if site.rank}
    ranks = ", ".join(f"{name} (rank {rank})" for name, rank in trained.items())
    console.print(
        f"[bold]Tessera[/]: hospitals fine-tune adapters beside a model: {escape(ranks)}. No note leaves its hospital"
        f"{'' if given.no_privacy else ', and differential privacy protects each patient'}.",
        soft_wrap=True,
    )
    federation.start_coordinator()
    with federation.admin() as client:
        clinic.start(client, given.pretraining_steps)
        folders = {task: clinic.model(task) for task in clinic.tasks}
        for _ in federation.await_workers(client, len(clinic.sites)):
            pass
        for task, folder in folders.items():
            _print_results(console, task, clinic.compare(client, task, folder))
    _print_what_next(console, given, next(iter(trained)))


def _print_results(console: Console, task: str, found: Mapping[str, Result]) -> None:
    columns = (f"{task}: {TASKS[task].score}", *SETTINGS, "ranks", "epsilon", "bytes")
    rows = [
        (
            name,
            *(f"{one.scores[setting]:.3f}" if setting in one.scores else "-" for setting in SETTINGS),
            ", ".join(map(str, one.ranks)) or "-",
            one.epsilon,
            one.moved,
        )
        for name, one in found.items()
    ]
    console.print()
    console.print(output.table(columns, rows, right=columns[1:]))


def _print_what_next(console: Console, given: argparse.Namespace, hospital: str) -> None:
    settings = shlex.quote(str(given.out / hospital / "worker.toml"))
    console.print(
        "\nin-domain: patients that the hospitals hold out; external: another source; new-site: a hospital that "
        "trains nothing. epsilon is that of each patient in this run, at the hospital that spent the most.",
        soft_wrap=True,
    )
    console.print(
        f"\nThe settings of a hospital, to copy: {escape(settings)}\n"
        f"Privacy that its runs have spent:     tessera worker ledger --config {escape(settings)}\n"
        "On your own tables and models:       python -m tessera.examples.clinic --tables FOLDER "
        "--entities-model FOLDER --questions-model FOLDER\n"
        f"docs/own-data.md has the columns. Models, tables and logs: {escape(str(given.out))}",
        soft_wrap=True,
    )


def arguments() -> argparse.Namespace:
    made = parser("tessera.examples.clinic", __doc__)
    made.add_argument(
        "--tables",
        type=Path,
        metavar="FOLDER",
        help="train and measure on FOLDER/SETTING/SITE/TASK.jsonl; the settings are in-domain, external and "
        "new-site, the tasks entities and questions",
    )
    for task, about in TASKS.items():
        made.add_argument(
            f"--{task}-model",
            type=Path,
            metavar="FOLDER",
            help=f"fine-tune {about.model}, saved with its tokenizer by save_pretrained. Without the other model, "
            "this task runs alone; a smaller learning rate may suit it, as --set training.learning_rate=0.0005",
        )
    made.add_argument("--max-length", type=int, metavar="TOKENS", help=f"default {OWN_MAX_LENGTH} for your models")
    made.add_argument("--no-privacy", action="store_true", help="leave privacy out of runs and settings, to compare")
    made.add_argument("--patients", type=int, default=PATIENTS, help="synthetic ones; default %(default)s")
    made.add_argument("--pretraining-steps", type=int, metavar="STEPS", help="of the small models")
    given = made.parse_args()
    given.models = {task: getattr(given, f"{task}_model") for task in TASKS}
    for task, folder in given.models.items():
        if folder and folder.resolve().is_relative_to(given.out.resolve()):
            made.error(f"--{task}-model {folder} is in {given.out}, which this demo replaces: give another --out")
    if given.tables and given.tables.resolve().is_relative_to(given.out.resolve()):
        made.error(f"--tables {given.tables} is in {given.out}, which this demo replaces: give another --out")
    return given


if __name__ == "__main__":
    sys.exit(play(demo, arguments()))

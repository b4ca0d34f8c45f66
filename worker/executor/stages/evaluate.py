"""The evaluation stage, with the second gate for evaluation data."""

import math
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Never

import numpy as np
import structlog
import torch
from torch import Tensor

from tessera.shared.api.class_counts import ALL, MAX_CLASSES, OTHER, Counts, LabelCounts, NumberSums
from tessera.shared.methods.base import Output, WorkerHalf
from tessera.shared.metrics.site_spread import PERSONAL
from tessera.shared.model.dataset_schema import token_limit
from tessera.shared.privacy.noise import NoiseSource, secret_key
from tessera.shared.schema import SCORED_LABELS
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.cells import AT_ONCE
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.data.groups import Subgroups, numbered_subjects
from tessera.worker.errors import TaskFailure, is_machine_failure
from tessera.worker.executor.stages.load import PreparedTask
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.executor.stages.tokenize import require_apart
from tessera.worker.executor.stages.train import loss_scaler
from tessera.worker.governance.policy import Policy
from tessera.worker.privacy.bounded_figures import bounded_sums
from tessera.worker.privacy.bounded_numbers import FigureNoise
from tessera.worker.privacy.disclosed_counts import CellTable, kept_examples
from tessera.worker.scores.answers import AnswerScorer
from tessera.worker.training.batches import Batches
from tessera.worker.training.evaluate import PredictionCounts
from tessera.worker.training.evaluate import evaluate as measure
from tessera.worker.training.optimization.precision import autocast
from tessera.worker.training.optimization.trimming import is_trimmable
from tessera.worker.training.progress import Check, rounded
from tessera.worker.training.tallies import ExampleFigures
from tessera.worker.training.trainer import Trainer, epochs_of


def evaluate(local: LocalTask, loaded: PreparedTask, dataset: Dataset) -> int:
    """Evaluate the version and, on held-out data, this site's personalized model too. Return the number of examples.

    Raises PolicyViolation, TaskFailure.
    """
    task, report, rules = local.task, local.report, local.rules
    measured = dataset.held_out if task.held_out else dataset
    if measured is None:
        nothing_held_out(local)
    rules.policy.check_measured(measured.examples)
    require_apart(local, loaded.context, measured)
    local.records.measure()
    ranks, rounds, privacy = local.setup.ranks, rules.rounds_figures(task), rules.privacy_of_figures(task)
    # The two classes of a pair are no classes of examples.
    counts = rules.policy.send_class_counts and not (rounds or loaded.context.preference)
    if counts and not rules.full_precision:
        by_word = loaded.context.head == "token-classification"
        measured, counts = _countable(measured, rules.policy, by_word=by_word)
    report.examples = measured.examples
    # All ranks divide the same batches, also where each has found a size of its own.
    size = ranks.same(lambda: local.piece_size.of_batches(task.training.batch_size, ranks.size))
    size = ranks.size if rounds else size
    answers = _answer_scorer(local, loaded, measured, alone=rounds)
    asked = measured.examples if answers and answers.ranges else 0
    report.begin("evaluating", steps=math.ceil(measured.examples / (size or measured.examples)) + asked)

    def counted() -> None:
        report.advance()
        local.check()

    if privacy is None:
        local.records.note_exact(measured.examples, "evaluation")
    context = loaded.context
    ignored = _ignored(loaded, task.ignore)
    batches = Batches(measured, size, local.device, trims=not rounds and is_trimmable(context, measured))

    def metrics(check: Check, scores: PredictionCounts | None = None) -> dict[str, float]:
        figures = ExampleFigures({**(answers.ranges if answers else {}), **loaded.half.metric_ranges})
        own = partial(_add_metrics, loaded, figures, alone=rounds) if loaded.half.metric_ranges else None
        if rounds:
            noise = None
            if privacy:
                # The reserved privacy stays spent, though a failure may send nothing.
                rho = local.records.reserve_figures(measured.examples, privacy.epsilon, privacy.delta)
                noise = FigureNoise(rho, NoiseSource(secret_key()))
            with autocast(task.training, local.device):
                sums = bounded_sums(context, measured, local.device, check, ranks, own)
            sums.own = _answered(local, answers, figures, check)
            return sums.figures(measured.examples, noise, ignored)
        # Features of a tower that trains would only take memory.
        once = context.images_once(measured) if context.images.is_settled else nullcontext(measured)
        with autocast(task.training, local.device), once as data:
            some = replace(batches, dataset=data)
            found = measure(context.model, context.head, some, check, ranks, scores, ignored, own, context.preference)
        figures = _answered(local, answers, figures, check)
        return found | figures.means(measured.examples, figures.sums())

    scores = PredictionCounts(_subgroups(measured, task.subgroups) if counts and not rules.full_precision else None)
    found = metrics(counted, scores)
    # A simulation's scores over a central data set are those of its examples already.
    if counts and (task.held_out or not rules.full_precision):
        report.class_counts, report.subgroup_counts = (
            _leaving(scores.by_class(ignored)),
            {
                name: _rounded(each) if isinstance(each, NumberSums) else each
                for name, each in scores.by_subgroup().items()
            },
        )
    if task.held_out and _personalise(local, loaded, dataset):
        own = metrics(local.check)
        found |= {PERSONAL + name: value for name, value in own.items() if name != SCORED_LABELS}
    # A count, as exact as that of the examples. Figures of rounded sums have no more in further digits.
    exact = {*found} if rounds else {SCORED_LABELS}
    report.metrics = {name: value if name in exact else rounded(value) for name, value in found.items()}
    report.metrics |= loaded.built.metrics
    local.check()
    return measured.examples


def _ignored(loaded: PreparedTask, names: Collection[str]) -> tuple[int, ...]:
    """Return the places of the classes that macro F1 leaves out: the named ones, and both classes of a pair."""
    named = getattr(loaded.context.model.config, "id2label", None) or {}
    return (0, 1) if loaded.context.preference else tuple(n for n, name in sorted(named.items()) if name in names)


def _answer_scorer(local: LocalTask, loaded: PreparedTask, measured: Dataset, *, alone: bool) -> AnswerScorer | None:
    """Return the scores of answers to these examples; None on a worker that divides the model."""
    task = local.task
    most = task.max_new_tokens
    ranks, limit = local.setup.ranks, token_limit(loaded.document)
    # Several ranks check together, and one may generate more tokens than another.
    between = local.check if ranks.size == 1 else lambda: None
    answers = AnswerScorer(loaded.context.model, measured, most, limit, alone, between)
    reason = "the model is divided among devices (compute.shard)" if ranks.shards > 1 else ""
    if most and not measured.tokenizer:
        reason = "max_new_tokens is for chats with loss_on = answers, which are not packed"
    if reason and (answers.ranges or most):
        structlog.get_logger("worker").warning("answers-not-scored", dataset=task.dataset, reason=reason)
    return answers if ranks.shards == 1 else None


def _answered(
    local: LocalTask, answers: AnswerScorer | None, figures: ExampleFigures, check: Check
) -> ExampleFigures:
    """Return the figures of all ranks, with the figures of answers."""
    if answers and answers.ranges:
        with autocast(local.task.training, local.device):
            answers.add_to(figures, check, local.setup.ranks)
    figures.sum_over(local.setup.ranks)
    return figures


def _require_ranges(half: WorkerHalf[Any], found: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a method's figures are not those that it declares."""
    if found.keys() != half.metric_ranges.keys():
        names = [sorted(names) for names in (found, half.metric_ranges)]
        raise ValueError(f"metrics of the method returns {names[0]}, and its metric_ranges are {names[1]}")


def _add_metrics(
    loaded: PreparedTask, figures: ExampleFigures, outputs: Output, labels: Tensor, *, alone: bool
) -> None:
    """Add the method's own figures of some examples. If one is measured `alone`, none can make this fail."""
    half = loaded.half
    try:
        found = half.metrics(loaded.context, outputs, labels)
        _require_ranges(half, found)
        values = {name: found[name].reshape(len(labels)) for name in half.metric_ranges}
    except Exception as fault:
        if not alone or is_machine_failure(fault):
            raise
        structlog.get_logger("worker").warning("metrics-not-measured", exc_info=fault)
        return
    for name, each in values.items():
        figures.add(name, each)


def example_losses(local: LocalTask, loaded: PreparedTask, dataset: Dataset) -> Array:
    """Return the version's loss of each example, float64 [training examples and then held-out ones].

    Raises TaskFailure and UnsupportedRun.
    """
    parts, context, ranks = (dataset, dataset.held_out or nothing_held_out(local)), loaded.context, local.setup.ranks
    size = ranks.same(lambda: local.piece_size.of_batches(local.task.training.batch_size, ranks.size))
    local.report.begin("evaluating", steps=sum(math.ceil(part.examples / (size or part.examples)) for part in parts))
    local.records.note_exact(sum(part.examples for part in parts), "attack")

    def counted() -> None:
        local.report.advance()
        local.check()

    found = []
    for part in parts:
        scores = PredictionCounts(examples=part.examples)
        batches = Batches(part, size, local.device, trims=is_trimmable(context, part))
        with autocast(local.task.training, local.device):
            measure(context.model, context.head, batches, counted, ranks, scores, objective=context.preference)
        found.append(scores.losses)
    return np.asarray(torch.cat(found))


def nothing_held_out(local: LocalTask) -> Never:
    """Raise TaskFailure for a data set without held-out examples."""
    raise TaskFailure(
        "nothing-held-out", f"the data set {local.task.dataset!r} has no held-out share here; set `held_out`"
    )


def countable(measured: Dataset, least: int, *, by_word: bool = False) -> Tensor:
    """Return the places of the examples of the classes, and in each column of the classes within a subgroup, that
    have `least` subjects or more.

    Of several labels, each is two classes: the examples with it, and those without. With `by_word`, a text has all
    classes of its words. The places depend on the data set and the site's settings alone, so that no two runs differ
    by the examples left out.
    """
    subjects, _ = numbered_subjects(measured.groups or [b""] * measured.examples)
    examples, classes = _classes_of_each(measured, by_word=by_word)
    columns = [(column.places, len(column.names)) for column in measured.subgroups.values()]
    tables = []
    for places, count in [(torch.zeros(measured.examples, dtype=torch.int64), 1), *columns]:
        cells = (classes * count + places[examples]).numpy()
        tables.append(CellTable(examples.numpy(), cells, int(cells.max(initial=0)) + 1))
    return torch.from_numpy(kept_examples(subjects, tables, least).nonzero()[0])


def _classes_of_each(measured: Dataset, *, by_word: bool) -> tuple[Tensor, Tensor]:
    """Return the place of an example and a class that it has, for each of its classes: int64 [entries] both."""
    every = torch.arange(measured.examples)
    if measured.classes is not None:
        return every, measured.classes
    labels = measured.inputs[LABELS]
    if measured.schema.problem == "multi_label":
        examples, places = torch.ones(labels.shape, dtype=torch.bool).nonzero().T
        return examples, 2 * places + measured.tensors[LABELS].flatten().long()
    if not by_word or labels.dtype.is_floating_point:
        return every, torch.zeros_like(every)
    pairs = [
        torch.stack([rows[:, None].expand_as(words)[words >= 0], words[words >= 0]], 1).unique(dim=0)  # type: ignore[no-untyped-call]
        for rows in torch.split(every, AT_ONCE)
        for words in [labels[rows]]
    ]
    examples, classes = torch.cat(pairs).T
    return examples, classes


def _countable(measured: Dataset, policy: Policy, *, by_word: bool) -> tuple[Dataset, bool]:
    """Return the examples that are measured, and True if counts of them may leave. If too few may be counted, return
    all of them, and False."""
    places = countable(measured, policy.min_subjects, by_word=by_word)
    if len(places) < policy.min_evaluation_examples:
        return measured, False
    return (measured if len(places) == measured.examples else measured.rows(places)), True


def _subgroups(measured: Dataset, column: str | None) -> Subgroups:
    """Return the subgroups of a column; where the run names none, one of all examples, and where the site's settings
    do not have it, `OTHER`."""
    everyone = Subgroups((OTHER if column else ALL,), torch.zeros(measured.examples, dtype=torch.int64))
    return measured.subgroups.get(column or "", everyone)


def _leaving(counts: Counts | None) -> Counts | None:
    """Return the counts as they leave: sums rounded as figures are; None for a large vocabulary."""
    if counts is None or len(counts.labels) > MAX_CLASSES:
        return None
    if isinstance(counts, NumberSums):
        return _rounded(counts)
    if isinstance(counts, LabelCounts):
        return counts
    return counts.model_copy(update={"bin_confidence": tuple(map(rounded, counts.bin_confidence))})


def _rounded(sums: NumberSums) -> NumberSums:
    found = sums.model_dump()
    return NumberSums(**{name: value if name == "examples" else rounded(value) for name, value in found.items()})


def _personalise(local: LocalTask, loaded: PreparedTask, dataset: Dataset) -> bool:
    """Turn the version into this site's personalized model. Return False if the method or the site has none."""
    task = local.task
    half, context = loaded.half, loaded.context
    if task.privacy is None and local.rules.rounds_figures(task):
        # One training example may change all predictions of a model that trains on it without noise. The private
        # state may have been trained before the site required privacy.
        return False
    loaded.personalise()
    phases = half.personalization_phases(context)
    local.rules.policy.check_epochs(epochs_of(phases, task.training, dataset.examples))
    if phases and task.privacy:
        # Personalization would train without noise, and its metrics would leak the examples.
        return False
    if phases:
        local.records.note_exact(dataset.examples, "training")
        with loss_scaler(local) as scaler:
            size = local.piece_size
            trainer = Trainer(half, context, task.training, local.setup, local.check, scaler=scaler, piece_size=size)
            trainer.train(phases, dataset, task.seed)
        return True
    # A vault may hold only training state, and a freshly added private layer that never trained personalizes
    # nothing. Of a sharded model nothing is private.
    return bool(context.vault) and local.setup.ranks.shards == 1 and (bool(context.private) or loaded.is_changed())

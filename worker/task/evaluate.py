"""The evaluation stage, with the second gate for evaluation data."""

import math
from contextlib import nullcontext
from dataclasses import replace

from tessera.shared.api.class_counts import MAX_CLASSES, ClassCounts
from tessera.shared.metrics.site_spread import PERSONAL
from tessera.shared.privacy.noise import NoiseSource, secret_key
from tessera.shared.schema import SCORED_LABELS
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import TaskFailure
from tessera.worker.privacy.bounded_figures import Noise, bounded_sums
from tessera.worker.task.environment import TaskRun, loss_scaler
from tessera.worker.task.fetch import Loaded
from tessera.worker.task.tokenize import require_apart
from tessera.worker.training.batches import Batches
from tessera.worker.training.evaluate import Scores
from tessera.worker.training.evaluate import evaluate as measure
from tessera.worker.training.optimization.precision import autocast
from tessera.worker.training.optimization.trimming import is_trimmable
from tessera.worker.training.progress import Check, rounded
from tessera.worker.training.trainer import Trainer, epochs_of


def evaluate(run: TaskRun, loaded: Loaded, dataset: Dataset) -> int:
    """Evaluate the version and, on held-out data, this site's personalized model too. Return the number of examples.

    Raises PolicyViolation, TaskFailure.
    """
    env, task, report = run.env, run.task, run.report
    measured = dataset.held_out if task.held_out else dataset
    if measured is None:
        raise TaskFailure(
            "nothing-held-out", f"the data set {task.dataset!r} has no held-out share here; set `held_out`"
        )
    env.policy.check_measured(measured.examples)
    require_apart(run, loaded.context, measured)
    if env.history:
        env.history.measure(task.run, task.dataset, env.policy)
    report.examples = measured.examples
    ranks, rounds, privacy = env.setup.ranks, env.rounds_figures(task), env.privacy_of_figures(task)
    # All ranks divide the same batches, also where each has found a size of its own.
    size = ranks.same(lambda: env.piece_size(task.run).of_batches(task.training.batch_size, ranks.size))
    size = ranks.size if rounds else size
    report.begin("evaluating", steps=math.ceil(measured.examples / (size or measured.examples)))

    def counted() -> None:
        report.advance()
        run.check()

    if privacy is None:
        run.journal.note_exact(measured.examples, "evaluation")
    context = loaded.context
    named = getattr(context.model.config, "id2label", None) or {}
    ignored = tuple(place for place, name in sorted(named.items()) if name in task.ignore)
    batches = Batches(measured, size, env.device, trims=not rounds and is_trimmable(context, measured))

    def metrics(check: Check, scores: Scores | None = None) -> dict[str, float]:
        if rounds:
            noise = None
            if privacy:
                # What is reserved stays spent, though a failure may send nothing.
                rho = run.journal.reserve_figures(measured.examples, privacy.epsilon, privacy.delta)
                noise = Noise(rho, NoiseSource(secret_key()))
            with autocast(task.training, env.device):
                sums = bounded_sums(context, measured, env.device, check, ranks)
            return sums.figures(measured.examples, noise, ignored)
        # Features of a tower that trains would only take memory.
        once = context.images_once(measured) if context.images.is_settled else nullcontext(measured)
        with autocast(task.training, env.device), once as data:
            return measure(context.model, context.head, replace(batches, dataset=data), check, ranks, scores, ignored)

    scores = Scores()
    found = metrics(counted, scores)
    # Over a central data set the scores are those of its examples already.
    if task.held_out and env.policy.send_class_counts and not rounds:
        report.class_counts = _leaving(scores.by_class(ignored))
    if task.held_out and _personalise(run, loaded, dataset):
        own = metrics(run.check)
        found |= {PERSONAL + name: value for name, value in own.items() if name != SCORED_LABELS}
    # A count, as exact as that of the examples. Figures of rounded sums have no more in further digits.
    exact = {*found} if rounds else {SCORED_LABELS}
    report.metrics = {name: value if name in exact else rounded(value) for name, value in found.items()}
    report.metrics |= loaded.built.metrics
    run.check()
    return measured.examples


def _leaving(counts: ClassCounts | None) -> ClassCounts | None:
    """Return the counts as they leave: sums of confidence rounded as figures are; None for a large vocabulary."""
    if counts is None or len(counts.labels) > MAX_CLASSES:
        return None
    return counts.model_copy(update={"bin_confidence": tuple(map(rounded, counts.bin_confidence))})


def _personalise(run: TaskRun, loaded: Loaded, dataset: Dataset) -> bool:
    """Turn the version into this site's personalized model. Return False if the method or the site has none."""
    env, task = run.env, run.task
    half, context = loaded.half, loaded.context
    if task.privacy is None and env.rounds_figures(task):
        # One training example may change all predictions of a model that trains on it without noise. The private
        # state may have been trained before the site required privacy.
        return False
    loaded.personalise()
    phases = half.personalization_phases(context)
    env.policy.check_epochs(epochs_of(phases, task.training, dataset.examples))
    if phases and task.privacy:
        # Personalization would train without noise, and its metrics would leak the examples.
        return False
    if phases:
        run.journal.note_exact(dataset.examples, "training")
        with loss_scaler(env, task) as scaler:
            size = env.piece_size(task.run)
            trainer = Trainer(half, context, task.training, env.setup, run.check, scaler=scaler, piece_size=size)
            trainer.train(phases, dataset, run.training_seed)
        return True
    # A vault may hold only training state, and a freshly added private layer that never trained personalizes
    # nothing. Of a sharded model nothing is private.
    return bool(context.vault) and env.setup.ranks.shards == 1 and (bool(context.private) or loaded.is_changed())

"""The loss scale of a run's float16 training, kept between its tasks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessera.shared.api.tasks import Task
from tessera.worker.task.environment import TaskEnvironment
from tessera.worker.training.divergence import TrainingDiverged
from tessera.worker.training.optimization.precision import gradient_scaler, restore_scale, scale_of


@contextmanager
def loss_scaler(env: TaskEnvironment, task: Task) -> Iterator[torch.amp.GradScaler]:
    """Yield a loss scaler at the scale that the run's last training found, also before a restart of the worker.

    The scale is kept at once, whether or not the update is merged. Training that diverges removes it: its scale is
    unusable.
    """
    scaler = env.scalers.pop(task.run, None)
    if scaler is None:
        scaler = gradient_scaler(task.training, env.device)
        if scaler.is_enabled():
            restore_scale(scaler, env.vault.load_scale(task.run))
    try:
        yield scaler
    except TrainingDiverged:
        env.vault.keep_scale(task.run, {})
        raise
    env.scalers[task.run] = scaler
    if scaler.is_enabled():
        env.vault.keep_scale(task.run, scale_of(scaler))

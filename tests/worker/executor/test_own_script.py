"""A site's own training script: real workers and coordinators over HTTP, and scripts that do what they should not."""

from __future__ import annotations

import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.shared.api.runs import Cohort, Run, Training
from tessera.shared.client.client import Client
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import exported
from tests.support.tasks import DIGITS_VIT
from tests.worker.test_agent import begin, working

BEGIN = """
import torch
import tessera.site
from transformers import Trainer, TrainingArguments

task = tessera.site.task()
model = task.model()
task.freeze(model)
"""

TRAIN = """
arguments = TrainingArguments(
    output_dir=str(task.folder / "trainer"), per_device_train_batch_size=task.examples, max_steps=task.steps + 100,
    learning_rate=task.training.learning_rate, optim="sgd", lr_scheduler_type="constant", weight_decay=0.0,
    max_grad_norm=0.0, report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=task.dataset(), callbacks=[task.callback()])
trained = trainer.train()
"""

SUBMIT = """
task.submit(trainer.model, {"loss": trained.training_loss, "train/seconds": 1.5, "broken": float("nan")})
"""

SGD = Training(optimizer="sgd", learning_rate=0.1, batch_size=None, steps=3, weight_decay=0.0)
WHOLE = BEGIN + TRAIN + SUBMIT


def script_settings(folder: Path, text: str, **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return {"executor": {"command": [sys.executable, str(path)], **more}}


def of_site(coordinator: LiveCoordinator, name: str, index: int) -> dict[str, Any]:
    digits = {"kind": "digits", "part": {"scheme": "iid", "count": 8, "index": index}}
    return {"token": coordinator.token("site", name), "datasets": {"digits": digits}}


def versions(coordinator: LiveCoordinator, folder: Path, text: str | None, **spec: Any) -> dict[str, np.ndarray]:
    """Return the last version of a run of two sites, which train by a script if its text is given."""
    client = coordinator.client()
    run = begin(client, DIGITS_VIT, training=SGD, seed=3, cohort=Cohort(quorum=2), **spec)
    with ExitStack() as stack:
        for index, name in enumerate("ab"):
            place = folder / name
            own = script_settings(place, text) if text else {}
            stack.enter_context(working(coordinator, place, **of_site(coordinator, name, index), **own))
        until(lambda: client.run(run.id).state == "completed", 300)
    return exported(client, run)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        # Values of a fused matrix, or of matrices of their own, and the head.
        {"name": "fedfrozen", "settings": {"warmup_rounds": 1, "scope": "v_head"}},
    ],
    ids=["fedavg", "fedfrozen"],
)
def test_a_script_with_the_products_steps_makes_the_products_versions(
    coordinator: LiveCoordinator, tmp_path: Path, method: Any
) -> None:
    """Two rounds of full-batch SGD at two sites, by transformers' Trainer and by the worker itself."""
    own, by_script = (
        versions(coordinator, tmp_path / kind, text, method=method, rounds=2)
        for kind, text in (("own", None), ("script", WHOLE))
    )
    far = {name: float(np.abs(values - by_script[name]).max()) for name, values in own.items()}
    assert own.keys() == by_script.keys()
    assert max(far.values()) < 1e-5, far

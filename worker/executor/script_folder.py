"""The folder of a task for a site's own training script: what the agent hands over, and what the script returns.

- `task.json`, `model/`: the task, and a model folder with the version.
- `progress.json`: the step and the loss, which the script replaces as it trains.
- `stop`: the task is no longer wanted.
- `result/`: `blocks.safetensors` and `figures.json`. The script writes it under another name and renames it.

`tessera.site` is the script's side of it, `script_result` the agent's. Imports no torch.
"""

import re
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt

from tessera.shared.run_settings import Training
from tessera.worker.executor.folder import Document
from tessera.worker.model.layouts import MappingFile
from tessera.worker.settings import DataSources

TASK_VARIABLE = "TESSERA_TASK"
"""The environment variable with the path of the folder."""
TASK, MODEL, PROGRESS, STOP = "task.json", "model", "progress.json", "stop"
RESULT, BLOCKS, FIGURES = "result", "blocks.safetensors", "figures.json"
FIGURE = re.compile(r"^[a-z][a-z0-9_]{0,47}$")
"""The name of a figure."""
MAX_FIGURES = 32


class ScriptTask(Document):
    """One training task, for a script."""

    run: str
    """The run's name."""
    round: int
    rounds: int
    method: str
    dataset: str
    examples: int
    """The number of training examples, by which the update is weighed."""
    steps: int
    """The number of optimizer steps that the run asks for."""
    seed: int
    training: Training
    train: tuple[str, ...]
    """The names of the blocks to train."""
    send: tuple[str, ...]
    """The names of the blocks to return."""
    lora_rank: int | None
    """The rank of the adapters with which the model computes; None for their whole rank."""
    mapping: MappingFile | None
    sources: DataSources
    """The settings of the data set."""
    data: dict[str, Any] | None
    """The kind and the options of the data set; None if some rows of its files are not for training."""


class ScriptProgress(Document):
    """The progress of a script."""

    step: NonNegativeInt = Field(lt=1 << 53)
    loss: FiniteFloat | None = None


class ScriptFigures(Document):
    """The figures of a script's training."""

    metrics: dict[Annotated[str, Field(pattern=FIGURE.pattern)], FiniteFloat] = Field(max_length=MAX_FIGURES)

"""A site's own script for supervised fine-tuning with TRL's SFTTrainer. The lines marked `# federated` were added.

It reads a CSV file with the columns `prompt` and `completion`, and trains on completions. In the worker's settings:

[executor]
command = ["python", "sft.py"]
"""

import csv
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,unused-ignore]

import tessera.site

task = tessera.site.task()  # federated
with Path(task.data["file"]).open(encoding="utf-8", newline="") as opened:
    rows = [{name: row[name] for name in ("prompt", "completion")} for row in csv.DictReader(opened)]

model = task.model()  # federated, in place of the name of a model
task.freeze(model)  # federated
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=folder,
            max_steps=task.steps,
            per_device_train_batch_size=task.training.batch_size or len(rows),
            learning_rate=task.training.learning_rate,
            gradient_checkpointing=False,
            bf16=False,
            seed=task.seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task.model_folder),
        callbacks=[task.callback()],  # federated
    )
    trained = trainer.train()

task.submit(model, {"loss": trained.training_loss})  # federated

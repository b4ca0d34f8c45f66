"""A site's own classification script with transformers' Trainer. The lines marked `# federated` were added.

It reads a CSV file with the columns `text` and `label`. In the worker's settings:

[executor]
command = ["python", "classify.py"]
"""

import csv
import tempfile
from pathlib import Path

from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

import tessera.site

task = tessera.site.task()  # federated
file, classes = Path(task.data["file"]), task.data["labels"]

tokenizer = AutoTokenizer.from_pretrained(task.model_folder)
with file.open(encoding="utf-8", newline="") as opened:
    rows = [
        {**tokenizer(row["text"], truncation=True, max_length=128), "labels": classes.index(row["label"])}
        for row in csv.DictReader(opened)
    ]

model = task.model()  # federated, in place of AutoModelForSequenceClassification.from_pretrained
task.freeze(model)  # federated
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=folder,
            max_steps=task.steps,
            per_device_train_batch_size=task.training.batch_size or len(rows),
            optim="sgd" if task.training.optimizer == "sgd" else "adamw_torch",
            learning_rate=task.training.learning_rate,
            weight_decay=task.training.weight_decay,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            seed=task.seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[task.callback()],  # federated
    )
    trained = trainer.train()

task.submit(model, {"loss": trained.training_loss})  # federated

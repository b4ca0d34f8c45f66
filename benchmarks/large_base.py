"""Memory of a LoRA run on a large external base: `python -m benchmarks.large_base [--quick]`.

A Llama of 1.1 billion random weights in bfloat16 lies at the site as a sharded snapshot, and the coordinator has
digests alone. A worker trains adapters on pieces of one example of 256 tokens. Counted are the anonymous memory of
the worker and its children (pages of the snapshot's files belong to the system's cache), loading included, the memory
of the coordinator, and the bytes that it sent.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.federation import DATASET, Federation
from benchmarks.measuring import MIB, OUT, PeakMemory, Results, anonymous_bytes
from tessera.examples.processes import tessera
from tessera.shared.updates.model_folder import ModelFolder

LARGE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2000,
}  # fmt: skip
EXAMPLES = 2
ROUNDS = 2


@dataclass(frozen=True)
class Measured:
    base_bytes: int
    idle_bytes: int
    """The worker's anonymous memory before the run."""
    worker_bytes: int
    """Its peak."""
    coordinator_bytes: int
    sent_bytes: int
    """What the coordinator sent."""


def write_snapshot(folder: Path, config: Mapping[str, Any]) -> None:
    """Write random weights in bfloat16 as a sharded snapshot of transformers."""
    # The process that measures should not have imported torch before.
    script = (
        "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM\n"
        f"config = AutoConfig.for_model('llama', **{dict(config)!r}, dtype='bfloat16')\n"
        "model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)\n"
        "model.save_pretrained(sys.argv[1], max_shard_size='500MB')\n"
    )
    subprocess.run([*tessera()[:1], "-c", script, str(folder)], check=True)


def measure(folder: Path, config: Mapping[str, Any], tokens: int) -> Measured:
    """Train adapters for two rounds, and return what that took."""
    snapshot, start = folder / "snapshot", folder / "model"
    folder.mkdir(exist_ok=True)
    write_snapshot(snapshot, config)
    words = ("--head", "causal-lm", "--lora-rank", "8", "--external-base")
    subprocess.run([*tessera("model", "init", str(start), "--config", str(snapshot), *words)], check=True)
    model = ModelFolder.open(start)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], (EXAMPLES, tokens))
    save_file({"input_ids": ids, "labels": ids}, folder / "examples.safetensors")
    with Federation(folder / "federation") as federation:
        federation.start_workers(1, {DATASET: folder / "examples.safetensors"}, micro_batch=1)
        settings = federation.folder / federation.workers[0] / "worker.toml"
        subprocess.run([*tessera("worker", "cache", "add", str(snapshot), "--config", str(settings))], check=True)
        (worker,) = federation.worker_pids
        idle, before = anonymous_bytes([worker]), federation.moved()
        coordinator = PeakMemory({"coordinator": [federation.coordinator_pid]})
        with PeakMemory({"worker": [worker]}, measure=anonymous_bytes) as most, coordinator:
            run = federation.begin(
                model,
                ROUNDS,
                1,
                {"name": "lora", "settings": {"train_head": False}},
                dataset=DATASET,
                training={"batch_size": EXAMPLES, "gradient_checkpointing": True},
            )
            federation.await_version(run, ROUNDS, 0.5)
        sent = federation.moved().since(before).sent
    base = sum(block.nbytes for block in model.model.base)
    return Measured(base, idle, most.peaks["worker"], coordinator.peaks["coordinator"], sent)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.large_base", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it works")
    given = parser.parse_args(arguments)
    config, tokens = (SMALL, 32) if given.quick else (LARGE, 256)
    results = Results("large_base", f"LoRA on an external base in bfloat16, pieces of one example of {tokens} tokens")
    with tempfile.TemporaryDirectory(prefix="tessera-base-") as name:
        found = measure(Path(name), config, tokens)
    results.add(
        base_MiB=found.base_bytes / MIB,
        worker_idle_MiB=found.idle_bytes / MIB,
        worker_peak_MiB=found.worker_bytes / MIB,
        coordinator_peak_MiB=found.coordinator_bytes / MIB,
        sent_MiB=found.sent_bytes / MIB,
    )
    results.aim(
        "anonymous memory of the worker", found.worker_bytes / MIB, 1.1 * found.base_bytes / MIB + 1024, " MiB"
    )
    results.aim("memory of the coordinator", found.coordinator_bytes / MIB, 300, " MiB")
    results.finish(given.out)


if __name__ == "__main__":
    main()

"""What each codec saves, costs and misses, on what fine-tuning leaves: `python -m small_tasks.codec_ratios`.

A text encoder is pre-trained here on docstrings of one part of the standard library and then trained for a few steps
on those of another, as a site would in a round: with AdamW, whose steps are all about one size, and with SGD and
momentum, whose few large ones stand out. Speeds are gigabytes of float32 per CPU second, the best of some tries.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

from common.figures import OUT, Results
from small_tasks.docstrings import BERT, OTHERS, docstrings, others
from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import ArrayTensor, unpacked
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, read_update, write_update

CODECS = (
    "raw", "zstd", "shuffle+zstd", pipeline.LOSSLESS, "delta+shuffle+zstd", "delta+bf16",
    "delta+bf16+shuffle+zstd", "delta+fp16", "delta+int8", "delta+int8+zstd", "delta+int4", "delta+int4+zstd",
    "delta+lowrank=16", "delta+lowrank=16+int8", "delta+lowrank=4", "delta+topk=0.1", "delta+topk=0.01",
    "delta+topk=0.01+shuffle+zstd",
)  # fmt: skip
WIDE: Mapping[str, Any] = {**BERT, "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
TRIES = 3
BATCH = 32

T = TypeVar("T")
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, Make] = {
    "AdamW 1e-4": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01),
    "SGD 0.1": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def trained(model: BertForSequenceClassification, make: Make, data: Any, steps: int, seed: int) -> None:
    optimizer, dice = make(model.parameters()), torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for batch in data.batches(BATCH, dice):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                return


def differences(config: Mapping[str, Any], pretraining: int, local: int) -> dict[str, list[TrainedBlock]]:
    """What a round of `local` steps changes, by optimizer."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig.from_dict({**config, "num_labels": len(OTHERS)}))
    trained(model, lambda parameters: torch.optim.AdamW(parameters, lr=5e-4), others(), pretraining, seed=0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found = {}
    for name, make in OPTIMIZERS.items():
        model.load_state_dict(start)
        trained(model, make, docstrings()[0], local, seed=1)
        found[name] = [_change(key, value, start[key]) for key, value in model.named_parameters()]
    return found


def _change(name: str, value: torch.Tensor, base: torch.Tensor) -> TrainedBlock:
    block = Block(tensor=name, role="other", shape=tuple(value.shape), dtype="F32")
    # Copies: what is trained next is trained in place.
    return TrainedBlock(block, ArrayTensor(value.detach().numpy().copy()), ArrayTensor(base.numpy().copy()))


@dataclass(frozen=True)
class Figures:
    ratio: float
    encode_seconds: float
    decode_seconds: float
    error: float


def measured(codec: str, changes: Sequence[TrainedBlock]) -> Figures:
    """An update of the changes, written and read."""

    def write() -> bytes:
        file = io.BytesIO()
        write_update(file, codec, changes)
        return file.getvalue()

    encode_seconds, data = _least(write)
    asked = {change.block.name: change.block for change in changes}
    bases = {change.block.name: change.base for change in changes}
    sent = read_update(lambda: io.BytesIO(data), len(data), asked, bases)
    decode_seconds, _ = _least(lambda: sum(_read(tensor) for tensor in sent.values()))
    whole = sum(change.block.nbytes for change in changes)
    return Figures(whole / len(data), encode_seconds, decode_seconds, _error(changes, sent))


def _read(tensor: EncodedTensor) -> int:
    """Its elements."""
    return sum(len(chunk) for chunk in tensor.chunks())


def _least(work: Callable[[], T]) -> tuple[float, T]:
    seconds = []
    for _ in range(TRIES):
        began = time.process_time()
        done = work()
        seconds.append(time.process_time() - began)
    return min(seconds), done


def _error(changes: Sequence[TrainedBlock], sent: Mapping[str, EncodedTensor]) -> float:
    """The l2 norm of what is missing, as a share of that of what was to be sent."""
    missing = whole = 0.0
    for change in changes:
        for step, read in zip(change.steps(), sent[change.block.name].steps(), strict=True):
            missing += float(np.square(step.astype(np.float64) - unpacked(read)).sum())
            whole += float(np.square(step.astype(np.float64)).sum())
    return float(np.sqrt(missing / whole))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m small_tasks.codec_ratios", description=(__doc__ or "")[:100])
    parser.add_argument("--steps", type=int, default=20, help="local steps of a round")
    parser.add_argument("--pretraining", type=int, default=300, help="steps before them")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = differences(BERT, 5, 2) if given.quick else differences(WIDE, given.pretraining, given.steps)
    gigabytes = sum(change.block.nbytes for change in next(iter(found.values()))) / 1e9
    results = Results("compression", f"updates of {1e3 * gigabytes:.0f} MB, by codec and local optimizer")
    for codec in CODECS:
        figures = {name: measured(codec, changes) for name, changes in found.items()}
        encode, decode = (
            gigabytes / min(getattr(each, which) for each in figures.values())
            for which in ("encode_seconds", "decode_seconds")
        )
        results.add(
            codec=codec,
            **{f"ratio, {name}": each.ratio for name, each in figures.items()},
            encode_GB_s=encode,
            decode_GB_s=decode,
            **{f"error, {name}": each.error for name, each in figures.items()},
        )
    results.show()
    print(f"written to {results.write(given.out)}")


if __name__ == "__main__":
    main()

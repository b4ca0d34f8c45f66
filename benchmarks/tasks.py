"""What `benchmarks.results` measures on: digits for a vision transformer, pairs for a CLIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Task
from benchmarks.pairs import pairs, pretrained
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import divide, hold_out, key_of_seed
from tessera.worker.data.partition.schemes import Dirichlet, Scheme, Shift
from tessera.worker.data.registry import load

HELD_OUT = 0.25
VIT = Path(__file__).parents[1] / "examples" / "digits" / "vit.json"


# ---------------------------------------------------------------- data


def shared_out(whole: Dataset, partition: Scheme) -> Mapping[str, Dataset]:
    """A data set divided among sites, each of which holds a quarter of its part out."""
    parts = divide(whole, partition)
    return {f"site-{i:02}": hold_out(part, HELD_OUT, key_of_seed(partition.seed)) for i, part in enumerate(parts)}


def digit_sites(seed: int) -> Mapping[str, Dataset]:
    return shared_out(load("digits", {}), Dirichlet(scheme="dirichlet", count=8, alpha=0.3, seed=seed))


def pair_sites(seed: int) -> Mapping[str, Dataset]:
    return shared_out(pairs()[1], Shift(scheme="shift", count=8, alpha=1.0, seed=seed))


# ---------------------------------------------------------------- models


def digit_model(name: str, seed: int, folder: Path) -> Sequence[str]:
    return ["--config", str(VIT), "--head", "image-classification", "--random"]


def pair_model(name: str, seed: int, folder: Path) -> Sequence[str]:
    pretrained(folder / "clip", seed)
    tokens = ["--vision-prompts", "4", "--text-prompts", "4"]
    return ["--config", str(folder / "clip"), "--pretrained", "--head", "contrastive", *tokens]


# ---------------------------------------------------------------- arms

GLOBAL = (
    Arm("fedavg", "fedavg"),
    Arm("centralised", "fedavg", central=True),
    Arm("fedprox", "fedprox", {"mu": 0.01}),
    Arm("fednova", "fednova"),
    Arm("moon", "moon"),
    Arm("fedavg + server momentum", "fedavg", spec={"server_optimizer": {"kind": "sgd", "momentum": 0.9}}),
    Arm("fedavg + server adam", "fedavg", spec={"server_optimizer": {"kind": "adam", "learning_rate": 0.01}}),
)
PERSONAL = (
    Arm("local only", "local"),
    Arm("fedper", "fedper"),
    Arm("fedrep", "fedrep"),
    Arm("fedbabu", "fedbabu"),
    Arm("fedbn", "fedbn"),
    Arm("ditto", "ditto"),
)

CODED = (
    Arm("fedavg, int8", "fedavg", spec={"codec": "delta+int8"}),
    Arm("fedavg, int8 both ways", "fedavg", spec={"codec": "delta+int8", "download_codec": "int8"}),
    Arm("fedavg, top 5 % with feedback", "fedavg", spec={"codec": "delta+topk=0.05+shuffle+zstd"}),
)

ADAMW: Mapping[str, Any] = {"epochs": 2, "batch_size": 32, "optimizer": "adamw", "learning_rate": 5e-4}
MOMENTUM = {"training": {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.0}}

PROMPTS = (
    Arm("pfeddc", "pfeddc"),
    Arm("pfeddc, no vision prompts", "pfeddc", {"modalities": ["text"]}),
    Arm("pfeddc, no text prompts", "pfeddc", {"modalities": ["vision"]}),
    Arm("pfeddc, mean for attention", "pfeddc", {"fusion": {"kind": "mean"}}),
    Arm("pfeddc, nothing averaged", "pfeddc", {"share": "nothing"}),
    Arm("pfeddc, sgd", "pfeddc", spec=MOMENTUM),
    Arm("promptfl, text", "promptfl"),
    Arm("promptfl, vision", "promptfl", {"modalities": ["vision"]}),
    Arm("promptfl, both", "promptfl", {"modalities": ["vision", "text"]}),
    Arm("fedavg, whole model", "fedavg", spec={"training": {"learning_rate": 5e-4}}),
)

TASKS = {
    task.name: task
    for task in (
        Task(
            "digits",
            (*GLOBAL, *CODED, *PERSONAL),
            rounds=12,
            training=ADAMW,
            sites=digit_sites,
            test=lambda: load("digits", {"split": "test"}),
            models=digit_model,
        ),
        Task(
            "pairs",
            PROMPTS,
            rounds=12,
            training={**ADAMW, "learning_rate": 5e-3},
            sites=pair_sites,
            test=lambda: pairs()[2],
            models=pair_model,
        ),
    )
}

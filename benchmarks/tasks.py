"""What `benchmarks.results` measures on: digits for a vision transformer, docstrings for a text encoder, pairs for a
CLIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Task
from benchmarks.docstrings import AREAS, docstrings
from benchmarks.docstrings import pretrained as docstring_encoder
from benchmarks.pairs import pairs, pretrained
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import divide, hold_out, key_of_seed
from tessera.worker.data.partition.schemes import Dirichlet, Scheme, Shift
from tessera.worker.data.registry import load

HELD_OUT = 0.25
SGD = {"training": {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.0}}
VIT = Path(__file__).parents[1] / "examples" / "digits" / "vit.json"


# ---------------------------------------------------------------- data


def shared_out(whole: Dataset, partition: Scheme) -> Mapping[str, Dataset]:
    """A data set divided among sites, each of which holds a quarter of its part out."""
    parts = divide(whole, partition)
    return {f"site-{i:02}": hold_out(part, HELD_OUT, key_of_seed(partition.seed)) for i, part in enumerate(parts)}


def digit_sites(seed: int) -> Mapping[str, Dataset]:
    return shared_out(load("digits", {}), Dirichlet(scheme="dirichlet", count=8, alpha=0.3, seed=seed))


def docstring_sites(seed: int) -> Mapping[str, Dataset]:
    return shared_out(docstrings()[0], Dirichlet(scheme="dirichlet", count=8, alpha=0.5, seed=seed))


def pair_sites(seed: int) -> Mapping[str, Dataset]:
    return shared_out(pairs()[1], Shift(scheme="shift", count=8, alpha=1.0, seed=seed))


# ---------------------------------------------------------------- models


def digit_model(name: str, seed: int, folder: Path) -> Sequence[str]:
    return ["--config", str(VIT), "--head", "image-classification", "--random", *LORA.get(name, ())]


def docstring_model(name: str, seed: int, folder: Path) -> Sequence[str]:
    docstring_encoder(folder / "bert", seed)
    labels = ["--head", "text-classification", "--labels", str(len(AREAS))]
    return ["--config", str(folder / "bert"), "--pretrained", *labels, *LORA.get(name, ())]


def pair_model(name: str, seed: int, folder: Path) -> Sequence[str]:
    pretrained(folder / "clip", seed)
    tokens = ["--vision-prompts", "4", "--text-prompts", "4"]
    return ["--config", str(folder / "clip"), "--pretrained", "--head", "contrastive", *tokens]


LORA = {"lora": ("--lora-rank", "4", "--lora-roles", "query,value")}


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
FROZEN = (
    Arm("fedfrozen all_but_qk", "fedfrozen", {"warmup_rounds": 4}),
    Arm("fedfrozen all_but_qk, auto", "fedfrozen", {"warmup_rounds": "auto"}),
    Arm("fedfrozen v_head", "fedfrozen", {"warmup_rounds": 4, "scope": "v_head"}),
    Arm("fedfrozen, values frozen", "fedfrozen", {"warmup_rounds": 4, "freeze": "value"}),
)
WITH_SGD = (
    Arm("fedavg, sgd", "fedavg", spec=SGD),
    Arm("scaffold, sgd", "scaffold", spec=SGD),
    Arm("feddyn, sgd", "feddyn", spec=SGD),
)
PERSONAL = (
    Arm("local only", "local"),
    Arm("fedper", "fedper"),
    Arm("fedrep", "fedrep"),
    Arm("fedbabu", "fedbabu"),
    Arm("fedbn", "fedbn"),
    Arm("ditto", "ditto"),
)

SCORES = ("attention", "gradient-norm", "random", "last")


def selecting(share: float, *scores: str) -> tuple[Arm, ...]:
    """SAFL and the controls that show whether attention matters, all with the same K."""
    return tuple(Arm(f"safl {score}", "safl", {"score": score, "share": share}) for score in scores)


OTHERWISE = (
    Arm("safl attention, consensus", "safl", {"chooser": "consensus"}),
    Arm("safl attention, pruned 0.4", "safl", {"prune": 0.4}),
)


CODED = (
    Arm("fedavg, int8", "fedavg", spec={"codec": "delta+int8"}),
    Arm("fedavg, int8 both ways", "fedavg", spec={"codec": "delta+int8", "download_codec": "int8"}),
    Arm("fedavg, top 5 % with feedback", "fedavg", spec={"codec": "delta+topk=0.05+shuffle+zstd"}),
)

ADAPTERS = (
    Arm("lora", "lora", model="lora"),
    Arm("lora, a frozen", "lora", {"freeze_a": True}, model="lora"),
)


def private(epsilon: float) -> tuple[Arm, ...]:
    """What remains of full training and of selection under DP-SGD, with a choice that needs no data as control."""
    budget = {"epsilon": epsilon, "delta": 1e-4, "clip_norm": 1.0}
    return (
        Arm(f"fedavg, epsilon {epsilon:g}", "fedavg", spec={"privacy": budget}),
        Arm(
            f"safl attention, epsilon {epsilon:g}",
            "safl",
            {"share": 1 / 3},
            spec={"privacy": {**budget, "selection": "noisy"}},
        ),
        Arm(
            f"safl random, epsilon {epsilon:g}", "safl", {"share": 1 / 3, "score": "random"}, spec={"privacy": budget}
        ),
        Arm(f"lora, a frozen, epsilon {epsilon:g}", "lora", {"freeze_a": True}, {"privacy": budget}, "lora"),
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
            (
                *GLOBAL,
                *CODED,
                *FROZEN,
                *WITH_SGD,
                *PERSONAL,
                *selecting(0.5, "attention", "random", "last"),
                ADAPTERS[0],
            ),
            rounds=12,
            training=ADAMW,
            sites=digit_sites,
            test=lambda: load("digits", {"split": "test"}),
            models=digit_model,
        ),
        Task(
            "docstrings",
            (GLOBAL[0], *selecting(1 / 3, *SCORES), *OTHERWISE, ADAPTERS[0]),
            rounds=12,
            training={**ADAMW, "epochs": 1, "learning_rate": 1e-3},
            sites=docstring_sites,
            test=lambda: docstrings()[1],
            models=docstring_model,
        ),
        Task(
            "privacy",
            (GLOBAL[0], *private(1.0), *private(8.0)),
            rounds=12,
            training={**ADAMW, "epochs": 1, "learning_rate": 1e-3},
            sites=docstring_sites,
            test=lambda: docstrings()[1],
            models=docstring_model,
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

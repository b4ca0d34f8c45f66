"""The methods of the table, with their baselines and the settings that are not defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROUNDS = 4
EPSILON = 8.0


@dataclass(frozen=True)
class Kind:
    """What trains, for which one learning rate is chosen: the best of `rates` for the arm `by`."""

    by: str
    rates: tuple[float, ...]


KINDS = {
    "all": Kind("fedavg", (0.0003, 0.001, 0.003)),
    "SGD": Kind("fedavg, SGD", (0.03, 0.1, 0.3)),
    "head": Kind("head only", (0.003, 0.01, 0.03)),
    "adapters": Kind("lora, `factors`", (0.003, 0.01, 0.03)),
    "prompts": Kind("promptfl", (0.003, 0.01, 0.03)),
}


@dataclass(frozen=True)
class Arm:
    name: str
    """Of its row: the method, and what is not a default."""
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = "plain"
    """One of MODELS."""
    kind: str = "all"
    """One of KINDS."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the run."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of its training."""

    tasks: tuple[str, ...] = ()
    """All if empty."""
    ranks: tuple[int, ...] = ()
    """Of adapters, which the sites have in turn; the model's without them."""

    @property
    def epsilon(self) -> float | None:
        private = self.run.get("privacy")
        return float(private["epsilon"]) if private else None


PRIVATE: Mapping[str, Any] = {"privacy": {"epsilon": EPSILON, "delta": 0.001, "clip_norm": 1.0}}
RANKS = (2, 4, 8)
_LORA = ("--lora-roles", "query,value,mlp", "--lora-rank")
_PROMPTS = ("--text-prompts", "4", "--vision-prompts", "4")
MODELS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "adapters": (*_LORA, "8"),
    "mixed": (*_LORA, "2,4,8"),
    "prompts": _PROMPTS,
    "deep prompts": (*_PROMPTS, "--prompt-depth", "2"),
}
"""Options of `tessera model init`."""


def _safl(name: str, **settings: object) -> Arm:
    return Arm(f"safl, {name}", "safl", settings)


def _lora(name: str, model: str = "adapters", **settings: object) -> Arm:
    return Arm(f"lora, {name}", "lora", settings, model, "adapters")


ARMS = (
    Arm("fedavg", "fedavg"),
    Arm("local", "local"),
    Arm("head only", "head-only", kind="head"),
    _lora("`factors`"),
    _safl("attention"),
    Arm("fedfrozen", "fedfrozen", {"warmup_rounds": ROUNDS // 2}),
    Arm("promptfl", "promptfl", {}, "prompts", "prompts"),
    Arm("pfeddc", "pfeddc", {}, "prompts", "prompts"),
    _safl("random, consensus", score="random", chooser="consensus"),
    _safl("last", score="last"),
    Arm("ditto", "ditto"),
    Arm("fedper", "fedper"),
    Arm("fedrep", "fedrep"),
    Arm("fedbabu", "fedbabu"),
    Arm("fedbn", "fedbn"),
    Arm("fedproto", "fedproto"),
    Arm("fedprox", "fedprox"),
    Arm("fednova", "fednova"),
    Arm("feddyn", "feddyn"),
    Arm("moon", "moon"),
    Arm("fedavg, SGD", "fedavg", kind="SGD", training={"optimizer": "sgd"}),
    Arm("scaffold, SGD", "scaffold", kind="SGD", training={"optimizer": "sgd"}),
    Arm("fedvpt", "fedvpt", {}, "deep prompts", "prompts"),
    Arm("fedpgp", "fedpgp", {}, "prompts", "prompts"),
    Arm("fedotp", "fedotp", {}, "prompts", "prompts"),
    Arm("pfeddc, nothing shared", "pfeddc", {"share": "nothing"}, "prompts", "prompts"),
    Arm("local, prompts", "local", {}, "prompts", "prompts"),
    _lora("`freeze_a`", freeze_a=True),
    _lora("`stack`", average="stack"),
    _lora("`residual`", average="residual"),
    Arm("lora, ranks 2, 4, 8, `partition`", "lora", {"average": "partition"}, "mixed", "adapters", ranks=RANKS),
    _safl("attention, consensus", chooser="consensus"),
    _safl("random", score="random"),
    # Accounting of privacy takes longer than training here.
    Arm("fedavg, private", "fedavg", run=PRIVATE, tasks=("text",)),
    Arm("head only, private", "head-only", kind="head", run=PRIVATE, tasks=("text",)),
    Arm("lora, private", "lora", {}, "adapters", "adapters", run=PRIVATE, tasks=("text",)),
)

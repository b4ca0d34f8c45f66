"""What pFedDC's attention came to in a run: how large its output A is, and how much of it differs between tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from tessera.shared.methods.pfeddc import PFedDCSettings
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.model.prompt_fusion import fusion_module
from tessera.worker.simulation import Result

FIGURES = ("|G|", "G moved", "|A|", "|A|/|G|", "A by token", "L moved")
"""By tower: l2 norms over all tokens, and the share of |A| that is left without the mean over the tokens."""


def attention_figures(result: Result, start: ModelFolder, sites: Sequence[str]) -> dict[str, float]:
    """`FIGURES` of each tower, means over the sites; none for a run without an attention at its sites."""
    if result.spec.method.name != "pfeddc":
        return {}
    settings = PFedDCSettings.model_validate(result.spec.method.settings)
    if settings.fusion.kind != "attention" or settings.share == "prompts-and-fusion":
        return {}
    first = {
        block.name: torch.from_numpy(np.frombuffer(raw, NUMPY_DTYPES[block.dtype]).reshape(block.shape).copy())
        for block, raw in start.blocks()
        if block.role == "prompt"
    }
    version = result.arrays()
    found: dict[str, list[float]] = {}
    for site in sites:
        kept = result.kept(site)
        for tower in ("vision", "text"):
            if f"local.{tower}" in kept:
                lengths = _lengths(settings, {**version, **kept}, first[f"prompts.{tower}"], tower)
                for name, length in zip(FIGURES, lengths, strict=True):
                    found.setdefault(f"{tower} {name}", []).append(float(length))
    return {name: fmean(values) for name, values in found.items()}


def _lengths(settings: PFedDCSettings, values: Mapping[str, Array], first: Tensor, tower: str) -> tuple[Tensor, ...]:
    """`FIGURES` of one site's tower."""
    shared, own = (torch.from_numpy(values[f"{kind}.{tower}"]) for kind in ("prompts", "local"))
    fusion = fusion_module(settings.fusion, shared.shape[1])
    prefix = f"fusion.{tower}."
    kept = {name.removeprefix(prefix): each for name, each in values.items() if name.startswith(prefix)}
    fusion.load_state_dict({name: torch.from_numpy(each) for name, each in kept.items()})
    with torch.no_grad():
        added = fusion(shared, own) - (shared if settings.fusion.asks == "global" else own)
    by_token = added - added.mean(dim=0)
    return (
        shared.norm(),
        (shared - first).norm(),
        added.norm(),
        added.norm() / shared.norm(),
        by_token.norm() / added.norm(),
        (own - first).norm(),
    )

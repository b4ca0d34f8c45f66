"""What `tessera model init` adds to the model that transformers builds: the options, and what they come to."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel

from tessera.shared.model.spec import MAX_TOKENS, Fusion, Lora, Prompts
from tessera.worker.model.prompts import caption_start, prompts_of

Asks = Literal["local", "global"]

VisionPrompts = Annotated[
    int,
    typer.Option(min=0, max=MAX_TOKENS, help="How many learnt tokens go into the image tower (CLIP and its kin)."),
]
TextPrompts = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_TOKENS, help="How many learnt tokens go into the text tower, before each class name."
    ),
]
TextPromptFrom = Annotated[
    str | None, typer.Option(help="A caption whose embeddings the text prompts start from, such as 'a photo of a'.")
]
PromptFusion = Annotated[
    Asks | None,
    typer.Option(help="Also make the attention that fuses prompts a part of the run: whose prompts ask in it."),
]
FusionHeads = Annotated[int | None, typer.Option(min=1, help="The heads of that attention; 8 if not given.")]
LoraRank = Annotated[int | None, typer.Option(min=1, help="Put low-rank adapters of this rank into the model.")]
LoraAlpha = Annotated[
    float | None, typer.Option(help="How much adapters count: alpha / rank. Twice the rank if not given.")
]
LoraRoles = Annotated[str, typer.Option(help="The roles of the matrices to adapt, divided by commas.")]


def caption_ids(caption: str | None, source: str) -> list[int] | None:
    """Return the caption's tokens, by the tokenizer of the model's folder or name, without start and end."""
    if caption is None:
        return None
    ids = AutoTokenizer.from_pretrained(source, trust_remote_code=False)(caption, add_special_tokens=False)[
        "input_ids"
    ]
    if not ids:
        raise ValueError("the caption for the text prompts has no tokens")
    return list(ids)


def prompts_from(
    vision: int, text: int | None, caption: list[int] | None, asks: Asks | None, heads: int | None
) -> Prompts | None:
    """Raise ValueError for a caption of another length than the text prompts, a fusion of no prompts, or heads of no
    fusion."""
    if heads is not None and not asks:
        raise ValueError("--fusion-heads needs --prompt-fusion: a fusion that stays at its site has the run's heads")
    if caption is not None and text is not None and text != len(caption):
        raise ValueError(f"the caption has {len(caption)} tokens: leave --text-prompts out, or say {len(caption)}")
    wanted = text or 0 if caption is None else len(caption)
    if not vision and not wanted:
        if asks:
            raise ValueError("--prompt-fusion needs --vision-prompts or --text-prompts")
        return None
    return Prompts(vision=vision, text=wanted, fusion=Fusion(asks=asks, heads=heads or 8) if asks else None)


def lora_from(rank: int | None, alpha: float | None, roles: str) -> Lora | None:
    """Raise ValueError for an alpha without a rank, or a role that there is none of."""
    if rank is None:
        if alpha is not None:
            raise ValueError("--lora-alpha needs --lora-rank")
        return None
    names = [name.strip() for name in roles.split(",") if name.strip()]
    return Lora.model_validate({"rank": rank, "alpha": alpha if alpha is not None else 2 * rank, "roles": names})


def start_from_caption(model: PreTrainedModel, ids: list[int]) -> None:
    """Give the text prompts the caption's embeddings."""
    tokens = prompts_of(model)
    own = tokens.own("text") if tokens else None
    if own is not None:
        own.detach().copy_(caption_start(model, torch.tensor(ids)))

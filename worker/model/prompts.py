"""Prompts: learnt tokens that go into both towers of a dual encoder, by hooks, without touching transformers' code.

The vision prompts go in after the class token, or first where there is none, once positions have been added (VPT,
shallow: Jia et al. 2022, arXiv 2203.12119, equation 4). The text prompts go in after the start token, or first where
there is none, as token embeddings, so that they get positions of their own (CoOp: Zhou et al. 2022, arXiv 2109.01134,
equation 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tessera.shared.model.spec import MODALITIES, Fusion, LocalStart, Modality, Prompts
from tessera.worker.model.config import ConfigError
from tessera.worker.model.prompt_fusion import fusion_module

PROMPTS = "prompts"
"""What the prompts are called among a model's submodules."""

REMEDY = "make the model with `tessera model init --vision-prompts N --text-prompts N`"

INITIAL_STD = 0.02
"""CoOp's, and that of most token embeddings."""

Way = Callable[[Tensor], Tensor]
"""What the model's own prompts, [tokens, width], go through before they go in; the result may have other tokens."""


class PromptError(ConfigError):
    """A model takes no prompts, or no such prompts, or not with such texts."""


@dataclass(frozen=True)
class Towers:
    """How many tokens come before the prompts in each tower of a family of dual encoders."""

    vision_first: int
    text_first: int
    # RoBERTa counts positions from the one after its padding's id, so as many fewer tokens fit.
    from_padding: bool = False

    def first(self, modality: Modality) -> int:
        return self.vision_first if modality == "vision" else self.text_first


TOWERS: Mapping[str, Towers] = {
    "aimv2": Towers(vision_first=0, text_first=1),
    "altclip": Towers(vision_first=1, text_first=1, from_padding=True),
    "chinese_clip": Towers(vision_first=1, text_first=1),
    "clip": Towers(vision_first=1, text_first=1),
    "clipseg": Towers(vision_first=1, text_first=1),
    "metaclip_2": Towers(vision_first=1, text_first=1),
    "siglip": Towers(vision_first=0, text_first=0),
    "siglip2": Towers(vision_first=0, text_first=0),
}
"""The families that take prompts: each holds a `vision_model` and a `text_model`, and these their embeddings."""


class PromptTokens(nn.Module):
    """The prompts of a model, `vision` and `text` [tokens, width], and the hooks that put them in.

    `ways` may name what the prompts of a tower go through first. It belongs to a task, not to the model.
    """

    def __init__(self, prompts: Prompts, widths: Mapping[Modality, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.ways: dict[Modality, Way] = {}
        self.fused_by = prompts.fusion
        for modality in _wanted(prompts):
            start = torch.empty(prompts.count(modality), widths[modality], dtype=dtype).normal_(std=INITIAL_STD)
            self.register_parameter(modality, nn.Parameter(start))
        if prompts.fusion:
            fusion = prompts.fusion
            self.fusion = nn.ModuleDict()
            for modality in _wanted(prompts):
                self.fusion[modality] = fusion_module(fusion, widths[modality]).to(dtype)

    def own(self, modality: Modality) -> Tensor | None:
        """Return the model's prompts for a tower, [tokens, width]; none if it has none."""
        own: Tensor | None = getattr(self, modality, None)
        return own

    def tokens(self, modality: Modality) -> Tensor | None:
        """Return what goes into a tower, [tokens, width]."""
        own, way = self.own(modality), self.ways.get(modality)
        return way(own) if own is not None and way is not None else own


class LocalPrompts(nn.Module):
    """A site's own prompts, [tokens, width] for each tower that it has any for."""

    def __init__(self, starts: Mapping[Modality, Tensor]) -> None:
        super().__init__()
        for modality, start in starts.items():
            self.register_parameter(modality, nn.Parameter(start.detach().clone()))


@dataclass(frozen=True)
class FusedPrompts:
    """A site's own prompts, and what makes one of them and the model's for each tower."""

    local: LocalPrompts
    fusion: nn.ModuleDict

    def way(self, modality: Modality, own: Tensor) -> Tensor:
        # Not `get_parameter`: while gradients of single examples are taken, a plain tensor stands in for it.
        fused: Tensor = self.fusion[modality](own, getattr(self.local, modality))
        return fused


def fused_prompts(
    tokens: PromptTokens,
    modalities: Sequence[Modality],
    fusion: Fusion,
    start: LocalStart,
    *,
    shared_fusion: bool = False,
) -> FusedPrompts:
    """Prompts of a site's own beside a model's, as many; what is random follows torch's seed.

    With `shared_fusion` the model's own modules fuse them. Raises PromptError if the model has no such prompts, or no
    such fusion of its own.
    """
    if absent := [modality for modality in modalities if tokens.own(modality) is None]:
        raise PromptError(f"the model has no prompts for {' and '.join(absent)}; {REMEDY}")
    if shared_fusion and tokens.fused_by != fusion:
        raise PromptError(f"the model fuses prompts by {tokens.fused_by}, not by {fusion}: say the same in both")
    own = {modality: tokens.get_parameter(modality) for modality in modalities}
    noise = {modality: torch.empty_like(each).normal_(std=INITIAL_STD) for modality, each in own.items()}
    local = LocalPrompts(own if start == "global" else noise)
    if shared_fusion:
        return FusedPrompts(local, tokens.fusion)
    made = nn.ModuleDict()
    for modality, each in own.items():
        made[modality] = fusion_module(fusion, each.shape[1]).to(each)
    return FusedPrompts(local, made)


def prompts_of(model: nn.Module) -> PromptTokens | None:
    """Return a model's prompts; none if it was built without any."""
    found = getattr(model, PROMPTS, None)
    return found if isinstance(found, PromptTokens) else None


def add_prompts(model: PreTrainedModel, prompts: Prompts) -> None:
    """Give a dual encoder its prompts, random under torch's seed, as the submodule `prompts`.

    Raises PromptError for a model that takes none, or for more than its text encoder has positions; ConfigError for a
    fusion of more heads than divide a tower's width.
    """
    towers = TOWERS.get(model.config.model_type)
    if towers is None:
        raise PromptError(
            f"a {model.config.model_type} takes no prompts; those that do are {', '.join(sorted(TOWERS))}"
        )
    embedding = _token_embedding(model)
    widths: dict[Modality, int] = {
        "vision": model.config.vision_config.hidden_size,
        "text": embedding.embedding_dim,
    }
    vision, text = (model.get_submodule(f"{modality}_model") for modality in MODALITIES)
    tokens = PromptTokens(prompts, widths, model.dtype)
    model.add_module(PROMPTS, tokens)
    if prompts.vision:
        _VisionHooks(tokens, towers.vision_first).register(vision)
    if prompts.text:
        hooks = _TextHooks(tokens, towers, model.config.text_config)
        if prompts.text >= hooks.positions:
            raise PromptError(f"{prompts.text} text prompts leave no room in {hooks.positions} positions")
        hooks.register(text, embedding)


def caption_start(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the embeddings of a caption's tokens, int64 [tokens], as CoOp starts its prompts: [tokens, width]."""
    return _token_embedding(model).weight.detach()[ids]


def _token_embedding(model: PreTrainedModel) -> nn.Embedding:
    text = model.get_submodule("text_model")
    return cast("nn.Embedding", cast("PreTrainedModel", text).get_input_embeddings())


def _wanted(prompts: Prompts) -> list[Modality]:
    return [modality for modality in MODALITIES if prompts.count(modality)]


# The hooks are methods of objects, which a deep copy of the model copies along with it; functions it would share.


@dataclass
class _VisionHooks:
    """What goes in is decided when the tower is called, and put in when its embeddings have been made."""

    tokens: PromptTokens
    first: int
    waiting: Tensor | None = None

    def register(self, tower: nn.Module) -> None:
        tower.register_forward_pre_hook(self.before, with_kwargs=True)
        embeddings: nn.Module = tower.get_submodule("embeddings")
        embeddings.register_forward_hook(self.after)

    def before(self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.waiting = self.tokens.tokens("vision")
        mask = kwargs.get("pixel_attention_mask")  # [images, patches]
        if mask is not None and self.waiting is not None:
            kwargs = {**kwargs, "pixel_attention_mask": _inserted(mask, self.first, len(self.waiting), 1)}
        return args, kwargs

    def after(self, _embeddings: nn.Module, _args: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        found, self.waiting = self.waiting, None
        if found is None or not len(found):
            return None
        own = found.to(embedded.dtype).expand(len(embedded), -1, -1)  # [images, tokens, width]
        return torch.cat([embedded[:, : self.first], own, embedded[:, self.first :]], dim=1)


@dataclass
class _TextHooks:
    """Makes room in the ids when the tower is called, and fills it when they have been looked up."""

    tokens: PromptTokens
    towers: Towers
    config: Any  # transformers': each family's has attributes of its own
    waiting: Tensor | None = None

    def register(self, tower: nn.Module, embedding: nn.Module) -> None:
        tower.register_forward_pre_hook(self.before, with_kwargs=True)
        embedding.register_forward_hook(self.after)

    def before(self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.waiting = found = self.tokens.tokens("text")
        if found is None or not len(found):
            return args, kwargs
        ids, mask, types = (kwargs.get(name) for name in ("input_ids", "attention_mask", "token_type_ids"))
        if ids is None or kwargs.get("position_ids") is not None:
            raise PromptError(
                "text prompts go into `input_ids`, given by name, and decide on the positions themselves"
            )
        kept = self._kept(ids, mask, len(found))
        more = {
            name: _inserted(given[:, :kept], self.towers.text_first, len(found), filler)
            for name, given, filler in (
                ("input_ids", ids, self._placeholder()),
                ("attention_mask", mask, 1),
                ("token_type_ids", types, 0),
            )
            if given is not None
        }
        return args, {**kwargs, **more}

    def after(self, _embedding: nn.Module, _args: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        found, self.waiting = self.waiting, None
        if found is None or not len(found):
            return None
        own = found.to(embedded.dtype).expand(len(embedded), -1, -1)  # [texts, tokens, width]
        first = self.towers.text_first
        return torch.cat([embedded[:, :first], own, embedded[:, first + len(found) :]], dim=1)

    @property
    def positions(self) -> int:
        """How many tokens the text encoder takes."""
        positions: int = self.config.max_position_embeddings
        return positions - (self.config.pad_token_id + 1) if self.towers.from_padding else positions

    def _placeholder(self) -> int:
        """Return an id to stand where a prompt will be. Never what ends or pads a text: pooling looks for the former,
        which in old CLIPs is the highest id, and positions are counted by the latter."""
        special = {self.config.pad_token_id}
        ends = self.config.eos_token_id
        special.update(ends if isinstance(ends, list) else [ends])
        return next(each for each in range(len(special) + 1) if each not in special)

    def _kept(self, ids: Tensor, mask: Tensor | None, count: int) -> int:
        """Return how many of the columns of `ids`, [texts, tokens], stay: only padding is cut. Raises PromptError."""
        length = ids.shape[1]
        kept = min(length, self.positions - count)
        # Without a mask, padding is told by the last token that goes on and on: its first may be the text's end.
        if kept < length and (
            kept < 1 or bool(mask[:, kept:].any() if mask is not None else (ids[:, kept - 1 :] != ids[:, -1:]).any())
        ):
            raise PromptError(
                f"{count} text prompts and texts of {length} tokens do not fit the {self.positions} positions of the "
                "text encoder: shorten the texts or use fewer prompts"
            )
        return kept


def _inserted(rows: Tensor, first: int, count: int, filler: int) -> Tensor:
    """`rows`, [rows, columns], with so many columns of the filler after the first ones."""
    return torch.cat([rows[:, :first], rows.new_full((len(rows), count), filler), rows[:, first:]], dim=1)

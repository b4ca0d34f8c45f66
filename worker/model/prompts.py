"""Prompts: learnt tokens that hooks insert into both towers of a dual encoder, without changing transformers' code.

Vision prompts are inserted after the class token, or first where there is none, once positions have been added (VPT,
shallow: Jia et al. 2022, arXiv 2203.12119, equation 4). Deep prompts take their place at the input of later layers
(the same, equation 7). Text prompts are inserted after the start token, or first where there is none, as token
embeddings, so that they have positions of their own (CoOp: Zhou et al. 2022, arXiv 2109.01134, equation 2).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tessera.shared.model.dataset_schema import positions_in
from tessera.shared.model.spec import MODALITIES, PROMPT_STD, Fusion, Modality, Prompts
from tessera.worker.errors import ConfigError

PROMPTS = "prompts"
"""The name of the submodule with a model's prompts."""

REMEDY = "create the model with `tessera model init --vision-prompts N --text-prompts N`"

PromptFunction = Callable[[Tensor], Tensor]
"""A function from the model's prompts, [tokens, width], to those inserted; the number of tokens may differ."""


class PromptError(ConfigError):
    """Prompts that the model, or the length of its texts, does not support."""


@dataclass(frozen=True)
class Towers:
    """The number of tokens before the prompts in each tower of a family of dual encoders."""

    vision_first: int
    text_first: int


TOWERS: Mapping[str, Towers] = {
    "aimv2": Towers(vision_first=0, text_first=1),
    "altclip": Towers(vision_first=1, text_first=1),
    "chinese_clip": Towers(vision_first=1, text_first=1),
    "clip": Towers(vision_first=1, text_first=1),
    "clipseg": Towers(vision_first=1, text_first=1),
    "metaclip_2": Towers(vision_first=1, text_first=1),
    "siglip": Towers(vision_first=0, text_first=0),
    "siglip2": Towers(vision_first=0, text_first=0),
}
"""The supported families, by model type. Each has a `vision_model` and a `text_model` with their embeddings."""

PAIRED = "vision-text-dual-encoder"
"""The model type of transformers' pair of any vision tower with any text tower."""

VISION_TOWERS: Mapping[str, int] = {
    "clip_vision_model": 1,
    "deit": 1,
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "vit": 1,
}
"""The vision towers supported in such a pair, by model type, with the number of tokens before the prompts. Each adds
positions in its embeddings, and pools the class token."""

TEXT_TOWERS = ("bert", "camembert", "roberta", "xlm-roberta")
"""The text towers supported in such a pair. Each begins a text with its class token, and pools that token."""


class PromptTokens(nn.Module):
    """The prompts of a model, `vision` and `text` [tokens, width], which the hooks insert, and the deep ones of later
    layers, [layers, tokens, width] each.

    `transforms` are applied to a tower's prompts first. They belong to a task, not to the model.
    """

    def __init__(self, prompts: Prompts, widths: Mapping[Modality, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.transforms: dict[Modality, PromptFunction] = {}
        self.fused_by = prompts.fusion
        wanted = [modality for modality in MODALITIES if prompts.count(modality)]
        for modality in wanted:
            start = torch.empty(prompts.count(modality), widths[modality], dtype=dtype).normal_(std=PROMPT_STD)
            self.register_parameter(modality, nn.Parameter(start))
        if (fusion := prompts.fusion) and fusion.trains:
            self.fusion = nn.ModuleDict({each: _fusion_start(fusion, widths[each]) for each in wanted}).to(dtype)
        if later := prompts.depth - 1:
            # Drawn last, so that the other prompts have the same values as without.
            self.deep = nn.ParameterDict()
            for modality in wanted:
                shape = (later, prompts.count(modality), widths[modality])
                self.deep[modality] = nn.Parameter(torch.empty(shape, dtype=dtype).normal_(std=PROMPT_STD))

    def own(self, modality: Modality) -> Tensor | None:
        """Return the model's prompts for a tower, [tokens, width], or None if it has none."""
        return getattr(self, modality, None)

    def tokens(self, modality: Modality) -> Tensor | None:
        """Return the prompts to insert into a tower, [tokens, width], or None."""
        own, transform = self.own(modality), self.transforms.get(modality)
        return transform(own) if own is not None and transform is not None else own

    def deep_tokens(self, modality: Modality, layer: int) -> Tensor | None:
        """Return the prompts of a layer, counted from 0, [tokens, width]. None if other prompts than the tower's own
        were inserted: these pass through all layers."""
        return self.deep[modality][layer - 1] if modality not in self.transforms else None

    def insert(self, prompts: Mapping[Modality, PromptFunction]) -> None:
        """Insert functions of the prompts of these towers. Raises PromptError for a tower without prompts."""
        if absent := [modality for modality in prompts if self.own(modality) is None]:
            raise PromptError(f"the model has no prompts for {' and '.join(absent)}; {REMEDY}")
        self.transforms |= prompts

    @contextmanager
    def transformed(self, transforms: dict[Modality, PromptFunction]) -> Iterator[None]:
        """Apply these transforms, and no others, within the block."""
        before, self.transforms = self.transforms, transforms
        try:
            yield
        finally:
            self.transforms = before


def _fusion_start(fusion: Fusion, width: int) -> nn.ParameterDict:
    return nn.ParameterDict(
        (name, nn.init.xavier_uniform_(torch.empty(shape)) if is_random else torch.zeros(shape))
        for name, (shape, is_random) in fusion.matrices(width).items()
    )


def prompts_of(model: nn.Module) -> PromptTokens | None:
    """Return a model's prompts, or None if it was built without."""
    prompts = getattr(model, PROMPTS, None)
    return prompts if isinstance(prompts, PromptTokens) else None


def require_prompts(model: nn.Module) -> PromptTokens:
    """Return a model's prompts. Raises PromptError if it was built without."""
    if (prompts := prompts_of(model)) is None:
        raise PromptError(f"the model has no prompts; {REMEDY}")
    return prompts


TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def text_features(model: nn.Module, batch: Mapping[str, Tensor], prompts: PromptFunction | None = None) -> Tensor:
    """Return the text features of a batch, float32 [texts, width], each of length one, with `prompts` of the model's
    inserted; by default the prompts of the task. Raises PromptError for a model that is no dual encoder with prompts.
    """
    tokens, encode = require_prompts(model), getattr(model, "get_text_features", None)
    if encode is None:
        raise PromptError(f"text features need a dual encoder; {REMEDY}")
    with tokens.transformed({**tokens.transforms, "text": prompts}) if prompts else nullcontext():
        return _unit(encode(**{name: batch[name] for name in TEXT_INPUTS if name in batch}).pooler_output)


def patch_features(model: Any, output: Any) -> Tensor:
    """Return the features of patches, float32 [images, patches, width], each of length one, from a model's output.

    A patch passes through the modules that the class token passes through. Raises PromptError for a model whose
    images have one feature from all patches together.
    """
    if not hasattr(model, "visual_projection") or hasattr(model.vision_model, "head"):
        raise PromptError(
            f"{model.config.model_type} has no features of patches, which its pooling puts together: choose CLIP or "
            f"a {PAIRED}"
        )
    tower, config, tokens = model.vision_model, model.vision_model.config, prompts_of(model)
    prompts = tokens.tokens("vision") if tokens else None
    others = 1 + (0 if prompts is None else len(prompts)) + (config.model_type == "deit")
    states = output.vision_model_output.last_hidden_state  # [images, tokens, width of the tower]
    states = states[:, others + getattr(config, "num_register_tokens", 0) :]
    if hasattr(tower, "post_layernorm"):
        states = tower.post_layernorm(states)
    if hasattr(tower, "pooler"):
        # It pools the first of several tokens.
        states = tower.pooler(states.flatten(0, 1).unsqueeze(1)).unflatten(0, states.shape[:2])
    return _unit(model.visual_projection(states))


def _unit(features: Tensor) -> Tensor:
    """Return features, [..., width], as float32 of length one."""
    features = features.float()
    normalised: Tensor = features / features.norm(dim=-1, keepdim=True)
    return normalised


def towers_of(config: PreTrainedConfig) -> Towers:
    """Return the places of prompts in a model with this config. Raises PromptError if it does not support prompts."""
    if config.model_type == PAIRED:
        return _paired_towers(config)
    towers = TOWERS.get(config.model_type)
    if towers is None:
        raise PromptError(
            f"{config.model_type} does not support prompts; these families do: {', '.join(sorted({*TOWERS, PAIRED}))}"
        )
    return towers


def _paired_towers(config: PreTrainedConfig) -> Towers:
    vision, text = config.vision_config.model_type, config.text_config.model_type
    supported: tuple[tuple[Modality, str, Collection[str]], ...] = (
        ("vision", vision, VISION_TOWERS),
        ("text", text, TEXT_TOWERS),
    )
    for modality, given, known in supported:
        if given not in known:
            raise PromptError(
                f"a {PAIRED} with the {modality} tower {given} does not support prompts: pair one of these, "
                f"{', '.join(sorted(known))}, or leave the prompts out"
            )
    return Towers(vision_first=VISION_TOWERS[vision], text_first=1)


def add_prompts(model: PreTrainedModel, prompts: Prompts) -> None:
    """Add prompts to a dual encoder as the submodule `prompts`, with random values from torch's seed.

    Raises PromptError for an unsupported family or tower, for deep prompts in more layers than a tower has, for more
    text prompts than the text encoder has positions, or if a fusion's heads do not divide a tower's width.
    """
    towers = towers_of(model.config)
    embedding = token_embedding(model)
    widths: dict[Modality, int] = {"vision": model.config.vision_config.hidden_size, "text": embedding.embedding_dim}
    fused = [width for modality, width in widths.items() if prompts.count(modality)]
    if prompts.fusion and (odd := [width for width in fused if not prompts.fusion.divides(width)]):
        raise PromptError(
            f"prompts of width {odd[0]} do not divide among {prompts.fusion.heads} heads: choose a number of heads "
            f"that divides {odd[0]}"
        )
    vision, text = (model.get_submodule(f"{modality}_model") for modality in MODALITIES)
    tokens = PromptTokens(prompts, widths, model.dtype)
    model.add_module(PROMPTS, tokens)
    if prompts.vision:
        hooks = _VisionHooks(tokens=tokens, first=towers.vision_first, placeholders=False)
        hooks.register(vision, vision.get_submodule("embeddings"))
    if prompts.text:
        first, config = towers.text_first, model.config.text_config
        text_hooks = _TextHooks(tokens=tokens, first=first, placeholders=True, config=config)
        if prompts.text >= (most := text_hooks.positions):
            raise PromptError(f"{prompts.text} text prompts leave no room in {most} positions: use fewer than {most}")
        text_hooks.register(text, embedding)
    places: tuple[tuple[Modality, nn.Module, int], ...] = (
        ("vision", vision, towers.vision_first),
        ("text", text, towers.text_first),
    )
    for modality, tower, first in places:
        if prompts.depth > 1 and prompts.count(modality):
            _register_deep(tokens, modality, tower, first, prompts.depth)


def _register_deep(tokens: PromptTokens, modality: Modality, tower: nn.Module, first: int, depth: int) -> None:
    """Insert the deep prompts of a tower. Raises PromptError if it has fewer layers."""
    count = cast("Any", tower).config.num_hidden_layers
    layers = next((m for m in tower.modules() if isinstance(m, nn.ModuleList) and len(m) == count), nn.ModuleList())
    if depth > len(layers):
        raise PromptError(
            f"prompts in {depth} layers, and the {modality} tower has {len(layers)}: use a depth of at most that"
        )
    for layer in range(1, depth):
        hook = _DeepHook(tokens=tokens, modality=modality, first=first, layer=layer)
        layers[layer].register_forward_pre_hook(hook.before)


def caption_start(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the embeddings of a caption's tokens, int64 [tokens], as CoOp's initial prompts, [tokens, width]."""
    return token_embedding(model).weight.detach()[ids]


def token_embedding(model: PreTrainedModel) -> nn.Embedding:
    """Return the table of a model's tokens: of a dual encoder, the text tower's."""
    text = getattr(model, "text_model", model)
    return cast("nn.Embedding", cast("PreTrainedModel", text).get_input_embeddings())


# The hooks are methods of objects, which a deep copy of the model copies too; it would share plain functions.


@dataclass(kw_only=True)
class _Hooks:
    """Hooks that choose a tower's prompts when it is called, and insert them after its `first` embeddings."""

    tokens: PromptTokens
    first: int
    placeholders: bool  # the prompts replace as many of the tower's embeddings
    pending: Tensor | None = None

    def register(self, tower: nn.Module, embedding: nn.Module) -> None:
        tower.register_forward_pre_hook(self.before, with_kwargs=True)
        embedding.register_forward_hook(self.after)

    def before(self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError

    def after(self, _embedding: nn.Module, _args: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        prompts, self.pending = self.pending, None
        if prompts is None or not len(prompts):
            return None
        own = prompts.to(embedded.dtype).expand(len(embedded), -1, -1)  # [images or texts, tokens, width]
        rest = self.first + (len(prompts) if self.placeholders else 0)
        return torch.cat([embedded[:, : self.first], own, embedded[:, rest:]], dim=1)


class _VisionHooks(_Hooks):
    def before(self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.pending = self.tokens.tokens("vision")
        mask = kwargs.get("pixel_attention_mask")  # [images, patches]
        if mask is not None and self.pending is not None:
            kwargs = {**kwargs, "pixel_attention_mask": _inserted(mask, self.first, len(self.pending), 1)}
        return args, kwargs


@dataclass(frozen=True, kw_only=True)
class _DeepHook:
    """A hook that replaces the prompts among a layer's inputs, [images or texts, tokens, width], by its own."""

    tokens: PromptTokens
    modality: Modality
    first: int
    layer: int

    def before(self, _layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        own = self.tokens.deep_tokens(self.modality, self.layer)
        if own is None:
            return None
        states, *rest = args
        rows = own.to(states.dtype).expand(len(states), -1, -1)
        end = self.first + len(own)
        return torch.cat([states[:, : self.first], rows, states[:, end:]], dim=1), *rest


@dataclass(kw_only=True)
class _TextHooks(_Hooks):
    config: Any  # transformers'; its attributes differ by family

    def before(self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.pending = prompts = self.tokens.tokens("text")
        if prompts is None or not len(prompts):
            return args, kwargs
        ids, mask, types = (kwargs.get(name) for name in ("input_ids", "attention_mask", "token_type_ids"))
        if ids is None or kwargs.get("position_ids") is not None:
            raise PromptError(
                "a model with text prompts needs `input_ids` by name, and no `position_ids`: the prompts set them"
            )
        kept = self._kept(ids, mask, len(prompts))
        more = {
            name: _inserted(given[:, :kept], self.first, len(prompts), filler)
            for name, given, filler in (
                ("input_ids", ids, self._placeholder()),
                ("attention_mask", mask, 1),
                ("token_type_ids", types, 0),
            )
            if given is not None
        }
        return args, {**kwargs, **more}

    @property
    def positions(self) -> int:
        """The longest text of the text encoder, in tokens."""
        return int(positions_in(self.config.to_dict()))

    def _placeholder(self) -> int:
        """Return a placeholder id for a prompt. Never an end or padding id: pooling looks for the former, the highest
        id in old CLIPs, and positions are counted by the latter."""
        ends = self.config.eos_token_id
        special = {self.config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
        return next(each for each in range(len(special) + 1) if each not in special)

    def _kept(self, ids: Tensor, mask: Tensor | None, count: int) -> int:
        """Return the number of columns of `ids`, [texts, tokens], to keep. Raises PromptError if a text is longer."""
        length = ids.shape[1]
        kept = min(length, self.positions - count)
        # Without a mask, repetitions of the last token are padding; the first of them may be the text's end.
        if kept < length and (
            kept < 1 or bool(mask[:, kept:].any() if mask is not None else (ids[:, kept - 1 :] != ids[:, -1:]).any())
        ):
            raise PromptError(
                f"{count} text prompts and texts of {length} tokens do not fit the {self.positions} positions of the "
                "text encoder: shorten the texts or use fewer prompts"
            )
        return kept


def _inserted(rows: Tensor, first: int, count: int, filler: int) -> Tensor:
    """Return `rows`, [rows, columns], with `count` columns of the filler after the first `first`."""
    return torch.cat([rows[:, :first], rows.new_full((len(rows), count), filler), rows[:, first:]], dim=1)

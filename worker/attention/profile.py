"""Attention profiles of a model's layers, for any family and also where a fused kernel hides the probabilities.

Every attention calls one of a few torch functions: `scaled_dot_product_attention`, which returns no probabilities, or
a softmax. While the unchanged model runs, a `TorchFunctionMode` intercepts these calls. It recomputes the
probabilities of a fused call from its queries and keys, a few query rows at a time, and keeps only sums, so that no
[heads, queries, keys] of a long sequence ever exists. The result of a softmax is read in the same way.

The block map relates each call to a layer: the calling module is an attention if it lies within a layer and contains
blocks of role query. Cross-attention (of a decoder to its encoder) does not contain the task's tokens and is ignored.
A layer with several attentions (over patches, over frames) is measured by the one over the most keys, and a layer
that runs several times by the mean.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Self

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tessera.shared.model.attention_stats import LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block, Layer, layers_of
from tessera.shared.tensors.lazy import Array
from tessera.worker.attention.heads import by_head
from tessera.worker.attention.probabilities import READERS, SOFTMAXES, Probabilities, of_softmax
from tessera.worker.errors import UnknownAttention
from tessera.worker.model.forward import evaluation_mode

OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")
"""Arguments of an attention whose keys come from another sequence than its queries."""

PADDING_MASKS = ("attention_mask", "pixel_attention_mask")
"""Arguments of a tower that mark padding, of a text or of an image's patches."""

_Masks = tuple[Tensor, Tensor, Tensor]
"""Masks of an attention's tokens, bool [sequences, tokens]: those that are not padding, the task's, and the first."""

RAW_INPUTS = ("input_ids", "pixel_values", "input_values", "input_features")


@dataclass(frozen=True)
class _Frame:
    """A running module and its arguments."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def inputs(self) -> dict[str, Any]:
        """Its arguments by name."""
        bound = _signature(type(self.module).forward).bind_partial(self.module, *self.args, **self.kwargs).arguments
        return {**bound, **bound.get("kwargs", {})}


_signature = cache(inspect.signature)


@dataclass(frozen=True)
class _Context:
    """The arguments of the innermost module around an attention that takes raw inputs."""

    examples: int | None
    ids: Tensor | None  # [examples, tokens]
    mask: Tensor | None  # [examples, tokens]: zero where there is padding
    per_example: bool = True


@dataclass(frozen=True)
class _Measurement:
    """The measurements of one call of an attention over one batch."""

    path: str
    keys: int
    mass: Tensor  # float64 [examples, heads]
    sink: Tensor  # float64 [examples]
    entropy: Tensor  # float64 [examples]
    per_example: bool
    rows: Tensor  # float32 [sequences, heads, kept queries, keys]


def attention_profile(
    model: nn.Module,
    blocks: Sequence[Block],
    batches: Iterable[Mapping[str, Tensor]],
    forward: Callable[[Mapping[str, Tensor]], object],
    tokens: TaskTokens,
    common: Callable[[Mapping[str, Tensor]], Collection[str]] = lambda _: (),
) -> dict[str, LayerAttention]:
    """Return the attention of each layer over the batches, by layer name (`shared.model.blocks`).

    `forward` runs the model on a batch; `common` returns the names of inputs without one row per example. The model
    runs in evaluation mode, without gradients, and is left as it was, as is torch's random state. Where an attention
    splits an example into pieces (frames, windows), positions count within the piece, and pieces are averaged. An
    example without a task token has a mass of 0.

    Raises UnknownAttention for a layer whose self-attention is not seen or does not cover all tokens, and for task
    tokens by id where a layer's tokens have no ids.
    """
    layers = _attending(blocks)
    gathered: dict[str, list[_Measurement]] = {layer.name: [] for layer in layers}
    # Not inference mode: what a model caches in it could not be used in training afterwards.
    with evaluation_mode(model), torch.no_grad(), _Watch(model, _places(layers), tokens) as watch:
        for batch in batches:
            watch.common = common(batch)
            forward(batch)
            for name, calls in watch.pop_measurements().items():
                gathered[name].append(_mean_call(calls))
    _require_seen(gathered)
    return {layer.name: _layer_attention(model, layer, gathered[layer.name]) for layer in layers}


def attention_rows(
    model: nn.Module,
    blocks: Sequence[Block],
    batch: Mapping[str, Tensor],
    forward: Callable[[Mapping[str, Tensor]], object],
    queries: int,
) -> dict[str, Array]:
    """Return attention probabilities of each layer on a batch, by layer name, float32 [sequences, heads, queries,
    keys]: of at most that many queries, spread over the tokens, and zero for padding.

    A layer that runs several times has those of its last call. The model is left as it was, and UnknownAttention is
    raised, as by `attention_profile`.
    """
    layers = _attending(blocks)
    with evaluation_mode(model), torch.no_grad(), _Watch(model, _places(layers), TaskTokens(), queries) as watch:
        forward(batch)
    seen = watch.pop_measurements()
    _require_seen({layer.name: seen.get(layer.name, []) for layer in layers})
    return {name: max(reversed(calls), key=lambda call: call.keys).rows.cpu().numpy() for name, calls in seen.items()}


def _attending(blocks: Sequence[Block]) -> list[Layer]:
    return [layer for layer in layers_of(blocks) if any(block.role == "query" for block in layer.blocks)]


def _require_seen(calls: Mapping[str, Sequence[object]]) -> None:
    """Raise UnknownAttention for layers without a call."""
    if missed := [name for name, seen in calls.items() if not seen]:
        raise UnknownAttention(f"no self-attention was seen in {', '.join(missed[:8])}: it cannot be measured")


def isolated_profile(
    profile: Callable[[Iterable[Mapping[str, Tensor]]], dict[str, LayerAttention]],
    placeholder: Mapping[str, Tensor],
    batches: Iterable[Mapping[str, Tensor]],
    common: Callable[[Mapping[str, Tensor]], Collection[str]],
) -> dict[str, LayerAttention]:
    """Return the profile of the batches, with a mass of 0 for each example on which `profile` fails.

    An empty batch stands for one such example.

    A failure that does not depend on the examples is raised for the placeholder, a batch of one synthetic example.
    Only `mass` and `sink` cover the batches; the rest is the placeholder's.
    """
    nothing = {
        name: replace(layer, mass=np.zeros_like(layer.mass), sink=np.zeros_like(layer.sink))
        for name, layer in profile([placeholder]).items()
    }

    def measured(batch: Mapping[str, Tensor]) -> list[dict[str, LayerAttention]]:
        if not batch:
            return [nothing]
        try:
            return [profile([batch])]
        except Exception as fault:  # noqa: BLE001  (each model's code raises its own errors)
            structlog.get_logger("worker").info("attention-not-measured", reason=repr(fault))
        apart = batches_of_one(batch, common(batch))
        return [nothing] if len(apart) == 1 else [found for each in apart for found in measured(each)]

    profiles = [found for batch in batches for found in measured(batch)]
    return {
        name: replace(
            layer,
            mass=np.concatenate([each[name].mass for each in profiles]),
            sink=np.concatenate([each[name].sink for each in profiles]),
        )
        for name, layer in nothing.items()
    }


def batches_of_one(batch: Mapping[str, Tensor], common: Collection[str]) -> list[dict[str, Tensor]]:
    """Return the examples of a batch as batches of one; the inputs in `common` go into each."""
    return [
        {name: tensor if name in common else tensor[row : row + 1] for name, tensor in batch.items()}
        for row in range(len(batch["labels"]))
    ]


def _places(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the layer name by path of each module that may be an attention: within a layer, above a query block."""
    places: dict[str, str] = {}
    for layer in layers:
        outermost = layer.name.count(".") + 1
        for block in layer.blocks:
            if block.role == "query":
                steps = block.tensor.split(".")
                places |= {".".join(steps[:end]): layer.name for end in range(outermost, len(steps))}
    return places


def _mean_call(calls: Sequence[_Measurement]) -> _Measurement:
    """Return the mean of one batch's calls of the layer's attention over the most keys."""
    widest = max(calls, key=lambda call: call.keys)
    counted = [call for call in calls if call.path == widest.path]
    mass, sink, entropy = (
        torch.stack([getattr(call, name) for call in counted]).mean(0) for name in ("mass", "sink", "entropy")
    )
    return replace(widest, mass=mass, sink=sink, entropy=entropy)


def _layer_attention(model: nn.Module, layer: Layer, seen: Sequence[_Measurement]) -> LayerAttention:
    mass = torch.cat([each.mass for each in seen]).cpu().numpy()  # [examples, heads]
    heads: Array = mass.mean(0)
    return LayerAttention(
        mass=mass.mean(1),
        sink=torch.cat([each.sink for each in seen]).cpu().numpy(),
        heads=heads,
        entropy=float(torch.cat([each.entropy for each in seen]).mean()),
        per_example=seen[0].per_example,
        rows=by_head(model, layer, seen[0].path, heads),
    )


class _Watch(TorchFunctionMode):
    """Measurement of each attention of a running model."""

    def __init__(self, model: nn.Module, places: Mapping[str, str], tokens: TaskTokens, kept: int = 0) -> None:
        super().__init__()
        self._kept = kept
        self._model = model
        self._places = places
        self._tokens = tokens
        self.common: Collection[str] = ()
        self._frames: list[_Frame] = []
        self._handles: list[RemovableHandle] = []
        self._measurements: dict[str, list[_Measurement]] = {}

    def __enter__(self) -> Self:
        for path, module in self._model.named_modules():
            enter = partial(self._enter_module, path)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_module))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def pop_measurements(self) -> dict[str, list[_Measurement]]:
        """Return the measurements since the last call, by layer."""
        seen, self._measurements = self._measurements, {}
        return seen

    def _enter_module(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._frames.append(_Frame(path, module, args, kwargs))

    def _leave_module(self, *_: Any) -> None:
        self._frames.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = function(*args, **given)
        if function not in SOFTMAXES and function not in READERS:
            return result
        frame = self._attention()
        if frame and not any(frame.inputs.get(name) is not None for name in OTHER_SEQUENCE):
            context = self._context()
            reader = READERS.get(function)
            probabilities = reader(*args, **given) if reader else of_softmax(result, context.examples, frame.path)
            self._measure(frame, probabilities, context)
        return result

    def _attention(self) -> _Frame | None:
        """Return the running attention, if any. Modules without parameters, such as a softmax, belong to another."""
        for frame in reversed(self._frames):
            if frame.path in self._places:
                return frame
            if next(frame.module.parameters(), None) is not None:
                return None
        return None

    def _context(self) -> _Context:
        """Return the arguments of the innermost running module with a raw input, and the innermost padding mask."""
        mask = None
        for frame in reversed(self._frames):
            inputs = frame.inputs
            if mask is None:
                mask = next((inputs[name] for name in PADDING_MASKS if _is_flat(inputs.get(name))), None)
            raw = next((name for name in RAW_INPUTS if inputs.get(name) is not None), None)
            if raw is not None:
                ids = inputs["input_ids"] if _is_flat(inputs.get("input_ids")) else None
                return _Context(len(inputs[raw]), ids, mask, raw not in self.common)
        return _Context(None, None, mask)

    def _measure(self, frame: _Frame, probabilities: Probabilities, context: _Context) -> None:
        # The last key of each head of GPT-OSS is not a token.
        if hasattr(frame.module, "sinks") and probabilities.keys == probabilities.queries + 1:
            probabilities = probabilities.of_first(probabilities.queries)
        if probabilities.keys != probabilities.queries:
            sizes = f"{probabilities.keys} keys for {probabilities.queries} tokens"
            only = "only attention of all tokens to all tokens can be measured"
            raise UnknownAttention(f"the attention {frame.path} has {sizes}; {only}")
        examples = context.examples or probabilities.batch
        if probabilities.batch % examples:
            sizes = f"{probabilities.batch} sequences for {examples} examples"
            raise UnknownAttention(
                f"the attention {frame.path} has {sizes}; the former must be a multiple of the latter"
            )
        where = _token_masks(self._tokens, context, (examples, probabilities.keys), frame)
        # Sums are in float32 also where the forward pass is not.
        with torch.autocast(where[0].device.type, enabled=False):
            kept = _kept_rows(probabilities, where[0], self._kept)
            measured = _measure_call(frame.path, probabilities, where, kept, per_example=context.per_example)
        self._measurements.setdefault(self._places[frame.path], []).append(measured)


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2


def _token_masks(wanted: TaskTokens, context: _Context, size: tuple[int, int], frame: _Frame) -> _Masks:
    """Return the masks of an attention's tokens, `size` [examples, keys].

    Raises UnknownAttention if ids or the padding mask do not fit.
    """
    device = next(frame.module.parameters()).device
    real = torch.ones(size, dtype=torch.bool, device=device)
    if context.mask is not None and not bool(context.mask.all()):
        if context.mask.shape != size:
            sizes = f"{list(size)} tokens, and its padding mask over {list(context.mask.shape)}"
            raise UnknownAttention(f"the attention {frame.path} is over {sizes}")
        real = context.mask.to(device).bool()
    place = torch.arange(size[1], device=device)
    first = place == real.int().argmax(1, keepdim=True)
    match wanted.where:
        case "first":
            task = first
        case "last":
            task = place == (place * real).amax(1, keepdim=True)
        case "ids":
            if context.ids is None or context.ids.shape != size:
                where = f"the tokens of the attention {frame.path}"
                raise UnknownAttention(f"{where} have no input ids: select them by position")
            task = torch.isin(context.ids.to(device), torch.tensor(wanted.ids, device=device))
    return real, task & real, first & real


def _kept_rows(probabilities: Probabilities, real: Tensor, count: int) -> Tensor:
    """Return the probabilities of `count` queries, spread over the tokens, [sequences, heads, queries, keys]; zero
    for tokens that the mask `real`, [examples, tokens], leaves out."""
    if not count:
        return torch.empty(0)
    last = probabilities.queries - 1
    places = sorted({round(place) for place in torch.linspace(0, last, min(count, last + 1)).tolist()})
    rows = torch.cat([probabilities.rows(place, place + 1).float() for place in places], dim=2)
    shown = real.repeat_interleave(probabilities.batch // len(real), 0)[:, None]  # [sequences, 1, tokens]
    return rows * shown[..., places, None] * shown[..., None, :]


def _measure_call(
    path: str, probabilities: Probabilities, where: _Masks, kept: Tensor, *, per_example: bool
) -> _Measurement:
    """Return the measurements of one call, computed in chunks of query rows."""
    examples, keys = where[0].shape
    pieces = probabilities.batch // examples
    real, task, first = (part.repeat_interleave(pieces, 0) for part in where)
    towards = torch.stack([task / task.sum(1, keepdim=True).clamp(min=1), first], 2).float()  # [sequences, keys, 2]
    shape = (probabilities.batch, probabilities.heads)
    mass, sink, entropy, choosing = torch.zeros(4, *shape, dtype=torch.float64, device=real.device)
    for start in range(0, probabilities.queries, probabilities.rows_at_a_time):
        stop = min(start + probabilities.rows_at_a_time, probabilities.queries)
        rows = probabilities.rows(start, stop).float()  # [sequences, heads, rows, keys]
        counted = real[:, None, start:stop]  # [sequences, 1, rows]
        columns = (rows @ towards[:, None]).double() * counted[..., None]  # [sequences, heads, rows, 2]
        mass += columns[..., 0].sum(2)
        sink += columns[..., 1].sum(2)
        share, choice = _entropies(rows)
        # A first token can see only itself and is not counted; any other token that sees one key has entropy 0.
        choice = counted & (choice | ~first[:, None, start:stop])
        entropy += share.double().where(choice, 0.0).sum(2)
        choosing += choice.sum(2)
    queries = real.sum(1, keepdim=True).clamp(min=1)
    parts = (mass / queries, sink / queries, entropy / choosing.clamp(min=1))
    mass, sink, entropy = (part.unflatten(0, (examples, pieces)).mean(1) for part in parts)  # [examples, heads]
    return _Measurement(path, keys, mass, sink.mean(1), entropy.mean(1), per_example, kept)


def _entropies(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's entropy over the maximum for its visible keys, and whether it sees several keys.

    A row need not sum to 1: without a key that is not a token, its entropy is that of the other keys.
    """
    total, visible = rows.sum(-1), (rows > 0).sum(-1)
    entropy = torch.special.entr(rows).sum(-1) / total + total.log()
    return (entropy / visible.clamp(min=2).log()).nan_to_num(0.0), visible > 1
